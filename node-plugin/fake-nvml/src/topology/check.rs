//! What a topology may not say.
//!
//! In: the parts of a topology file. Out: the first contradiction, with its line and the
//! remedy. Never: a limit that hardware does not have.

use std::collections::BTreeSet;
use std::fmt;

use super::{Gpu, Group, LinkTo, Mig, Model, Profile};

/// What a GPU shares with an earlier one that it must not share.
pub(super) fn conflict(earlier: &[Gpu], gpu: &Gpu) -> Option<(String, &'static str)> {
    let shares = |what: &str, value: &dyn fmt::Display| format!("two GPUs have the {what} {value}");
    for other in earlier {
        if other.pci == gpu.pci {
            return Some((shares("PCI address", &gpu.pci), "give each its own pci"));
        }
        if other.uuid == gpu.uuid {
            return Some((shares("UUID", &gpu.uuid), "give each its own uuid, or none"));
        }
        if other.minor == gpu.minor {
            return Some((
                shares("minor number", &gpu.minor),
                "give each its own minor, or none",
            ));
        }
    }
    let root_is_named = gpu
        .root
        .strip_prefix("pci")
        .and_then(|root| root.split_once(':'));
    if root_is_named.is_none() {
        let problem = format!("{:?} of {} is not a PCIe root", gpu.root, gpu.pci);
        return Some((problem, "write pci<domain>:<bus>, such as pci0000:64"));
    }
    None
}

/// Whether a group's links can lead where the file says.
pub(super) fn links(group: &Group, model: &Model) -> Option<(String, &'static str)> {
    let Some(links) = &model.nvlink else {
        return group.fabric.is_some().then(|| {
            let problem = format!(
                "a fabric of the model {:?}, which has no nvlink",
                group.model
            );
            (problem, "drop fabric, or add nvlink to the model")
        });
    };
    let peers = group.devices.len().saturating_sub(1);
    if links.to == LinkTo::Peers && (peers == 0 || !(links.count as usize).is_multiple_of(peers)) {
        let problem = format!(
            "{} links of the model {:?} cannot lead to {peers} peers alike",
            links.count, group.model
        );
        return Some((
            problem,
            "use a count that is a multiple of the group's other GPUs",
        ));
    }
    if !(1..=5).contains(&links.generation) {
        let problem = format!(
            "NVLink generation {} of the model {:?}",
            links.generation, group.model
        );
        return Some((problem, "use 1 to 5"));
    }
    None
}

/// The line where one is known, the problem and the remedy.
pub(super) type Refusal = (Option<u64>, String, &'static str);

/// Whether a model's MIG tables describe hardware that can be.
pub(super) fn mig(name: &str, model: &Model, mig: &Mig) -> Result<(), Refusal> {
    if !mig.memory_slices.is_power_of_two() {
        let problem = format!("model {name:?} has {} memory slices", mig.memory_slices);
        return Err((
            None,
            problem,
            "use a power of two: instance ids form a tree over them",
        ));
    }
    let mut seen: Vec<&Profile> = Vec::new();
    for spanned in &mig.profiles {
        let line = Some(spanned.referenced.line());
        let profile = &spanned.value;
        let what = format!("profile {} of model {name:?}", profile.name);
        if let Some(other) = seen
            .iter()
            .find(|other| other.id == profile.id || other.nvml_profile == profile.nvml_profile)
        {
            let problem = format!("{what} has the id or nvmlProfile of {}", other.name);
            return Err((line, problem, "give each profile its own"));
        }
        if !profile.size.is_power_of_two() || profile.size > mig.memory_slices {
            let problem = format!("{what} takes {} memory slices", profile.size);
            return Err((line, problem, "use a power of two that the GPU has"));
        }
        for start in &profile.starts {
            if start % profile.size != 0 || start + profile.size > mig.memory_slices {
                let problem = format!(
                    "{what} is placed at {start}:{}, outside the {} memory slices or across a \
                     boundary of its size",
                    profile.size, mig.memory_slices
                );
                return Err((
                    line,
                    problem,
                    "use starts that are multiples of size and fit",
                ));
            }
        }
        let distinct: BTreeSet<_> = profile.starts.iter().collect();
        if profile.max == 0 || distinct.len() != profile.starts.len() {
            let problem = format!("{what} has max 0 or a start twice");
            return Err((
                line,
                problem,
                "list each start once and let at least one fit",
            ));
        }
        if profile.max as usize > profile.starts.len() {
            let problem = format!(
                "{what} says that {} fit, with {} placements",
                profile.max,
                profile.starts.len()
            );
            return Err((line, problem, "lower max or add starts"));
        }
        if profile.slices == 0 || profile.slices > mig.compute_slices {
            let problem = format!("{what} has {} compute slices", profile.slices);
            return Err((line, problem, "use 1 up to the model's computeSlices"));
        }
        if profile.memory_mib > model.memory_mib {
            let problem = format!("{what} has more memory than the GPU");
            return Err((line, problem, "lower memoryMib"));
        }
        if !mig
            .compute_profiles
            .iter()
            .any(|compute| compute.slices == profile.slices)
        {
            let problem = format!("no compute profile spans {what}");
            return Err((
                line,
                problem,
                "add one with as many slices to computeProfiles",
            ));
        }
        seen.push(profile);
    }
    Ok(())
}
