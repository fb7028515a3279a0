//! The write-ahead checkpoint: one file for each claim.
//!
//! In: records. Out: records as they were last written, or the fact that a file
//! cannot be trusted. Never: a record that a crash could tear, and never one broken
//! file that hides the others.
//!
//! A file is a header line (`{"version":1,"sha256":"…"}`) and a JSON payload. The
//! checksum covers the payload's raw bytes, so that a field added by a later release
//! can never turn an old file into a corrupt one, and unknown fields are skipped.
//! Writing is: temporary file, fsync, rename, fsync of the folder.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::known::{Known, Stamp};
pub use super::record::{ClaimRef, InstanceIds, PreparedDevice, Record, Stage, Target};
use crate::metrics::{Phase, phase};

/// The format that this release writes; it reads this one and every earlier one.
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Header {
    version: u32,
    sha256: String,
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
        "the checkpoint {path} is corrupt: {reason}; the node plugin puts it aside when it starts"
    )]
    Corrupt {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A later release wrote the file.
    #[error(
        "the checkpoint {path} has version {version}, this release reads up to {VERSION}; run the release that wrote it, or drain the node and delete the file"
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
    known: Known,
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
            folder,
            known: Known::default(),
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
        phase(Phase::Checkpoint, || read(&path))
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
        let header = Header {
            version: VERSION,
            sha256: digest(&payload),
        };
        let mut bytes = serde_json::to_vec(&header).map_err(|e| error(e.into()))?;
        bytes.push(b'\n');
        bytes.extend(payload);
        let written = phase(Phase::Checkpoint, || write_durably(&path, &bytes)).map_err(error);
        self.known.forget(&path);
        written
    }

    /// Forgets a claim; one that is unknown is a success.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn remove(&self, uid: &str) -> Result<(), CheckpointError> {
        let path = self.path(uid)?;
        let removed = phase(Phase::Checkpoint, || remove_durably(&path));
        self.known.forget(&path);
        removed.map_err(|source| CheckpointError::Io {
            action: "remove",
            path,
            source,
        })
    }

    /// Every record as it is now, and what could not be read. Files that are the same
    /// as last time are not read again.
    ///
    /// # Errors
    /// When the folder cannot be listed.
    pub fn all(&self) -> Result<(Vec<Arc<Record>>, Vec<CheckpointError>), CheckpointError> {
        phase(Phase::Checkpoint, || self.read_all())
    }

    fn read_all(&self) -> Result<(Vec<Arc<Record>>, Vec<CheckpointError>), CheckpointError> {
        let mut records = Vec::new();
        let mut broken = Vec::new();
        let paths = self.files("json")?;
        for path in &paths {
            match self.look(path) {
                Ok(Some(record)) => records.push(record),
                Ok(None) => {} // Removed since the folder was listed.
                Err(error) => broken.push(error),
            }
        }
        self.known.keep(&paths.into_iter().collect());
        records.sort_by(|a, b| a.claim.uid.cmp(&b.claim.uid));
        Ok((records, broken))
    }

    fn look(&self, path: &Path) -> Result<Option<Arc<Record>>, CheckpointError> {
        // Whatever is wrong with the file is for `read` to say.
        let stamp = fs::metadata(path).ok().as_ref().map(Stamp::of);
        if let Some(record) = stamp.and_then(|stamp| self.known.get(path, stamp)) {
            return Ok(Some(record));
        }
        let record = read(path)?.map(Arc::new);
        if let Some((stamp, record)) = stamp.zip(record.as_ref()) {
            self.known.insert(path.to_owned(), stamp, record.clone());
        }
        Ok(record)
    }

    /// Puts a corrupt file aside, where it can be looked at and is in nobody's way.
    ///
    /// # Errors
    /// When it cannot be moved.
    pub fn quarantine(&self, path: &Path) -> Result<PathBuf, CheckpointError> {
        let mut aside = path.as_os_str().to_owned();
        aside.push(".corrupt");
        let aside = PathBuf::from(aside);
        fs::rename(path, &aside).map_err(|source| CheckpointError::Io {
            action: "put aside",
            path: path.to_owned(),
            source,
        })?;
        Ok(aside)
    }

    fn files(&self, extension: &str) -> Result<Vec<PathBuf>, CheckpointError> {
        let error = |source| CheckpointError::Io {
            action: "list",
            path: self.folder.clone(),
            source,
        };
        let mut paths = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(error)? {
            let path = entry.map_err(error)?.path();
            let hidden = path
                .file_name()
                .is_some_and(|n| n.as_encoded_bytes().starts_with(b"."));
            if !hidden && path.extension().is_some_and(|e| e == extension) {
                paths.push(path);
            }
        }
        Ok(paths)
    }
}

fn read(path: &Path) -> Result<Option<Record>, CheckpointError> {
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
    let end = bytes
        .iter()
        .position(|b| *b == b'\n')
        .ok_or_else(|| corrupt("no header".into()))?;
    let (header, payload) = (&bytes[..end], &bytes[end + 1..]);
    let header: Header =
        serde_json::from_slice(header).map_err(|e| corrupt(format!("bad header: {e}")))?;
    if header.version > VERSION {
        let path = path.to_owned();
        return Err(CheckpointError::TooNew {
            path,
            version: header.version,
        });
    }
    if header.sha256 != digest(payload) {
        return Err(corrupt("the checksum does not match".into()));
    }
    let record =
        serde_json::from_slice(payload).map_err(|e| corrupt(format!("bad record: {e}")))?;
    Ok(Some(record))
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Writes a file so that a reader sees the old one or the new one, also after a crash.
fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace(path, bytes, File::sync_all)?;
    File::open(split(path)?.0)?.sync_all()
}

/// Writes a file so that a reader sees the old one or the new one. `flush` is called
/// before the new one takes the old one's place.
pub(super) fn replace(
    path: &Path,
    bytes: &[u8],
    flush: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
    let (folder, name) = split(path)?;
    // The extension keeps CDI readers and `all` off; one writer for each path is what
    // the claim's lock guarantees.
    let mut temporary_name = std::ffi::OsString::from(".");
    temporary_name.push(name);
    temporary_name.push(".tmp");
    let temporary = folder.join(temporary_name);
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    flush(&file)?;
    fs::rename(&temporary, path)
}

/// Removes a file and makes that survive a crash; a missing file is a success.
fn remove_durably(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Ok(()) => File::open(split(path)?.0)?.sync_all(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn split(path: &Path) -> io::Result<(&Path, &std::ffi::OsStr)> {
    path.parent()
        .zip(path.file_name())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a file in a folder"))
}

#[cfg(test)]
mod tests {
    use gpu::Placement;

    use super::*;

    fn record(uid: &str) -> Record {
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
                request: "gpu".into(),
                subrequest: None,
                pool: "node".into(),
                device: "gpu-0000-65-00-0-mig-1g10gb-6".into(),
                share_id: None,
                admin_access: false,
                target: Target::Partition {
                    pci: "0000:65:00.0".parse().unwrap(),
                    uuid: "GPU-1".into(),
                    minor: 0,
                    profile: "1g.10gb".into(),
                    profile_id: 19,
                    placement: Placement { start: 6, size: 1 },
                    adopted: false,
                    instance: None,
                },
                cdi_device_ids: vec![],
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

        let (records, broken) = store.all().unwrap();
        assert_eq!(records, [Arc::new(record("good"))]);
        assert_eq!(broken.len(), 3);
        assert!(
            broken
                .iter()
                .all(|e| matches!(e, CheckpointError::Corrupt { .. }))
        );
        store.quarantine(&flipped).unwrap();
        assert_eq!(store.all().unwrap().1.len(), 2);
    }

    #[test]
    fn a_record_that_another_process_changed_or_removed_is_seen_and_an_unchanged_one_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let store = Checkpoints::open(folder.path().to_owned()).unwrap();
        let other = Checkpoints::open(folder.path().to_owned()).unwrap();
        for uid in ["uid-1", "uid-2"] {
            other.write(&record(uid)).unwrap();
        }
        let first = store.all().unwrap().0;
        assert!(Arc::ptr_eq(&first[0], &store.all().unwrap().0[0]));

        // As long as before: only which file it is differs.
        let mut changed = record("uid-1");
        changed.boot_id = changed.boot_id.chars().rev().collect();
        assert_ne!(changed, record("uid-1"));
        for next in [record("uid-1"), changed] {
            other.write(&next).unwrap();
            let now = store.all().unwrap().0;
            assert_eq!(*now[0], next);
            assert!(Arc::ptr_eq(&first[1], &now[1]));
        }
        other.remove("uid-1").unwrap();
        assert_eq!(store.all().unwrap().0, [Arc::new(record("uid-2"))]);
    }

    #[test]
    fn an_unknown_field_is_skipped_and_a_later_version_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let store = Checkpoints::open(folder.path().to_owned()).unwrap();
        let mut value = serde_json::to_value(record("uid-1")).unwrap();
        value["addedLater"] = serde_json::json!({"x": 1});
        let payload = serde_json::to_vec(&value).unwrap();
        let write = |version: u32| {
            let mut bytes = serde_json::to_vec(&Header {
                version,
                sha256: digest(&payload),
            })
            .unwrap();
            bytes.push(b'\n');
            bytes.extend(&payload);
            fs::write(store.path("uid-1").unwrap(), bytes).unwrap();
        };
        write(1);
        assert_eq!(store.read("uid-1").unwrap(), Some(record("uid-1")));
        write(2);
        assert!(matches!(
            store.read("uid-1"),
            Err(CheckpointError::TooNew { version: 2, .. })
        ));
    }

    #[test]
    fn a_uid_cannot_leave_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let store = Checkpoints::open(folder.path().to_owned()).unwrap();
        assert!(matches!(store.path("../x"), Err(CheckpointError::Uid(_))));
        assert!(matches!(store.path(""), Err(CheckpointError::Uid(_))));
    }
}
