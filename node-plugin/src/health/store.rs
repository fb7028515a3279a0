//! Small files that outlive the process: written whole, or not at all.
//!
//! In: a value and a path. Out: the value as it was last written, or the reason why the
//! file cannot be trusted. Never: half a file, also with two instances side by side.
//!
//! A file is a JSON payload with a header, as the claims' checkpoints are.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::claims::files::{self, Flush};
use crate::claims::sealed;

/// The format that this release writes.
const VERSION: u32 = 1;

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The disk did not do it.
    #[error("cannot {action} {path}: {source}; check the disk and the folder's permissions")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not what was written, or a later release wrote it.
    #[error("{path} cannot be used: {reason}; what it held is found anew where NVML tells it")]
    Unusable {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// Reads a file; `None` where there is none. One that cannot be used is put aside, so
/// that it is reported once and can be looked at.
pub(super) fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, StoreError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(StoreError::Io {
                action: "read",
                path: path.to_owned(),
                source,
            });
        }
    };
    parse(&bytes).map(Some).map_err(|reason| {
        fs::rename(path, path.with_extension("unusable")).ok(); // Else it is overwritten.
        StoreError::Unusable {
            path: path.to_owned(),
            reason,
        }
    })
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    let opened = sealed::open(bytes)?;
    if opened.version > VERSION {
        return Err(format!(
            "it has version {}, this release reads up to {VERSION}",
            opened.version
        ));
    }
    if !opened.intact {
        return Err("the checksum does not match".to_owned());
    }
    serde_json::from_slice(opened.payload).map_err(|error| format!("bad content: {error}"))
}

/// Writes a file so that a reader sees the old one or the new one, also after a crash.
pub(super) fn write<T: Serialize>(path: &Path, value: &T) -> Result<(), StoreError> {
    let try_to = || -> io::Result<()> {
        let payload = serde_json::to_vec(value)?;
        let bytes = sealed::seal(VERSION, &payload)?;
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        // Two instances write the same files during an update.
        let lock = File::options()
            .create(true)
            .append(true)
            .open(path.with_extension("lock"))?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
        files::replace(path, &bytes, Flush::File)?;
        match path.parent() {
            Some(folder) => File::open(folder)?.sync_all(),
            None => Ok(()),
        }
    };
    try_to().map_err(|source| StoreError::Io {
        action: "write",
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_as_it_was_written_and_a_broken_one_is_put_aside_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("below/health.json");
        assert_eq!(read::<Vec<u32>>(&path).unwrap(), None);
        write(&path, &vec![1, 2]).unwrap();
        write(&path, &vec![1, 2, 3]).unwrap();
        assert_eq!(read(&path).unwrap(), Some(vec![1, 2, 3]));

        let mut bytes = fs::read(&path).unwrap();
        let last = bytes.len() - 2;
        bytes[last] ^= 1;
        fs::write(&path, bytes).unwrap();
        let error = read::<Vec<u32>>(&path).unwrap_err().to_string();
        assert!(error.contains("checksum"), "{error}");
        assert_eq!(read::<Vec<u32>>(&path).unwrap(), None);
        assert!(path.with_extension("unusable").exists());
    }

    #[test]
    fn a_later_releases_file_is_not_guessed_at() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("health.json");
        fs::write(&path, "{\"version\":2,\"sha256\":\"\"}\n{}").unwrap();
        let error = read::<Vec<u32>>(&path).unwrap_err().to_string();
        assert!(error.contains("version 2"), "{error}");
    }
}
