//! The MIG instances that are there, and which of them are offered as they are.
//!
//! In: what is wanted. Out: whether an instance can be given to a claim, and for people
//! what is not offered and what to do about it. Never: a change of an instance; those that
//! no claim created are their maker's.

use gpu::{Gpu, MigInstance, MigMode, MigProfile};

use super::{MigPolicy, StaticInstance, Wanted};

/// The instance on the hardware behind an administrator's.
pub(super) fn on_hardware<'a>(gpu: &'a Gpu, of: &StaticInstance) -> Option<&'a MigInstance> {
    gpu.instances
        .iter()
        .find(|i| i.profile_id == of.profile_id && i.placement == of.placement)
}

/// Whether a claim can be given an instance as it is: one compute instance spans it. Without
/// one nothing can run, and where there are several or a smaller one, what the profile says
/// of its compute is not what a claim would get.
pub(super) fn is_usable(instance: &MigInstance, profile: &MigProfile) -> bool {
    match instance.compute_instances.as_slice() {
        [only] => only.profile_id == profile.compute_instance_profile_id,
        _ => false,
    }
}

/// What of the GPUs is not offered although it is there, each with what to do about it.
#[must_use]
pub fn not_offered(wanted: &Wanted) -> Vec<String> {
    let mut all = Vec::new();
    for gpu in &wanted.inventory.gpus {
        let own = wanted.statics.iter().filter(|s| s.pci == gpu.pci);
        all.extend(own.filter_map(|instance| why_not_offered(gpu, instance)));
        let is_on = matches!(gpu.mig, MigMode::Enabled { .. });
        if wanted.mig == MigPolicy::Static && is_on && gpu.instances.is_empty() {
            all.push(format!(
                "GPU {pci} has MIG mode on and no instances, and this node's policy \
                 (--mig-mode=static) changes neither: nothing of it is offered. Create instances \
                 (nvidia-smi mig -i {pci} -cgi PROFILE -C) or switch MIG mode off \
                 (nvidia-smi -i {pci} -mig 0)",
                pci = gpu.pci
            ));
        }
    }
    all
}

fn why_not_offered(gpu: &Gpu, of: &StaticInstance) -> Option<String> {
    let instance = on_hardware(gpu, of)?;
    let (pci, id) = (gpu.pci, instance.gpu_instance_id);
    let destroy =
        format!("nvidia-smi mig -i {pci} -gi {id} -dci; nvidia-smi mig -i {pci} -dgi -gi {id}");
    let Some(profile) = gpu.profiles.iter().find(|p| p.id == of.profile_id) else {
        return Some(format!(
            "GPU {pci}: GPU instance {id} has profile {}, which NVML does not list; neither it nor \
             what overlaps it is offered. Destroy it ({destroy}) to have its place back",
            of.profile_id
        ));
    };
    if is_usable(instance, profile) {
        return None;
    }
    let (name, start) = (&profile.name, of.placement.start);
    let problem = match instance.compute_instances.len() {
        0 => "has no compute instance".to_owned(),
        1 => "has a compute instance that does not span it".to_owned(),
        n => format!("is divided into {n} compute instances"),
    };
    let mend = if instance.compute_instances.is_empty() {
        format!("Create one (nvidia-smi mig -i {pci} -gi {id} -cci) or destroy it ({destroy})")
    } else {
        format!("Replace them by one that spans it, or destroy it ({destroy})")
    };
    Some(format!(
        "GPU {pci}: GPU instance {id} ({name} at {start}), which no claim created, {problem}; \
         neither it nor what overlaps it is offered. {mend}"
    ))
}

/// The instances of administrators on a GPU as one text, such as `1g.10gb@5,6 2g.20gb@0`:
/// profiles with the memory slices at which they start.
pub(super) fn layout(gpu: &Gpu, statics: &[&StaticInstance]) -> String {
    let profiles = gpu.profiles.iter().filter_map(|profile| {
        let of_profile = statics.iter().filter(|s| s.profile_id == profile.id);
        let starts: Vec<String> = of_profile.map(|s| s.placement.start.to_string()).collect();
        (!starts.is_empty()).then(|| format!("{}@{}", profile.name, starts.join(",")))
    });
    profiles.collect::<Vec<_>>().join(" ")
}
