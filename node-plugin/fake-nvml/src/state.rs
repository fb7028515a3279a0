//! MIG mode and instances, kept in a file.
//!
//! In: the topology and what `mig` decides. Out: a [`State`] that every process
//! with the same state file sees. Never: a rule about what may be created.
//!
//! Each change holds a file lock and replaces the file by a rename, so that a
//! reader needs no lock and a process killed half-way leaves the old state. As on
//! hardware, a boot ends every instance: the file carries the boot id.
//!
//! What hardware does by itself (errors, heat, loss) is in the file too, written by
//! [`crate::control`].

mod file;
mod injected;

pub(crate) use file::Store;
pub(crate) use injected::{CountDown, Event, Faults, Health, Process};

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

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
    /// How many events there ever were: the number of the newest.
    #[serde(default)]
    pub(crate) last_event: u64,
    /// The newest events, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) events: Vec<Event>,
    /// What functions answer, or how long they take, whatever they are called on.
    #[serde(flatten)]
    pub(crate) faults: Faults,
    /// Functions that kill their process at the nth call, before they act.
    #[serde(default, skip_serializing_if = "CountDown::is_empty")]
    pub(crate) kill: CountDown,
    /// The same after they have acted, before they return.
    #[serde(default, skip_serializing_if = "CountDown::is_empty")]
    pub(crate) kill_after: CountDown,
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
    /// Whether the GPU has fallen off the bus.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) lost: bool,
    /// How it is doing.
    #[serde(default, skip_serializing_if = "Health::is_fine")]
    pub(crate) health: Health,
    /// The processes that compute on it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) processes: Vec<Process>,
    /// What functions answer, or how long they take, on this GPU.
    #[serde(flatten)]
    pub(crate) faults: Faults,
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

/// The kernel's name of this boot, which no process outlives.
fn boot_id() -> &'static str {
    static BOOT_ID: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    BOOT_ID.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        text.trim().to_owned()
    })
}

/// Brings the state to this boot and to the GPUs of the topology.
fn settle(state: &mut State, node: &Node) {
    let boot = boot_id();
    let rebooted = state.boot_id != boot;
    if rebooted {
        *state = State {
            boot_id: boot.to_owned(),
            created: state.created,
            last_event: state.last_event,
            gpus: std::mem::take(&mut state.gpus),
            ..State::default()
        };
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
                health: now.health.after_reset(),
                ..fresh
            };
        }
    }
}
