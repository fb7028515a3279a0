//! GPU instances: profiles, placements, create, destroy.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings as sys;

use super::call;
use super::handle;
use super::ptr::{Fill, In, Out, chars, struct_version};
use crate::mig;
use crate::session::Code;
use crate::topology::{Mig, Profile};

/// Profile values of `nvml.h` end here (`NVML_GPU_INSTANCE_PROFILE_COUNT` of 13.x).
const GPU_INSTANCE_PROFILES: c_uint = 18;

fn lookup(mig: &Mig, profile: c_uint) -> Result<&Profile, Code> {
    if profile >= GPU_INSTANCE_PROFILES {
        return Err(Code::INVALID_ARGUMENT);
    }
    mig.nvml_profile(profile).ok_or(Code::NOT_SUPPORTED)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuInstanceProfileInfo(
    device: sys::nvmlDevice_t,
    profile: c_uint,
    info: Out<sys::nvmlGpuInstanceProfileInfo_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetGpuInstanceProfileInfo", |session| {
        let (_, _, mig) = session.with_mig(device)?;
        let profile = lookup(mig, profile)?;
        info.set(sys::nvmlGpuInstanceProfileInfo_t {
            id: profile.id,
            isP2pSupported: 0,
            sliceCount: profile.slices,
            instanceCount: profile.max,
            multiprocessorCount: profile.sms,
            copyEngineCount: profile.copy,
            decoderCount: profile.dec,
            encoderCount: profile.enc,
            jpegCount: profile.jpeg,
            ofaCount: profile.ofa,
            memorySizeMB: profile.memory_mib,
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuInstanceProfileInfoV(
    device: sys::nvmlDevice_t,
    profile: c_uint,
    info: Out<sys::nvmlGpuInstanceProfileInfo_v2_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetGpuInstanceProfileInfoV", |session| {
        let (_, _, mig) = session.with_mig(device)?;
        write_profile(lookup(mig, profile)?, &info)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuInstanceProfileInfoByIdV(
    device: sys::nvmlDevice_t,
    profile_id: c_uint,
    info: Out<sys::nvmlGpuInstanceProfileInfo_v2_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetGpuInstanceProfileInfoByIdV", |session| {
        let (_, _, mig) = session.with_mig(device)?;
        write_profile(mig.profile(profile_id).ok_or(Code::NOT_SUPPORTED)?, &info)
    })
}

fn write_profile(
    profile: &Profile,
    info: &Out<sys::nvmlGpuInstanceProfileInfo_v2_t>,
) -> Result<(), Code> {
    // The real library prints the name with its prefix.
    let name = format!("MIG {}", profile.name);
    let version = info.version()?;
    if version == struct_version::<sys::nvmlGpuInstanceProfileInfo_v2_t>(2) {
        info.set(sys::nvmlGpuInstanceProfileInfo_v2_t {
            version,
            id: profile.id,
            isP2pSupported: 0,
            sliceCount: profile.slices,
            instanceCount: profile.max,
            multiprocessorCount: profile.sms,
            copyEngineCount: profile.copy,
            decoderCount: profile.dec,
            encoderCount: profile.enc,
            jpegCount: profile.jpeg,
            ofaCount: profile.ofa,
            memorySizeMB: profile.memory_mib,
            name: chars(&name),
        })
    } else if version == struct_version::<sys::nvmlGpuInstanceProfileInfo_v3_t>(3) {
        info.as_version().set(sys::nvmlGpuInstanceProfileInfo_v3_t {
            version,
            id: profile.id,
            sliceCount: profile.slices,
            instanceCount: profile.max,
            multiprocessorCount: profile.sms,
            copyEngineCount: profile.copy,
            decoderCount: profile.dec,
            encoderCount: profile.enc,
            jpegCount: profile.jpeg,
            ofaCount: profile.ofa,
            memorySizeMB: profile.memory_mib,
            name: chars(&name),
            capabilities: 0,
        })
    } else {
        Err(Code::VERSION_MISMATCH)
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(
    device: sys::nvmlDevice_t,
    profile_id: c_uint,
    placements: Fill<sys::nvmlGpuInstancePlacement_t>,
    count: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetGpuInstancePossiblePlacements_v2", |session| {
        // nvml.h wants MIG on for this; drivers answer with it off as well, and dynamic
        // partitioning needs that.
        let (_, _, mig) = session.with_mig(device)?;
        let profile = mig.profile(profile_id).ok_or(Code::NOT_SUPPORTED)?;
        let all: Vec<_> = profile
            .starts
            .iter()
            .map(|start| sys::nvmlGpuInstancePlacement_t {
                start: *start,
                size: profile.size,
            })
            .collect();
        placements.set(&count, &all)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuInstanceRemainingCapacity(
    device: sys::nvmlDevice_t,
    profile_id: c_uint,
    count: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetGpuInstanceRemainingCapacity", |session| {
        let (_, gpu, mig) = session.with_mig(device)?;
        let state = session.state(gpu)?;
        let profile = mig
            .profile(profile_id)
            .filter(|_| state.mig)
            .ok_or(Code::NOT_SUPPORTED)?;
        count.set(mig::remaining(mig, &state, profile))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceCreateGpuInstance(
    device: sys::nvmlDevice_t,
    profile_id: c_uint,
    instance: Out<sys::nvmlGpuInstance_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceCreateGpuInstance", |session| {
        let (index, gpu, mig) = session.with_mig(device)?;
        instance.set(std::ptr::null_mut())?;
        let gi = session.update(gpu, |state, _| mig::create(mig, state, profile_id, None))?;
        instance.set(handle::gpu_instance(index, gi))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceCreateGpuInstanceWithPlacement(
    device: sys::nvmlDevice_t,
    profile_id: c_uint,
    placement: In<sys::nvmlGpuInstancePlacement_t>,
    instance: Out<sys::nvmlGpuInstance_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceCreateGpuInstanceWithPlacement", |session| {
        let (index, gpu, mig) = session.with_mig(device)?;
        let placement = placement.get()?;
        let placement = Some((placement.start, placement.size));
        instance.set(std::ptr::null_mut())?;
        let gi = session.update(gpu, |state, _| {
            mig::create(mig, state, profile_id, placement)
        })?;
        instance.set(handle::gpu_instance(index, gi))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpuInstanceDestroy(instance: sys::nvmlGpuInstance_t) -> sys::nvmlReturn_t {
    call("nvmlGpuInstanceDestroy", |session| {
        let found = session.gpu_instance(instance)?;
        session.update(found.gpu, |state, _| mig::destroy(state, found.gi))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuInstances(
    device: sys::nvmlDevice_t,
    profile_id: c_uint,
    instances: Fill<sys::nvmlGpuInstance_t>,
    count: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetGpuInstances", |session| {
        let (index, gpu, mig) = session.with_mig(device)?;
        let state = session.state(gpu)?;
        if !state.mig {
            return Err(Code::NOT_SUPPORTED);
        }
        mig.profile(profile_id).ok_or(Code::INVALID_ARGUMENT)?;
        let handles: Vec<_> = state
            .instances
            .iter()
            .filter(|(_, instance)| instance.profile == profile_id)
            .map(|(gi, _)| handle::gpu_instance(index, *gi))
            .collect();
        instances.set(&count, &handles)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuInstanceById(
    device: sys::nvmlDevice_t,
    id: c_uint,
    instance: Out<sys::nvmlGpuInstance_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetGpuInstanceById", |session| {
        let (index, gpu, _) = session.with_mig(device)?;
        let state = session.state(gpu)?;
        if !state.mig {
            return Err(Code::NOT_SUPPORTED);
        }
        if !state.instances.contains_key(&id) {
            return Err(Code::NOT_FOUND);
        }
        instance.set(handle::gpu_instance(index, id))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpuInstanceGetInfo(
    instance: sys::nvmlGpuInstance_t,
    info: Out<sys::nvmlGpuInstanceInfo_t>,
) -> sys::nvmlReturn_t {
    call("nvmlGpuInstanceGetInfo", |session| {
        let found = session.gpu_instance(instance)?;
        info.set(sys::nvmlGpuInstanceInfo_t {
            device: handle::device(found.index),
            id: found.gi,
            profileId: found.instance.profile,
            placement: sys::nvmlGpuInstancePlacement_t {
                start: found.instance.start,
                size: found.instance.size,
            },
        })
    })
}
