//! Shared devices: one device that several claims hold at once, each a share of it.
//!
//! In: a device as one claim would have it alone. Out: the device that is handed out in
//! shares in its place. Never: a share of nothing, and never more handed out than there
//! is by omission: a claim that names no amount gets everything.
//!
//! A partition that is created on demand has no shared device: one as small as the
//! share can be created, and isolates better.

use std::collections::BTreeMap;

use gpu::Gpu;
use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceCapacity,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::attributes::string;
use super::{SharingKind, names, quantity};

/// The smallest amount of memory in a share and the step between amounts: MPS takes
/// its limits in MiB.
const MEMORY_STEP: u64 = 1 << 20;

/// All of a device's compute, in percent: what MPS calls active threads.
const CORES: u32 = 100;

/// The shared device in place of a device that one claim would have alone; none where
/// there is less memory than the smallest share.
pub(super) fn of(
    device: Device,
    gpu: &Gpu,
    kind: Option<SharingKind>,
    memory_bytes: u64,
) -> Option<Device> {
    let memory = memory_bytes / MEMORY_STEP * MEMORY_STEP;
    if memory == 0 {
        return None;
    }
    let mut attributes = device.attributes.unwrap_or_default();
    attributes.insert("type".to_owned(), string("share"));
    if let Some(kind) = kind {
        attributes.insert("sharing".to_owned(), string(kind.as_str()));
    }
    attributes.remove("uuid"); // Of a whole GPU: its shares are not the GPU.
    attributes.insert("parentUUID".to_owned(), string(&gpu.uuid));
    let all = quantity::bytes(memory);
    let memory = portions(all, quantity::bytes(MEMORY_STEP));
    let cores = portions(quantity::count(CORES), quantity::count(1));
    Some(Device {
        name: names::shared(&device.name),
        attributes: Some(attributes),
        allow_multiple_allocations: Some(true),
        capacity: Some(BTreeMap::from([
            ("memory".to_owned(), memory),
            ("cores".to_owned(), cores),
        ])),
        consumes_counters: device.consumes_counters,
        ..Device::default()
    })
}

/// A capacity that is handed out in steps, everything to who names no amount.
fn portions(all: Quantity, step: Quantity) -> DeviceCapacity {
    DeviceCapacity {
        request_policy: Some(CapacityRequestPolicy {
            default: Some(all.clone()),
            valid_range: Some(CapacityRequestPolicyRange {
                min: step.clone(),
                max: Some(all.clone()),
                step: Some(step),
            }),
            valid_values: None,
        }),
        value: all,
    }
}
