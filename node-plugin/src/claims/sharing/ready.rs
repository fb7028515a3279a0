//! Waiting for a descriptor of the kernel's, without a thread that waits.
//!
//! In: a process's or a folder's descriptor. Out: the moment at which it has something to
//! tell. Never: a descriptor that somebody else may close.

use std::ffi::OsStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::inotify;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a descriptor that tells by being readable.
fn registered(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // Deprecated for types that may change their descriptor behind the reactor's back,
    // which an `OwnedFd` does not; the replacement is `unsafe`.
    #[allow(deprecated)]
    AsyncFd::with_interest(descriptor, Interest::READABLE)
}

/// Waits until a descriptor is readable: a process's is when the process has ended.
///
/// # Errors
/// When the kernel does not tell.
pub(super) async fn readable(descriptor: OwnedFd) -> io::Result<()> {
    registered(descriptor)?.readable().await?.retain_ready();
    Ok(())
}

/// Tells of files that appear in a folder.
pub(super) struct FolderWatch {
    inotify: AsyncFd<OwnedFd>,
}

impl FolderWatch {
    /// Watches from now on.
    ///
    /// # Errors
    /// When there is no such folder.
    pub(super) fn new(folder: &Path) -> io::Result<Self> {
        let flags = inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC;
        let descriptor = inotify::init(flags)?;
        let appears = inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO;
        inotify::add_watch(&descriptor, AsRef::<OsStr>::as_ref(folder), appears)?;
        Ok(Self {
            inotify: registered(descriptor)?,
        })
    }

    /// Waits until something appeared since the last call.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub(super) async fn changed(&self) -> io::Result<()> {
        let mut ready = self.inotify.readable().await?;
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(ready.get_inner(), &mut buffer);
        while events.next().is_ok() {}
        ready.clear_ready();
        Ok(())
    }
}
