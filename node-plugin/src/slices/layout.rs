//! How devices and counters are spread over slices.
//!
//! In: what each GPU publishes. Out: slice contents within the API's limits, and the
//! ResourceSlice objects. Never: a device dropped to make something fit.

use k8s_openapi::api::resource::v1::{Device, ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use sha2::{Digest, Sha256};

use super::SliceContent;
use super::devices::Published;
use crate::DRIVER;

/// Counter sets in one slice.
pub(super) const MAX_COUNTER_SETS: usize = 8;
/// Devices in one slice of plain devices.
pub(super) const MAX_DEVICES: usize = 128;
/// Devices in one slice once any of them consumes counters or has taints.
pub(super) const MAX_ADVANCED_DEVICES: usize = 64;

/// Spreads the GPUs' counters and devices over slices: counters, partitions, then whole and
/// shared devices; a pool without devices is one empty slice.
pub(super) fn arrange(published: Vec<Published>) -> Vec<SliceContent> {
    let mut counters = Vec::new();
    let mut partitions = Vec::new();
    let (mut wholes, mut shared_partitions, mut shared) = (Vec::new(), Vec::new(), Vec::new());
    for gpu in published {
        counters.extend(gpu.counters);
        partitions.push(gpu.partitions);
        wholes.push(gpu.whole.into_iter().collect::<Vec<_>>());
        shared_partitions.push(gpu.shared_partitions);
        shared.push(gpu.shared.into_iter().collect());
    }
    wholes.reverse();
    // Few and in this order: they fit one slice on most nodes, and the fewer slices a pool
    // has, the sooner a change of it is complete.
    wholes.extend(shared_partitions);
    wholes.extend(shared);

    let mut slices: Vec<SliceContent> = counters
        .chunks(MAX_COUNTER_SETS)
        .map(|sets| SliceContent::Counters(sets.to_vec()))
        .collect();
    slices.extend(pack(partitions));
    slices.extend(pack(wholes));
    if slices.is_empty() {
        slices.push(SliceContent::Devices(Vec::new()));
    }
    slices
}

/// Packs groups of devices into slices in order; a group is split only when it alone
/// exceeds a slice.
fn pack(groups: Vec<Vec<Device>>) -> Vec<SliceContent> {
    let advanced = groups
        .iter()
        .flatten()
        .any(|d| d.consumes_counters.is_some() || d.taints.as_ref().is_some_and(|t| !t.is_empty()));
    let limit = if advanced {
        MAX_ADVANCED_DEVICES
    } else {
        MAX_DEVICES
    };
    let mut slices: Vec<Vec<Device>> = Vec::new();
    for group in groups {
        let fits = slices
            .last()
            .is_some_and(|s| s.len() + group.len() <= limit);
        if fits {
            if let Some(last) = slices.last_mut() {
                last.extend(group);
            }
        } else {
            slices.extend(group.chunks(limit).map(<[Device]>::to_vec));
        }
    }
    slices.into_iter().map(SliceContent::Devices).collect()
}

/// The name of a node's slice: the index in hexadecimal first, because the scheduler
/// sorts slices by name. The same content always has the same name, so that a
/// repeated create collides instead of doubling.
pub(super) fn slice_name(node: &str, index: usize) -> String {
    let name = format!("{index:05x}-{DRIVER}-{node}");
    if name.len() <= 253 {
        return name;
    }
    let hash = Sha256::digest(node.as_bytes());
    let hash: String = hash
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("{index:05x}-{DRIVER}-{hash}")
}

/// One slice as an object of the API.
#[must_use]
pub fn resource_slice(
    content: &SliceContent,
    node: &str,
    owner: Option<&OwnerReference>,
    index: usize,
    count: usize,
    generation: i64,
) -> ResourceSlice {
    let (devices, counters) = match content {
        SliceContent::Counters(sets) => (None, Some(sets.clone())),
        SliceContent::Devices(devices) if devices.is_empty() => (None, None),
        SliceContent::Devices(devices) => (Some(devices.clone()), None),
    };
    ResourceSlice {
        metadata: ObjectMeta {
            name: Some(slice_name(node, index)),
            owner_references: owner.map(|owner| vec![owner.clone()]),
            ..ObjectMeta::default()
        },
        spec: ResourceSliceSpec {
            driver: DRIVER.to_owned(),
            node_name: Some(node.to_owned()),
            pool: ResourcePool {
                name: node.to_owned(),
                generation,
                resource_slice_count: i64::try_from(count).unwrap_or(i64::MAX),
            },
            devices,
            shared_counters: counters,
            ..ResourceSliceSpec::default()
        },
    }
}
