//! Records that were read before.
//!
//! In: a checkpoint's path, and how to read it. Out: its record, read only if the file is another one than
//! last time. Never: an answer that the disk does not support: two instances of the plugin may write the
//! same folder, so each file is looked at each time, and only its content is remembered.
//!
//! Every prepare compares its devices with all records; without this it takes longer with every claim on
//! the node.

use std::collections::{HashMap, HashSet};
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::checkpoint::Record;

/// What tells one content of a file from the next. Records are written to a new file that replaces the
/// old one: another inode, or, should the number be used again, another time of change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    inode: u64,
    changed: (i64, i64),
    size: u64,
}

impl Stamp {
    /// The stamp of a file. Take it before reading: if the file is replaced in between, the next look
    /// finds another stamp, and reads again.
    pub(super) fn of(file: &Metadata) -> Self {
        Self {
            inode: file.ino(),
            changed: (file.ctime(), file.ctime_nsec()),
            size: file.size(),
        }
    }
}

/// The records, by the file that each was read from.
#[derive(Debug, Default)]
pub(super) struct Known {
    records: Mutex<HashMap<PathBuf, (Stamp, Arc<Record>)>>,
}

impl Known {
    /// The record of this file as it is now, if it was read before.
    pub(super) fn get(&self, path: &Path, stamp: Stamp) -> Option<Arc<Record>> {
        let records = self.records();
        let (of, record) = records.get(path)?;
        (*of == stamp).then(|| record.clone())
    }

    /// Remembers what was read.
    pub(super) fn insert(&self, path: PathBuf, stamp: Stamp, record: Arc<Record>) {
        self.records().insert(path, (stamp, record));
    }

    /// Forgets a file that this process writes or removes.
    pub(super) fn forget(&self, path: &Path) {
        self.records().remove(path);
    }

    /// Forgets every file that is not there any more.
    pub(super) fn keep(&self, there: &HashSet<PathBuf>) {
        self.records().retain(|path, _| there.contains(path));
    }

    fn records(&self) -> MutexGuard<'_, HashMap<PathBuf, (Stamp, Arc<Record>)>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
