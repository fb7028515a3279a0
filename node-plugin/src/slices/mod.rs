//! What a node offers: inventory in, ResourceSlices out.
//!
//! In: what is [`Wanted`] (GPUs, administrators' MIG instances), and whether the API
//! server keeps partitionable devices. Out: the content of the node's one
//! pool, within the API's limits (8 counter sets in a slice, 64 devices where
//! counters are consumed and 128 where not; `api/resource/v1/types.go` of Kubernetes
//! 1.37). The same inventory always gives the same slices: preparing a claim creates
//! and destroys MIG instances and switches MIG mode, and none of that shows here.
//! Never: a client, a clock, or a write; [`publisher`] is the shell.
//!
//! # The order of devices is a decision
//! The scheduler takes the first device that fits, in the order slice name, then
//! position. So:
//! - partitions come before whole devices and small ones before large ones: a claim
//!   that leaves the choice open gets the least disruptive device;
//! - within a profile the placement with the highest start comes first: on a
//!   7-slice part 4g fits only at 0, and a 1g at 3 already forbids it, so small
//!   partitions fill a GPU from slice 6 downwards and keep `{0}:4` open longest;
//! - partitions run from the first GPU upwards, so that one GPU is broken up before
//!   the next; whole devices stand in slices of their own and run from the last GPU
//!   downwards, so that the two kinds meet as late as possible.
//!
//! Within each kind a slice holds all devices of a GPU unless one GPU alone exceeds
//! the limit.

mod devices;
mod layout;
pub mod names;
mod plan;
pub mod publisher;
mod quantity;
mod wanted;

use gpu::{Inventory, PciAddress, Placement};
use k8s_openapi::api::resource::v1::{CounterSet, Device};

pub use layout::resource_slice;
pub use plan::{Write, plan_writes};
pub use wanted::Wanted;

/// A MIG instance that exists and that no claim of ours created: an administrator's.
/// It is published as it is and never destroyed; what overlaps it is not offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StaticInstance {
    /// Its GPU.
    pub pci: PciAddress,
    /// Its GPU instance profile id.
    pub profile_id: u32,
    /// Where it sits.
    pub placement: Placement,
}

/// How much of the API a server keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// Counters are kept: partitions and whole devices share each GPU.
    Full,
    /// Counters are dropped (feature `DRAPartitionableDevices` off, the default up to
    /// 1.35): nothing would keep a partition and its GPU apart, so only devices that
    /// cannot overlap are offered.
    Reduced,
}

/// The content of one slice: counters and devices exclude each other since 1.35.
#[derive(Debug, Clone, PartialEq)]
pub enum SliceContent {
    /// Counter sets, at most 8.
    Counters(Vec<CounterSet>),
    /// Devices, possibly none: an empty pool differs from no pool.
    Devices(Vec<Device>),
}

/// A device of a node by its name, with the attributes and capacities under which it is
/// published; `None` where the inventory has no such device.
#[must_use]
pub fn describe(inventory: &Inventory, device: &str) -> Option<Device> {
    devices::describe(inventory, device)
}

/// The content of the node's pool, slice by slice.
#[must_use]
pub fn pool(wanted: &Wanted, view: View) -> Vec<SliceContent> {
    let inventory = &wanted.inventory;
    let published: Vec<_> = inventory
        .gpus
        .iter()
        .map(|gpu| {
            let published = devices::of_gpu(inventory, gpu, &wanted.statics, view);
            // A server that drops counters drops taints too.
            if view == View::Full && wanted.unreadable.contains(&gpu.pci) {
                published.tainted()
            } else {
                published
            }
        })
        .collect();
    layout::arrange(published)
}
