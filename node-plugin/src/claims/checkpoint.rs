//! The write-ahead checkpoint: one file for each claim.
//!
//! In: records. Out: records as they were last written, or the fact that a file
//! cannot be trusted. Never: a record that a crash could tear, and never one broken
//! file that hides the others.
//!
//! A file is a JSON payload with a header, see [`super::sealed`]; unknown fields are
//! skipped. Writing is: temporary file, fsync, rename; why no more, says [`super::files`].

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use gpu::PciAddress;

use super::files::{self, Flush};
use super::index::Index;
pub use super::index::{Records, Unreadable};
pub use super::record::{ClaimRef, InstanceIds, PreparedDevice, Record, Stage, Target};
use super::sealed;
use crate::metrics::{Phase, phase};

/// The newest format that this release reads; it reads every earlier one, too.
const VERSION: u32 = 2;

/// The oldest format that holds a record, so that an earlier release can still read
/// whatever has a meaning for it. Version 2 knows [`Stage::Unprepared`] and
/// [`Target::Share`].
fn version_of(record: &Record) -> u32 {
    let share = |device: &PreparedDevice| matches!(device.target, Target::Share { .. });
    match record.stage {
        Stage::PrepareStarted | Stage::PrepareCompleted if !record.devices.iter().any(share) => 1,
        Stage::PrepareStarted | Stage::PrepareCompleted | Stage::Unprepared => 2,
    }
}

/// A checkpoint that could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The disk did not do it.
    #[error(
        "cannot {action} the checkpoint {path}: {source}; check the disk and the folder's permissions"
    )]
    Io {
        /// What was tried.
        action: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not what was written.
    #[error(
        "the checkpoint {path} is corrupt: {reason}; the node plugin keeps what it held and makes the record anew from the claim"
    )]
    Corrupt {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A later release wrote the file.
    #[error(
        "the checkpoint {path} has version {version}, this release reads up to {VERSION}: its claim keeps its devices and cannot be prepared or unprepared; run the release that wrote it, or drain the node and delete the file"
    )]
    TooNew {
        /// Which file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
    /// A UID that cannot be a file name.
    #[error("{0:?} is not the UID of a claim")]
    Uid(String),
}

/// The folder of checkpoints.
#[derive(Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    index: Index,
}

impl Checkpoints {
    /// Opens the folder, creating it if it is missing. What an interrupted write left is
    /// hidden and stays: it may be another instance's write of this moment.
    ///
    /// # Errors
    /// When the folder cannot be made or read.
    pub fn open(folder: PathBuf) -> Result<Self, CheckpointError> {
        let error = |action, source| CheckpointError::Io {
            action,
            path: folder.clone(),
            source,
        };
        fs::create_dir_all(&folder).map_err(|e| error("create the folder of", e))?;
        Ok(Self {
            index: Index::new(folder.clone()),
            folder,
        })
    }

    /// The file of a claim.
    ///
    /// # Errors
    /// When the UID is not one.
    pub fn path(&self, uid: &str) -> Result<PathBuf, CheckpointError> {
        let plain = uid.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        if uid.is_empty() || uid.len() > 100 || !plain {
            return Err(CheckpointError::Uid(uid.to_owned()));
        }
        Ok(self.folder.join(format!("{uid}.json")))
    }

    /// Reads the record of a claim; `None` where there is none.
    ///
    /// # Errors
    /// When the file cannot be read or is not what was written.
    pub fn read(&self, uid: &str) -> Result<Option<Record>, CheckpointError> {
        let path = self.path(uid)?;
        phase(Phase::Checkpoint, || read_file(&path))
    }

    /// Writes a record so that it survives a crash at any moment.
    ///
    /// # Errors
    /// When the disk refuses; the earlier record is then still there.
    pub fn write(&self, record: &Record) -> Result<(), CheckpointError> {
        let path = self.path(&record.claim.uid)?;
        let error = |source| CheckpointError::Io {
            action: "write",
            path: path.clone(),
            source,
        };
        let payload = serde_json::to_vec(record).map_err(|e| error(e.into()))?;
        let bytes = sealed::seal(version_of(record), &payload).map_err(|e| error(e.into()))?;
        phase(Phase::Checkpoint, || {
            files::replace(&path, &bytes, Flush::File)
        })
        .map_err(error)
    }

    /// Forgets a claim; one that is unknown is a success.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn remove(&self, uid: &str) -> Result<(), CheckpointError> {
        let path = self.path(uid)?;
        phase(Phase::Checkpoint, || files::remove(&path)).map_err(|source| CheckpointError::Io {
            action: "remove",
            path,
            source,
        })
    }

    /// The records of other claims that may be in conflict with one that names these GPUs,
    /// as they are now: those of the GPUs, and every one that cannot be read. The caller
    /// holds the GPUs' locks.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn of_gpus(&self, gpus: &BTreeSet<PciAddress>) -> Result<Records, CheckpointError> {
        phase(Phase::Checkpoint, || self.index.of_gpus(gpus))
            .map_err(|source| self.unlisted(source))
    }

    /// Every record as it is now, and what could not be read.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn all(&self) -> Result<Records, CheckpointError> {
        self.index.all().map_err(|source| self.unlisted(source))
    }

    /// The same after a look at every file, whatever the kernel told of them.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn all_anew(&self) -> Result<Records, CheckpointError> {
        self.index
            .list_anew()
            .map_err(|source| self.unlisted(source))?;
        self.all()
    }

    fn unlisted(&self, source: io::Error) -> CheckpointError {
        CheckpointError::Io {
            action: "list",
            path: self.folder.clone(),
            source,
        }
    }

    /// Keeps a copy of a damaged file where people can look at it and no reader does. A
    /// record that replaces the file comes after that.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn copy_aside(&self, uid: &str) -> Result<PathBuf, CheckpointError> {
        let (path, aside) = self.aside(uid)?;
        let copied = fs::read(&path).and_then(|bytes| files::replace(&aside, &bytes, Flush::None));
        copied.map_err(|source| CheckpointError::Io {
            action: "put aside",
            path,
            source,
        })?;
        Ok(aside)
    }

    /// Moves a damaged file out of the way.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn move_aside(&self, uid: &str) -> Result<PathBuf, CheckpointError> {
        let (path, aside) = self.aside(uid)?;
        fs::rename(&path, &aside).map_err(|source| CheckpointError::Io {
            action: "put aside",
            path,
            source,
        })?;
        files::step("damaged file moved aside");
        Ok(aside)
    }

    fn aside(&self, uid: &str) -> Result<(PathBuf, PathBuf), CheckpointError> {
        let path = self.path(uid)?;
        let mut aside = path.as_os_str().to_owned();
        aside.push(".corrupt");
        Ok((path, PathBuf::from(aside)))
    }

    /// The UIDs for which a write was interrupted: its temporary file is still there. It
    /// may be another instance's write of this moment, which the claim's lock tells.
    #[must_use]
    pub fn interrupted(&self) -> Vec<String> {
        let names = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        names
            .filter_map(|entry| {
                let name = entry.file_name();
                let name = files::of_temporary(name.to_str()?)?;
                let name = name.strip_suffix(".corrupt").unwrap_or(name);
                Some(name.strip_suffix(".json")?.to_owned())
            })
            .collect()
    }

    /// Removes what an interrupted write of a claim's record left; the claim is locked.
    pub fn remove_interrupted(&self, uid: &str) {
        if let Ok((path, aside)) = self.aside(uid) {
            files::remove_temporary(&path);
            files::remove_temporary(&aside);
        }
    }
}

/// Reads a record from a file; `None` where there is none.
pub(super) fn read_file(path: &Path) -> Result<Option<Record>, CheckpointError> {
    let corrupt = |reason: String| CheckpointError::Corrupt {
        path: path.to_owned(),
        reason,
    };
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(CheckpointError::Io {
                action: "read",
                path: path.to_owned(),
                source,
            });
        }
    };
    let opened = sealed::open(&bytes).map_err(corrupt)?;
    if opened.version == 0 || !opened.intact {
        return Err(corrupt("the checksum does not match".into()));
    }
    if opened.version > VERSION {
        let path = path.to_owned();
        return Err(CheckpointError::TooNew {
            path,
            version: opened.version,
        });
    }
    let record =
        serde_json::from_slice(opened.payload).map_err(|e| corrupt(format!("bad record: {e}")))?;
    Ok(Some(record))
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use super::*;

    pub(in crate::claims) fn record(uid: &str) -> Record {
        Record {
            claim: ClaimRef {
                namespace: "ns".into(),
                name: "claim".into(),
                uid: uid.into(),
            },
            pod_claim_name: None,
            boot_id: "boot".into(),
            stage: Stage::PrepareStarted,
            devices: vec![PreparedDevice {
                device: "gpu-0000-65-00-0-mig-1g10gb-6".into(),
                target: Target::partition_for_test(None),
                ..PreparedDevice::for_test()
            }],
        }
    }

    #[test]
    fn a_record_survives_and_is_forgotten_when_removed() {
        let folder = tempfile::tempdir().unwrap();
        let store = Checkpoints::open(folder.path().join("claims")).unwrap();
        assert_eq!(store.read("uid-1").unwrap(), None);
        store.write(&record("uid-1")).unwrap();
        assert_eq!(store.read("uid-1").unwrap(), Some(record("uid-1")));
        store.remove("uid-1").unwrap();
        store.remove("uid-1").unwrap();
        assert_eq!(store.read("uid-1").unwrap(), None);
    }

    #[test]
    fn a_flipped_byte_a_cut_file_and_garbage_are_corrupt_and_hide_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let store = Checkpoints::open(folder.path().to_owned()).unwrap();
        for uid in ["flipped", "cut", "garbage", "good"] {
            store.write(&record(uid)).unwrap();
        }
        let flipped = store.path("flipped").unwrap();
        let mut bytes = fs::read(&flipped).unwrap();
        let last = bytes.len() - 2;
        bytes[last] ^= 1;
        fs::write(&flipped, bytes).unwrap();
        let cut = store.path("cut").unwrap();
        let bytes = fs::read(&cut).unwrap();
        fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
        fs::write(store.path("garbage").unwrap(), "garbage").unwrap();

        let all = store.all().unwrap();
        assert_eq!(all.records, [Arc::new(record("good"))]);
        let broken = all.unreadable;
        let uids: Vec<&str> = broken.iter().map(|b| b.uid.as_str()).collect();
        assert_eq!(uids, ["cut", "flipped", "garbage"]);
        assert!(
            broken
                .iter()
                .all(|b| matches!(b.error, CheckpointError::Corrupt { .. }))
        );
        store.copy_aside("flipped").unwrap();
        assert_eq!(store.all().unwrap().unreadable.len(), 3);
        store.write(&record("flipped")).unwrap();
        store.move_aside("cut").unwrap();
        assert_eq!(store.all().unwrap().unreadable.len(), 1);
    }

    #[test]
    fn an_unknown_field_is_skipped_and_a_later_version_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let store = Checkpoints::open(folder.path().to_owned()).unwrap();
        let mut value = serde_json::to_value(record("uid-1")).unwrap();
        value["addedLater"] = serde_json::json!({"x": 1});
        let payload = serde_json::to_vec(&value).unwrap();
        let write = |version: u32| {
            let bytes = sealed::seal(version, &payload).unwrap();
            fs::write(store.path("uid-1").unwrap(), bytes).unwrap();
        };
        write(1);
        assert_eq!(store.read("uid-1").unwrap(), Some(record("uid-1")));
        write(VERSION + 1);
        assert!(matches!(
            store.read("uid-1"),
            Err(CheckpointError::TooNew { .. })
        ));
    }

    #[test]
    fn a_record_has_the_oldest_version_that_holds_it() {
        let folder = tempfile::tempdir().unwrap();
        let store = Checkpoints::open(folder.path().to_owned()).unwrap();
        let mut ended = record("uid-2");
        ended.stage = Stage::Unprepared;
        let mut shared = record("uid-3");
        shared.devices[0].target = Target::Share {
            of: Box::new(shared.devices[0].target.clone()),
            memory_bytes: 1 << 30,
            cores_percent: 25,
            kind: crate::slices::SharingKind::Mps,
        };
        for (record, version) in [(record("uid-1"), "1"), (ended, "2"), (shared, "2")] {
            store.write(&record).unwrap();
            let text = fs::read_to_string(store.path(&record.claim.uid).unwrap()).unwrap();
            assert!(
                text.starts_with(&format!("{{\"version\":{version},")),
                "{text}"
            );
            assert_eq!(store.read(&record.claim.uid).unwrap(), Some(record));
        }
    }

    #[test]
    fn a_uid_cannot_leave_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let store = Checkpoints::open(folder.path().to_owned()).unwrap();
        assert!(matches!(store.path("../x"), Err(CheckpointError::Uid(_))));
        assert!(matches!(store.path(""), Err(CheckpointError::Uid(_))));
    }
}
