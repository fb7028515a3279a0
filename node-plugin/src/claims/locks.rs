//! Locks by name that hold within this process and between two of them.
//!
//! In: the name of a claim or of a GPU. Out: a guard. Never: a lock for the whole
//! node: a slow claim must not keep others waiting.
//!
//! During a rolling update two instances of the plugin run, and the kubelet may send
//! a claim's prepare to one and its unprepare to the other, so each lock is an
//! `flock` on a file as well as an async mutex. Lock files are never removed (that
//! could not be done without a race); claims share a fixed number of them by hash,
//! so that their number does not grow. Whoever takes several takes a claim's first,
//! then GPUs in ascending order.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use gpu::PciAddress;
use rustix::fs::FlockOperation;
use sha2::{Digest, Sha256};
use tokio::sync::OwnedMutexGuard;

const CLAIM_FILES: u8 = 64;

/// The locks of one node.
#[derive(Debug)]
pub(super) struct Locks {
    folder: PathBuf,
    names: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
}

/// A held lock; dropping it releases it.
#[derive(Debug)]
pub(super) struct Held {
    _file: File,
    _guard: OwnedMutexGuard<()>,
}

impl Locks {
    /// Locks whose files lie in `folder`.
    ///
    /// # Errors
    /// When the folder cannot be made.
    pub(super) fn open(folder: PathBuf) -> io::Result<Self> {
        std::fs::create_dir_all(&folder)?;
        Ok(Self {
            folder,
            names: Mutex::new(HashMap::new()),
        })
    }

    /// Waits for a claim.
    ///
    /// # Errors
    /// When the lock file cannot be opened or locked.
    pub(super) async fn claim(&self, uid: &str) -> io::Result<Held> {
        // A hash that every release computes alike: old and new must meet.
        let bucket = Sha256::digest(uid.as_bytes())
            .first()
            .map_or(0, |byte| byte % CLAIM_FILES);
        self.acquire(format!("claim-{bucket:02x}.lock")).await
    }

    /// Waits for a GPU.
    ///
    /// # Errors
    /// When the lock file cannot be opened or locked.
    pub(super) async fn gpu(&self, pci: PciAddress) -> io::Result<Held> {
        self.acquire(format!("gpu-{}.lock", pci.dns_label())).await
    }

    /// Waits for the turn to change a shared device's daemon. Whoever also takes a claim's
    /// lock takes that first; nobody waits for a turn who holds a GPU's.
    ///
    /// # Errors
    /// When the lock file cannot be opened or locked.
    pub(super) async fn daemon(&self, device: &str) -> io::Result<Held> {
        self.acquire(format!("daemon-{device}.lock")).await
    }

    /// The mutex comes first, so that only another process can make a thread wait.
    async fn acquire(&self, name: String) -> io::Result<Held> {
        let path = self.folder.join(&name);
        let mutex = {
            let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
            names.entry(name).or_default().clone()
        };
        let guard = mutex.lock_owned().await;
        let file = File::options().create(true).append(true).open(&path)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Held {
                _file: file,
                _guard: guard,
            }),
            Err(rustix::io::Errno::WOULDBLOCK) => tokio::task::spawn_blocking(move || {
                rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
                Ok(Held {
                    _file: file,
                    _guard: guard,
                })
            })
            .await
            .map_err(io::Error::other)?,
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn two_instances_exclude_each_other_and_two_gpus_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (
            Locks::open(folder.path().to_owned()).unwrap(),
            Locks::open(folder.path().to_owned()).unwrap(),
        );
        let (first, second) = (
            "0000:65:00.0".parse().unwrap(),
            "0000:66:00.0".parse::<PciAddress>().unwrap(),
        );
        let held = old.gpu(first).await.unwrap();
        let _other = new.gpu(second).await.unwrap();
        let waiting = tokio::spawn(async move { new.gpu(first).await.map(drop) });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(held);
        waiting.await.unwrap().unwrap();
    }
}
