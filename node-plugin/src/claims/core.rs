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
//!
//! A claim that shares a device by MPS is recorded and left there: its daemon is brought
//! up by [`super::sharing::daemons`], which takes as long as it takes and holds no lock of
//! a GPU, and only then is the claim finished. Likewise its record goes when its daemon
//! has what the remaining claims need.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpu::{Gpu, PciAddress};

use super::allocation::Allocated;
use super::cdi::{self, CdiFiles};
use super::checkpoint::{CheckpointError, Checkpoints, ClaimRef, PreparedDevice, Record, Stage};
use super::driver::Driver;
pub use super::error::CoreError;
use super::hardware::{Hardware, HardwareError, NoHardware};
use super::metadata::MetadataFiles;
use super::sharing::{self, SharedDevice, limits, refuse_over_commit, refuse_several_daemons};
use super::statics::Statics;
use super::targets::{Others, holder_of, pci_of, plan, ready, refuse_overlap, release};
use crate::metrics::{Phase, phase};
use crate::slices::{SharingKind, StaticInstance};

/// The GPUs that a claim names, as they were read behind their locks: nobody else changes
/// them meanwhile, so they are read once for each call.
pub(super) type ClaimedGpus = BTreeMap<PciAddress, Gpu>;

/// A step after which a crash must be survivable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// `PrepareStarted` is on the disk.
    Started,
    /// The hardware is ready.
    Acted,
    /// The daemons of shared devices have what their claims need.
    DaemonsReady,
    /// The CDI file is there.
    CdiWritten,
    /// `PrepareCompleted` is on the disk.
    Completed,
    /// Unprepare: the CDI file is gone.
    CdiRemoved,
    /// Unprepare: the hardware is given back.
    Released,
    /// Unprepare: the daemons of shared devices have what the other claims need.
    DaemonsLeft,
    /// Unprepare: the record is gone.
    Forgotten,
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
    /// How devices are shared.
    pub sharing: sharing::Settings,
    /// The MIG instances that no claim made.
    pub(super) statics: Statics,
    /// This boot.
    pub boot_id: String,
    /// Called after each durable step.
    pub after: StepHook,
}

/// How far a prepare came.
#[derive(Debug)]
pub enum Prepared {
    /// To its end.
    Completed(Vec<PreparedDevice>),
    /// To where daemons have to be brought up; [`Core::complete`] goes on.
    Waiting(Box<Waiting>),
    /// What is recorded has to be given back first, and some of it is shared.
    GiveBackFirst,
}

/// A claim that is recorded and made ready, except for its daemons.
#[derive(Debug)]
pub struct Waiting {
    record: Record,
    /// What is on the disk.
    before: Record,
    /// The devices whose daemons it needs.
    pub daemons: BTreeSet<SharedDevice>,
    /// Whether it is undone when this fails; a claim that was prepared before stays.
    pub fresh: bool,
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
    ) -> Result<Prepared, CoreError> {
        match self.checkpoints.read(&claim.uid) {
            Ok(Some(record))
                if record.stage == Stage::PrepareCompleted && same(&record, wanted) =>
            {
                return self.restore(hardware, driver_version, record);
            }
            // Started, or ended, or allocated anew to other devices.
            Ok(Some(record)) if limits::daemons_of(&record).is_empty() => {
                self.undo(hardware, &record)?.all()?;
            }
            Ok(Some(_)) => return Ok(Prepared::GiveBackFirst),
            Ok(None) => {}
            Err(CheckpointError::Corrupt { .. }) => {
                let record = self.rebuild(hardware, claim, pod_claim_name, wanted)?;
                return self.restore(hardware, driver_version, record);
            }
            Err(error) => return Err(error.into()),
        }

        let gpus = self.read_gpus(hardware, wanted)?;
        let others = self.others(&claim.uid, gpus.keys().copied().collect())?;
        let mut record = Record {
            claim: claim.clone(),
            pod_claim_name,
            boot_id: self.boot_id.clone(),
            stage: Stage::PrepareStarted,
            devices: Vec::with_capacity(wanted.len()),
        };
        for device in wanted {
            let noted = |instance: &StaticInstance| self.statics.contains(instance);
            let kind_of = |gpu: &Gpu| self.kind_of(gpu);
            let device = plan(&gpus, &others, claim, device, noted, kind_of)?;
            record.devices.push(device);
        }
        refuse_overlap(&others, &gpus, &record)?;
        refuse_several_daemons(&record)?;
        refuse_over_commit(&gpus, others.readable(), &record)?;
        tell_once(&mut record);
        // What a crash could leave behind: an instance, a daemon. A claim of whole devices
        // alone has nothing to undo but its CDI file, which start-up removes for want of a
        // record, and is spared the write.
        let daemons = limits::daemons_of(&record);
        if record.own_instances().next().is_some() || !daemons.is_empty() {
            self.checkpoints.write(&record)?;
            (self.after)(Step::Started);
        }

        match self.act(hardware, driver_version, &gpus, record.clone(), true) {
            Ok(prepared) => Ok(prepared),
            Err(error) => {
                if let Err(undo) = self.undo(hardware, &record).and_then(Undone::all) {
                    tracing::error!(error = %undo,
                        "A failed prepare could not be undone; the next attempt starts with it.");
                }
                Err(error)
            }
        }
    }

    /// Undoes a claim; one that is unknown is a success, and so is one whose GPU does not
    /// answer: the pod has to be able to end. Its instance is then kept in mind, nobody
    /// else gets its place, and the next call of this destroys it. `wanted` is the claim's
    /// allocation, where that is known; it is used where the record is damaged.
    ///
    /// Where a claim shares devices, its record stays, and the answer is the devices whose
    /// daemons have to hear that it leaves; [`Self::forget`] is the end then.
    ///
    /// # Errors
    /// When an instance is in use or the disk refuses; the record is then kept.
    pub fn unprepare(
        &self,
        hardware: Option<&dyn Hardware>,
        claim: &ClaimRef,
        wanted: &[Allocated],
    ) -> Result<BTreeSet<SharedDevice>, CoreError> {
        let hardware = hardware.unwrap_or(&NoHardware);
        let record = match self.checkpoints.read(&claim.uid) {
            Ok(Some(record)) => record,
            Ok(None) => {
                self.remove_files(&claim.uid)?;
                return Ok(BTreeSet::new());
            }
            Err(CheckpointError::Corrupt { .. }) => {
                return self.end_damaged(hardware, claim, wanted);
            }
            Err(error) => return Err(error.into()),
        };
        let daemons = limits::daemons_of(&record);
        let undone = if daemons.is_empty() {
            self.undo(hardware, &record)?
        } else {
            self.release(hardware, &record)?
        };
        match undone {
            Undone::All => {}
            Undone::ButInstance { error, .. } => {
                tracing::warn!(claim = %record.claim, %error,
                    "The claim ends though its MIG instance cannot be destroyed; that is done when the GPU is back.");
            }
        }
        Ok(daemons)
    }

    /// The last part of an unprepare of a claim that shared devices: the record goes, unless
    /// it keeps something in mind.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn forget(&self, uid: &str) -> Result<(), CoreError> {
        let record = self.checkpoints.read(uid)?;
        if record.is_some_and(|record| record.stage == Stage::Unprepared) {
            return Ok(());
        }
        self.checkpoints.remove(uid)?;
        (self.after)(Step::Forgotten);
        Ok(())
    }

    /// How a GPU would be shared that nobody shares yet.
    pub(super) fn kind_of(&self, gpu: &Gpu) -> Option<SharingKind> {
        let program = sharing::program(&self.driver.roots().driver).is_some();
        sharing::decide(self.sharing.policy, gpu.compute_capability, program)
    }

    /// Puts back what a completed claim needs and that is gone: after a reboot its MIG
    /// instances and its CDI file. The devices and their CDI ids stay the same.
    fn restore(
        &self,
        hardware: &dyn Hardware,
        driver_version: &str,
        mut record: Record,
    ) -> Result<Prepared, CoreError> {
        let gpus = self.read_gpus(hardware, &record.devices)?;
        for device in &record.devices {
            let Some(gpu) = gpus.get(&device.target.pci()) else {
                continue; // `read_gpus` has read every one.
            };
            let uuid = device.target.gpu_uuid();
            if gpu.uuid != uuid {
                return Err(CoreError::Swapped {
                    device: device.device.clone(),
                    pci: gpu.pci,
                    found: gpu.uuid.clone(),
                    expected: uuid.to_owned(),
                });
            }
        }
        if record.boot_id != self.boot_id {
            let others = self.others(&record.claim.uid, gpus.keys().copied().collect())?;
            refuse_overlap(&others, &gpus, &record)?;
            refuse_over_commit(&gpus, others.readable(), &record)?;
            // Written ahead of the hardware, as in prepare: a record of an earlier boot
            // holds nothing, and a crash would leave an instance that nobody owns.
            record.boot_id.clone_from(&self.boot_id);
            if record.own_instances().next().is_some() || !limits::daemons_of(&record).is_empty() {
                self.checkpoints.write(&record)?;
            }
        }
        self.act(hardware, driver_version, &gpus, record, false)
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
            Some(now) if now == *record => match self.restore(hardware, driver_version, now)? {
                // Its daemon is seen to by whoever sees to all of them.
                Prepared::Waiting(waiting) => self
                    .complete(hardware, driver_version, *waiting)
                    .map(|_| ()),
                Prepared::Completed(_) | Prepared::GiveBackFirst => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// Hardware, CDI file, `PrepareCompleted`; each only where it is not so already.
    fn act(
        &self,
        hardware: &dyn Hardware,
        driver_version: &str,
        gpus: &ClaimedGpus,
        mut record: Record,
        fresh: bool,
    ) -> Result<Prepared, CoreError> {
        let mut before = record.clone();
        for device in &mut record.devices {
            ready(hardware, gpus, device)?;
        }
        (self.after)(Step::Acted);
        let daemons = limits::daemons_of(&record);
        if !daemons.is_empty() && record != before {
            // A partition may have another UUID than before a reboot, and its daemon is
            // started from what is on the disk.
            self.checkpoints.write(&record)?;
            before = record.clone();
        }
        let waiting = Waiting {
            record,
            before,
            daemons,
            fresh,
        };
        if !waiting.daemons.is_empty() {
            return Ok(Prepared::Waiting(Box::new(waiting)));
        }
        self.complete(hardware, driver_version, waiting)
            .map(Prepared::Completed)
    }

    /// The rest of a prepare, once the daemons are there; the claim's lock is enough.
    ///
    /// # Errors
    /// When a file cannot be written; the claim is then given back or prepared again.
    pub fn complete(
        &self,
        hardware: &dyn Hardware,
        driver_version: &str,
        waiting: Waiting,
    ) -> Result<Vec<PreparedDevice>, CoreError> {
        let Waiting {
            mut record, before, ..
        } = waiting;
        phase(Phase::Cdi, || {
            self.write_files(&record, &hardware.described(), driver_version)
        })?;
        (self.after)(Step::CdiWritten);

        record.boot_id.clone_from(&self.boot_id);
        record.stage = Stage::PrepareCompleted;
        if record != before {
            self.checkpoints.write(&record)?;
        }
        (self.after)(Step::Completed);
        Ok(record.devices)
    }

    /// Gives everything back that a record names: CDI file, instances, the record.
    fn undo(&self, hardware: &dyn Hardware, record: &Record) -> Result<Undone, CoreError> {
        let undone = self.release(hardware, record)?;
        if let Undone::All = undone {
            self.checkpoints.remove(&record.claim.uid)?;
            (self.after)(Step::Forgotten);
        }
        Ok(undone)
    }

    /// Gives back what a record names, and keeps the record.
    fn release(&self, hardware: &dyn Hardware, record: &Record) -> Result<Undone, CoreError> {
        self.remove_files(&record.claim.uid)?;
        (self.after)(Step::CdiRemoved);
        let gpus: BTreeSet<PciAddress> = record.own_instances().map(|i| i.pci).collect();
        // What an earlier boot made is gone; what sits there now is somebody else's.
        if !gpus.is_empty() && record.boot_id == self.boot_id {
            let others = self.others(&record.claim.uid, gpus)?;
            for device in &record.devices {
                // Only after a reboot, which took ours: it is the other claim's.
                if holder_of(&others.records, &device.target).is_some() {
                    continue;
                }
                match release(hardware, device) {
                    Ok(()) => {}
                    Err(error) if error.is_unreachable() => {
                        return self.keep_in_mind(record, device, error);
                    }
                    Err(source) => {
                        let device = device.device.clone();
                        return Err(CoreError::Hardware { device, source });
                    }
                }
            }
        }
        (self.after)(Step::Released);
        Ok(Undone::All)
    }

    fn keep_in_mind(
        &self,
        record: &Record,
        device: &PreparedDevice,
        error: HardwareError,
    ) -> Result<Undone, CoreError> {
        if record.stage != Stage::Unprepared {
            let mut ended = record.clone();
            ended.stage = Stage::Unprepared;
            self.checkpoints.write(&ended)?;
        }
        Ok(Undone::ButInstance {
            device: device.device.clone(),
            error,
        })
    }

    /// Reads each GPU that the claim names, once and as it is now. One that does not
    /// answer can still be looked at by an administrator, as it was when it did.
    pub(super) fn read_gpus<'a, D: 'a + NamesDevice>(
        &self,
        hardware: &dyn Hardware,
        devices: impl IntoIterator<Item = &'a D>,
    ) -> Result<ClaimedGpus, CoreError> {
        let mut gpus = BTreeMap::new();
        let mut silent: BTreeMap<PciAddress, HardwareError> = BTreeMap::new();
        for named in devices {
            let device = named.device();
            let pci = pci_of(device).ok_or_else(|| CoreError::UnknownDevice {
                device: device.to_owned(),
            })?;
            if let std::collections::btree_map::Entry::Vacant(entry) = gpus.entry(pci) {
                match hardware.gpu(pci) {
                    Ok(gpu) => drop(entry.insert(gpu)),
                    Err(error) => {
                        let described = hardware.described();
                        let last = described.gpus.iter().find(|gpu| gpu.pci == pci);
                        last.map(|gpu| entry.insert(gpu.clone()));
                        silent.insert(pci, error);
                    }
                }
            }
            if let Some(source) = silent.get(&pci)
                && !(named.looks_on() && gpus.contains_key(&pci))
            {
                return Err(CoreError::Hardware {
                    device: device.to_owned(),
                    source: source.clone(),
                });
            }
        }
        Ok(gpus)
    }

    /// What other claims of this boot have on these GPUs. One from before a reboot holds
    /// nothing: its containers and instances are gone.
    pub(super) fn others(
        &self,
        uid: &str,
        gpus: BTreeSet<PciAddress>,
    ) -> Result<Others, CoreError> {
        let all = self.checkpoints.of_gpus(&gpus)?;
        let (mut records, unreadable) = (all.records, all.unreadable.iter());
        records.retain(|other| other.claim.uid != uid && other.boot_id == self.boot_id);
        Ok(Others {
            records,
            doubtful: unreadable
                .filter(|other| other.uid != uid)
                .map(|other| self.doubtful(&other.uid, &other.error))
                .collect(),
        })
    }
}

/// Gives the metadata of each request to the first of its devices: a container that
/// uses the request gets all of them.
pub(super) fn tell_once(record: &mut Record) {
    let mut told: BTreeSet<String> = BTreeSet::new();
    for device in &mut record.devices {
        if told.insert(device.request.clone()) {
            let id = cdi::metadata_id(&record.claim.uid, &device.request);
            device.cdi_device_ids.push(id);
        }
    }
}

/// How far an undo came.
enum Undone {
    /// Nothing is left.
    All,
    /// An instance is on a GPU that does not answer; its record stays.
    ButInstance {
        device: String,
        error: HardwareError,
    },
}

impl Undone {
    /// For whom less than all is a failure.
    fn all(self) -> Result<(), CoreError> {
        match self {
            Self::All => Ok(()),
            Self::ButInstance {
                device,
                error: source,
            } => Err(CoreError::Hardware { device, source }),
        }
    }
}

/// Something that is known by its device's name.
pub(super) trait NamesDevice {
    /// The name.
    fn device(&self) -> &str;

    /// Whether it is for an administrator, who looks on and uses nothing.
    fn looks_on(&self) -> bool;
}

impl NamesDevice for Allocated {
    fn device(&self) -> &str {
        &self.device
    }

    fn looks_on(&self) -> bool {
        self.admin_access
    }
}

impl NamesDevice for PreparedDevice {
    fn device(&self) -> &str {
        &self.device
    }

    fn looks_on(&self) -> bool {
        self.admin_access
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
