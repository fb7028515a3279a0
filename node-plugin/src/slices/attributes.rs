//! The attributes of devices.
//!
//! In: one GPU of an inventory. Out: what a selector or a `matchAttribute` can ask for.
//! Never: a value that preparing a claim changes, and never more than the API takes: 32
//! attributes and capacities of a device together, 64 characters a value.

use std::collections::BTreeMap;

use gpu::{Gpu, Inventory};
use k8s_openapi::api::resource::v1::DeviceAttribute;

use super::nvlink::Connected;
use super::quantity;

/// The attributes of a device by name; a name without a domain is in the driver's.
pub(super) type Attributes = BTreeMap<String, DeviceAttribute>;

/// The longest string value that an attribute may have.
pub(super) const MAX_VALUE: usize = 64;

/// What a whole GPU, its partitions and their shared devices have in common.
pub(super) fn common(inventory: &Inventory, gpu: &Gpu) -> Attributes {
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
    if let Some(pcie) = gpu.pcie {
        attributes.insert("pcieGeneration".to_owned(), int(pcie.generation));
        attributes.insert("pcieWidth".to_owned(), int(pcie.width));
    }
    attributes
}

/// What only a GPU as a whole has: its memory's bandwidth, and NVLink, which no MIG instance
/// can use.
pub(super) fn of_whole(gpu: &Gpu, connected: Option<&Connected>) -> Attributes {
    let mut attributes = BTreeMap::new();
    if let Some(mbps) = gpu.memory_bandwidth_mbps {
        attributes.insert("memoryBandwidth".to_owned(), int(mbps));
    }
    if let Some(connected) = connected {
        attributes.insert("nvlinkClique".to_owned(), string(&connected.clique));
        attributes.insert("nvlinkPeers".to_owned(), int(connected.peers));
        if connected.bandwidth_mbps > 0 {
            let mbps = int(connected.bandwidth_mbps);
            attributes.insert("nvlinkBandwidth".to_owned(), mbps);
        }
    }
    attributes
}

/// A text, cut to what the API takes.
pub(super) fn string(value: &str) -> DeviceAttribute {
    let mut end = value.len().min(MAX_VALUE);
    while !value.is_char_boundary(end) {
        end -= 1;
    }
    DeviceAttribute {
        string: Some(value[..end].to_owned()),
        ..DeviceAttribute::default()
    }
}

/// A number.
pub(super) fn int(value: impl TryInto<i64>) -> DeviceAttribute {
    DeviceAttribute {
        int: Some(value.try_into().unwrap_or(i64::MAX)),
        ..DeviceAttribute::default()
    }
}

/// A truth.
pub(super) fn boolean(value: bool) -> DeviceAttribute {
    DeviceAttribute {
        bool: Some(value),
        ..DeviceAttribute::default()
    }
}

fn version(value: String) -> DeviceAttribute {
    DeviceAttribute {
        version: Some(value),
        ..DeviceAttribute::default()
    }
}
