//! Every claim's record, by the GPUs it names.
//!
//! In: the folder of checkpoints. Out: the records as they are on the disk now, those of
//! one GPU without a look at the others. Never: an answer that the disk does not support:
//! two instances of the plugin may write the same folder.
//!
//! Each prepare compares its devices with the records of its GPUs; if it listed the folder
//! for that, it would take longer with every claim on the node. Instead the kernel tells
//! what changed: a change by any process is queued by inotify before the system call that
//! makes it returns, and records of a GPU change only behind that GPU's lock, so whoever
//! holds the lock and has read the queue knows them all. Where there is no inotify (its
//! instances are limited for each user), the folder is listed at each look.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, Metadata};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu::PciAddress;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};

use super::checkpoint::{CheckpointError, Record, read_file};

/// What tells one content of a file from the next. Records are written to a new file that
/// replaces the old one: another inode, or, should the number be used again, another time
/// of change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    changed: (i64, i64),
    size: u64,
}

impl Stamp {
    /// The stamp of a file. Take it before reading: if the file is replaced in between,
    /// the next look finds another stamp, and reads again.
    fn of(file: &Metadata) -> Self {
        Self {
            inode: file.ino(),
            changed: (file.ctime(), file.ctime_nsec()),
            size: file.size(),
        }
    }
}

/// A file whose record cannot be used. What it held is still held.
#[derive(Debug)]
pub struct Unreadable {
    /// The claim's UID, which is the file's name.
    pub uid: String,
    /// Why it cannot be used.
    pub error: CheckpointError,
}

/// Records as they are now.
#[derive(Debug, Clone, Default)]
pub struct Records {
    /// Those that were asked for.
    pub records: Vec<Arc<Record>>,
    /// Those that cannot be read, whatever they name.
    pub unreadable: Vec<Arc<Unreadable>>,
}

#[derive(Debug)]
enum Entry {
    Record(Arc<Record>),
    Unreadable(Arc<Unreadable>),
}

#[derive(Debug, Default)]
struct Files {
    /// By UID.
    entries: BTreeMap<String, (Stamp, Entry)>,
    by_gpu: HashMap<PciAddress, BTreeSet<String>>,
    unreadable: BTreeSet<String>,
}

/// The index of one folder.
#[derive(Debug)]
pub(super) struct Index {
    folder: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    files: Files,
    /// The queue of changes since the last look.
    changes: Option<OwnedFd>,
    /// That there is none was said.
    said: bool,
    /// How often the whole folder was listed.
    listed: u64,
}

impl Index {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            state: Mutex::default(),
        }
    }

    /// The records that name one of these GPUs, and every unreadable one.
    ///
    /// # Errors
    /// When the folder cannot be listed.
    pub(super) fn of_gpus(&self, gpus: &BTreeSet<PciAddress>) -> io::Result<Records> {
        let state = self.look()?;
        let files = &state.files;
        let uids: BTreeSet<&String> = gpus
            .iter()
            .filter_map(|gpu| files.by_gpu.get(gpu))
            .flatten()
            .collect();
        Ok(Records {
            records: uids
                .into_iter()
                .filter_map(|uid| files.record(uid))
                .collect(),
            unreadable: files.all_unreadable(),
        })
    }

    /// Everything, in the order of UIDs.
    ///
    /// # Errors
    /// When the folder cannot be listed.
    pub(super) fn all(&self) -> io::Result<Records> {
        let state = self.look()?;
        let files = &state.files;
        Ok(Records {
            records: files
                .entries
                .keys()
                .filter_map(|uid| files.record(uid))
                .collect(),
            unreadable: files.all_unreadable(),
        })
    }

    /// Compares every file with what is known of it: what the kernel did not tell, such as
    /// a disk that was exchanged under the folder, is found here.
    ///
    /// # Errors
    /// When the folder cannot be listed.
    pub(super) fn list_anew(&self) -> io::Result<()> {
        let mut state = self.look()?;
        state.listed += 1;
        list(&self.folder, &mut state.files)
    }

    /// Whether the kernel tells of changes.
    #[cfg(test)]
    pub(super) fn is_told(&self) -> bool {
        self.lock().changes.is_some()
    }

    fn look(&self) -> io::Result<MutexGuard<'_, State>> {
        let mut state = self.lock();
        let State {
            files,
            changes,
            said,
            listed,
        } = &mut *state;
        if let Some(queue) = changes {
            if let Some(changed) = drain(queue) {
                for uid in changed {
                    files.read(&self.folder, &uid);
                }
                return Ok(state);
            }
            // The queue overflowed or the folder is another one.
            *changes = None;
        }
        match watch(&self.folder) {
            Ok(queue) => *changes = Some(queue),
            Err(error) if !*said => {
                *said = true;
                tracing::warn!(%error, folder = %self.folder.display(),
                    "The kernel does not tell of changes to the checkpoints, so each prepare lists them all; \
                     raise fs.inotify.max_user_instances to keep prepare quick with many claims.");
            }
            Err(_) => {}
        }
        // After the watch began: what changes meanwhile is in the queue.
        *listed += 1;
        if let Err(error) = list(&self.folder, files) {
            *changes = None;
            return Err(error);
        }
        Ok(state)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Files {
    fn record(&self, uid: &str) -> Option<Arc<Record>> {
        match self.entries.get(uid)? {
            (_, Entry::Record(record)) => Some(record.clone()),
            (_, Entry::Unreadable(_)) => None,
        }
    }

    fn all_unreadable(&self) -> Vec<Arc<Unreadable>> {
        let entries = self
            .unreadable
            .iter()
            .filter_map(|uid| self.entries.get(uid));
        entries
            .filter_map(|(_, entry)| match entry {
                Entry::Unreadable(unreadable) => Some(unreadable.clone()),
                Entry::Record(_) => None,
            })
            .collect()
    }

    /// Reads a file unless it is as it was.
    fn read(&mut self, folder: &Path, uid: &str) {
        let path = folder.join(format!("{uid}.json"));
        let stamp = match fs::metadata(&path) {
            Ok(file) => Stamp::of(&file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return self.forget(uid),
            // The attempt to read says what is wrong.
            Err(_) => Stamp {
                inode: 0,
                changed: (0, 0),
                size: 0,
            },
        };
        if self
            .entries
            .get(uid)
            .is_some_and(|(known, _)| *known == stamp && stamp.inode != 0)
        {
            return;
        }
        let entry = match read_file(&path) {
            Ok(None) => return self.forget(uid),
            Ok(Some(record)) if record.claim.uid == uid => Entry::Record(Arc::new(record)),
            Ok(Some(record)) => Entry::Unreadable(Arc::new(Unreadable {
                uid: uid.to_owned(),
                error: CheckpointError::Corrupt {
                    path,
                    reason: format!("it is the record of claim {}", record.claim),
                },
            })),
            Err(error) => Entry::Unreadable(Arc::new(Unreadable {
                uid: uid.to_owned(),
                error,
            })),
        };
        self.forget(uid);
        match &entry {
            Entry::Record(record) => {
                for device in &record.devices {
                    let uids = self.by_gpu.entry(device.target.pci()).or_default();
                    uids.insert(uid.to_owned());
                }
            }
            Entry::Unreadable(_) => {
                self.unreadable.insert(uid.to_owned());
            }
        }
        self.entries.insert(uid.to_owned(), (stamp, entry));
    }

    fn forget(&mut self, uid: &str) {
        let Some((_, entry)) = self.entries.remove(uid) else {
            return;
        };
        self.unreadable.remove(uid);
        if let Entry::Record(record) = entry {
            for device in &record.devices {
                if let Some(uids) = self.by_gpu.get_mut(&device.target.pci()) {
                    uids.remove(uid);
                }
            }
        }
    }
}

fn list(folder: &Path, files: &mut Files) -> io::Result<()> {
    let mut there = BTreeSet::new();
    for entry in fs::read_dir(folder)? {
        if let Some(uid) = entry?.file_name().to_str().and_then(uid_of) {
            there.insert(uid.to_owned());
        }
    }
    let gone: Vec<String> = files
        .entries
        .keys()
        .filter(|uid| !there.contains(*uid))
        .cloned()
        .collect();
    for uid in there.iter().chain(&gone) {
        files.read(folder, uid);
    }
    Ok(())
}

fn watch(folder: &Path) -> io::Result<OwnedFd> {
    let queue = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
    let flags = WatchFlags::CREATE
        | WatchFlags::MOVED_TO
        | WatchFlags::MOVED_FROM
        | WatchFlags::DELETE
        | WatchFlags::MODIFY
        | WatchFlags::ATTRIB
        | WatchFlags::DELETE_SELF
        | WatchFlags::MOVE_SELF
        | WatchFlags::ONLYDIR;
    inotify::add_watch(&queue, folder, flags)?;
    Ok(queue)
}

/// The UIDs whose files changed; `None` where the queue cannot tell any more.
fn drain(queue: &OwnedFd) -> Option<BTreeSet<String>> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(queue, &mut buffer);
    let mut changed = BTreeSet::new();
    let mut valid = true;
    loop {
        match reader.next() {
            Ok(event) => {
                let ended = ReadFlags::QUEUE_OVERFLOW
                    | ReadFlags::IGNORED
                    | ReadFlags::UNMOUNT
                    | ReadFlags::DELETE_SELF
                    | ReadFlags::MOVE_SELF;
                valid &= !event.events().intersects(ended);
                let name = event.file_name().and_then(|name| name.to_str().ok());
                changed.extend(name.and_then(uid_of).map(str::to_owned));
            }
            Err(rustix::io::Errno::AGAIN) => return valid.then_some(changed),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

/// The UID in the name of a checkpoint; `None` for any other file.
fn uid_of(name: &str) -> Option<&str> {
    let uid = name.strip_suffix(".json")?;
    (!uid.is_empty() && !uid.starts_with('.')).then_some(uid)
}

#[cfg(test)]
mod tests {
    use super::super::checkpoint::Checkpoints;
    use super::super::checkpoint::tests::record;
    use super::*;

    fn of(records: &[Arc<Record>]) -> Vec<&str> {
        records.iter().map(|r| r.claim.uid.as_str()).collect()
    }

    #[test]
    fn a_record_that_another_process_changed_or_removed_is_seen_and_an_unchanged_one_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let index = Index::new(folder.path().to_owned());
        let other = Checkpoints::open(folder.path().to_owned()).unwrap();
        for uid in ["uid-1", "uid-2"] {
            other.write(&record(uid)).unwrap();
        }
        let first = index.all().unwrap().records;
        assert!(index.is_told());
        assert!(Arc::ptr_eq(&first[0], &index.all().unwrap().records[0]));

        // As long as before: only which file it is differs.
        let mut changed = record("uid-1");
        changed.boot_id = changed.boot_id.chars().rev().collect();
        assert_ne!(changed, record("uid-1"));
        for next in [record("uid-1"), changed] {
            other.write(&next).unwrap();
            let now = index.all().unwrap().records;
            assert_eq!(*now[0], next);
            assert!(Arc::ptr_eq(&first[1], &now[1]));
        }
        other.remove("uid-1").unwrap();
        assert_eq!(of(&index.all().unwrap().records), ["uid-2"]);
        index.list_anew().unwrap();
        assert_eq!(of(&index.all().unwrap().records), ["uid-2"]);
    }

    #[test]
    fn a_gpus_records_are_found_without_the_others_also_after_they_moved_to_another_gpu() {
        let folder = tempfile::tempdir().unwrap();
        let index = Index::new(folder.path().to_owned());
        let store = Checkpoints::open(folder.path().to_owned()).unwrap();
        let there = BTreeSet::from(["0000:65:00.0".parse().unwrap()]);
        let elsewhere: PciAddress = "0000:66:00.0".parse().unwrap();
        store.write(&record("uid-1")).unwrap();
        let mut moved = record("uid-2");
        store.write(&moved).unwrap();
        assert_eq!(
            of(&index.of_gpus(&there).unwrap().records),
            ["uid-1", "uid-2"]
        );
        let super::super::record::Target::Partition { pci, .. } = &mut moved.devices[0].target
        else {
            panic!("a partition was recorded")
        };
        *pci = elsewhere;
        store.write(&moved).unwrap();
        assert_eq!(of(&index.of_gpus(&there).unwrap().records), ["uid-1"]);
        let now = index.of_gpus(&BTreeSet::from([elsewhere])).unwrap();
        assert_eq!(of(&now.records), ["uid-2"]);
    }

    #[test]
    fn among_hundreds_of_claims_a_look_reads_what_changed_and_lists_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let index = Index::new(folder.path().to_owned());
        let store = Checkpoints::open(folder.path().to_owned()).unwrap();
        for number in 0..300 {
            store.write(&record(&format!("uid-{number}"))).unwrap();
        }
        let first = index.all().unwrap().records;
        for number in 0..20 {
            store.write(&record(&format!("uid-{number}"))).unwrap();
            store.remove(&format!("uid-{number}")).unwrap();
            index.of_gpus(&BTreeSet::new()).unwrap();
        }
        let now = index.all().unwrap().records;
        assert_eq!((first.len(), now.len()), (300, 280));
        let kept = now
            .iter()
            .filter(|r| first.iter().any(|f| Arc::ptr_eq(f, r)));
        assert_eq!(kept.count(), 280);
        assert_eq!(index.lock().listed, 1);
    }

    #[test]
    fn a_file_that_is_damaged_in_place_while_running_is_unreadable_at_the_next_look() {
        let folder = tempfile::tempdir().unwrap();
        let index = Index::new(folder.path().to_owned());
        let store = Checkpoints::open(folder.path().to_owned()).unwrap();
        store.write(&record("uid-1")).unwrap();
        assert!(index.all().unwrap().unreadable.is_empty());
        let path = store.path("uid-1").unwrap();
        let mut bytes = fs::read(&path).unwrap();
        bytes[150] ^= 4;
        fs::write(&path, bytes).unwrap();
        let all = index.of_gpus(&BTreeSet::new()).unwrap();
        assert_eq!(all.unreadable[0].uid, "uid-1");
        assert!(all.records.is_empty());
    }

    #[test]
    fn a_queue_that_overflows_and_a_folder_that_is_exchanged_are_listed_anew() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("claims");
        let store = Checkpoints::open(folder.clone()).unwrap();
        let index = Index::new(folder.clone());
        store.write(&record("uid-1")).unwrap();
        assert_eq!(of(&index.all().unwrap().records), ["uid-1"]);

        let limit = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
        let limit: usize = limit.trim().parse().unwrap();
        let noise = (folder.join("a"), folder.join("b"));
        fs::write(&noise.0, "").unwrap();
        for _ in 0..limit / 4 + 1 {
            fs::rename(&noise.0, &noise.1).unwrap();
            fs::rename(&noise.1, &noise.0).unwrap();
        }
        store.write(&record("uid-2")).unwrap();
        assert_eq!(of(&index.all().unwrap().records), ["uid-1", "uid-2"]);

        fs::rename(&folder, parent.path().join("old")).unwrap();
        assert!(index.all().is_err());
        fs::create_dir(&folder).unwrap();
        store.write(&record("uid-3")).unwrap();
        assert_eq!(of(&index.all().unwrap().records), ["uid-3"]);
        store.write(&record("uid-4")).unwrap();
        assert_eq!(of(&index.all().unwrap().records), ["uid-3", "uid-4"]);
    }
}
