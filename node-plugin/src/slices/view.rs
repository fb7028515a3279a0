//! What of the API's newer fields a server keeps, and what that leaves to offer.
//!
//! In: an object as it was sent and as the server stored it. Out: a [`View`]. Never: a guess
//! from a version; gates are set one by one, and only the server's answer tells.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Counter, Device, DeviceCapacity,
    DeviceCounterConsumption, DeviceTaint, ResourceSlice,
};

use super::{SliceContent, quantity};

/// Which of the API's newer fields a server keeps. Each has a feature gate of its own; all
/// three are off by default up to Kubernetes 1.35 and on from 1.36.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// Counters (`DRAPartitionableDevices`). Without them nothing would keep a partition, its
    /// GPU and their shared devices apart, so only devices that cannot overlap are offered:
    /// whole GPUs, and administrators' instances. Not shared devices in their place: a claim
    /// for a GPU of its own is what every class knows, and a share is what few ask for.
    pub counters: bool,
    /// Devices with several allocations (`DRAConsumableCapacity`). Without them there are no
    /// shared devices: what is left of one would be a second whole device.
    pub shares: bool,
    /// Taints (`DRADeviceTaints`). Without them a device that should get no new claims is
    /// withdrawn.
    pub taints: bool,
}

impl View {
    /// A server that keeps everything.
    pub const FULL: Self = Self {
        counters: true,
        shares: true,
        taints: true,
    };
    /// A server that keeps nothing of it.
    pub const REDUCED: Self = Self {
        counters: false,
        shares: false,
        taints: false,
    };

    /// A server that keeps one of the fields, for each of them.
    pub const EACH: [Self; 3] = [
        Self {
            counters: true,
            ..Self::REDUCED
        },
        Self {
            shares: true,
            ..Self::REDUCED
        },
        Self {
            taints: true,
            ..Self::REDUCED
        },
    ];

    /// What either keeps.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            counters: self.counters || other.counters,
            shares: self.shares || other.shares,
            taints: self.taints || other.taints,
        }
    }

    /// What both keep.
    #[must_use]
    pub fn both(self, other: Self) -> Self {
        Self {
            counters: self.counters && other.counters,
            shares: self.shares && other.shares,
            taints: self.taints && other.taints,
        }
    }

    /// What it means for the people of a cluster, as one sentence for each field that is
    /// dropped.
    #[must_use]
    pub fn explanation(self) -> String {
        let mut sentences = Vec::new();
        if !self.counters {
            sentences.push(
                "It drops counters (feature gate DRAPartitionableDevices): GPU partitions that \
                 would be created on demand are not offered, nor shares; whole GPUs and \
                 administrators' MIG instances are.",
            );
        }
        if !self.shares {
            sentences.push(
                "It drops multiple allocations (feature gate DRAConsumableCapacity): shares of \
                 GPUs are not offered.",
            );
        }
        if !self.taints {
            sentences.push(
                "It drops taints (feature gate DRADeviceTaints): devices of a faulty GPU are \
                 withdrawn instead, and pods that have them are not evicted.",
            );
        }
        format!(
            "The API server does not keep all fields of ResourceSlices. {} All are on by default \
             since Kubernetes 1.36; what the server keeps later is offered without a restart.",
            sentences.join(" ")
        )
    }
}

/// Whether a pool has anything that a server might drop.
pub(super) fn is_plain(content: &[SliceContent]) -> bool {
    content.iter().all(|slice| match slice {
        SliceContent::Counters(_) => false,
        SliceContent::Devices(devices) => devices.iter().all(|device| {
            device.consumes_counters.is_none()
                && device.allow_multiple_allocations.is_none()
                && device.taints.is_none()
        }),
    })
}

/// A device with nothing but the fields of a view. It is asked about with a dry run of an
/// object of its own: an existing one would keep fields of a gate that is off now.
pub(super) fn probe(view: View) -> SliceContent {
    let one = || quantity::count(1);
    let request_policy = CapacityRequestPolicy {
        default: Some(one()),
        valid_range: Some(CapacityRequestPolicyRange {
            min: one(),
            max: Some(one()),
            step: None,
        }),
        valid_values: None,
    };
    let capacity = DeviceCapacity {
        value: one(),
        request_policy: Some(request_policy),
    };
    // Of a set in another slice of the pool: 1.34 knows only sets beside the devices, and
    // refuses this even where its gate is on.
    let consumption = DeviceCounterConsumption {
        counter_set: "probe".to_owned(),
        counters: BTreeMap::from([("probe".to_owned(), Counter { value: one() })]),
        compatibility_groups: None,
    };
    let taint = DeviceTaint {
        key: format!("{}/probe", crate::DRIVER),
        value: None,
        effect: "NoSchedule".to_owned(),
        time_added: None,
    };
    SliceContent::Devices(vec![Device {
        name: "probe".to_owned(),
        consumes_counters: view.counters.then(|| vec![consumption]),
        allow_multiple_allocations: view.shares.then_some(true),
        capacity: view
            .shares
            .then(|| BTreeMap::from([("probe".to_owned(), capacity)])),
        taints: view.taints.then(|| vec![taint]),
        ..Device::default()
    }])
}

/// Which fields a server kept of what it was sent; of a field that was not sent, yes.
pub(super) fn kept(sent: &ResourceSlice, stored: &ResourceSlice) -> View {
    let counters = sent.spec.shared_counters == stored.spec.shared_counters;
    let mut view = View {
        counters,
        ..View::FULL
    };
    let stored = stored.spec.devices.as_deref().unwrap_or_default();
    for sent in sent.spec.devices.iter().flatten() {
        let Some(stored) = stored.iter().find(|device| device.name == sent.name) else {
            continue;
        };
        let taints = |device: &Device| device.taints.as_ref().map_or(0, Vec::len);
        view = view.both(View {
            counters: sent.consumes_counters == stored.consumes_counters,
            shares: sent.allow_multiple_allocations == stored.allow_multiple_allocations
                && (sent.allow_multiple_allocations.is_none() || sent.capacity == stored.capacity),
            taints: taints(sent) == taints(stored),
        });
    }
    view
}

/// Whether the server stored what was sent; the time that a taint was added is its own.
pub(super) fn same_content(sent: &ResourceSlice, stored: &ResourceSlice) -> bool {
    let mut stored = stored.spec.clone();
    let sent_devices = sent.spec.devices.iter().flatten();
    for (device, sent) in stored.devices.iter_mut().flatten().zip(sent_devices) {
        let taints = device.taints.iter_mut().flatten();
        for (taint, sent) in taints.zip(sent.taints.iter().flatten()) {
            taint.time_added.clone_from(&sent.time_added);
        }
    }
    stored == sent.spec
}
