//! Records that cannot be read: what they hold, and how they are made anew.
//!
//! In: a damaged file, the claim as the API server has it, the hardware. Out: the record
//! as it must have been, or its end. Never: a device that a damaged record may hold given
//! to somebody else, and never an administrator's instance destroyed for one.

use std::collections::BTreeSet;
use std::fs;

use gpu::{Gpu, Inventory, PciAddress};

use super::allocation::Allocated;
use super::checkpoint::{CheckpointError, ClaimRef, Record, Stage};
use super::core::{Core, CoreError, tell_once};
use super::hardware::Hardware;
use super::salvage::{Salvaged, SalvagedDevice, salvage};
use super::sharing::{SharedDevice, refuse_over_commit};
use super::targets::{self, pci_of, refuse_overlap};
use crate::slices::StaticInstance;
use crate::slices::names::{self, Named};

/// A claim whose record cannot be read, and the devices that it may hold.
#[derive(Debug, Clone)]
pub(super) struct Doubtful {
    /// Its UID.
    pub(super) uid: String,
    /// Why its record cannot be read.
    pub(super) reason: String,
    /// Their names; none where nothing tells them.
    pub(super) devices: Vec<String>,
}

impl Core {
    /// What a record that cannot be read may have named: what is left of it, the metadata
    /// files, which name the claim, and the CDI file, whose devices carry its UID.
    pub(super) fn salvaged(&self, uid: &str) -> Salvaged {
        let path = self.checkpoints.path(uid).ok();
        let bytes = path.and_then(|path| fs::read(path).ok());
        let mut salvaged = salvage(&bytes.unwrap_or_default(), uid);
        salvaged.claim = salvaged.claim.or_else(|| self.metadata.claim(uid));
        for device in self.cdi.devices(uid) {
            if !salvaged.devices.iter().any(|known| known.device == device) {
                salvaged.devices.push(SalvagedDevice {
                    device,
                    adopted: None,
                });
            }
        }
        salvaged
            .devices
            .retain(|device| pci_of(&device.device).is_some());
        salvaged
    }

    /// The GPUs on which a record that cannot be read may hold something.
    pub(super) fn salvaged_gpus(&self, uid: &str) -> BTreeSet<PciAddress> {
        let devices = self.salvaged(uid).devices;
        devices
            .iter()
            .filter_map(|device| pci_of(&device.device))
            .collect()
    }

    pub(super) fn doubtful(&self, uid: &str, error: &CheckpointError) -> Doubtful {
        let devices = self.salvaged(uid).devices;
        Doubtful {
            uid: uid.to_owned(),
            reason: error.to_string(),
            devices: devices.into_iter().map(|device| device.device).collect(),
        }
    }

    /// Makes the record of a claim anew that is allocated and whose file is damaged. It is
    /// written as completed, so that nothing undoes what running containers may use.
    ///
    /// # Errors
    /// When the GPU does not answer, another claim holds its devices, or the disk refuses;
    /// the damaged file is then still there, and holds what it held.
    pub(super) fn rebuild(
        &self,
        hardware: &dyn Hardware,
        claim: &ClaimRef,
        pod_claim_name: Option<String>,
        wanted: &[Allocated],
    ) -> Result<Record, CoreError> {
        let gpus = self.read_gpus(hardware, wanted)?;
        let salvaged = self.salvaged(&claim.uid);
        let mut record = Record {
            claim: claim.clone(),
            pod_claim_name,
            boot_id: self.boot_id.clone(),
            stage: Stage::PrepareCompleted,
            devices: Vec::with_capacity(wanted.len()),
        };
        let others = self.others(&claim.uid, gpus.keys().copied().collect())?;
        for wanted in wanted {
            let adopted = |instance: &StaticInstance| self.was_adopted(&salvaged, wanted, instance);
            let kind_of = |gpu: &Gpu| self.kind_of(gpu);
            let device = targets::replan(&gpus, claim, wanted, adopted, &others, kind_of)?;
            record.devices.push(device);
        }
        refuse_overlap(&others, &gpus, &record)?;
        refuse_over_commit(&gpus, others.readable(), &record)?;
        tell_once(&mut record);
        self.replace_damaged(&record)?;
        Ok(record)
    }

    /// Ends a claim whose file is damaged: what it may have made is destroyed, as far as it
    /// is known, and its file is put aside. `wanted` is its allocation, where that is known.
    ///
    /// # Errors
    /// As [`Core::unprepare`].
    pub(super) fn end_damaged(
        &self,
        hardware: &dyn Hardware,
        claim: &ClaimRef,
        wanted: &[Allocated],
    ) -> Result<BTreeSet<SharedDevice>, CoreError> {
        let salvaged = self.salvaged(&claim.uid);
        let mut devices: Vec<Allocated> = wanted.to_vec();
        for device in &salvaged.devices {
            if !devices.iter().any(|known| known.device == device.device) {
                devices.push(Allocated {
                    device: device.device.clone(),
                    ..Allocated::default()
                });
            }
        }
        // A whole device has nothing that could be left; of a shared one, a daemon.
        devices.retain(|d| d.device.contains("-mig-") || d.device.ends_with("-shared"));
        let mut record = Record {
            claim: claim.clone(),
            pod_claim_name: None,
            boot_id: self.boot_id.clone(),
            stage: Stage::PrepareStarted,
            devices: Vec::new(),
        };
        let gpus = self.read_gpus(hardware, &devices)?;
        let others = self.others(&claim.uid, gpus.keys().copied().collect())?;
        for wanted in &devices {
            let adopted = |instance: &StaticInstance| self.was_adopted(&salvaged, wanted, instance);
            let kind_of = |gpu: &Gpu| self.kind_of(gpu);
            match targets::replan(&gpus, claim, wanted, adopted, &others, kind_of) {
                Ok(device) => record.devices.push(device),
                Err(
                    CoreError::UnknownDevice { .. } // A name that is damaged itself.
                    | CoreError::NotShared { .. }
                    | CoreError::NotOurs { .. },
                ) => {}
                Err(error) => return Err(error),
            }
        }
        if record.devices.is_empty() {
            self.remove_files(&claim.uid)?;
            self.checkpoints.move_aside(&claim.uid)?;
            return Ok(BTreeSet::new());
        }
        self.replace_damaged(&record)?;
        self.unprepare(Some(hardware), claim, &[])
    }

    /// The copy comes first: a crash between the two leaves the damaged file in its place.
    fn replace_damaged(&self, record: &Record) -> Result<(), CoreError> {
        let aside = self.checkpoints.copy_aside(&record.claim.uid)?;
        self.checkpoints.write(record)?;
        tracing::warn!(claim = %record.claim, aside = %aside.display(),
            "A damaged checkpoint was put aside and made anew.");
        Ok(())
    }

    fn was_adopted(
        &self,
        salvaged: &Salvaged,
        wanted: &Allocated,
        instance: &StaticInstance,
    ) -> bool {
        let known = salvaged
            .devices
            .iter()
            .find(|device| device.device == wanted.device)
            .and_then(|device| device.adopted);
        wanted.admin_access || known.unwrap_or_else(|| self.statics.contains(instance))
    }

    /// The instances that exist and that no claim made or may have made: an
    /// administrator's. `ours` are those of the records that can be read.
    pub(super) fn administrators(
        &self,
        inventory: &Inventory,
        ours: &BTreeSet<StaticInstance>,
        doubtful: &[Doubtful],
    ) -> BTreeSet<StaticInstance> {
        let instances = inventory.gpus.iter().flat_map(|gpu| {
            gpu.instances.iter().map(|instance| StaticInstance {
                pci: gpu.pci,
                profile_id: instance.profile_id,
                placement: instance.placement,
            })
        });
        instances
            .filter(|instance| !ours.contains(instance))
            .filter(|instance| {
                doubtful.iter().all(|doubtful| {
                    if doubtful.devices.is_empty() {
                        // It may hold anything that was not there without it.
                        return self.statics.contains(instance);
                    }
                    !doubtful
                        .devices
                        .iter()
                        .any(|device| is(inventory, device, instance))
                })
            })
            .collect()
    }
}

impl Core {
    /// How many instances exist that neither a record nor an administrator accounts for.
    pub(super) fn unaccounted(&self, hardware: &dyn Hardware) -> Result<usize, String> {
        let text = |error: &dyn std::error::Error| error.to_string();
        let inventory = hardware.inventory().map_err(|error| text(&error))?;
        let all = self.checkpoints.all().map_err(|error| text(&error))?;
        let ours = all.records.iter().flat_map(|r| r.own_instances()).collect();
        let unaccounted = self.administrators(&inventory, &ours, &[]);
        let noted = |instance: &&StaticInstance| !self.statics.contains(instance);
        Ok(unaccounted.iter().filter(noted).count())
    }
}

/// Whether a device name stands for an instance.
fn is(inventory: &Inventory, device: &str, instance: &StaticInstance) -> bool {
    matches!(names::resolve(&inventory.gpus, partition_of(device)),
        Some(Named::Partition(gpu, profile, placement))
            if gpu.pci == instance.pci
                && profile.id == instance.profile_id
                && placement == instance.placement)
}

/// The device of which a device is a share, or the device itself.
pub(super) fn partition_of(device: &str) -> &str {
    device.strip_suffix("-shared").unwrap_or(device)
}
