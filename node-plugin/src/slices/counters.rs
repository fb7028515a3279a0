//! The counters that keep the devices of one GPU apart.
//!
//! In: one GPU. Out: its counter set, and what a device takes of it. Never: a counter
//! that forbids a layout which the hardware allows.
//!
//! Counters encode the geometry: a counter of one per memory slice, and the compute
//! slices. Video, copy and optical flow engines are not counted: the largest profile
//! often reports fewer of them than a legal layout uses together, and a counter set
//! to that number would forbid layouts that the hardware allows.

use std::collections::BTreeMap;

use gpu::{Gpu, MigProfile, Placement};
use k8s_openapi::api::resource::v1::{Counter, CounterSet, DeviceCounterConsumption};

use super::{names, quantity};

/// The counter of a GPU's one set of media extension engines; see [`of_partitions`].
const MEDIA_EXTENSIONS: &str = "media-extensions";

/// The one counter of a GPU that has no partitions and yet more than one device.
const GPU: &str = "gpu";

/// Everything that the devices of a GPU with partitions draw on.
///
/// A GPU has one set of media extension engines (JPEG, optical flow), and NVML
/// reports a maximum of one instance for each `+me` profile; but two such profiles of
/// different size (A30: `1g.6gb+me`, `2g.12gb+me`) cannot exist together either. So
/// all `+me` profiles draw on one counter, where each has a maximum of one.
pub(super) fn of_partitions(gpu: &Gpu) -> CounterSet {
    let slices = gpu
        .profiles
        .iter()
        .flat_map(|p| p.placements.iter())
        .map(|at| at.start + at.size)
        .max()
        .unwrap_or(0);
    let compute = gpu
        .profiles
        .iter()
        .map(|p| p.compute_slices)
        .max()
        .unwrap_or(0);
    let mut counters: BTreeMap<String, Counter> = (0..slices)
        .map(|slice| (memory_slice(slice), counter(1)))
        .collect();
    counters.insert("compute-slices".to_owned(), counter(compute));
    let mut media = gpu
        .profiles
        .iter()
        .filter(|p| has_media_extensions(p))
        .peekable();
    if media.peek().is_some() && media.all(|p| p.max_instances == 1) {
        counters.insert(MEDIA_EXTENSIONS.to_owned(), counter(1));
    }
    CounterSet {
        name: names::whole(gpu.pci),
        counters,
    }
}

/// What the whole device and the shared device of a GPU without partitions draw on.
pub(super) fn of_whole(gpu: &Gpu) -> CounterSet {
    CounterSet {
        name: names::whole(gpu.pci),
        counters: BTreeMap::from([(GPU.to_owned(), counter(1))]),
    }
}

/// What a device takes that leaves nothing of its GPU to others.
///
/// A shared device takes it with its first share, and no share after that takes more:
/// the scheduler charges a device's counters once, however many claims hold a share.
pub(super) fn everything(set: &CounterSet) -> DeviceCounterConsumption {
    consumption(set, set.counters.clone())
}

/// What a partition takes.
pub(super) fn of_partition(
    set: &CounterSet,
    profile: &MigProfile,
    at: Placement,
) -> DeviceCounterConsumption {
    let mut counters: BTreeMap<String, Counter> = (at.start..at.start + at.size)
        .map(|slice| (memory_slice(slice), counter(1)))
        .collect();
    counters.insert("compute-slices".to_owned(), counter(profile.compute_slices));
    if has_media_extensions(profile) && set.counters.contains_key(MEDIA_EXTENSIONS) {
        counters.insert(MEDIA_EXTENSIONS.to_owned(), counter(1));
    }
    consumption(set, counters)
}

/// Whether a profile has the engines of which a GPU has one set.
pub(super) fn has_media_extensions(profile: &MigProfile) -> bool {
    profile.name.contains("+me")
}

fn memory_slice(slice: u32) -> String {
    format!("memory-slice-{slice}")
}

fn counter(value: u32) -> Counter {
    Counter {
        value: quantity::count(value),
    }
}

fn consumption(set: &CounterSet, counters: BTreeMap<String, Counter>) -> DeviceCounterConsumption {
    DeviceCounterConsumption {
        counter_set: set.name.clone(),
        counters,
        compatibility_groups: None,
    }
}
