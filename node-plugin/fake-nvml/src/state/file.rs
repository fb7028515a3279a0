//! Where the state is kept, and how a reader learns that it has changed.
//!
//! In: a path. Out: the state now, changed under a lock, and a wait for the next change.
//! Never: what the state means.

use std::ffi::{OsStr, OsString, c_int};
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use nvml_wrapper_sys::bindings as sys;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::fs::{FlockOperation, flock};

use super::{State, settle};
use crate::session::Code;
use crate::topology::Node;

/// Where the state lives.
pub(crate) enum Store {
    /// In a file that processes share.
    File {
        /// The file.
        path: PathBuf,
        /// The file as it was last read: most calls find it unchanged.
        read: Mutex<Option<(Option<Stamp>, Arc<State>)>>,
    },
    /// In this process, where no file was named.
    Memory(Mutex<State>),
}

impl Store {
    /// A state that processes share.
    pub(crate) fn file(path: PathBuf) -> Self {
        Self::File {
            path,
            read: Mutex::default(),
        }
    }

    /// The state now.
    pub(crate) fn read(&self, node: &Node) -> Result<Arc<State>, Code> {
        match self {
            Self::File { path, read } => {
                // Before the file is read: what is read is this old, or newer.
                let stamp = Stamp::of(path);
                let mut last = locked(read);
                if let Some((then, state)) = &*last
                    && stamp == *then
                {
                    return Ok(Arc::clone(state));
                }
                let state = Arc::new(load(path, node)?);
                // A file that is not there yet tells of itself once it is.
                let settled = stamp.as_ref().is_none_or(Stamp::is_settled);
                *last = settled.then(|| (stamp, Arc::clone(&state)));
                Ok(state)
            }
            Self::Memory(state) => {
                let mut state = locked(state);
                settle(&mut state, node);
                Ok(Arc::new(state.clone()))
            }
        }
    }

    /// Changes the state; nothing is kept when `change` refuses.
    pub(crate) fn update<T>(
        &self,
        node: &Node,
        change: impl FnOnce(&mut State) -> Result<T, Code>,
    ) -> Result<T, Code> {
        match self {
            Self::Memory(shared) => {
                let mut shared = locked(shared);
                let mut state = shared.clone();
                settle(&mut state, node);
                let answer = change(&mut state)?;
                *shared = state;
                Ok(answer)
            }
            Self::File { path, .. } => {
                let lock = lock(path).map_err(|error| unusable(path, &error))?;
                let before = load(path, node)?;
                let mut state = before.clone();
                let answer = change(&mut state)?;
                if state != before {
                    save(path, &state).map_err(|error| unusable(path, &error))?;
                }
                drop(lock);
                Ok(answer)
            }
        }
    }

    /// A watch on the state, made before it is read, so that no change is missed.
    pub(crate) fn watch(&self) -> Watch {
        let file = match self {
            Self::File { path, .. } => path.parent().zip(path.file_name()),
            Self::Memory(_) => None,
        };
        Watch(file.and_then(|(folder, name)| {
            let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok()?;
            // Replaced by a rename; written in place by a test.
            let changes = WatchFlags::MOVED_TO | WatchFlags::CLOSE_WRITE;
            inotify::add_watch(&watch, folder, changes).ok()?;
            Some((watch, name.to_owned()))
        }))
    }
}

/// Waits for a change of the state file; without inotify, for a moment.
pub(crate) struct Watch(Option<(OwnedFd, OsString)>);

/// How long a wait is where there is no inotify.
const MOMENT: Duration = Duration::from_millis(50);
/// After which the reader looks without being told: not every file system tells.
const LONGEST: Duration = Duration::from_secs(1);
/// Changes come in bursts, of which the last is worth a look.
const BURST: Duration = Duration::from_millis(10);

impl Watch {
    /// Waits until the state has changed, at most so long; may end without a change.
    pub(crate) fn wait(&self, at_most: Duration) {
        let Some((watch, name)) = &self.0 else {
            std::thread::sleep(at_most.min(MOMENT));
            return;
        };
        let end = Instant::now() + at_most.min(LONGEST);
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let mut wanted = libc::pollfd {
                fd: watch.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // A millisecond more: the rest of one must not become a busy loop.
            ready(&mut wanted, left.as_millis() as c_int + 1);
            if says(watch, name) {
                std::thread::sleep(BURST.min(left));
                says(watch, name);
                return;
            }
        }
    }
}

/// Whether what the watch has to say is about this file; then it is said.
fn says(watch: &OwnedFd, name: &OsStr) -> bool {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut changes = inotify::Reader::new(watch, &mut buffer);
    let mut said = false;
    while let Ok(change) = changes.next() {
        said |= change
            .file_name()
            .is_some_and(|file| file.to_bytes() == name.as_bytes());
    }
    said
}

#[allow(unsafe_code)]
fn ready(wanted: &mut libc::pollfd, milliseconds: c_int) {
    // SAFETY: one pollfd, alive and ours for the length of the call.
    unsafe { libc::poll(wanted, 1, milliseconds) };
}

/// What tells one content of a file from the next without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    place: (u64, u64, u64),
    modified: SystemTime,
    changed: (i64, i64),
}

impl Stamp {
    fn of(path: &Path) -> Option<Self> {
        let file = fs::metadata(path).ok()?;
        Some(Self {
            place: (file.dev(), file.ino(), file.size()),
            modified: file.modified().ok()?,
            changed: (file.ctime(), file.ctime_nsec()),
        })
    }

    /// Whether a later change must differ: file times are a few milliseconds coarse.
    fn is_settled(&self) -> bool {
        let age = SystemTime::now().duration_since(self.modified);
        age.is_ok_and(|age| age > Duration::from_millis(50))
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Locks the state between processes until the file is dropped.
fn lock(path: &Path) -> io::Result<fs::File> {
    // A file of its own: the state file itself is replaced at each change.
    let file = fs::OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(beside(path, ".lock"))?;
    flock(&file, FlockOperation::LockExclusive)?;
    Ok(file)
}

fn load(path: &Path, node: &Node) -> Result<State, Code> {
    let mut state = match fs::read(path) {
        Ok(text) => serde_json::from_slice(&text)
            .map_err(|error| unusable(path, &io::Error::other(error)))?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => State::default(),
        Err(error) => return Err(unusable(path, &error)),
    };
    settle(&mut state, node);
    Ok(state)
}

fn save(path: &Path, state: &State) -> io::Result<()> {
    let text = serde_json::to_vec_pretty(state)?;
    // The lock is held, so one name is enough. No fsync: a boot voids the state anyway.
    let temporary = beside(path, ".new");
    fs::write(&temporary, text)?;
    fs::rename(&temporary, path)
}

fn unusable(path: &Path, error: &io::Error) -> Code {
    crate::session::complain(&format!(
        "the state file {} cannot be used: {error}; repair or remove it, or name another in \
         FAKE_NVML_STATE",
        path.display()
    ));
    Code(sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN)
}
