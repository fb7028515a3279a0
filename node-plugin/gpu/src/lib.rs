//! NVML facts as plain data.
//!
//! In: a loaded NVML and the roots of `/proc` and `/sys`. Out: an [`Inventory`],
//! and MIG instances created and destroyed. Never: a decision about what to
//! publish or to prepare. This crate is the only caller of NVML.

mod inventory;

pub use inventory::{
    ComputeInstance, Gpu, Inventory, MigInstance, MigMode, MigProfile, PciAddress, PciAddressError,
    Placement, UnreadableGpu,
};
