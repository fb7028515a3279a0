//! MIG mode and instances, kept in a file.
//!
//! In: the topology and what `mig` decides. Out: a [`State`] that every process
//! with the same state file sees. Never: a rule about what may be created.
//!
//! Each change holds a file lock and replaces the file by a rename, so that a
//! reader needs no lock and a process killed half-way leaves the old state. As on
//! hardware, a boot ends every instance: the file carries the boot id.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use nvml_wrapper_sys::bindings as sys;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::session::Code;
use crate::topology::{ModeSwitch, Node};

/// What changes on a node while it runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct State {
    /// The boot in which the instances were made.
    pub(crate) boot_id: String,
    /// How many compute instances were ever made: no two get the same UUID.
    #[serde(default)]
    pub(crate) created: u64,
    /// The GPUs by UUID.
    #[serde(default)]
    pub(crate) gpus: BTreeMap<String, GpuState>,
}

/// What changes on one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct GpuState {
    /// Whether MIG is on.
    pub(crate) mig: bool,
    /// Whether MIG will be on after a reset.
    pub(crate) mig_pending: bool,
    /// `nvmlComputeMode_t`.
    #[serde(default)]
    pub(crate) compute_mode: u32,
    /// The GPU instances by id.
    #[serde(default)]
    pub(crate) instances: BTreeMap<u32, Instance>,
    /// Whether the GPU has fallen off the bus. Tests set it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) lost: bool,
    /// Return codes that functions answer with instead of acting, by name. Tests set them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) faults: BTreeMap<String, u32>,
}

/// A GPU instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Instance {
    /// The profile id.
    pub(crate) profile: u32,
    /// The first memory slice.
    pub(crate) start: u32,
    /// The number of memory slices.
    pub(crate) size: u32,
    /// The compute instances by id.
    #[serde(default)]
    pub(crate) compute_instances: BTreeMap<u32, ComputeInstance>,
}

/// A compute instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ComputeInstance {
    /// The profile id.
    pub(crate) profile: u32,
    /// The first compute slice.
    pub(crate) start: u32,
    /// The number of compute slices.
    pub(crate) size: u32,
    /// `MIG-…`.
    pub(crate) uuid: String,
}

/// Where the state lives.
pub(crate) enum Store {
    /// In a file that processes share.
    File(PathBuf),
    /// In this process, where no file was named.
    Memory(Mutex<State>),
}

impl Store {
    /// The state now.
    pub(crate) fn read(&self, node: &Node) -> Result<State, Code> {
        match self {
            Self::File(path) => load(path, node),
            Self::Memory(state) => {
                let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
                settle(&mut state, node);
                Ok(state.clone())
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
                let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
                let mut state = shared.clone();
                settle(&mut state, node);
                let answer = change(&mut state)?;
                *shared = state;
                Ok(answer)
            }
            Self::File(path) => {
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

/// The kernel's name of this boot, which no process outlives.
fn boot_id() -> &'static str {
    static BOOT_ID: OnceLock<String> = OnceLock::new();
    BOOT_ID.get_or_init(|| {
        let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        text.trim().to_owned()
    })
}

/// Brings the state to this boot and to the GPUs of the topology.
fn settle(state: &mut State, node: &Node) {
    let boot = boot_id();
    let rebooted = state.boot_id != boot;
    if rebooted {
        boot.clone_into(&mut state.boot_id);
    }
    for gpu in &node.gpus {
        let fresh = GpuState {
            mig: gpu.mig_enabled,
            mig_pending: gpu.mig_enabled,
            ..GpuState::default()
        };
        let now = state
            .gpus
            .entry(gpu.uuid.clone())
            .or_insert_with(|| fresh.clone());
        if rebooted {
            // The mode is kept in the InfoROM of the parts that need a reset for it.
            let kept = gpu
                .model
                .mig
                .as_ref()
                .is_some_and(|m| m.mode_switch == ModeSwitch::Reset);
            let mode = if kept {
                now.mig_pending
            } else {
                gpu.mig_enabled
            };
            *now = GpuState {
                mig: mode,
                mig_pending: mode,
                ..fresh
            };
        }
    }
}

fn unusable(path: &Path, error: &io::Error) -> Code {
    crate::session::complain(&format!(
        "the state file {} cannot be used: {error}; repair or remove it, or name another in \
         FAKE_NVML_STATE",
        path.display()
    ));
    Code(sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN)
}
