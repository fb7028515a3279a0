//! The devices and counters of one GPU.
//!
//! In: one [`Gpu`] of an inventory. Out: its whole device, its partitions in order of
//! preference and the counter set that keeps them apart. Never: a device that the
//! hardware could not give.
//!
//! Counters encode the geometry: a counter of one per memory slice, and the compute
//! slices. Video, copy and optical flow engines are not counted: the largest profile
//! often reports fewer of them than a legal layout uses together, and a counter set
//! to that number would forbid layouts that the hardware allows.

use std::collections::{BTreeMap, BTreeSet};

use gpu::{Gpu, Inventory, MigMode, MigProfile, Placement};
use k8s_openapi::api::resource::v1::{
    Counter, CounterSet, Device, DeviceAttribute, DeviceCapacity, DeviceCounterConsumption,
    DeviceTaint,
};

use super::{StaticInstance, View, names, quantity};

/// The key of the taint on devices of a GPU that cannot be read.
const UNREADABLE: &str = "gpu.ai.deckhouse.io/unreadable";

/// The longest string value that an attribute may have.
const MAX_VALUE: usize = 64;

/// The counter of a GPU's one set of media extension engines; see [`counters`].
const MEDIA_EXTENSIONS: &str = "media-extensions";

/// What is published of one GPU.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Published {
    pub(super) counters: Option<CounterSet>,
    /// In order of preference.
    pub(super) partitions: Vec<Device>,
    pub(super) whole: Option<Device>,
}

impl Published {
    /// The same, for a GPU that cannot be read: no new claim gets its devices.
    pub(super) fn tainted(mut self) -> Self {
        for device in self.partitions.iter_mut().chain(self.whole.as_mut()) {
            device.taints = Some(vec![DeviceTaint {
                key: UNREADABLE.to_owned(),
                value: None,
                effect: "NoSchedule".to_owned(),
                time_added: None, // The API server's.
            }]);
        }
        self
    }
}

/// The devices of one GPU.
pub(super) fn of_gpu(
    inventory: &Inventory,
    gpu: &Gpu,
    statics: &BTreeSet<StaticInstance>,
    view: View,
) -> Published {
    let statics: Vec<&StaticInstance> = statics.iter().filter(|s| s.pci == gpu.pci).collect();
    let (whole, partitions) = match gpu.mig {
        MigMode::Unsupported | MigMode::Disabled { switchable: false } => (true, false),
        // Work on the whole of a GPU needs MIG off, which an administrator's
        // instances and a pending GPU reset both forbid.
        MigMode::Enabled { switchable: false } => (false, true),
        MigMode::Disabled { switchable: true } | MigMode::Enabled { switchable: true } => {
            (statics.is_empty(), true)
        }
    };
    if !partitions || gpu.profiles.is_empty() {
        let whole = whole.then(|| whole_device(inventory, gpu, None));
        return Published {
            whole,
            ..Published::default()
        };
    }

    let offered = partitions_in_order(gpu, &statics, view);
    if view == View::Reduced {
        let partitions = offered
            .iter()
            .map(|(p, at)| partition(inventory, gpu, p, *at, None));
        return Published {
            counters: None,
            partitions: partitions.collect(),
            whole: whole.then(|| whole_device(inventory, gpu, None)),
        };
    }
    let set = counters(gpu);
    Published {
        partitions: offered
            .iter()
            .map(|(p, at)| partition(inventory, gpu, p, *at, Some(&set)))
            .collect(),
        whole: whole.then(|| whole_device(inventory, gpu, Some(&set))),
        counters: Some(set),
    }
}

/// A device as it is, or would be, published, without what it consumes.
pub(super) fn describe(inventory: &Inventory, device: &str) -> Option<Device> {
    Some(match names::resolve(&inventory.gpus, device)? {
        names::Named::Whole(gpu) => whole_device(inventory, gpu, None),
        names::Named::Partition(gpu, profile, at) => partition(inventory, gpu, profile, at, None),
    })
}

/// The partitions to offer: smallest first, then by compute, plain profiles before
/// those with scarce engines, and each profile from its highest placement down.
fn partitions_in_order<'a>(
    gpu: &'a Gpu,
    statics: &[&StaticInstance],
    view: View,
) -> Vec<(&'a MigProfile, Placement)> {
    let mut all: Vec<(&MigProfile, Placement)> = gpu
        .profiles
        .iter()
        .flat_map(|profile| profile.placements.iter().map(move |at| (profile, *at)))
        .filter(|(profile, at)| {
            let is_static = statics
                .iter()
                .any(|s| s.profile_id == profile.id && s.placement == *at);
            let is_free = view == View::Full && !statics.iter().any(|s| s.placement.overlaps(*at));
            is_static || is_free
        })
        .collect();
    all.sort_by(|(a, at), (b, bt)| {
        let size = |p: &MigProfile, at: Placement| (at.size, p.compute_slices, p.name.len());
        size(a, *at)
            .cmp(&size(b, *bt))
            .then_with(|| a.name.cmp(&b.name))
            .then_with(|| bt.start.cmp(&at.start))
    });
    all
}

/// Everything that a GPU's devices draw on.
///
/// A GPU has one set of media extension engines (JPEG, optical flow), and NVML
/// reports a maximum of one instance for each `+me` profile; but two such profiles of
/// different size (A30: `1g.6gb+me`, `2g.12gb+me`) cannot exist together either. So
/// all `+me` profiles draw on one counter, where each has a maximum of one.
fn counters(gpu: &Gpu) -> CounterSet {
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

fn has_media_extensions(profile: &MigProfile) -> bool {
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

fn whole_device(inventory: &Inventory, gpu: &Gpu, set: Option<&CounterSet>) -> Device {
    let mut attributes = common_attributes(inventory, gpu);
    attributes.insert("type".to_owned(), string("gpu"));
    attributes.insert("uuid".to_owned(), string(&gpu.uuid));
    // Not the mode of this moment: where it can be switched, claims switch it, and a
    // slice must not change because a claim was prepared.
    let mode = match gpu.mig {
        MigMode::Unsupported => "unsupported",
        MigMode::Disabled { switchable: false } => "disabled",
        MigMode::Enabled { switchable: false } => "enabled",
        MigMode::Disabled { switchable: true } | MigMode::Enabled { switchable: true } => "dynamic",
    };
    attributes.insert("migMode".to_owned(), string(mode));
    Device {
        name: names::whole(gpu.pci),
        attributes: Some(attributes),
        capacity: Some(BTreeMap::from([capacity(
            "memory",
            quantity::bytes(gpu.memory_bytes),
        )])),
        consumes_counters: set.map(|set| vec![consumption(set, set.counters.clone())]),
        ..Device::default()
    }
}

fn partition(
    inventory: &Inventory,
    gpu: &Gpu,
    profile: &MigProfile,
    at: Placement,
    set: Option<&CounterSet>,
) -> Device {
    let mut attributes = common_attributes(inventory, gpu);
    attributes.insert("type".to_owned(), string("mig"));
    attributes.insert("profile".to_owned(), string(&profile.name));
    attributes.insert("parentUUID".to_owned(), string(&gpu.uuid));
    attributes.insert("placementStart".to_owned(), int(at.start));
    attributes.insert("placementSize".to_owned(), int(at.size));
    let consumed = set.map(|set| {
        let mut counters: BTreeMap<String, Counter> = (at.start..at.start + at.size)
            .map(|s| (memory_slice(s), counter(1)))
            .collect();
        counters.insert("compute-slices".to_owned(), counter(profile.compute_slices));
        if has_media_extensions(profile) && set.counters.contains_key(MEDIA_EXTENSIONS) {
            counters.insert(MEDIA_EXTENSIONS.to_owned(), counter(1));
        }
        vec![consumption(set, counters)]
    });
    Device {
        name: names::partition(gpu.pci, &profile.name, at.start),
        attributes: Some(attributes),
        capacity: Some(BTreeMap::from([
            capacity("memory", quantity::bytes(profile.memory_bytes)),
            capacity("multiprocessors", quantity::count(profile.multiprocessors)),
        ])),
        consumes_counters: consumed,
        ..Device::default()
    }
}

/// What a whole GPU and its partitions have in common.
fn common_attributes(inventory: &Inventory, gpu: &Gpu) -> BTreeMap<String, DeviceAttribute> {
    let (cuda_major, cuda_minor) = inventory.cuda_version;
    let (cc_major, cc_minor) = gpu.compute_capability;
    let mut attributes = BTreeMap::from([
        ("productName".to_owned(), string(&gpu.product_name)),
        ("brand".to_owned(), string(&gpu.brand)),
        ("architecture".to_owned(), string(&gpu.architecture)),
        (
            "cudaComputeCapability".to_owned(),
            version(format!("{cc_major}.{cc_minor}.0")),
        ),
        (
            "cudaDriverVersion".to_owned(),
            version(format!("{cuda_major}.{cuda_minor}.0")),
        ),
        ("index".to_owned(), int(gpu.index)),
        ("pciAddress".to_owned(), string(&gpu.pci.to_string())),
        (
            "resource.kubernetes.io/pciBusID".to_owned(),
            string(&gpu.pci.to_string()),
        ),
    ]);
    if let Some(driver) = quantity::version(&inventory.driver_version) {
        attributes.insert("driverVersion".to_owned(), version(driver));
    }
    if let Some(root) = &gpu.pcie_root {
        attributes.insert("resource.kubernetes.io/pcieRoot".to_owned(), string(root));
    }
    if let Some(node) = gpu.numa_node {
        attributes.insert("resource.kubernetes.io/numaNode".to_owned(), int(node));
    }
    attributes
}

fn string(value: &str) -> DeviceAttribute {
    let mut end = value.len().min(MAX_VALUE);
    while !value.is_char_boundary(end) {
        end -= 1;
    }
    DeviceAttribute {
        string: Some(value[..end].to_owned()),
        ..DeviceAttribute::default()
    }
}

fn int(value: u32) -> DeviceAttribute {
    DeviceAttribute {
        int: Some(i64::from(value)),
        ..DeviceAttribute::default()
    }
}

fn version(value: String) -> DeviceAttribute {
    DeviceAttribute {
        version: Some(value),
        ..DeviceAttribute::default()
    }
}

fn capacity(
    name: &str,
    value: k8s_openapi::apimachinery::pkg::api::resource::Quantity,
) -> (String, DeviceCapacity) {
    (
        name.to_owned(),
        DeviceCapacity {
            value,
            request_policy: None,
        },
    )
}

fn consumption(set: &CounterSet, counters: BTreeMap<String, Counter>) -> DeviceCounterConsumption {
    DeviceCounterConsumption {
        counter_set: set.name.clone(),
        counters,
        compatibility_groups: None,
    }
}
