//! What this node's claims hold, for what is published.
//!
//! In: the checkpoints. Out: the devices, by the names under which they were allocated.
//! Never: what administrative access only looks at.

use std::collections::BTreeMap;

use gpu::PciAddress;

use super::record::Target;
use super::{Claims, LookError};
use crate::slices::Holding;

impl Claims {
    /// What claims hold now; also one that ended while its GPU was away.
    ///
    /// # Errors
    /// When the checkpoints cannot be read.
    pub async fn held(&self) -> Result<BTreeMap<String, (PciAddress, Holding)>, LookError> {
        let core = self.core.clone();
        let held = tokio::task::spawn_blocking(move || {
            let records = core.checkpoints.all()?.records;
            let devices = records.iter().flat_map(|record| &record.devices);
            let held = devices.filter(|device| !device.admin_access).map(|device| {
                let holding = Holding::of(&device.target);
                (device.device.clone(), (device.target.pci(), holding))
            });
            Ok(held.collect())
        });
        held.await.unwrap_or(Err(LookError::Died))
    }
}

impl Holding {
    /// What a claim's target takes of its GPU.
    #[must_use]
    pub fn of(target: &Target) -> Self {
        match target {
            Target::Share { of, .. } => Self::of(of),
            Target::Whole { .. } => Self::Whole,
            Target::Partition {
                profile_id,
                placement,
                ..
            } => Self::Partition {
                profile_id: *profile_id,
                placement: *placement,
            },
        }
    }
}
