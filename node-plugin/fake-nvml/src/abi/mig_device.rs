//! MIG mode, and MIG devices as devices.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings as sys;

use super::call;
use super::handle::{self, Device};
use super::ptr::Out;
use crate::mig;
use crate::session::{Code, Session};
use crate::topology::Gpu;

/// The MIG devices of a GPU in the order of their indices.
pub(super) fn devices(session: &Session, gpu: &Gpu) -> Result<Vec<(u32, u32)>, Code> {
    let mut devices = Vec::new();
    for (gi, instance) in session.state(gpu)?.instances {
        devices.extend(instance.compute_instances.keys().map(|ci| (gi, *ci)));
    }
    Ok(devices)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMigMode(
    device: sys::nvmlDevice_t,
    current: Out<c_uint>,
    pending: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetMigMode", |session| {
        let (_, gpu, _) = session.with_mig(device)?;
        let state = session.state(gpu)?;
        current.set(state.mig.into())?;
        pending.set(state.mig_pending.into())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceSetMigMode(
    device: sys::nvmlDevice_t,
    mode: c_uint,
    activation: Out<sys::nvmlReturn_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceSetMigMode", |session| {
        let (_, gpu, tables) = session.with_mig(device)?;
        let on = match mode {
            sys::NVML_DEVICE_MIG_DISABLE => false,
            sys::NVML_DEVICE_MIG_ENABLE => true,
            _ => return Err(Code::INVALID_ARGUMENT),
        };
        // The call succeeds; whether the mode took effect is the activation status.
        let status = session.update(gpu, |state, _| Ok(mig::set_mode(tables, state, on)))?;
        activation.set(status.map_or_else(|code| code.0, |()| sys::nvmlReturn_enum_NVML_SUCCESS))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceIsMigDeviceHandle(
    device: sys::nvmlDevice_t,
    is_mig: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceIsMigDeviceHandle", |session| {
        is_mig.set(matches!(session.device(device)?, Device::Mig(_)).into())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMaxMigDeviceCount(
    device: sys::nvmlDevice_t,
    count: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetMaxMigDeviceCount", |session| {
        let (_, gpu) = session.whole(device)?;
        // 0, not an error, where MIG is absent or off.
        count.set(match &gpu.model.mig {
            Some(mig) if session.state(gpu)?.mig => mig.compute_slices,
            _ => 0,
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    device: sys::nvmlDevice_t,
    index: c_uint,
    mig_device: Out<sys::nvmlDevice_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetMigDeviceHandleByIndex", |session| {
        let (gpu_index, gpu, mig) = session.with_mig(device)?;
        if index >= mig.compute_slices {
            return Err(Code::INVALID_ARGUMENT);
        }
        let devices = devices(session, gpu)?;
        let (gi, ci) = devices.get(index as usize).ok_or(Code::NOT_FOUND)?;
        mig_device.set(handle::mig_device(gpu_index, *gi, *ci))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
    mig_device: sys::nvmlDevice_t,
    device: Out<sys::nvmlDevice_t>,
) -> sys::nvmlReturn_t {
    call(
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
        |session| match session.device(mig_device)? {
            Device::Whole(..) => Err(Code::INVALID_ARGUMENT),
            Device::Mig(mig) => device.set(handle::device(mig.index)),
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuInstanceId(
    device: sys::nvmlDevice_t,
    id: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetGpuInstanceId", |session| {
        match session.device(device)? {
            Device::Whole(..) => Err(Code::INVALID_ARGUMENT),
            Device::Mig(mig) => id.set(mig.gi),
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeInstanceId(
    device: sys::nvmlDevice_t,
    id: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetComputeInstanceId", |session| {
        match session.device(device)? {
            Device::Whole(..) => Err(Code::INVALID_ARGUMENT),
            Device::Mig(mig) => id.set(mig.ci),
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetAttributes_v2(
    device: sys::nvmlDevice_t,
    attributes: Out<sys::nvmlDeviceAttributes_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetAttributes_v2", |session| {
        match session.device(device)? {
            Device::Whole(..) => Err(Code::NOT_SUPPORTED),
            Device::Mig(mig) => {
                let profile = mig.profile;
                attributes.set(sys::nvmlDeviceAttributes_t {
                    multiprocessorCount: profile.sms * mig.compute.size / profile.slices,
                    sharedCopyEngineCount: profile.copy,
                    sharedDecoderCount: profile.dec,
                    sharedEncoderCount: profile.enc,
                    sharedJpegCount: profile.jpeg,
                    sharedOfaCount: profile.ofa,
                    gpuInstanceSliceCount: profile.slices,
                    computeInstanceSliceCount: mig.compute.size,
                    memorySizeMB: profile.memory_mib,
                })
            }
        }
    })
}
