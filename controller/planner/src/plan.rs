//! What the planner answers: a plan, or why there is none.

use std::collections::BTreeMap;

use dra_cel::Quantity;
use serde::{Deserialize, Serialize};

use crate::demand::{PlacementType, SharingMode};
use crate::explanation::{Explanation, Rejection};

/// The answer to a demand.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    /// At least one replica fits now.
    Planned(Box<Plan>),
    /// Every allowed device class was searched and none has room: the order's
    /// reason `ResourceClaimExhausted`.
    Exhausted(Explanation),
    /// A selector could not be judged, and nothing that could be judged has
    /// room: the order's reason `PlacementUndecidable`.
    Undecidable(Explanation),
    /// The cluster has no device class, or none of those that the class names.
    NoDeviceClass(Explanation),
}

/// How each replica of an order is placed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// DeviceClass for the claim's request.
    pub device_class_name: String,
    /// Driver of the devices.
    pub driver: String,
    /// How a replica holds its devices.
    pub sharing_mode: SharingMode,
    /// What it is placed on.
    pub placement_type: PlacementType,
    /// The partition's profile (`1g.10gb`), when it is a partition that has one.
    pub profile: Option<String>,
    /// Devices per replica: the request's `count`.
    pub devices_per_replica: u32,
    /// Bytes that the replica needs on each device.
    pub memory_needed_bytes: u64,
    /// Bytes that are granted of each device: of a share what it takes, else all of
    /// it, the least of the devices of this kind.
    pub memory_bytes: u64,
    /// Bytes that each device has, whatever part of them is granted.
    #[serde(default)]
    pub device_memory_bytes: u64,
    /// CEL selectors for the claim's request: the class's own, and those that
    /// keep the scheduler's first fit on devices of this kind.
    pub selectors: Vec<String>,
    /// The request's `capacity.requests`, for a share.
    pub capacity_requests: BTreeMap<String, Quantity>,
    /// How many replicas fit now, at most the demand's maximum; the order's own
    /// claims count as free.
    pub replicas_that_fit: u32,
    /// Whether fewer replicas fit now than the order's minimum.
    pub below_minimum: bool,
    /// Where each fitting replica would go; an example, since the scheduler
    /// decides.
    pub placements: Vec<Placement>,
    /// Why this was chosen and each other candidate was not.
    pub explanation: Explanation,
}

/// Where one replica would go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    /// Node.
    pub node: String,
    /// Devices.
    pub devices: Vec<DeviceRef>,
}

/// Names a device.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceRef {
    /// Driver.
    pub driver: String,
    /// Pool.
    pub pool: String,
    /// Device.
    pub device: String,
}

impl Plan {
    /// Why each other candidate was not chosen.
    pub fn rejections(&self) -> &[Rejection] {
        &self.explanation.rejections
    }
}
