//! MIG: what is offered, and on request what creating and destroying answers.
//!
//! In: a device. Out: answers. Never: an instance or a mode left other than before.

use std::ffi::c_uint;
use std::ptr::null_mut;

use nvml_wrapper_sys::bindings::*;
use serde_json::{Value, json};

use crate::walk::{Walk, ask, text, version, zeroed};

/// A profile: its id, its slices and its placements.
struct Profile {
    id: u32,
    slices: u32,
    placements: Vec<nvmlGpuInstancePlacement_t>,
}

/// Every profile by every version of the call, and its placements.
pub(crate) fn profiles(walk: &mut Walk, at: &str, device: nvmlDevice_t) {
    offered(walk, at, device);
}

fn offered(walk: &mut Walk, at: &str, device: nvmlDevice_t) -> Vec<Profile> {
    let mut found: Vec<Profile> = Vec::new();
    for value in 0..20 {
        let mut v1: nvmlGpuInstanceProfileInfo_t = zeroed();
        let known = ask!(walk, "{at}/{} {value}",
        nvmlDeviceGetGpuInstanceProfileInfo(device, value, &mut v1)
        => json!({
            "id": v1.id,
            "slices": v1.sliceCount,
            "instances": v1.instanceCount,
            "multiprocessors": v1.multiprocessorCount,
            "copyEngines": v1.copyEngineCount,
            "decoders": v1.decoderCount,
            "encoders": v1.encoderCount,
            "jpeg": v1.jpegCount,
            "ofa": v1.ofaCount,
            "memoryMib": v1.memorySizeMB,
        }));
        let mut v3: nvmlGpuInstanceProfileInfo_v3_t = zeroed();
        v3.version = version::<nvmlGpuInstanceProfileInfo_v3_t>(3);
        let place = (&raw mut v3).cast();
        ask!(walk, "{at}/{} {value} 3", nvmlDeviceGetGpuInstanceProfileInfoV(device, value, place)
            => json!({ "id": v3.id, "name": text(&v3.name), "memoryMib": v3.memorySizeMB }));
        let mut v2: nvmlGpuInstanceProfileInfo_v2_t = zeroed();
        v2.version = version::<nvmlGpuInstanceProfileInfo_v2_t>(2);
        ask!(walk, "{at}/{} {value} 2", nvmlDeviceGetGpuInstanceProfileInfoV(device, value, &mut v2)
            => json!({ "id": v2.id, "name": text(&v2.name), "memoryMib": v2.memorySizeMB }));
        if !known || found.iter().any(|profile| profile.id == v1.id) {
            continue;
        }
        let mut places = [nvmlGpuInstancePlacement_t { start: 0, size: 0 }; 64];
        let (id, mut count) = (v1.id, 0);
        ask!(walk, "{at}/{} {id} counted",
            nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, id, null_mut(), &mut count)
            => json!({ "places": count }));
        let told = ask!(walk, "{at}/{} {id}",
        nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, id, places.as_mut_ptr(), &mut count)
        => {
            let list = &mut places[..(count as usize).min(64)];
            list.sort_by_key(|place| place.start);
            json!({ "places": list.iter().map(|p| [p.start, p.size]).collect::<Vec<_>>() })
        });
        let mut left = 0;
        ask!(walk, "{at}/{} {id}",
            nvmlDeviceGetGpuInstanceRemainingCapacity(device, id, &mut left)
            => json!({ "left": left }));
        found.push(Profile {
            id,
            slices: v1.sliceCount,
            placements: if told {
                places[..(count as usize).min(64)].to_vec()
            } else {
                Vec::new()
            },
        });
    }
    found
}

/// Modes set and instances made and destroyed; everything is put back.
pub(crate) fn change(walk: &mut Walk, at: &str, device: nvmlDevice_t) {
    let mut mode = 0;
    if ask!(walk, "{at}/change {} before", nvmlDeviceGetComputeMode(device, &mut mode)
        => json!({ "mode": mode }))
    {
        ask!(walk, "{at}/change {} exclusive", nvmlDeviceSetComputeMode(device, 3) => Value::Null);
        ask!(walk, "{at}/change {} unknown", nvmlDeviceSetComputeMode(device, 99) => Value::Null);
        ask!(walk, "{at}/change {} back", nvmlDeviceSetComputeMode(device, mode) => Value::Null);
    }
    let (mut now, mut later, mut status) = (0, 0, 0);
    if !ask!(walk, "{at}/change {}", nvmlDeviceGetMigMode(device, &mut now, &mut later)
        => json!({ "now": now }))
    {
        return;
    }
    if now == 0 {
        let mut gi = null_mut();
        ask!(walk, "{at}/change {} without MIG", nvmlDeviceCreateGpuInstance(device, 0, &mut gi)
            => Value::Null);
        ask!(walk, "{at}/change {} on", nvmlDeviceSetMigMode(device, 1, &mut status)
            => json!({ "status": status }));
        if status != nvmlReturn_enum_NVML_SUCCESS {
            // A reset would be needed: what waits for it is taken back.
            ask!(walk, "{at}/change {} back", nvmlDeviceSetMigMode(device, 0, &mut status)
                => Value::Null);
            return;
        }
    }
    for profile in offered(walk, &format!("{at}/MIG on"), device) {
        for place in profile.placements.clone() {
            let (start, id) = (place.start, profile.id);
            instance(
                walk,
                &format!("{at}/profile {id} at {start}"),
                device,
                &profile,
                place,
            );
        }
    }
    if now == 0 {
        ask!(walk, "{at}/change {} off", nvmlDeviceSetMigMode(device, 0, &mut status)
            => json!({ "status": status }));
    }
}

fn instance(
    walk: &mut Walk,
    at: &str,
    device: nvmlDevice_t,
    profile: &Profile,
    place: nvmlGpuInstancePlacement_t,
) {
    let (mut gi, mut second) = (null_mut(), null_mut());
    let id = profile.id;
    if !ask!(walk, "{at}/{}",
        nvmlDeviceCreateGpuInstanceWithPlacement(device, id, &place, &mut gi) => Value::Null)
    {
        return;
    }
    ask!(walk, "{at}/{} again",
        nvmlDeviceCreateGpuInstanceWithPlacement(device, id, &place, &mut second) => Value::Null);
    let mut info: nvmlGpuInstanceInfo_t = zeroed();
    ask!(walk, "{at}/{}", nvmlGpuInstanceGetInfo(gi, &mut info) => json!({
        "id": info.id,
        "profile": info.profileId,
        "start": info.placement.start,
        "size": info.placement.size,
    }));
    let mut spanning = None;
    for value in 0..10 {
        let mut offer: nvmlComputeInstanceProfileInfo_t = zeroed();
        let told = ask!(walk, "{at}/{} {value}",
        nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, value, 0, &mut offer)
        => json!({
            "id": offer.id,
            "slices": offer.sliceCount,
            "instances": offer.instanceCount,
            "multiprocessors": offer.multiprocessorCount,
        }));
        if told && offer.sliceCount == profile.slices && spanning.is_none() {
            spanning = Some(offer.id);
        }
    }
    if let Some(compute_profile) = spanning {
        compute(walk, at, device, gi, compute_profile);
    }
    ask!(walk, "{at}/{}", nvmlGpuInstanceDestroy(gi) => Value::Null);
    let mut gone = null_mut();
    ask!(walk, "{at}/{} when gone", nvmlDeviceGetGpuInstanceById(device, info.id, &mut gone)
        => Value::Null);
}

fn compute(walk: &mut Walk, at: &str, device: nvmlDevice_t, gi: nvmlGpuInstance_t, profile: u32) {
    let (mut ci, mut second) = (null_mut(), null_mut());
    if !ask!(walk, "{at}/{}", nvmlGpuInstanceCreateComputeInstance(gi, profile, &mut ci)
        => Value::Null)
    {
        return;
    }
    ask!(walk, "{at}/{} again", nvmlGpuInstanceCreateComputeInstance(gi, profile, &mut second)
        => Value::Null);
    ask!(walk, "{at}/{} too early", nvmlGpuInstanceDestroy(gi) => Value::Null);
    let mut status = 0;
    ask!(walk, "{at}/{} too early", nvmlDeviceSetMigMode(device, 0, &mut status)
        => json!({ "status": status }));
    let mut info: nvmlComputeInstanceInfo_t = zeroed();
    if ask!(walk, "{at}/{}", nvmlComputeInstanceGetInfo_v2(ci, &mut info)
        => json!({ "id": info.id, "profile": info.profileId }))
    {
        let mig = info.device;
        let mut buffer = [0; 96];
        let length = buffer.len() as c_uint;
        ask!(walk, "{at}/{} of the MIG device", nvmlDeviceGetUUID(mig, buffer.as_mut_ptr(), length)
            => json!({ "uuid": text(&buffer), "kind": text(&buffer[..4]) }));
        ask!(walk, "{at}/{} of the MIG device", nvmlDeviceGetName(mig, buffer.as_mut_ptr(), length)
            => json!({ "name": text(&buffer) }));
        let mut memory: nvmlMemory_v2_t = zeroed();
        memory.version = version::<nvmlMemory_v2_t>(2);
        ask!(walk, "{at}/{} of the MIG device", nvmlDeviceGetMemoryInfo_v2(mig, &mut memory)
            => json!({ "total": memory.total }));
        let mut attributes: nvmlDeviceAttributes_t = zeroed();
        ask!(walk, "{at}/{} of the MIG device", nvmlDeviceGetAttributes_v2(mig, &mut attributes)
        => json!({
            "multiprocessors": attributes.multiprocessorCount,
            "memoryMib": attributes.memorySizeMB,
            "slices": attributes.gpuInstanceSliceCount,
        }));
        let mut processes: [nvmlProcessInfo_t; 8] = zeroed();
        let mut room = 8;
        ask!(walk, "{at}/{} of the MIG device",
            nvmlDeviceGetComputeRunningProcesses_v3(mig, &mut room, processes.as_mut_ptr())
            => json!({ "count": room }));
        let mut mode = 0;
        ask!(walk, "{at}/{} of the MIG device", nvmlDeviceGetComputeMode(mig, &mut mode)
            => json!({ "mode": mode }));
        let mut kinds = 0;
        ask!(walk, "{at}/{} of the MIG device", nvmlDeviceGetSupportedEventTypes(mig, &mut kinds)
            => json!({ "events": kinds }));
    }
    let mut mode = 0;
    if ask!(walk, "{at}/{} with MIG on", nvmlDeviceGetComputeMode(device, &mut mode)
        => json!({ "mode": mode }))
    {
        ask!(walk, "{at}/{} exclusive with MIG on", nvmlDeviceSetComputeMode(device, 3)
            => Value::Null);
        ask!(walk, "{at}/{} back with MIG on", nvmlDeviceSetComputeMode(device, mode)
            => Value::Null);
    }
    ask!(walk, "{at}/{}", nvmlComputeInstanceDestroy(ci) => Value::Null);
}
