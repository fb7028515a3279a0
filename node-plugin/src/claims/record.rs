//! What is known of a claim, and of the hardware it holds.
//!
//! In: a claim's allocation. Out: plain values that [`super::checkpoint`] keeps on the
//! disk. Never: a field that a later release may not find missing.

use gpu::{PciAddress, Placement};
use serde::{Deserialize, Serialize};

/// A claim by name and identity.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ClaimRef {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

impl ClaimRef {
    /// The span of the work on this claim: what is logged in it says which claim it was.
    #[must_use]
    pub fn span(&self) -> tracing::Span {
        tracing::info_span!(
            "claim",
            claim_namespace = self.namespace,
            claim_name = self.name,
            claim_uid = self.uid
        )
    }
}

impl std::fmt::Display for ClaimRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{} (UID {})", self.namespace, self.name, self.uid)
    }
}

/// How far a claim has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// The hardware may have been touched: what is recorded has to be undone.
    PrepareStarted,
    /// The answer was, or may be, given to the kubelet.
    PrepareCompleted,
    /// The claim has ended, and its instance could not be destroyed yet: the GPU was lost
    /// or the driver away. It is destroyed when the GPU is back.
    Unprepared,
}

/// The ids of a MIG instance after it was created.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InstanceIds {
    /// The GPU instance.
    pub gpu_instance: u32,
    /// The compute instance in it.
    pub compute_instance: u32,
    /// The MIG device's UUID.
    pub uuid: String,
}

/// The hardware behind a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    rename_all = "camelCase",
    rename_all_fields = "camelCase",
    tag = "type"
)]
pub enum Target {
    /// The whole of a GPU.
    Whole {
        /// The GPU.
        pci: PciAddress,
        /// Its UUID when the claim was prepared.
        uuid: String,
        /// The minor number of its device node.
        minor: u32,
    },
    /// A partition of a GPU.
    Partition {
        /// The GPU.
        pci: PciAddress,
        /// The GPU's UUID when the claim was prepared.
        uuid: String,
        /// The minor number of the GPU's device node.
        minor: u32,
        /// The profile's name.
        profile: String,
        /// The profile's id.
        profile_id: u32,
        /// Where it sits.
        placement: Placement,
        /// An administrator made it: it is used and left alone.
        adopted: bool,
        /// Its ids, known once it exists.
        instance: Option<InstanceIds>,
    },
}

impl Target {
    /// The GPU it is on.
    #[must_use]
    pub fn pci(&self) -> PciAddress {
        match self {
            Self::Whole { pci, .. } | Self::Partition { pci, .. } => *pci,
        }
    }

    /// Whether the two would use the same hardware.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        if self.pci() != other.pci() {
            return false;
        }
        match (self, other) {
            (Self::Partition { placement: a, .. }, Self::Partition { placement: b, .. }) => {
                a.overlaps(*b)
            }
            _ => true,
        }
    }
}

/// One device of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PreparedDevice {
    /// The request it was allocated for, without a subrequest.
    pub request: String,
    /// Which of the request's alternatives was allocated, where it has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subrequest: Option<String>,
    /// Its pool.
    pub pool: String,
    /// Its name.
    pub device: String,
    /// The share of the device, where several claims hold it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// Granted for administration: it excludes nobody.
    #[serde(default)]
    pub admin_access: bool,
    /// The hardware behind it.
    pub target: Target,
    /// The CDI devices for the container runtime.
    pub cdi_device_ids: Vec<String>,
}

/// What is known of one claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// The claim.
    pub claim: ClaimRef,
    /// What its pod calls it, where it was made from a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_claim_name: Option<String>,
    /// The boot in which it was prepared: MIG instances do not survive a reboot.
    pub boot_id: String,
    /// How far it came.
    pub stage: Stage,
    /// Its devices.
    pub devices: Vec<PreparedDevice>,
}
