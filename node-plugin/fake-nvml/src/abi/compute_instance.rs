//! Compute instances: what a GPU instance offers, create, destroy.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings as sys;

use super::call;
use super::handle;
use super::ptr::{Fill, In, Out, chars, struct_version};
use crate::mig::{self, Offer};
use crate::session::Code;
use crate::state::Instance;
use crate::topology::{Mig, Profile};

/// Profile values of `nvml.h` end here (`NVML_COMPUTE_INSTANCE_PROFILE_COUNT` of 13.x).
const COMPUTE_INSTANCE_PROFILES: c_uint = 9;

/// The compute profiles of a GPU instance, with the instance's own profile.
fn offers<'a>(mig: &'a Mig, instance: &Instance) -> Result<(&'a Profile, Vec<Offer<'a>>), Code> {
    let profile = mig.profile(instance.profile).ok_or(Code::UNKNOWN)?;
    Ok((profile, mig::offers(mig, profile)))
}

fn offer_by_value<'a>(
    mig: &'a Mig,
    instance: &Instance,
    value: c_uint,
    engine: c_uint,
) -> Result<(&'a Profile, Offer<'a>), Code> {
    if value >= COMPUTE_INSTANCE_PROFILES
        || engine >= sys::NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT
    {
        return Err(Code::INVALID_ARGUMENT);
    }
    let (profile, offers) = offers(mig, instance)?;
    let offer = offers
        .into_iter()
        .find(|offer| offer.profile.nvml_profile == value);
    Ok((profile, offer.ok_or(Code::NOT_SUPPORTED)?))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
    instance: sys::nvmlGpuInstance_t,
    profile: c_uint,
    engine: c_uint,
    info: Out<sys::nvmlComputeInstanceProfileInfo_t>,
) -> sys::nvmlReturn_t {
    call("nvmlGpuInstanceGetComputeInstanceProfileInfo", |session| {
        let found = session.gpu_instance(instance)?;
        let (parent, offer) = offer_by_value(found.mig, &found.instance, profile, engine)?;
        info.set(sys::nvmlComputeInstanceProfileInfo_t {
            id: offer.profile.id,
            sliceCount: offer.profile.slices,
            instanceCount: parent.slices / offer.profile.slices,
            multiprocessorCount: offer.sms,
            sharedCopyEngineCount: parent.copy,
            sharedDecoderCount: parent.dec,
            sharedEncoderCount: parent.enc,
            sharedJpegCount: parent.jpeg,
            sharedOfaCount: parent.ofa,
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpuInstanceGetComputeInstanceProfileInfoV(
    instance: sys::nvmlGpuInstance_t,
    profile: c_uint,
    engine: c_uint,
    info: Out<sys::nvmlComputeInstanceProfileInfo_v2_t>,
) -> sys::nvmlReturn_t {
    call("nvmlGpuInstanceGetComputeInstanceProfileInfoV", |session| {
        let found = session.gpu_instance(instance)?;
        let (parent, offer) = offer_by_value(found.mig, &found.instance, profile, engine)?;
        let (slices, name) = (offer.profile.slices, &parent.name);
        let name = if slices == parent.slices {
            format!("MIG {name}")
        } else {
            format!("MIG {slices}c.{name}")
        };
        let version = info.version()?;
        if version == struct_version::<sys::nvmlComputeInstanceProfileInfo_v2_t>(2) {
            info.set(sys::nvmlComputeInstanceProfileInfo_v2_t {
                version,
                id: offer.profile.id,
                sliceCount: slices,
                instanceCount: parent.slices / slices,
                multiprocessorCount: offer.sms,
                sharedCopyEngineCount: parent.copy,
                sharedDecoderCount: parent.dec,
                sharedEncoderCount: parent.enc,
                sharedJpegCount: parent.jpeg,
                sharedOfaCount: parent.ofa,
                name: chars(&name),
            })
        } else if version == struct_version::<sys::nvmlComputeInstanceProfileInfo_v3_t>(3) {
            info.as_version()
                .set(sys::nvmlComputeInstanceProfileInfo_v3_t {
                    version,
                    id: offer.profile.id,
                    sliceCount: slices,
                    instanceCount: parent.slices / slices,
                    multiprocessorCount: offer.sms,
                    sharedCopyEngineCount: parent.copy,
                    sharedDecoderCount: parent.dec,
                    sharedEncoderCount: parent.enc,
                    sharedJpegCount: parent.jpeg,
                    sharedOfaCount: parent.ofa,
                    name: chars(&name),
                    capabilities: 0,
                })
        } else {
            Err(Code::VERSION_MISMATCH)
        }
    })
}

fn offer_by_id<'a>(mig: &'a Mig, instance: &Instance, id: c_uint) -> Result<Offer<'a>, Code> {
    let (_, offers) = offers(mig, instance)?;
    offers
        .into_iter()
        .find(|offer| offer.profile.id == id)
        .ok_or(Code::NOT_SUPPORTED)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpuInstanceGetComputeInstanceRemainingCapacity(
    instance: sys::nvmlGpuInstance_t,
    profile_id: c_uint,
    count: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call(
        "nvmlGpuInstanceGetComputeInstanceRemainingCapacity",
        |session| {
            let found = session.gpu_instance(instance)?;
            let offer = offer_by_id(found.mig, &found.instance, profile_id)?;
            count.set(mig::free_compute_starts(&found.instance, &offer).len() as c_uint)
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpuInstanceGetComputeInstancePossiblePlacements(
    instance: sys::nvmlGpuInstance_t,
    profile_id: c_uint,
    placements: Fill<sys::nvmlComputeInstancePlacement_t>,
    count: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call(
        "nvmlGpuInstanceGetComputeInstancePossiblePlacements",
        |session| {
            let found = session.gpu_instance(instance)?;
            let offer = offer_by_id(found.mig, &found.instance, profile_id)?;
            let size = offer.profile.slices;
            let all: Vec<_> = offer
                .starts
                .iter()
                .map(|start| sys::nvmlComputeInstancePlacement_t {
                    start: *start,
                    size,
                })
                .collect();
            placements.set(&count, &all)
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpuInstanceCreateComputeInstance(
    instance: sys::nvmlGpuInstance_t,
    profile_id: c_uint,
    compute: Out<sys::nvmlComputeInstance_t>,
) -> sys::nvmlReturn_t {
    let function = "nvmlGpuInstanceCreateComputeInstance";
    create_compute(function, instance, profile_id, || Ok(None), &compute)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpuInstanceCreateComputeInstanceWithPlacement(
    instance: sys::nvmlGpuInstance_t,
    profile_id: c_uint,
    placement: In<sys::nvmlComputeInstancePlacement_t>,
    compute: Out<sys::nvmlComputeInstance_t>,
) -> sys::nvmlReturn_t {
    let placement = || {
        placement
            .get()
            .map(|wanted| Some((wanted.start, wanted.size)))
    };
    let function = "nvmlGpuInstanceCreateComputeInstanceWithPlacement";
    create_compute(function, instance, profile_id, placement, &compute)
}

fn create_compute(
    function: &'static str,
    instance: sys::nvmlGpuInstance_t,
    profile_id: c_uint,
    placement: impl FnOnce() -> Result<Option<(u32, u32)>, Code>,
    compute: &Out<sys::nvmlComputeInstance_t>,
) -> sys::nvmlReturn_t {
    call(function, |session| {
        let found = session.gpu_instance(instance)?;
        let wanted = (profile_id, placement()?);
        compute.set(std::ptr::null_mut())?;
        let ci = session.update(found.gpu, |state, created| {
            let instance = state
                .instances
                .get_mut(&found.gi)
                .ok_or(Code::INVALID_ARGUMENT)?;
            mig::create_compute(found.gpu, found.mig, (found.gi, instance), wanted, created)
        })?;
        compute.set(handle::compute_instance(found.index, found.gi, ci))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlComputeInstanceDestroy(compute: sys::nvmlComputeInstance_t) -> sys::nvmlReturn_t {
    call("nvmlComputeInstanceDestroy", |session| {
        let (parent, ci, _) = session.compute_instance(compute)?;
        session.update(parent.gpu, |state, _| {
            mig::destroy_compute(state, parent.gi, ci)
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpuInstanceGetComputeInstances(
    instance: sys::nvmlGpuInstance_t,
    profile_id: c_uint,
    computes: Fill<sys::nvmlComputeInstance_t>,
    count: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlGpuInstanceGetComputeInstances", |session| {
        let found = session.gpu_instance(instance)?;
        offer_by_id(found.mig, &found.instance, profile_id)?;
        let handles: Vec<_> = found
            .instance
            .compute_instances
            .iter()
            .filter(|(_, compute)| compute.profile == profile_id)
            .map(|(ci, _)| handle::compute_instance(found.index, found.gi, *ci))
            .collect();
        computes.set(&count, &handles)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpuInstanceGetComputeInstanceById(
    instance: sys::nvmlGpuInstance_t,
    id: c_uint,
    compute: Out<sys::nvmlComputeInstance_t>,
) -> sys::nvmlReturn_t {
    call("nvmlGpuInstanceGetComputeInstanceById", |session| {
        let found = session.gpu_instance(instance)?;
        if !found.instance.compute_instances.contains_key(&id) {
            return Err(Code::NOT_FOUND);
        }
        compute.set(handle::compute_instance(found.index, found.gi, id))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlComputeInstanceGetInfo_v2(
    compute: sys::nvmlComputeInstance_t,
    info: Out<sys::nvmlComputeInstanceInfo_t>,
) -> sys::nvmlReturn_t {
    call("nvmlComputeInstanceGetInfo_v2", |session| {
        let (parent, ci, found) = session.compute_instance(compute)?;
        info.set(sys::nvmlComputeInstanceInfo_t {
            // The MIG device, not the GPU: clients read its UUID from here.
            device: handle::mig_device(parent.index, parent.gi, ci),
            gpuInstance: handle::gpu_instance(parent.index, parent.gi),
            id: ci,
            profileId: found.profile,
            placement: sys::nvmlComputeInstancePlacement_t {
                start: found.start,
                size: found.size,
            },
        })
    })
}
