//! What is known of a claim, and of the hardware it holds.
//!
//! In: a claim's allocation. Out: plain values that [`super::checkpoint`] keeps on the
//! disk. Never: a field that a later release may not find missing.

use gpu::{PciAddress, Placement};
use serde::{Deserialize, Serialize};

use super::sharing::SharedDevice;
use crate::slices::SharingKind;

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
    /// A portion of a device that several claims use at once.
    Share {
        /// The device: a whole GPU, or an administrator's partition.
        of: Box<Target>,
        /// Device memory that was granted, in bytes.
        memory_bytes: u64,
        /// Compute that was granted, in percent of the device.
        cores_percent: u32,
        /// How the claims are kept apart.
        kind: SharingKind,
    },
}

impl Target {
    /// The GPU it is on.
    #[must_use]
    pub fn pci(&self) -> PciAddress {
        match self {
            Self::Whole { pci, .. } | Self::Partition { pci, .. } => *pci,
            Self::Share { of, .. } => of.pci(),
        }
    }

    /// What it is all or a share of.
    #[must_use]
    pub fn device(&self) -> &Self {
        match self {
            Self::Share { of, .. } => of,
            alone => alone,
        }
    }

    /// The UUID of the GPU it is on, as it was when the claim was prepared.
    #[must_use]
    pub fn gpu_uuid(&self) -> &str {
        match self {
            Self::Whole { uuid, .. } | Self::Partition { uuid, .. } => uuid,
            Self::Share { of, .. } => of.gpu_uuid(),
        }
    }

    /// The UUID under which CUDA knows the device; `None` for a partition that has no
    /// instance yet.
    #[must_use]
    pub fn device_uuid(&self) -> Option<&str> {
        match self {
            Self::Whole { uuid, .. } => Some(uuid),
            Self::Partition { instance, .. } => instance.as_ref().map(|ids| ids.uuid.as_str()),
            Self::Share { of, .. } => of.device_uuid(),
        }
    }

    /// Whether the two would use the same hardware and cannot share it.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        if self.pci() != other.pci() {
            return false;
        }
        match (self, other) {
            // Shares of one device exist side by side; a share and what overlaps its
            // device do not.
            (Self::Share { of: a, .. }, Self::Share { of: b, .. }) => {
                SharedDevice::shared_out(a) != SharedDevice::shared_out(b) && a.overlaps(b)
            }
            (Self::Share { of, .. }, other) | (other, Self::Share { of, .. }) => of.overlaps(other),
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

#[cfg(test)]
impl Target {
    /// The partition `1g.10gb` at memory slice 6 of a GPU.
    pub(crate) fn partition_for_test(instance: Option<InstanceIds>) -> Self {
        Self::Partition {
            pci: "0000:65:00.0".parse().unwrap(),
            uuid: "GPU-1".into(),
            minor: 0,
            profile: "1g.10gb".into(),
            profile_id: 19,
            placement: Placement { start: 6, size: 1 },
            adopted: false,
            instance,
        }
    }
}

#[cfg(test)]
impl PreparedDevice {
    /// A whole GPU.
    pub(crate) fn for_test() -> Self {
        Self {
            request: "gpu".into(),
            subrequest: None,
            pool: "node".into(),
            device: "gpu-0000-65-00-0".into(),
            share_id: None,
            admin_access: false,
            target: Target::Whole {
                pci: "0000:65:00.0".parse().unwrap(),
                uuid: "GPU-1".into(),
                minor: 0,
            },
            cdi_device_ids: vec![],
        }
    }
}

#[cfg(test)]
impl Record {
    /// A claim without devices.
    pub(crate) fn for_test() -> Self {
        Self {
            claim: ClaimRef {
                namespace: "ns".into(),
                name: "claim".into(),
                uid: "uid".into(),
            },
            pod_claim_name: None,
            boot_id: "boot".into(),
            stage: Stage::PrepareStarted,
            devices: vec![],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole() -> Target {
        PreparedDevice::for_test().target
    }

    fn partition(start: u32) -> Target {
        Target::Partition {
            pci: "0000:65:00.0".parse().unwrap(),
            uuid: "GPU-1".into(),
            minor: 0,
            profile: "3g.40gb".into(),
            profile_id: 9,
            placement: Placement { start, size: 4 },
            adopted: true,
            instance: None,
        }
    }

    fn share(of: Target) -> Target {
        Target::Share {
            of: Box::new(of),
            memory_bytes: 1,
            cores_percent: 1,
            kind: SharingKind::Mps,
        }
    }

    #[test]
    fn shares_of_one_device_do_not_overlap_and_overlap_all_that_their_device_does() {
        for (a, b, overlap) in [
            (share(whole()), share(whole()), false),
            (share(partition(0)), share(partition(0)), false),
            (share(partition(0)), share(partition(4)), false),
            (share(whole()), whole(), true),
            (share(whole()), partition(4), true),
            (share(whole()), share(partition(4)), true),
            (share(partition(0)), partition(0), true),
            (share(partition(0)), whole(), true),
            (share(partition(0)), partition(4), false),
        ] {
            assert_eq!(a.overlaps(&b), overlap, "{a:?} {b:?}");
            assert_eq!(b.overlaps(&a), overlap, "{b:?} {a:?}");
        }
    }
}
