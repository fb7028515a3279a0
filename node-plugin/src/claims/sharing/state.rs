//! What a daemon was last brought to, and the folders it needs.
//!
//! In: the folder of a device's daemon. Out: what must not be lost with the process that
//! changed it. Never: anything of another boot: the folder is on a tmpfs, or stands in for
//! one.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use gpu::ComputeMode;
use serde::{Deserialize, Serialize};

use super::error::SharingError;
use super::{Places, Portion, SharedDevice};
use crate::claims::files::{self, Flush};

/// What a daemon was last brought to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct State {
    /// The boot that all of it is of.
    pub(super) boot_id: String,
    /// The UUID of its device.
    pub(super) uuid: String,
    /// The compute mode that the GPU had, where it was changed.
    pub(super) compute_mode: Option<ComputeMode>,
    /// The limits that the daemon took; `None` until it answered once.
    pub(super) limits: Option<Portion>,
}

impl State {
    /// What was kept in the folder in this boot.
    pub(super) fn read(places: &Places, boot_id: &str) -> Option<Self> {
        let bytes = fs::read(places.folder.join("state.json")).ok()?;
        let state: Self = serde_json::from_slice(&bytes).ok()?;
        (state.boot_id == boot_id).then_some(state)
    }

    /// Keeps it, whole or not at all.
    ///
    /// # Errors
    /// When the folder is not writable.
    pub(super) fn save(&self, device: SharedDevice, places: &Places) -> Result<(), SharingError> {
        let path = places.folder.join("state.json");
        let write = || {
            let bytes = serde_json::to_vec(self)?;
            files::replace(&path, &bytes, Flush::None)
        };
        write().map_err(|source| SharingError::Folder {
            device,
            path: path.clone(),
            source,
        })
    }
}

/// Makes the folders of a daemon that is about to be started, without anything of an
/// earlier one.
///
/// # Errors
/// When the parent is not writable.
pub(super) fn make_folders(device: SharedDevice, places: &Places) -> Result<(), SharingError> {
    let made = |path: PathBuf, mode: u32| {
        let make = fs::create_dir_all(&path)
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(mode)));
        make.map_err(|source| SharingError::Folder {
            device,
            path,
            source,
        })
    };
    // Sockets of a daemon that is gone would be taken for its successor's.
    for stale in [places.pipe(), places.folder.join("process.json")] {
        let gone = if stale.is_dir() {
            fs::remove_dir_all(&stale)
        } else {
            fs::remove_file(&stale)
        };
        drop(gone); // The next step says what is wrong with the folder.
    }
    made(places.folder.clone(), 0o711)?;
    made(places.pipe(), 0o755)?; // Clients of any user connect there.
    made(places.shm(), 0o1777)?; // It is their /dev/shm.
    made(places.log(), 0o700)?;
    files::step("daemon's folders made");
    Ok(())
}
