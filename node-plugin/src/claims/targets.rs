//! The hardware behind a claim's devices.
//!
//! In: an allocated device, the GPU as it is, the other claims' records. Out: what the
//! device stands for, whether somebody holds it, and the hardware made ready or given
//! back. Never: the disk; what has to survive a crash is recorded by [`super::core`]
//! around these calls.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpu::{Gpu, MigInstance, MigMode, PciAddress};

use super::allocation::Allocated;
use super::cdi;
use super::checkpoint::{ClaimRef, InstanceIds, PreparedDevice, Record, Target};
use super::core::CoreError;
use super::hardware::{Hardware, HardwareError};
use super::rebuild::{Doubtful, partition_of};
use super::sharing::grant;
use crate::slices::names::{self, Named, Shared};
use crate::slices::{SharingKind, StaticInstance};

/// What others have on a claim's GPUs.
#[derive(Debug, Default)]
pub(super) struct Others {
    /// Claims of this boot.
    pub(super) records: Vec<Arc<Record>>,
    /// Claims whose records cannot be read.
    pub(super) doubtful: Vec<Doubtful>,
}

impl Others {
    /// The claims of this boot.
    pub(super) fn readable(&self) -> impl Iterator<Item = &Record> + Clone {
        self.records.iter().map(|record| &**record)
    }
}

/// What a device will be, before anything is touched. `noted` tells the instances that an
/// administrator is known to have made, `kind_of` how a GPU would be shared.
pub(super) fn plan(
    gpus: &BTreeMap<PciAddress, Gpu>,
    others: &Others,
    claim: &ClaimRef,
    wanted: &Allocated,
    noted: impl Fn(&StaticInstance) -> bool,
    kind_of: impl Fn(&Gpu) -> Option<SharingKind>,
) -> Result<PreparedDevice, CoreError> {
    let (gpu, mut target, shared) = target(gpus, wanted)?;
    if let Target::Partition { adopted, .. } = &mut target {
        *adopted |= wanted.admin_access;
    }
    // Administrative access has no portion: it looks at all of the device.
    if shared && !wanted.admin_access {
        target = grant(gpu, others.readable(), wanted, target, kind_of(gpu))?;
    }
    let unheld = !wanted.admin_access && holder_of(&others.records, &target).is_none();
    if unheld && let Some(instance) = adopted_instance(&target) {
        // It is there and nobody's that can be read.
        let doubt = others
            .doubtful
            .iter()
            .find(|doubtful| doubtful.devices.is_empty());
        if let Some(doubtful) = doubt.filter(|_| !noted(&instance)) {
            return Err(doubted(&wanted.device, doubtful));
        }
    }
    // An instance in the way that another claim holds is that claim's to report.
    if unheld && refuse_doubtful(others, gpus, &wanted.device, &target).is_ok() {
        let blocking = gpu.instances.iter().find(|i| match target.device() {
            Target::Whole { .. } | Target::Share { .. } => true,
            Target::Partition {
                profile_id,
                placement,
                ..
            } => {
                i.placement.overlaps(*placement)
                    && (i.profile_id != *profile_id || i.placement != *placement)
            }
        });
        if let Some(instance) = blocking {
            return Err(CoreError::Foreign {
                device: wanted.device.clone(),
                instance: instance.gpu_instance_id,
                pci: gpu.pci,
            });
        }
    }
    Ok(prepared(claim, wanted, target))
}

/// What a device must have been when it was prepared, for a record that is made anew.
/// `was_adopted` is asked of an instance that exists.
pub(super) fn replan(
    gpus: &BTreeMap<PciAddress, Gpu>,
    claim: &ClaimRef,
    wanted: &Allocated,
    was_adopted: impl Fn(&StaticInstance) -> bool,
    others: &Others,
    kind_of: impl Fn(&Gpu) -> Option<SharingKind>,
) -> Result<PreparedDevice, CoreError> {
    let (gpu, mut target, shared) = target(gpus, wanted)?;
    if shared && !wanted.admin_access {
        target = grant(gpu, others.readable(), wanted, target, kind_of(gpu))?;
    } else if let Some(instance) = adopted_instance(&target)
        && let Target::Partition { adopted, .. } = &mut target
    {
        *adopted = was_adopted(&instance);
    }
    Ok(prepared(claim, wanted, target))
}

/// The hardware that an allocated device stands for, and whether a share of it was
/// allocated. A partition counts as adopted where its instance exists: whoever made it, it
/// was not this claim.
fn target<'a>(
    gpus: &'a BTreeMap<PciAddress, Gpu>,
    wanted: &Allocated,
) -> Result<(&'a Gpu, Target, bool), CoreError> {
    let unknown = || CoreError::UnknownDevice {
        device: wanted.device.clone(),
    };
    let gpu = pci_of(&wanted.device)
        .and_then(|pci| gpus.get(&pci))
        .ok_or_else(unknown)?;
    let named = names::resolve(std::slice::from_ref(gpu), &wanted.device).ok_or_else(unknown)?;
    let (alone, shared) = match named {
        Named::Whole(gpu) => (Shared::Whole(gpu), false),
        Named::Partition(gpu, profile, at) => (Shared::Partition(gpu, profile, at), false),
        Named::Share(of) => (of, true),
    };
    let target = match alone {
        Shared::Whole(gpu) => Target::Whole {
            pci: gpu.pci,
            uuid: gpu.uuid.clone(),
            minor: gpu.minor,
        },
        Shared::Partition(gpu, profile, placement) => {
            let mut instances = gpu.instances.iter();
            let there = instances.find(|i| i.profile_id == profile.id && i.placement == placement);
            Target::Partition {
                pci: gpu.pci,
                uuid: gpu.uuid.clone(),
                minor: gpu.minor,
                profile: profile.name.clone(),
                profile_id: profile.id,
                placement,
                adopted: there.is_some(),
                // A share's daemon needs the UUID before the hardware is made ready.
                instance: there.filter(|_| shared).and_then(ids),
            }
        }
    };
    Ok((gpu, target, shared))
}

fn adopted_instance(target: &Target) -> Option<StaticInstance> {
    match target.device() {
        Target::Partition {
            pci,
            profile_id,
            placement,
            adopted: true,
            ..
        } => Some(StaticInstance {
            pci: *pci,
            profile_id: *profile_id,
            placement: *placement,
        }),
        Target::Partition { .. } | Target::Whole { .. } | Target::Share { .. } => None,
    }
}

fn prepared(claim: &ClaimRef, wanted: &Allocated, target: Target) -> PreparedDevice {
    PreparedDevice {
        request: wanted.request.clone(),
        subrequest: wanted.subrequest.clone(),
        pool: wanted.pool.clone(),
        device: wanted.device.clone(),
        share_id: wanted.share_id.clone(),
        admin_access: wanted.admin_access,
        target,
        cdi_device_ids: vec![cdi::device_id(
            &claim.uid,
            &wanted.device,
            wanted.share_id.as_deref(),
        )],
    }
}

/// The last line of defence: the scheduler should never have allocated it twice.
pub(super) fn refuse_overlap(
    others: &Others,
    gpus: &BTreeMap<PciAddress, Gpu>,
    record: &Record,
) -> Result<(), CoreError> {
    for (index, device) in record.devices.iter().enumerate() {
        if device.admin_access {
            continue;
        }
        let held = |holder: &ClaimRef, other: &PreparedDevice| CoreError::Held {
            device: device.device.clone(),
            other_device: other.device.clone(),
            holder: holder.clone(),
        };
        let within = record.devices[..index]
            .iter()
            .find(|other| !other.admin_access && other.target.overlaps(&device.target));
        if let Some(other) = within {
            return Err(held(&record.claim, other));
        }
        if let Some((holder, other)) = holder_of(&others.records, &device.target) {
            return Err(held(holder, other));
        }
        refuse_doubtful(others, gpus, &device.device, &device.target)?;
    }
    Ok(())
}

/// Keeps a device from others that a record may hold which cannot be read.
fn refuse_doubtful(
    others: &Others,
    gpus: &BTreeMap<PciAddress, Gpu>,
    device: &str,
    target: &Target,
) -> Result<(), CoreError> {
    let may_hold = |doubtful: &&Doubtful| {
        let mut names = doubtful.devices.iter();
        names.any(|name| may_overlap(gpus, name, target))
    };
    match others.doubtful.iter().find(may_hold) {
        Some(doubtful) => Err(doubted(device, doubtful)),
        None => Ok(()),
    }
}

fn doubted(device: &str, doubtful: &Doubtful) -> CoreError {
    CoreError::Doubtful {
        device: device.to_owned(),
        uid: doubtful.uid.clone(),
        reason: doubtful.reason.clone(),
    }
}

/// Whether a device that is known by its name alone may use the same hardware.
fn may_overlap(gpus: &BTreeMap<PciAddress, Gpu>, name: &str, target: &Target) -> bool {
    let pci = target.pci();
    if pci_of(name) != Some(pci) {
        return false;
    }
    let named = gpus
        .get(&pci)
        .and_then(|gpu| names::resolve(std::slice::from_ref(gpu), partition_of(name)));
    match (named, target.device()) {
        (Some(Named::Partition(_, _, named)), Target::Partition { placement, .. }) => {
            named.overlaps(*placement)
        }
        _ => true,
    }
}

/// Which other claim holds hardware that overlaps.
pub(super) fn holder_of<'a>(
    others: &'a [Arc<Record>],
    target: &Target,
) -> Option<(&'a ClaimRef, &'a PreparedDevice)> {
    others.iter().find_map(|other| {
        let device = other
            .devices
            .iter()
            .find(|d| !d.admin_access && d.target.overlaps(target));
        device.map(|device| (&other.claim, device))
    })
}

/// The PCI address in a device name: `gpu-0000-65-00-0[-mig-…]`.
#[must_use]
pub(super) fn pci_of(device: &str) -> Option<PciAddress> {
    let mut parts = device.strip_prefix("gpu-")?.split('-');
    let (domain, bus) = (parts.next()?, parts.next()?);
    let (slot, function) = (parts.next()?, parts.next()?);
    format!("{domain}:{bus}:{slot}.{function}").parse().ok()
}

/// Makes the hardware of a device ready; where it is, nothing happens.
/// `gpus` is how they were read behind their locks.
pub(super) fn ready(
    hardware: &dyn Hardware,
    gpus: &BTreeMap<PciAddress, Gpu>,
    device: &mut PreparedDevice,
) -> Result<(), CoreError> {
    let gpu = gpus
        .get(&device.target.pci())
        .ok_or_else(|| CoreError::UnknownDevice {
            device: device.device.clone(),
        })?;
    if device.admin_access {
        watch(&mut device.target, gpu);
        return Ok(());
    }
    make_ready(hardware, gpu, &device.device, &mut device.target)
}

fn make_ready(
    hardware: &dyn Hardware,
    gpu: &Gpu,
    device: &str,
    target: &mut Target,
) -> Result<(), CoreError> {
    let failed = |source| CoreError::Hardware {
        device: device.to_owned(),
        source,
    };
    match target {
        // A partition that is shared is an administrator's, and never made.
        Target::Share { of, .. } => make_ready(hardware, gpu, device, of)?,
        Target::Whole { pci, minor, .. } => {
            *minor = gpu.minor; // It may differ after a reboot.
            if gpu.mig == (MigMode::Enabled { switchable: false }) {
                return Err(CoreError::MigOn {
                    device: device.to_owned(),
                    pci: *pci,
                });
            }
            if gpu.mig != MigMode::Unsupported {
                hardware.disable_mig(*pci).map_err(failed)?;
            }
        }
        Target::Partition {
            pci,
            minor,
            profile_id,
            placement,
            adopted,
            instance,
            ..
        } => {
            *minor = gpu.minor;
            let there = gpu
                .instances
                .iter()
                .find(|i| i.profile_id == *profile_id && i.placement == *placement)
                .cloned();
            let not_ours = |problem| CoreError::NotOurs {
                device: device.to_owned(),
                pci: *pci,
                problem,
            };
            let there = match there {
                // What a claim did not create, it neither destroys nor creates again: nobody
                // would destroy that one.
                None if *adopted => {
                    return Err(not_ours(
                        "is gone; create it again, or delete the pod and its claim",
                    ));
                }
                Some(there) if *adopted && there.compute_instances.is_empty() => {
                    return Err(not_ours(
                        "has no compute instance; create one (nvidia-smi mig -cci)",
                    ));
                }
                Some(there) if there.compute_instances.is_empty() => {
                    // A crash between the two create calls leaves half an instance.
                    hardware
                        .destroy_instance(*pci, there.gpu_instance_id)
                        .map_err(failed)?;
                    hardware
                        .create_instance(*pci, *profile_id, *placement)
                        .map_err(failed)?
                }
                Some(there) => there,
                None => hardware
                    .create_instance(*pci, *profile_id, *placement)
                    .map_err(failed)?,
            };
            *instance = ids(&there);
        }
    }
    Ok(())
}

/// Administrative access changes nothing on the hardware: a partition that exists is
/// opened, one that does not stands for its GPU, whose device node is all there is.
fn watch(target: &mut Target, gpu: &Gpu) {
    if let Target::Partition {
        profile_id,
        placement,
        minor,
        instance,
        ..
    } = target
    {
        let there = gpu
            .instances
            .iter()
            .find(|i| i.profile_id == *profile_id && i.placement == *placement);
        if let Some(found) = there.and_then(ids) {
            *minor = gpu.minor;
            *instance = Some(found);
            return;
        }
    }
    *target = Target::Whole {
        pci: gpu.pci,
        uuid: gpu.uuid.clone(),
        minor: gpu.minor,
    };
}

fn ids(instance: &MigInstance) -> Option<InstanceIds> {
    instance
        .compute_instances
        .first()
        .map(|compute| InstanceIds {
            gpu_instance: instance.gpu_instance_id,
            compute_instance: compute.id,
            uuid: compute.uuid.clone(),
        })
}

/// Gives a device's hardware back: our own MIG instance is destroyed, found by where it
/// sits, because a crash may have come before its id was recorded.
pub(super) fn release(
    hardware: &dyn Hardware,
    device: &PreparedDevice,
) -> Result<(), HardwareError> {
    let Target::Partition {
        pci,
        profile_id,
        placement,
        adopted: false,
        ..
    } = &device.target
    else {
        return Ok(());
    };
    let gpu = match hardware.gpu(*pci) {
        // Its instances went with it, and the pod has to be able to end.
        Err(HardwareError::Absent(_)) => return Ok(()),
        gpu => gpu?,
    };
    let ours = gpu
        .instances
        .iter()
        .find(|i| i.profile_id == *profile_id && i.placement == *placement);
    ours.map_or(Ok(()), |ours| {
        hardware.destroy_instance(*pci, ours.gpu_instance_id)
    })
}
