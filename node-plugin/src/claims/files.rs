//! Files that are replaced whole, and the points at which a crash must be survivable.
//!
//! In: a path and its content. Out: a file that a reader sees as it was or as it will be,
//! whichever process looks and whenever this one dies. Never: a file that is written in
//! place, and never a sync of a folder.
//!
//! What a folder's sync buys is that a rename or a removal outlives a power failure. The
//! next boot voids what is recorded here: MIG instances and containers are gone, the
//! kubelet prepares each claim anew, and a record of an earlier boot holds nothing. A
//! killed process loses nothing that the kernel took. A file is synced, though: a disk that
//! is full or broken is an error of this call, and a rename never shows a torn file.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::OnceLock;

type Hook = Box<dyn Fn(&str) + Send + Sync>;

static HOOK: OnceLock<Hook> = OnceLock::new();

/// Has `hook` called at each point of this process at which a crash must be survivable,
/// with the point's name; tests end their process there. The first call counts.
pub fn at_each_step(hook: Hook) {
    drop(HOOK.set(hook));
}

/// A point at which a crash must be survivable: between any two changes to something that
/// outlives this process.
pub(crate) fn step(name: &str) {
    if let Some(hook) = HOOK.get() {
        hook(name);
    }
}

/// Whether a file's content has to be on the disk before it takes the old one's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flush {
    /// Yes: see above.
    File,
    /// No: it is in memory, or made anew when it is gone.
    None,
}

/// Writes a file so that a reader sees the old one or the new one.
///
/// # Errors
/// When the disk refuses; the old file is then still there, and no other is left.
pub(crate) fn replace(path: &Path, bytes: &[u8], flush: Flush) -> io::Result<()> {
    let (folder, name) = split(path)?;
    let temporary = folder.join(temporary_name(name));
    let replaced = write(&temporary, bytes, flush).and_then(|()| {
        fs::rename(&temporary, path)?;
        step("file renamed");
        Ok(())
    });
    if replaced.is_err() {
        fs::remove_file(&temporary).ok(); // A full disk gets its space back.
    }
    replaced
}

fn write(path: &Path, bytes: &[u8], flush: Flush) -> io::Result<()> {
    let mut file = File::create(path)?;
    step("temporary file made");
    file.write_all(bytes)?;
    step("temporary file written");
    if flush == Flush::File {
        file.sync_all()?;
        step("temporary file synced");
    }
    Ok(())
}

/// Removes a file; a missing one is a success.
///
/// # Errors
/// When the disk refuses.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Ok(()) => {
            step("file removed");
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// The file that a new content is written to first. The dot and the extension keep CDI
/// readers and the checkpoint's off; one writer for each path is what its lock guarantees.
fn temporary_name(name: &OsStr) -> OsString {
    let mut temporary = OsString::from(".");
    temporary.push(name);
    temporary.push(".tmp");
    temporary
}

/// The file for which a temporary one was made; `None` where the name is not one of ours.
pub(crate) fn of_temporary(name: &str) -> Option<&str> {
    name.strip_prefix('.')?.strip_suffix(".tmp")
}

/// Removes what an interrupted [`replace`] of a file left. Whoever calls holds the lock
/// that keeps other writers of the file off.
pub(crate) fn remove_temporary(path: &Path) {
    if let Ok((folder, name)) = split(path) {
        fs::remove_file(folder.join(temporary_name(name))).ok();
    }
}

fn split(path: &Path) -> io::Result<(&Path, &OsStr)> {
    path.parent()
        .zip(path.file_name())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a file in a folder"))
}
