//! What is known of a device once it is prepared.
//!
//! In: a prepared device and the description of the node's GPUs. Out: plain facts, for
//! the container ([`super::metadata`]) and for the claim's status ([`super::status`]),
//! so that both say the same. Never: a call to the hardware, or a guess: a fact that
//! nobody measured is left out.

use gpu::{Inventory, Placement};

use super::record::{PreparedDevice, Target};
use crate::slices::SharingKind;
use crate::slices::names::{self, Named, Shared};

/// The facts of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// The UUID under which CUDA and NVML know it: a GPU's, or a MIG instance's, which
    /// exists only once the claim is prepared. None for a partition that an
    /// administrator looks at and that does not exist.
    pub uuid: Option<String>,
    /// The UUID of the GPU that a partition is on.
    pub parent_uuid: Option<String>,
    /// The device's memory in bytes as NVML measures it (MIG profile names round it up), or
    /// how much of it the share may use.
    pub memory_bytes: Option<u64>,
    /// A partition's streaming multiprocessors.
    pub multiprocessors: Option<u32>,
    /// A partition's profile, such as `1g.10gb`.
    pub profile: Option<String>,
    /// Where a partition sits.
    pub placement: Option<Placement>,
    /// Of a share: its compute, in percent of the device. Its memory is the share's too.
    pub cores_percent: Option<u32>,
    /// Of a share: how the device's claims are kept apart.
    pub sharing: Option<SharingKind>,
}

impl Facts {
    /// The facts of a prepared device.
    #[must_use]
    pub fn of(inventory: &Inventory, device: &PreparedDevice) -> Self {
        let mut facts = match names::resolve(&inventory.gpus, &device.device) {
            Some(Named::Whole(gpu) | Named::Share(Shared::Whole(gpu))) => Self {
                memory_bytes: Some(gpu.memory_bytes),
                ..Self::default()
            },
            Some(
                Named::Partition(gpu, profile, placement)
                | Named::Share(Shared::Partition(gpu, profile, placement)),
            ) => Self {
                parent_uuid: Some(gpu.uuid.clone()),
                memory_bytes: Some(profile.memory_bytes),
                multiprocessors: Some(profile.multiprocessors),
                profile: Some(profile.name.clone()),
                placement: Some(placement),
                ..Self::default()
            },
            None => Self::default(),
        };
        match &device.target {
            Target::Partition { instance, .. } => {
                facts.uuid = instance.as_ref().map(|instance| instance.uuid.clone());
            }
            // Otherwise it stands for a partition that does not exist.
            Target::Whole { uuid, .. } if facts.profile.is_none() => {
                facts.uuid = Some(uuid.clone());
            }
            Target::Whole { .. } => {}
            Target::Share {
                memory_bytes,
                cores_percent,
                kind,
                ..
            } => {
                facts.uuid = device.target.device_uuid().map(str::to_owned);
                facts.parent_uuid = Some(device.target.gpu_uuid().to_owned());
                facts.memory_bytes = Some(*memory_bytes);
                facts.cores_percent = Some(*cores_percent);
                facts.sharing = Some(*kind);
            }
        }
        facts
    }
}
