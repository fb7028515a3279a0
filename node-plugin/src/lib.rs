//! The DRA kubelet plugin: GPUs as ResourceSlices, claims as devices.
//!
//! In: NVML through crate `gpu`, the kubelet's calls, claims from the API server. Out:
//! the node's slices, prepared devices. Never: anything about another node.
//!
//! `slices` decides what is offered, `claims` turns a claim into devices, `kubelet` is
//! transport, `discovery` finds the GPUs, `health` knows what is wrong with them; [`run()`]
//! wires them together.

pub mod admin;
pub mod claims;
pub mod discovery;
pub mod events;
pub mod health;
pub mod kubelet;
pub mod liveness;
pub mod logs;
pub mod metrics;
pub mod monitoring;
pub mod options;
pub mod readiness;
mod run;
pub mod slices;

pub use run::run;

/// The driver's name: in slices, claims, sockets and CDI kinds.
pub const DRIVER: &str = "gpu.ai.deckhouse.io";
