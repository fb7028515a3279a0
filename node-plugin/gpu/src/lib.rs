//! NVML facts as plain data.
//!
//! In: a loaded NVML and the roots of `/proc` and `/sys`. Out: an [`Inventory`],
//! health readings and events, and MIG instances created and destroyed. Never: a
//! decision about what to publish or to prepare. This crate is the only caller of NVML.
//!
//! Every call blocks until the driver answers, and any number of threads may call at once.
//! NVML promises the latter and no more: a driver that hangs in a call on one GPU (a reset,
//! a MIG change, a card that is falling off the bus) usually answers calls on other GPUs
//! still, for it locks per GPU, but calls that look at all GPUs ([`Gpus::open`],
//! [`Gpus::inventory`]) may wait behind the hung one. [`Events::wait`] holds no lock that
//! another call needs. No call here holds a lock of this crate while NVML works, but
//! `wait`, which holds its own.

mod compute;
mod error;
mod events;
mod gpus;
mod health;
mod instances;
mod inventory;
mod library;
mod mig_minors;
mod profile;
mod raw;
mod root;
mod sysfs;
mod topology;

pub use compute::{ComputeMode, Process};
pub use error::{Error, NvmlCode};
pub use events::{EventInstance, EventKind, Events, GpuEvent};
pub use gpus::{Gpus, Roots};
pub use health::{HealthReading, RecoveryAction, RemappedRows, Slowdown};
pub use inventory::{
    ComputeInstance, Gpu, Inventory, MigInstance, MigMode, MigProfile, PciAddress, PciAddressError,
    Placement, UnreadableGpu,
};
pub use library::Library;
pub use mig_minors::{MigMinors, MigMinorsError};
pub use root::resolve;
pub use topology::{NvLink, NvLinkRemote, Pcie};
