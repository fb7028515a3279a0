//! The rules of MIG: what may be created where, and what a destroy needs.
//!
//! In: a GPU's tables and state. Out: the changed state, or NVML's code for the
//! refusal. Never: a file or a pointer.

use crate::session::Code;
use crate::state::{ComputeInstance, GpuState, Instance, Process};
use crate::topology::{ComputeProfile, Gpu, Mig, ModeSwitch, Profile, dashed, derive_id};

fn overlap(a: (u32, u32), b: (u32, u32)) -> bool {
    a.0 < b.0 + b.1 && b.0 < a.0 + a.1
}

/// The memory slices at which one more instance of a profile fits now.
pub(crate) fn free_starts(mig: &Mig, state: &GpuState, profile: &Profile) -> Vec<u32> {
    let existing = state
        .instances
        .values()
        .filter(|i| i.profile == profile.id)
        .count();
    let compute_used: u32 = state
        .instances
        .values()
        .filter_map(|instance| mig.profile(instance.profile))
        .map(|used| used.slices)
        .sum();
    if existing >= profile.max as usize || compute_used + profile.slices > mig.compute_slices {
        return Vec::new();
    }
    let free = |start: &u32| {
        let wanted = (*start, profile.size);
        !state
            .instances
            .values()
            .any(|i| overlap(wanted, (i.start, i.size)))
    };
    profile.starts.iter().copied().filter(free).collect()
}

/// How many more instances of a profile fit now.
pub(crate) fn remaining(mig: &Mig, state: &GpuState, profile: &Profile) -> u32 {
    let existing = state
        .instances
        .values()
        .filter(|i| i.profile == profile.id)
        .count() as u32;
    (free_starts(mig, state, profile).len() as u32).min(profile.max - existing.min(profile.max))
}

/// Creates a GPU instance and returns its id. Without a start the library chooses
/// the highest free one; the real choice is undocumented.
pub(crate) fn create(
    mig: &Mig,
    state: &mut GpuState,
    profile: u32,
    placement: Option<(u32, u32)>,
) -> Result<u32, Code> {
    if !state.mig {
        return Err(Code::NOT_SUPPORTED);
    }
    let profile = mig.profile(profile).ok_or(Code::INVALID_ARGUMENT)?;
    if let Some((start, size)) = placement
        && (size != profile.size || !profile.starts.contains(&start))
    {
        return Err(Code::INVALID_ARGUMENT);
    }
    let free = free_starts(mig, state, profile);
    let start = match placement {
        Some((start, _)) if free.contains(&start) => start,
        Some(_) => return Err(Code::INSUFFICIENT_RESOURCES),
        None => free.into_iter().max().ok_or(Code::INSUFFICIENT_RESOURCES)?,
    };
    let id = mig.instance_id(start, profile.size);
    let instance = Instance {
        profile: profile.id,
        start,
        size: profile.size,
        compute_instances: Default::default(),
    };
    state.instances.insert(id, instance);
    Ok(id)
}

/// Destroys a GPU instance, which must have no compute instances.
pub(crate) fn destroy(state: &mut GpuState, id: u32) -> Result<(), Code> {
    let instance = state.instances.get(&id).ok_or(Code::INVALID_ARGUMENT)?;
    if !instance.compute_instances.is_empty() {
        return Err(Code::IN_USE);
    }
    state.instances.remove(&id);
    Ok(())
}

/// A compute profile as one GPU instance offers it.
pub(crate) struct Offer<'a> {
    /// The profile.
    pub(crate) profile: &'a ComputeProfile,
    /// Its multiprocessors in this GPU instance.
    pub(crate) sms: u32,
    /// The compute slices at which it may start.
    pub(crate) starts: Vec<u32>,
}

/// The compute profiles of a GPU instance profile.
pub(crate) fn offers<'a>(mig: &'a Mig, profile: &Profile) -> Vec<Offer<'a>> {
    let fits = |compute: &&ComputeProfile| compute.slices <= profile.slices;
    mig.compute_profiles
        .iter()
        .filter(fits)
        .map(|compute| Offer {
            profile: compute,
            sms: profile.sms * compute.slices / profile.slices,
            starts: compute
                .starts
                .iter()
                .copied()
                .filter(|start| start + compute.slices <= profile.slices)
                .collect(),
        })
        .collect()
}

/// The compute slices at which one more compute instance fits now.
pub(crate) fn free_compute_starts(instance: &Instance, offer: &Offer<'_>) -> Vec<u32> {
    let free = |start: &u32| {
        let wanted = (*start, offer.profile.slices);
        !instance
            .compute_instances
            .values()
            .any(|ci| overlap(wanted, (ci.start, ci.size)))
    };
    offer.starts.iter().copied().filter(free).collect()
}

/// Creates a compute instance and returns its id.
pub(crate) fn create_compute(
    gpu: &Gpu,
    mig: &Mig,
    instance: (u32, &mut Instance),
    (profile, placement): (u32, Option<(u32, u32)>),
    created: &mut u64,
) -> Result<u32, Code> {
    let (gi, instance) = instance;
    let gpu_profile = mig.profile(instance.profile).ok_or(Code::UNKNOWN)?;
    let offers = offers(mig, gpu_profile);
    let offer = offers
        .iter()
        .find(|o| o.profile.id == profile)
        .ok_or(Code::NOT_SUPPORTED)?;
    if let Some((start, size)) = placement
        && (size != offer.profile.slices || !offer.starts.contains(&start))
    {
        return Err(Code::INVALID_ARGUMENT);
    }
    let free = free_compute_starts(instance, offer);
    let start = match placement {
        Some((start, _)) if free.contains(&start) => start,
        Some(_) => return Err(Code::INSUFFICIENT_RESOURCES),
        None => free.into_iter().min().ok_or(Code::INSUFFICIENT_RESOURCES)?,
    };
    let id = (0..)
        .find(|id| !instance.compute_instances.contains_key(id))
        .unwrap_or_default();
    *created += 1;
    // A new UUID each time: no client may count on getting an old one back.
    let uuid = derive_id(&[
        &gpu.uuid,
        &gi.to_string(),
        &id.to_string(),
        &created.to_string(),
    ]);
    let compute = ComputeInstance {
        profile,
        start,
        size: offer.profile.slices,
        uuid: format!("MIG-{}", dashed(uuid)),
    };
    instance.compute_instances.insert(id, compute);
    Ok(id)
}

/// Destroys a compute instance, in which nobody must compute.
pub(crate) fn destroy_compute(state: &mut GpuState, gi: u32, ci: u32) -> Result<(), Code> {
    let computes = |process: &Process| process.gi == Some(gi) && process.ci == Some(ci);
    if state.processes.iter().any(computes) {
        return Err(Code::IN_USE);
    }
    let instance = state.instances.get_mut(&gi).ok_or(Code::INVALID_ARGUMENT)?;
    instance
        .compute_instances
        .remove(&ci)
        .map(|_| ())
        .ok_or(Code::INVALID_ARGUMENT)
}

/// Sets the MIG mode; the answer is NVML's activation status.
pub(crate) fn set_mode(mig: &Mig, state: &mut GpuState, on: bool) -> Result<(), Code> {
    let changes = state.mig != on;
    if !on && !state.instances.is_empty() || changes && !state.processes.is_empty() {
        return Err(Code::IN_USE);
    }
    state.mig_pending = on;
    if state.mig == on {
        return Ok(());
    }
    match mig.mode_switch {
        ModeSwitch::Immediate => {
            state.mig = on;
            Ok(())
        }
        ModeSwitch::Reset => Err(Code::RESET_REQUIRED),
    }
}
