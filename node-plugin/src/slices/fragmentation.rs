//! How broken up a GPU is: the largest partition that still has a place.
//!
//! In: one GPU as it is and what claims hold of it. Out: a profile. Never: a promise; the
//! scheduler may have given away what no claim has been prepared for yet.

use gpu::{Gpu, MigMode, MigProfile, Placement};

use super::{MigPolicy, counters, instances};

/// What a claim holds of a GPU; a share holds what its device is a share of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holding {
    /// All of it.
    Whole,
    /// A partition.
    Partition {
        /// The GPU instance profile id.
        profile_id: u32,
        /// Where it sits.
        placement: Placement,
    },
}

/// The largest partition that a further claim could get on a GPU: by memory slices, then by
/// compute slices. `None` where there is none: the GPU is full, held whole, or has no MIG.
#[must_use]
pub fn largest_placeable<'a>(
    gpu: &'a Gpu,
    held: &[Holding],
    policy: MigPolicy,
) -> Option<&'a MigProfile> {
    let on_demand = match gpu.mig {
        MigMode::Unsupported | MigMode::Disabled { switchable: false } => return None,
        MigMode::Disabled { switchable: true } | MigMode::Enabled { .. } => {
            policy == MigPolicy::Dynamic
        }
    };
    // Every place that is not free: held, or an instance that is there.
    let mut taken: Vec<(u32, Placement)> = Vec::new();
    for holding in held {
        match holding {
            Holding::Whole => return None,
            Holding::Partition {
                profile_id,
                placement,
            } => taken.push((*profile_id, *placement)),
        }
    }
    let is_held = taken.clone();
    let there = gpu.instances.iter().map(|i| (i.profile_id, i.placement));
    taken.extend(there.filter(|place| !is_held.contains(place)));

    let profile_of = |id: u32| gpu.profiles.iter().find(move |profile| profile.id == id);
    let compute_taken: u32 = taken
        .iter()
        .filter_map(|(id, _)| profile_of(*id).map(|profile| profile.compute_slices))
        .sum();
    let all_compute = gpu.profiles.iter().map(|p| p.compute_slices).max()?;
    let compute_left = all_compute.saturating_sub(compute_taken);
    let media_taken = taken
        .iter()
        .any(|(id, _)| profile_of(*id).is_some_and(counters::has_media_extensions));

    let fits = |profile: &MigProfile, at: Placement| {
        on_demand
            && profile.compute_slices <= compute_left
            && !(media_taken && counters::has_media_extensions(profile))
            && !taken.iter().any(|(_, place)| place.overlaps(at))
    };
    // An administrator's instance that nobody has.
    let waits = |profile: &MigProfile, at: Placement| {
        !is_held.contains(&(profile.id, at))
            && gpu.instances.iter().any(|instance| {
                (instance.profile_id, instance.placement) == (profile.id, at)
                    && instances::is_usable(instance, profile)
            })
    };
    let placeable = |profile: &&MigProfile| {
        let mut placements = profile.placements.iter();
        placements.any(|at| fits(profile, *at) || waits(profile, *at))
    };
    gpu.profiles
        .iter()
        .filter(placeable)
        // Of two of one size the plain one, whose name is shorter.
        .max_by_key(|p| {
            let plain = std::cmp::Reverse(p.name.len());
            (p.memory_slices, p.compute_slices, plain)
        })
}
