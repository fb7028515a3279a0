//! The node's devices as they were last seen, for an NVML that cannot tell.
//!
//! In: what discovery found. Out: the same after a restart. Never: a GPU forgotten that
//! a claim may draw on: the scheduler counts what is allocated by what is published, so
//! a lost GPU stays, under a taint.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use gpu::{Inventory, PciAddress, Placement};
use serde::{Deserialize, Serialize};

use super::store::{self, StoreError};
use crate::slices::{SharingKind, StaticInstance, Wanted};

/// The file of the devices.
#[derive(Debug)]
pub struct Memory {
    path: PathBuf,
    boot_id: String,
    /// What was last written.
    written: Option<Kept>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Kept {
    boot_id: String,
    inventory: Inventory,
    statics: Vec<Static>,
    /// The GPUs that are shared, and whether by MPS.
    #[serde(default)]
    sharing: BTreeMap<PciAddress, bool>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Static {
    pci: PciAddress,
    profile_id: u32,
    placement: Placement,
}

/// What is remembered of the node.
#[derive(Debug, Clone, PartialEq)]
pub struct Remembered {
    /// Its devices.
    pub wanted: Wanted,
    /// Whether the node was rebooted since.
    pub rebooted: bool,
}

impl Remembered {
    /// Forgets the GPUs that a reboot has removed, which are those that are neither on
    /// the PCI bus nor held by a claim; without a reboot a card cannot be taken out.
    #[must_use]
    pub fn still_there(mut self, is_there: impl Fn(PciAddress) -> bool) -> Wanted {
        if self.rebooted {
            self.wanted.inventory.gpus.retain(|gpu| is_there(gpu.pci));
        }
        self.wanted
    }
}

impl Memory {
    /// The memory in a folder, for this boot.
    #[must_use]
    pub fn new(folder: &std::path::Path, boot_id: &str) -> Self {
        Self {
            path: folder.join("devices.json"),
            boot_id: boot_id.to_owned(),
            written: None,
        }
    }

    /// What was there.
    ///
    /// # Errors
    /// When the file cannot be used.
    pub fn recall(&mut self) -> Result<Option<Remembered>, StoreError> {
        let Some(kept) = store::read::<Kept>(&self.path)? else {
            return Ok(None);
        };
        self.written = Some(kept.clone());
        let rebooted = kept.boot_id != self.boot_id;
        // MIG instances end with the boot.
        let statics: BTreeSet<StaticInstance> = match rebooted {
            true => BTreeSet::new(),
            false => kept
                .statics
                .iter()
                .map(|known| StaticInstance {
                    pci: known.pci,
                    profile_id: known.profile_id,
                    placement: known.placement,
                })
                .collect(),
        };
        let sharing = kept.sharing.iter().map(|(pci, is_mps)| match is_mps {
            true => (*pci, SharingKind::Mps),
            false => (*pci, SharingKind::TimeSlicing),
        });
        let sharing = sharing.collect();
        let mut wanted = Wanted::new(kept.inventory, statics).shared(sharing);
        wanted.unreadable = wanted.inventory.gpus.iter().map(|gpu| gpu.pci).collect();
        Ok(Some(Remembered { wanted, rebooted }))
    }

    /// What belongs on the disk now; `None` when it is there.
    pub fn changed(
        &mut self,
        wanted: &Wanted,
    ) -> Option<impl FnOnce() -> Result<(), StoreError> + use<>> {
        let mut inventory = wanted.inventory.clone();
        inventory.unreadable.clear();
        for gpu in &mut inventory.gpus {
            // Those of claims come and go, and so does the mode that their sharing takes.
            gpu.instances.clear();
            gpu.compute_mode = gpu::ComputeMode::Default;
        }
        let statics = wanted.statics.iter().map(|known| Static {
            pci: known.pci,
            profile_id: known.profile_id,
            placement: known.placement,
        });
        let kept = Kept {
            boot_id: self.boot_id.clone(),
            inventory,
            statics: statics.collect(),
            sharing: wanted
                .sharing
                .iter()
                .map(|(pci, kind)| (*pci, *kind == SharingKind::Mps))
                .collect(),
        };
        if self.written.as_ref() == Some(&kept) {
            return None;
        }
        self.written = Some(kept.clone());
        let path = self.path.clone();
        Some(move || store::write(&path, &kept))
    }
}
