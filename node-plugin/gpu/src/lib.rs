//! NVML facts as plain data.
//!
//! In: a loaded NVML and the roots of `/proc` and `/sys`. Out: an [`Inventory`],
//! and MIG instances created and destroyed. Never: a decision about what to
//! publish or to prepare. This crate is the only caller of NVML.

mod error;
mod gpus;
mod instances;
mod inventory;
mod library;
mod mig_minors;
mod profile;
mod raw;
mod sysfs;

pub use error::{Error, NvmlCode};
pub use gpus::{Gpus, Roots};
pub use inventory::{
    ComputeInstance, Gpu, Inventory, MigInstance, MigMode, MigProfile, PciAddress, PciAddressError,
    Placement, UnreadableGpu,
};
pub use library::Library;
pub use mig_minors::{MigMinors, MigMinorsError};
