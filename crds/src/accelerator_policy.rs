//! Which accelerators and which portions of them orders of a class get.
//!
//! Two words that must not be mixed: a *partition* is hardware (isolated memory and compute), and
//! `allowedPlacementTypes` speaks of it; a *share* is a portion of a device that several claims use
//! at once, and `allowedSharingModes` speaks of it.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::rules;

/// Whether a device serves one copy or several at once.
#[derive(
    Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord,
)]
pub enum SharingMode {
    /// Several copies use one device at once, each within its share.
    Shared,
    /// A device, or a partition of one, serves one copy.
    Dedicated,
}

impl SharingMode {
    /// The value as written in a manifest.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Shared => "Shared",
            Self::Dedicated => "Dedicated",
        }
    }
}

/// Whether a copy gets a whole device or a hardware partition of one.
#[derive(
    Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord,
)]
pub enum PlacementType {
    /// A whole device.
    WholeDevice,
    /// A hardware partition of a device (MIG).
    Partition,
}

impl PlacementType {
    /// The value as written in a manifest.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::WholeDevice => "WholeDevice",
            Self::Partition => "Partition",
        }
    }
}

/// Which accelerators and which portions of them orders get.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = rules::invalid(
        "!has(self.minSharePercent) || !has(self.maxSharePercent) || self.minSharePercent <= self.maxSharePercent",
        "spec.acceleratorPolicy.minSharePercent must not exceed maxSharePercent: lower the first or raise the second"
    ),
    validation = rules::forbidden(
        "self.allowedSharingModes.exists(mode, mode == 'Shared') || !has(self.minSharePercent)",
        ".minSharePercent",
        "spec.acceleratorPolicy.minSharePercent needs Shared in allowedSharingModes: a dedicated device has no share; remove the bound, or allow Shared"
    ),
    validation = rules::forbidden(
        "self.allowedSharingModes.exists(mode, mode == 'Shared') || !has(self.maxSharePercent)",
        ".maxSharePercent",
        "spec.acceleratorPolicy.maxSharePercent needs Shared in allowedSharingModes: a dedicated device has no share; remove the bound, or allow Shared"
    ),
)]
pub struct AcceleratorPolicy {
    /// Sharing modes that the plan may choose from: `Dedicated` (a device, or a partition of one, serves one copy) and `Shared` (several copies use one device at once, each within its share). Default: [Dedicated].
    #[serde(default = "dedicated")]
    #[schemars(length(max = 2))]
    #[x_kube(
        merge_strategy = ListMerge::Atomic,
        validation = rules::not_empty("spec.acceleratorPolicy.allowedSharingModes", "name at least one of Shared, Dedicated"),
        validation = rules::unique("spec.acceleratorPolicy.allowedSharingModes")
    )]
    pub allowed_sharing_modes: Vec<SharingMode>,

    /// Placement types that the plan may choose from: `WholeDevice` and `Partition` (a hardware partition, such as a MIG instance). Default: [WholeDevice].
    #[serde(default = "whole_device")]
    #[schemars(length(max = 2))]
    #[x_kube(
        merge_strategy = ListMerge::Atomic,
        validation = rules::not_empty("spec.acceleratorPolicy.allowedPlacementTypes", "name at least one of WholeDevice, Partition"),
        validation = rules::unique("spec.acceleratorPolicy.allowedPlacementTypes")
    )]
    pub allowed_placement_types: Vec<PlacementType>,

    /// Most devices of one copy, 1 to 64. Default: 1.
    #[serde(default = "one")]
    #[x_kube(validation = rules::invalid("self >= 1 && self <= 64", "spec.acceleratorPolicy.maxAcceleratorCount must be 1 to 64: it counts the devices of one copy"))]
    pub max_accelerator_count: i32,

    /// Smallest share of a device that a copy may get, in percent, 1 to 100. Absent: the smallest share that holds the model's memory. Needs Shared in allowedSharingModes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = rules::invalid("self >= 1 && self <= 100", "spec.acceleratorPolicy.minSharePercent must be 1 to 100: a percentage of a device"))]
    pub min_share_percent: Option<i32>,

    /// Largest share of a device that a copy may get, in percent, 1 to 100. Absent: no bound. Needs Shared in allowedSharingModes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = rules::invalid("self >= 1 && self <= 100", "spec.acceleratorPolicy.maxSharePercent must be 1 to 100: a percentage of a device"))]
    pub max_share_percent: Option<i32>,

    /// DeviceClasses (resource.k8s.io) that the plan may take devices from; their order means nothing. Absent: every DeviceClass whose devices publish their memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), inner(length(max = 253)))]
    #[x_kube(
        merge_strategy = ListMerge::Atomic,
        validation = rules::not_empty("spec.acceleratorPolicy.deviceClassNames", "name a DeviceClass, or remove the field to allow every one"),
        validation = rules::unique("spec.acceleratorPolicy.deviceClassNames"),
        validation = rules::object_names("spec.acceleratorPolicy.deviceClassNames", "a DeviceClass")
    )]
    pub device_class_names: Option<Vec<String>>,

    /// Conditions on devices besides those of their DeviceClass; a device must satisfy all of them. Same shape and meaning as in a ResourceClaim.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    #[x_kube(
        merge_strategy = ListMerge::Atomic,
        validation = rules::not_empty("spec.acceleratorPolicy.selectors", "give a selector, or remove the field")
    )]
    pub selectors: Option<Vec<AcceleratorSelector>>,
}

/// One condition on devices.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct AcceleratorSelector {
    /// A condition in CEL.
    pub cel: CelSelector,
}

/// A condition on a device in CEL.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct CelSelector {
    /// CEL expression over `device` that is true for the devices to allow, such as `device.attributes["gpu.ai.deckhouse.io"].architecture == "Hopper"`. At most 10 KiB. The class's condition Validated says whether it can be judged.
    #[schemars(length(max = 10240))]
    #[x_kube(validation = rules::invalid(
        "self.matches('[^[:space:]]')",
        "spec.acceleratorPolicy.selectors[].cel.expression must not be empty: give a CEL expression over 'device', or remove the selector"
    ))]
    pub expression: String,
}

fn dedicated() -> Vec<SharingMode> {
    vec![SharingMode::Dedicated]
}

fn whole_device() -> Vec<PlacementType> {
    vec![PlacementType::WholeDevice]
}

fn one() -> i32 {
    1
}

impl Default for AcceleratorPolicy {
    /// What an absent `acceleratorPolicy` means: one whole accelerator for each copy.
    fn default() -> Self {
        Self {
            allowed_sharing_modes: dedicated(),
            allowed_placement_types: whole_device(),
            max_accelerator_count: one(),
            min_share_percent: None,
            max_share_percent: None,
            device_class_names: None,
            selectors: None,
        }
    }
}
