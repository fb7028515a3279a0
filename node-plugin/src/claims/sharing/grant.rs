//! From an allocation of a shared device to a portion of it.
//!
//! In: what the scheduler granted, the GPU as it is, the other claims. Out: the portion as
//! it is recorded, or why the claim cannot have it. Never: the disk or the hardware.

use std::collections::BTreeMap;

use gpu::{Gpu, PciAddress};

use super::{SharedDevice, limits};
use crate::claims::allocation::Allocated;
use crate::claims::core::CoreError;
use crate::claims::record::{Record, Target};
use crate::slices::SharingKind;

/// The portion of a device that was granted. `kind` is how a device that nobody shares yet
/// would be shared.
pub(in crate::claims) fn grant<'a>(
    gpu: &Gpu,
    others: impl IntoIterator<Item = &'a Record>,
    wanted: &Allocated,
    of: Target,
    kind: Option<SharingKind>,
) -> Result<Target, CoreError> {
    let device = || wanted.device.clone();
    if of.device_uuid().is_none() {
        return Err(CoreError::NotOurs {
            device: device(),
            pci: gpu.pci,
            problem: "does not exist; create it (nvidia-smi mig -cgi -C), or delete the pod and its claim",
        });
    }
    // What is in use decides: the clients of one device are kept apart in one way.
    let kind = limits::kind_in_use(others, SharedDevice::shared_out(&of))
        .or(kind)
        .ok_or_else(|| CoreError::NotShared { device: device() })?;
    let whole =
        limits::whole(gpu, &of).ok_or_else(|| CoreError::UnknownDevice { device: device() })?;
    let portion = limits::granted(wanted, whole);
    Ok(Target::Share {
        of: Box::new(of),
        memory_bytes: portion.memory_bytes,
        cores_percent: portion.cores_percent,
        kind,
    })
}

/// A container has one pipe directory, so it reaches one MPS daemon. All devices of a
/// request go to the same containers.
pub(in crate::claims) fn refuse_several_daemons(record: &Record) -> Result<(), CoreError> {
    let mut daemons: BTreeMap<&str, SharedDevice> = BTreeMap::new();
    for prepared in record.devices.iter().filter(|d| !d.admin_access) {
        let Target::Share {
            of,
            kind: SharingKind::Mps,
            ..
        } = &prepared.target
        else {
            continue;
        };
        let device = SharedDevice::shared_out(of);
        if *daemons.entry(&prepared.request).or_insert(device) != device {
            return Err(CoreError::SeveralDaemons {
                request: prepared.request.clone(),
                device: prepared.device.clone(),
            });
        }
    }
    Ok(())
}

/// The last line of defence: the scheduler should never have granted more than there is.
pub(in crate::claims) fn refuse_over_commit<'a>(
    gpus: &BTreeMap<PciAddress, Gpu>,
    others: impl IntoIterator<Item = &'a Record> + Clone,
    record: &Record,
) -> Result<(), CoreError> {
    let whole_of = |of: &Target| limits::whole(gpus.get(&of.pci())?, of);
    limits::refuse_over_commit(others, record, whole_of)
        .map_err(|error| CoreError::OverCommitted(Box::new(error)))
}
