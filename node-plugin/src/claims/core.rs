//! The steps of preparing and unpreparing one claim, in order, each durable.
//!
//! In: a claim's allocation or its record. Out: hardware, CDI file and checkpoint that
//! agree. Never: an await, a lock or a request to the API server; the caller holds the
//! locks of the claim and of its GPUs, and runs this on a blocking thread.
//!
//! Prepare is: record `PrepareStarted` with what undo needs, act on the hardware, write the CDI file, record
//! `PrepareCompleted`. Any of them may be the last before a crash. What is recorded as
//! started is undone before it is tried again; what is recorded as completed is put
//! back where it is missing, with the same answer.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpu::{Gpu, Inventory, MigInstance, PciAddress};

use super::allocation::Allocated;
use super::cdi::{self, CdiFiles};
use super::checkpoint::{
    CheckpointError, Checkpoints, ClaimRef, PreparedDevice, Record, Stage, Target,
};
use super::driver::{Driver, DriverError};
use super::hardware::{GpuEvents, Hardware, HardwareError};
use super::metadata::MetadataFiles;
use super::targets::{holder_of, pci_of, plan, ready, refuse_overlap, release};
use crate::metrics::{Phase, phase};

/// A step after which a crash must be survivable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// `PrepareStarted` is on the disk.
    Started,
    /// The hardware is ready.
    Acted,
    /// The CDI file is there.
    CdiWritten,
    /// `PrepareCompleted` is on the disk.
    Completed,
    /// Unprepare: the CDI file is gone.
    CdiRemoved,
    /// Unprepare: the hardware is given back.
    Released,
    /// Unprepare: the record is gone.
    Forgotten,
}

/// Why a claim could not be prepared or unprepared.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// The device is not on this node.
    #[error(
        "device {device} does not exist on this node; the GPU is gone or its partitions changed since the claim was allocated"
    )]
    UnknownDevice {
        /// The device.
        device: String,
    },
    /// Another claim holds the same hardware.
    #[error(
        "device {device} overlaps {other_device}, which claim {holder} holds; the claim can be prepared when that one is unprepared"
    )]
    Held {
        /// The device that was asked for.
        device: String,
        /// The device that is in use.
        other_device: String,
        /// The claim that uses it.
        holder: ClaimRef,
    },
    /// An administrator's MIG instance is in the way.
    #[error(
        "device {device} overlaps MIG instance {instance} on GPU {pci}, which no claim created; destroy it (nvidia-smi mig -dci/-dgi) or use another device"
    )]
    Foreign {
        /// The device.
        device: String,
        /// The GPU instance id.
        instance: u32,
        /// The GPU.
        pci: PciAddress,
    },
    /// An administrator's MIG instance that the claim was to be given is not usable.
    #[error("device {device}: the MIG instance on GPU {pci}, which no claim created, {problem}")]
    NotOurs {
        /// The device.
        device: String,
        /// The GPU.
        pci: PciAddress,
        /// What is wrong and what to do.
        problem: &'static str,
    },
    /// Another card is at the address now.
    #[error(
        "device {device}: the GPU at {pci} is {found} now, the claim was prepared with {expected}; delete the pod and its claim"
    )]
    Swapped {
        /// The device.
        device: String,
        /// The address.
        pci: PciAddress,
        /// The UUID that is there.
        found: String,
        /// The UUID that was recorded.
        expected: String,
    },
    /// MIG mode needs a reset to change.
    #[error(
        "device {device}: MIG mode of GPU {pci} is on and cannot be switched off without a GPU reset"
    )]
    MigOn {
        /// The device.
        device: String,
        /// The GPU.
        pci: PciAddress,
    },
    /// The GPU refused.
    #[error("device {device}: {source}")]
    Hardware {
        /// The device.
        device: String,
        /// NVML's error.
        source: HardwareError,
    },
    /// A driver file is missing.
    #[error("device {device}: {source}")]
    Driver {
        /// The device.
        device: String,
        /// What is missing.
        source: DriverError,
    },
    /// The CDI file could not be written or removed.
    #[error("cannot write the CDI file {path}: {source}; check the CDI folder")]
    Cdi {
        /// The file.
        path: std::path::PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The metadata files could not be written or removed.
    #[error("cannot write the device metadata below {path}: {source}; check the plugin's folder")]
    Metadata {
        /// The claim's folder.
        path: std::path::PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The checkpoint could not be read or written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// A function that is called after each durable step; tests stop there.
pub type StepHook = Arc<dyn Fn(Step) + Send + Sync>;

/// The node's durable state.
pub struct Core {
    /// The checkpoints.
    pub checkpoints: Checkpoints,
    /// The CDI files.
    pub cdi: CdiFiles,
    /// The device metadata files, which the CDI files mount.
    pub metadata: MetadataFiles,
    /// The driver's files.
    pub driver: Driver,
    /// This boot.
    pub boot_id: String,
    /// Called after each durable step.
    pub after: StepHook,
}

impl Core {
    /// Prepares a claim, or returns what was prepared before.
    ///
    /// # Errors
    /// With what was done undone, as far as the hardware lets it; what is left is
    /// recorded and undone by the next attempt.
    pub fn prepare(
        &self,
        hardware: &dyn Hardware,
        driver_version: &str,
        claim: &ClaimRef,
        pod_claim_name: Option<String>,
        wanted: &[Allocated],
    ) -> Result<Vec<PreparedDevice>, CoreError> {
        match self.checkpoints.read(&claim.uid)? {
            Some(record) if record.stage == Stage::PrepareCompleted && same(&record, wanted) => {
                return self.restore(hardware, driver_version, record);
            }
            // Started, or allocated anew to other devices.
            Some(record) => self.undo(hardware, &record)?,
            None => {}
        }

        let gpus = self.read_gpus(hardware, wanted)?;
        let others = self.others(&claim.uid)?;
        let mut record = Record {
            claim: claim.clone(),
            pod_claim_name,
            boot_id: self.boot_id.clone(),
            stage: Stage::PrepareStarted,
            devices: Vec::with_capacity(wanted.len()),
        };
        for device in wanted {
            record.devices.push(plan(&gpus, &others, claim, device)?);
        }
        refuse_overlap(&others, &record)?;
        tell_once(&mut record);
        // What a crash could leave behind: an instance. A claim of whole devices alone
        // has nothing to undo but its CDI file, which start-up removes for want of a
        // record, and is spared the write.
        if record.own_instances().next().is_some() {
            self.checkpoints.write(&record)?;
            (self.after)(Step::Started);
        }

        match self.act(hardware, driver_version, &mut record) {
            Ok(()) => Ok(record.devices),
            Err(error) => {
                if let Err(undo) = self.undo(hardware, &record) {
                    tracing::error!(error = %undo,
                        "A failed prepare could not be undone; the next attempt starts with it.");
                }
                Err(error)
            }
        }
    }

    /// Undoes a claim; one that is unknown is a success.
    ///
    /// # Errors
    /// When an instance is in use or the disk refuses; the record is then kept.
    pub fn unprepare(&self, hardware: Option<&dyn Hardware>, uid: &str) -> Result<(), CoreError> {
        match self.checkpoints.read(uid)? {
            Some(record) => match hardware {
                Some(hardware) => self.undo(hardware, &record),
                None => self.undo(&NoHardware, &record),
            },
            None => self.remove_files(uid),
        }
    }

    /// Puts back what a completed claim needs and that is gone: after a reboot its MIG
    /// instances and its CDI file. The devices and their CDI ids stay the same.
    fn restore(
        &self,
        hardware: &dyn Hardware,
        driver_version: &str,
        mut record: Record,
    ) -> Result<Vec<PreparedDevice>, CoreError> {
        for device in &record.devices {
            let gpu = hardware
                .gpu(device.target.pci())
                .map_err(|source| CoreError::Hardware {
                    device: device.device.clone(),
                    source,
                })?;
            let (Target::Whole { uuid, .. } | Target::Partition { uuid, .. }) = &device.target;
            if gpu.uuid != *uuid {
                return Err(CoreError::Swapped {
                    device: device.device.clone(),
                    pci: gpu.pci,
                    found: gpu.uuid,
                    expected: uuid.clone(),
                });
            }
        }
        if record.boot_id != self.boot_id {
            refuse_overlap(&self.others(&record.claim.uid)?, &record)?;
            // Written ahead of the hardware, as in prepare: a record of an earlier boot
            // holds nothing, and a crash would leave an instance that nobody owns.
            record.boot_id.clone_from(&self.boot_id);
            if record.own_instances().next().is_some() {
                self.checkpoints.write(&record)?;
            }
        }
        self.act(hardware, driver_version, &mut record)?;
        Ok(record.devices)
    }

    /// Puts back what a completed claim is missing, if it is still the same record.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub fn restore_if_known(
        &self,
        hardware: &dyn Hardware,
        driver_version: &str,
        record: &Record,
    ) -> Result<(), CoreError> {
        match self.checkpoints.read(&record.claim.uid)? {
            Some(now) if now == *record => self.restore(hardware, driver_version, now).map(|_| ()),
            _ => Ok(()),
        }
    }

    /// Hardware, CDI file, `PrepareCompleted`; each only where it is not so already.
    fn act(
        &self,
        hardware: &dyn Hardware,
        driver_version: &str,
        record: &mut Record,
    ) -> Result<(), CoreError> {
        let before = record.clone();
        for device in &mut record.devices {
            ready(hardware, device)?;
        }
        (self.after)(Step::Acted);

        phase(Phase::Cdi, || {
            self.write_files(record, &hardware.described(), driver_version)
        })?;
        (self.after)(Step::CdiWritten);

        record.boot_id.clone_from(&self.boot_id);
        record.stage = Stage::PrepareCompleted;
        if *record != before {
            self.checkpoints.write(record)?;
        }
        (self.after)(Step::Completed);
        Ok(())
    }

    /// Gives everything back that a record names: CDI file, instances, the record.
    fn undo(&self, hardware: &dyn Hardware, record: &Record) -> Result<(), CoreError> {
        self.remove_files(&record.claim.uid)?;
        (self.after)(Step::CdiRemoved);
        let others = match record.own_instances().next() {
            Some(_) => self.others(&record.claim.uid)?,
            None => Vec::new(),
        };
        for device in &record.devices {
            // Only after a reboot, which took ours: what sits there is the other claim's.
            if holder_of(&others, &device.target).is_some() {
                continue;
            }
            release(hardware, device).map_err(|source| CoreError::Hardware {
                device: device.device.clone(),
                source,
            })?;
        }
        (self.after)(Step::Released);
        self.checkpoints.remove(&record.claim.uid)?;
        (self.after)(Step::Forgotten);
        Ok(())
    }

    /// Reads each GPU that the claim names, once and as it is now.
    fn read_gpus(
        &self,
        hardware: &dyn Hardware,
        wanted: &[Allocated],
    ) -> Result<BTreeMap<PciAddress, Gpu>, CoreError> {
        let mut gpus = BTreeMap::new();
        for device in wanted {
            let pci = pci_of(&device.device).ok_or_else(|| CoreError::UnknownDevice {
                device: device.device.clone(),
            })?;
            if let std::collections::btree_map::Entry::Vacant(entry) = gpus.entry(pci) {
                let gpu = hardware.gpu(pci).map_err(|source| CoreError::Hardware {
                    device: device.device.clone(),
                    source,
                })?;
                entry.insert(gpu);
            }
        }
        Ok(gpus)
    }

    /// The other claims of this boot. One from before a reboot holds nothing: its
    /// containers and instances are gone.
    fn others(&self, uid: &str) -> Result<Vec<Arc<Record>>, CoreError> {
        let (mut records, _) = self.checkpoints.all()?;
        records.retain(|other| other.claim.uid != uid && other.boot_id == self.boot_id);
        Ok(records)
    }
}

/// Gives the metadata of each request to the first of its devices: a container that
/// uses the request gets all of them.
fn tell_once(record: &mut Record) {
    let mut told: BTreeSet<String> = BTreeSet::new();
    for device in &mut record.devices {
        if told.insert(device.request.clone()) {
            let id = cdi::metadata_id(&record.claim.uid, &device.request);
            device.cdi_device_ids.push(id);
        }
    }
}

/// Whether a record answers an allocation.
fn same(record: &Record, wanted: &[Allocated]) -> bool {
    record.devices.len() == wanted.len()
        && record.devices.iter().zip(wanted).all(|(have, want)| {
            (&have.request, &have.pool, &have.device, &have.share_id)
                == (&want.request, &want.pool, &want.device, &want.share_id)
        })
}

/// Stands in while NVML is not loaded: whole devices can still be given back.
struct NoHardware;

impl Hardware for NoHardware {
    fn inventory(&self) -> Result<Inventory, HardwareError> {
        Err(unavailable())
    }

    fn gpu(&self, _: PciAddress) -> Result<Gpu, HardwareError> {
        Err(unavailable())
    }

    fn described(&self) -> Arc<Inventory> {
        Arc::new(super::hardware::nothing())
    }

    fn create_instance(
        &self,
        _: PciAddress,
        _: u32,
        _: gpu::Placement,
    ) -> Result<MigInstance, HardwareError> {
        Err(unavailable())
    }

    fn destroy_instance(&self, _: PciAddress, _: u32) -> Result<(), HardwareError> {
        Err(unavailable())
    }

    fn disable_mig(&self, _: PciAddress) -> Result<(), HardwareError> {
        Err(unavailable())
    }

    fn health(&self, _: PciAddress) -> Result<gpu::HealthReading, HardwareError> {
        Err(unavailable())
    }

    fn set_compute_mode(&self, _: PciAddress, _: gpu::ComputeMode) -> Result<(), HardwareError> {
        Err(unavailable())
    }

    fn processes(&self, _: PciAddress) -> Result<Vec<gpu::Process>, HardwareError> {
        Err(unavailable())
    }

    fn events(&self, _: &[PciAddress]) -> Result<Box<dyn GpuEvents>, HardwareError> {
        Err(unavailable())
    }
}

/// The answer to every hardware call while NVML is not loaded.
#[must_use]
pub fn unavailable() -> HardwareError {
    HardwareError::Failed(
        "NVML is not loaded on this node; /readyz of the node plugin says why, and the call is retried"
            .to_owned(),
    )
}
