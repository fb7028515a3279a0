//! What an order asks for, after its class, model and recipe are resolved.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::snapshot::{OrderRef, TaintEffect};

/// What one order needs, and what its class allows it to have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Demand {
    /// The order itself: what its own claims hold counts as available to it.
    pub order: OrderRef,
    /// Memory by number of devices per replica: one row for each number that
    /// both the class (`maxAcceleratorCount`) and the runtime allow. More
    /// devices need less each, so rows are tried in ascending order.
    pub memory: Vec<MemoryNeed>,
    /// Whether a replica may have a device alone, share it, or either.
    pub sharing_modes: Vec<SharingMode>,
    /// Whether whole devices, partitions or both may be used.
    pub placement_types: Vec<PlacementType>,
    /// Names of the only device classes allowed; `None` allows all of them.
    #[serde(default)]
    pub device_class_names: Option<Vec<String>>,
    /// The class's CEL selectors; a device must match all of them.
    #[serde(default)]
    pub selectors: Vec<String>,
    /// The smallest and largest share that the class allows.
    #[serde(default)]
    pub share_bounds: ShareBounds,
    /// How many replicas.
    pub replicas: ReplicaBounds,
    /// Tolerations of the claim, for taints of devices; the claim's request must
    /// carry the same.
    #[serde(default)]
    pub device_tolerations: Vec<Toleration>,
    /// Tolerations of the pod, for taints of nodes; the pod must carry the same.
    #[serde(default)]
    pub node_tolerations: Vec<Toleration>,
    /// Labels that the pod's node must have; the pod must carry the same.
    #[serde(default)]
    pub node_selector: BTreeMap<String, String>,
}

/// Memory that a replica needs on each device when it has this many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MemoryNeed {
    /// Devices per replica; at least one.
    pub devices: u32,
    /// Bytes on each device: weights, cache and what the runtime itself takes.
    pub bytes_per_device: u64,
}

/// How a replica holds its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SharingMode {
    /// Nobody else uses the device or partition.
    Dedicated,
    /// Several claims use portions of one device at once.
    Shared,
}

/// What a replica is placed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PlacementType {
    /// A partition that hardware isolates (a MIG instance).
    Partition,
    /// A whole physical device.
    WholeDevice,
}

/// Bounds on the memory of a share, in percent of its device's (1 to 100).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ShareBounds {
    /// The least; a replica that needs less gets this much.
    #[serde(default)]
    pub min_percent: Option<u32>,
    /// The most; a replica that needs more gets no share.
    #[serde(default)]
    pub max_percent: Option<u32>,
}

/// How many replicas an order wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplicaBounds {
    /// The order needs these to be complete.
    pub min: u32,
    /// The order may grow to these; a plan counts places up to here.
    pub max: u32,
}

/// A toleration, of a claim for device taints or of a pod for node taints.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Toleration {
    /// Key; `None` with `exists` tolerates every taint.
    #[serde(default)]
    pub key: Option<String>,
    /// `true` is the operator `Exists`, `false` is `Equal`.
    #[serde(default)]
    pub exists: bool,
    /// Value that must be equal, unless `exists`.
    #[serde(default)]
    pub value: String,
    /// The only effect tolerated; `None` tolerates each.
    #[serde(default)]
    pub effect: Option<TaintEffect>,
}
