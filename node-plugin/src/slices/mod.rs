//! What a node offers: inventory in, ResourceSlices out.
//!
//! In: what is [`Wanted`] (GPUs, administrators' MIG instances, how GPUs are shared), and
//! what the API server keeps. Out: the content of the node's one pool, within the API's limits (8 counter sets in a slice, 64 devices where
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
//!   downwards, so that the two kinds meet as late as possible;
//! - shared devices come last: a claim that leaves the choice open never asked to share,
//!   and one that names no amount takes as much of a shared device as of the whole one,
//!   with less isolation. Among themselves those of administrators' partitions come
//!   before those of GPUs, and both run from the first GPU upwards: a share needs a GPU
//!   without partitions in use, so first fit gathers shares on the lowest such GPU until
//!   that is full, beside the GPUs that partitions broke up and far from the whole ones.
//!
//! Within each kind a slice holds all devices of a GPU unless one GPU alone exceeds
//! the limit.

mod attributes;
mod counters;
mod described;
mod devices;
mod fragmentation;
mod held;
mod instances;
mod layout;
pub mod names;
mod nvlink;
mod plan;
pub mod publisher;
mod quantity;
mod shares;
mod stored;
mod taints;
mod view;
mod wanted;

use devices::Published;
use gpu::{PciAddress, Placement};
use k8s_openapi::api::resource::v1::{CounterSet, Device};
use serde::{Deserialize, Serialize};

pub use described::Described;
pub use fragmentation::{Holding, largest_placeable};
pub use instances::not_offered;
pub use layout::resource_slice;
pub use plan::{Plan, plan_writes};
pub use stored::Stored;
pub(crate) use taints::affecting;
pub use view::View;
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

/// Whether claims may change how a GPU is partitioned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum MigPolicy {
    /// A claim's instance is created when it is prepared and destroyed when it is unprepared,
    /// and MIG mode is switched where the hardware does that without a reset.
    #[default]
    Dynamic,
    /// MIG mode and instances are the administrator's; what exists is offered.
    Static,
}

/// How the claims that share a device are kept apart. The same for every share of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SharingKind {
    /// By MPS: each client's memory and active threads are limited to its share.
    Mps,
    /// By the driver's time-slicing: each client has the GPU in turn, and nothing limits
    /// its memory to its share.
    TimeSlicing,
}

impl SharingKind {
    /// The value of the attribute `sharing`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Mps => "mps",
            Self::TimeSlicing => "time-slicing",
        }
    }
}

/// The content of one slice: counters and devices exclude each other since 1.35.
#[derive(Debug, Clone, PartialEq)]
pub enum SliceContent {
    /// Counter sets, at most 8.
    Counters(Vec<CounterSet>),
    /// Devices, possibly none: an empty pool differs from no pool.
    Devices(Vec<Device>),
}

/// The content of the node's pool, slice by slice.
#[must_use]
pub fn pool(wanted: &Wanted, view: View) -> Vec<SliceContent> {
    let connections = nvlink::connections(&wanted.inventory.gpus);
    let mut published: Vec<_> = wanted
        .inventory
        .gpus
        .iter()
        .map(|gpu| devices::of_gpu(wanted, gpu, connections.get(&gpu.pci), view))
        .collect();
    taints::apply(&mut published, wanted);
    if !view.taints {
        published.iter_mut().for_each(Published::withdraw);
    }
    layout::arrange(published)
}
