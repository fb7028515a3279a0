//! The devices of one GPU.
//!
//! In: one [`Gpu`] of an inventory. Out: its whole device, its partitions in order of
//! preference, the shared devices of both, and the counter set that keeps them apart.
//! Never: a device that the hardware could not give.

use std::collections::BTreeMap;

use gpu::{Gpu, Inventory, MigMode, MigProfile, PciAddress, Placement};
use k8s_openapi::api::resource::v1::{CounterSet, Device, DeviceCapacity};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::attributes::{self, Attributes, boolean, int, string};
use super::names::{self, Named, Shared};
use super::nvlink::Connected;
use super::{
    Holding, MigPolicy, StaticInstance, View, Wanted, counters, held, instances, quantity, shares,
};

/// The attribute that says whether a partition is created when a claim of it is prepared, or
/// is an administrator's.
const ON_DEMAND: &str = "onDemand";

/// What is published of one GPU.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Published {
    pub(super) counters: Option<CounterSet>,
    /// In order of preference.
    pub(super) partitions: Vec<Device>,
    pub(super) whole: Option<Device>,
    /// The shared devices of administrators' instances, in the order of those.
    pub(super) shared_partitions: Vec<Device>,
    /// The shared device of the whole GPU.
    pub(super) shared: Option<Device>,
}

impl Published {
    /// Every device of the GPU.
    pub(super) fn devices_mut(&mut self) -> impl Iterator<Item = &mut Device> {
        self.partitions
            .iter_mut()
            .chain(&mut self.whole)
            .chain(&mut self.shared_partitions)
            .chain(&mut self.shared)
    }

    /// Takes back what should get no new claims, for a server that drops the taints that
    /// say so; what is allocated stays allocated.
    ///
    /// With counters that is every device of the GPU. The scheduler charges a claim's
    /// counters by its published device: were only some withdrawn, it would take those that
    /// a claim of them holds for free, and give them away with another device. Without
    /// counters no device of a GPU overlaps another, and the others stay.
    pub(super) fn withdraw(&mut self) {
        let keeps_off = |device: &Device| {
            let mut taints = device.taints.iter().flatten();
            taints.any(|taint| taint.effect != "None")
        };
        if self.counters.is_some() && self.devices_mut().any(|device| keeps_off(device)) {
            *self = Self {
                counters: self.counters.take(),
                ..Self::default()
            };
        }
        self.partitions.retain(|device| !keeps_off(device));
        self.shared_partitions.retain(|device| !keeps_off(device));
        self.whole = self.whole.take().filter(|device| !keeps_off(device));
        self.shared = self.shared.take().filter(|device| !keeps_off(device));
        for device in self.devices_mut() {
            device.taints = None;
        }
    }
}

/// The devices of one GPU.
pub(super) fn of_gpu(
    wanted: &Wanted,
    gpu: &Gpu,
    connected: Option<&Connected>,
    view: View,
) -> Published {
    let statics: Vec<&StaticInstance> = wanted
        .statics
        .iter()
        .filter(|instance| instance.pci == gpu.pci)
        .collect();
    let (has_whole, has_partitions) = match (gpu.mig, wanted.mig) {
        (MigMode::Unsupported | MigMode::Disabled { switchable: false }, _)
        | (MigMode::Disabled { .. }, MigPolicy::Static) => (true, false),
        // Work on the whole of a GPU needs MIG off, which an administrator's
        // instances, a pending GPU reset and the policy all forbid.
        (MigMode::Enabled { switchable: false }, _)
        | (MigMode::Enabled { .. }, MigPolicy::Static) => (false, true),
        (
            MigMode::Disabled { switchable: true } | MigMode::Enabled { switchable: true },
            MigPolicy::Dynamic,
        ) => (statics.is_empty(), true),
    };
    let has_partitions = has_partitions && !gpu.profiles.is_empty();
    // A shared device overlaps what it shares out; only counters tell the scheduler.
    let sharing = wanted
        .sharing
        .get(&gpu.pci)
        .filter(|_| view.counters && view.shares);
    let held = wanted.held.iter().filter(|(_, (pci, _))| *pci == gpu.pci);
    let holds_partition = held
        .clone()
        .any(|(_, (_, holding))| *holding != Holding::Whole);
    let holds_share = held.clone().any(|(name, _)| names::is_shared(name));
    let set = if !view.counters {
        None
    } else if has_partitions || holds_partition {
        Some(counters::of_partitions(gpu))
    } else if sharing.is_some() || holds_share {
        Some(counters::of_whole(gpu))
    } else {
        None
    };
    let offered = if has_partitions {
        let on_demand = view.counters && wanted.mig == MigPolicy::Dynamic;
        partitions_in_order(gpu, &statics, on_demand)
    } else {
        Vec::new()
    };
    let of = Of {
        inventory: &wanted.inventory,
        gpu,
        connected,
        policy: wanted.mig,
        statics: &statics,
        set: set.as_ref(),
    };
    let whole = has_whole.then(|| of.whole());
    let mut published = Published {
        partitions: offered.iter().map(|offer| of.partition(offer)).collect(),
        shared_partitions: sharing.map_or_else(Vec::new, |kind| {
            let made = offered.iter().filter(|offer| offer.is_static);
            let shared = |offer: &Offer<'_>| {
                shares::of(
                    of.partition(offer),
                    gpu,
                    Some(*kind),
                    offer.profile.memory_bytes,
                )
            };
            made.filter_map(shared).collect()
        }),
        shared: sharing.zip(whole.as_ref()).and_then(|(kind, whole)| {
            shares::of(whole.clone(), gpu, Some(*kind), gpu.memory_bytes)
        }),
        whole,
        counters: set.clone(),
    };
    // Without counters nothing is charged by what is published, and nothing would keep a
    // device that is there once more from what it overlaps.
    if view.counters {
        held::keep(&mut published, &of, wanted, view);
    }
    published
}

/// A device as it is, or would be, published, without what it consumes and without what
/// only the other instances on its GPU and the node's policies tell.
pub(super) fn describe(
    inventory: &Inventory,
    connections: &BTreeMap<PciAddress, Connected>,
    device: &str,
) -> Option<Device> {
    let named = names::resolve(&inventory.gpus, device)?;
    let (Named::Whole(gpu)
    | Named::Partition(gpu, ..)
    | Named::Share(Shared::Whole(gpu) | Shared::Partition(gpu, ..))) = named;
    let of = Of {
        inventory,
        gpu,
        connected: connections.get(&gpu.pci),
        policy: MigPolicy::default(),
        statics: &[],
        set: None,
    };
    let partition = |profile, at| {
        let is_static = false; // Not known; see below.
        let mut device = of.partition(&Offer {
            profile,
            at,
            is_static,
        });
        if let Some(attributes) = &mut device.attributes {
            attributes.remove(ON_DEMAND);
        }
        device
    };
    Some(match named {
        Named::Whole(_) => of.whole(),
        Named::Partition(_, profile, at) => partition(profile, at),
        Named::Share(Shared::Whole(_)) => shares::of(of.whole(), gpu, None, gpu.memory_bytes)?,
        Named::Share(Shared::Partition(_, profile, at)) => {
            shares::of(partition(profile, at), gpu, None, profile.memory_bytes)?
        }
    })
}

/// A partition to offer.
pub(super) struct Offer<'a> {
    pub(super) profile: &'a MigProfile,
    pub(super) at: Placement,
    /// It is an administrator's.
    pub(super) is_static: bool,
}

/// The partitions to offer: smallest first, then by compute, plain profiles before
/// those with scarce engines, and each profile from its highest placement down.
fn partitions_in_order<'a>(
    gpu: &'a Gpu,
    statics: &[&StaticInstance],
    on_demand: bool,
) -> Vec<Offer<'a>> {
    let media_in_use = statics.iter().any(|s| {
        let profile = gpu.profiles.iter().find(|p| p.id == s.profile_id);
        profile.is_some_and(counters::has_media_extensions)
    });
    let offer = |profile: &'a MigProfile, at: Placement| {
        let is = |s: &StaticInstance| s.profile_id == profile.id && s.placement == at;
        let of_static = statics.iter().find(|s| is(s));
        if let Some(instance) = of_static {
            return instances::on_hardware(gpu, instance)
                .is_none_or(|found| instances::is_usable(found, profile))
                .then_some(Offer {
                    profile,
                    at,
                    is_static: true,
                });
        }
        // An administrator's instance holds engines whether a claim has it or not.
        let is_blocked = statics.iter().any(|s| s.placement.overlaps(at))
            || media_in_use && counters::has_media_extensions(profile);
        (on_demand && !is_blocked).then_some(Offer {
            profile,
            at,
            is_static: false,
        })
    };
    let placements = |profile: &'a MigProfile| {
        let placements = profile.placements.iter();
        placements.map(move |at| (profile, *at))
    };
    let mut all: Vec<Offer<'a>> = gpu
        .profiles
        .iter()
        .flat_map(placements)
        .filter_map(|(profile, at)| offer(profile, at))
        .collect();
    all.sort_by(|a, b| {
        let size = |o: &Offer<'_>| (o.at.size, o.profile.compute_slices, o.profile.name.len());
        size(a)
            .cmp(&size(b))
            .then_with(|| a.profile.name.cmp(&b.profile.name))
            .then_with(|| b.at.start.cmp(&a.at.start))
    });
    all
}

/// What the devices of one GPU are made from.
pub(super) struct Of<'a> {
    inventory: &'a Inventory,
    pub(super) gpu: &'a Gpu,
    connected: Option<&'a Connected>,
    policy: MigPolicy,
    statics: &'a [&'a StaticInstance],
    set: Option<&'a CounterSet>,
}

impl Of<'_> {
    /// What the devices of the GPU have in common, and what kind this one is.
    fn attributes(&self, kind: &str) -> Attributes {
        let mut attributes = attributes::common(self.inventory, self.gpu);
        attributes.insert("type".to_owned(), string(kind));
        attributes.insert("migMode".to_owned(), string(self.mig_mode()));
        let layout = instances::layout(self.gpu, self.statics);
        // A text that was cut would tell of another layout.
        if !layout.is_empty() && layout.len() <= attributes::MAX_VALUE {
            attributes.insert("migLayout".to_owned(), string(&layout));
        }
        attributes
    }

    /// Not the mode of this moment: where claims may switch it, they do, and a slice must
    /// not change because a claim was prepared.
    fn mig_mode(&self) -> &'static str {
        match (self.gpu.mig, self.policy) {
            (MigMode::Unsupported, _) => "unsupported",
            (
                MigMode::Disabled { switchable: true } | MigMode::Enabled { switchable: true },
                MigPolicy::Dynamic,
            ) => "dynamic",
            (MigMode::Disabled { .. }, _) => "disabled",
            (MigMode::Enabled { .. }, _) => "enabled",
        }
    }

    pub(super) fn whole(&self) -> Device {
        let mut attributes = self.attributes("gpu");
        attributes.insert("uuid".to_owned(), string(&self.gpu.uuid));
        attributes.extend(attributes::of_whole(self.gpu, self.connected));
        Device {
            name: names::whole(self.gpu.pci),
            attributes: Some(attributes),
            capacity: Some(BTreeMap::from([capacity(
                "memory",
                quantity::bytes(self.gpu.memory_bytes),
            )])),
            consumes_counters: self.set.map(|set| vec![counters::everything(set)]),
            ..Device::default()
        }
    }

    pub(super) fn partition(&self, offer: &Offer<'_>) -> Device {
        let Offer { profile, at, .. } = offer;
        let mut attributes = self.attributes("mig");
        attributes.insert("profile".to_owned(), string(&profile.name));
        attributes.insert("parentUUID".to_owned(), string(&self.gpu.uuid));
        attributes.insert("placementStart".to_owned(), int(at.start));
        attributes.insert("placementSize".to_owned(), int(at.size));
        attributes.insert(ON_DEMAND.to_owned(), boolean(!offer.is_static));
        Device {
            name: names::partition(self.gpu.pci, &profile.name, at.start),
            attributes: Some(attributes),
            capacity: Some(BTreeMap::from([
                capacity("memory", quantity::bytes(profile.memory_bytes)),
                capacity("multiprocessors", quantity::count(profile.multiprocessors)),
            ])),
            consumes_counters: self
                .set
                .map(|set| vec![counters::of_partition(set, profile, *at)]),
            ..Device::default()
        }
    }
}

fn capacity(name: &str, value: Quantity) -> (String, DeviceCapacity) {
    let request_policy = None;
    let capacity = DeviceCapacity {
        value,
        request_policy,
    };
    (name.to_owned(), capacity)
}
