//! NVML calls that `nvml-wrapper` lacks or gets wrong, and the only `unsafe` of this crate.
//!
//! In: handles that NVML gave out. Out: plain values. Never: a method of `NvmlLib`,
//! which panics on a missing symbol; here each symbol is taken as the `Result` it is.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_uint};

use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;

use crate::Placement;
use crate::error::NvmlCode;

/// A call that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failed {
    /// The function of `nvml.h`.
    pub(crate) call: &'static str,
    /// Its answer.
    pub(crate) code: NvmlCode,
}

pub(crate) type Result<T> = std::result::Result<T, Failed>;

/// The handle of a GPU or of a MIG device. Valid as long as NVML is initialised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceHandle(sys::nvmlDevice_t);

// SAFETY: the handle is an opaque name that only NVML follows, and NVML is thread-safe
// ("It is safe to make simultaneous NVML calls from multiple threads", nvml.h).
unsafe impl Send for DeviceHandle {}
// SAFETY: as above.
unsafe impl Sync for DeviceHandle {}

/// The handle of a GPU instance.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuInstanceHandle(sys::nvmlGpuInstance_t);

/// The handle of a compute instance.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ComputeInstanceHandle(sys::nvmlComputeInstance_t);

/// Calls a symbol of the library, or says that it is missing.
///
/// What makes each use safe: the symbol has the signature that `nvml-wrapper-sys`
/// declares, the handles come from the same library, and every pointer is to a live
/// local of the right type.
macro_rules! nvml {
    ($nvml:expr, $symbol:ident($($argument:expr),* $(,)?)) => {
        match $nvml.lib().$symbol.as_ref() {
            Err(_) => Err(Failed { call: stringify!($symbol), code: NvmlCode::MissingSymbol }),
            Ok(function) => {
                // SAFETY: see the macro's head.
                let value = unsafe { function($($argument),*) };
                match NvmlCode::of(value) {
                    None => Ok(()),
                    Some(code) => Err(Failed { call: stringify!($symbol), code }),
                }
            }
        }
    };
}

/// A struct of integers, arrays and handles with every byte zero.
macro_rules! zeroed {
    ($type:ty) => {{
        // SAFETY: the type is a C struct of integers, arrays and raw pointers, for which
        // all zero is a value.
        let value: $type = unsafe { std::mem::zeroed() };
        value
    }};
}

mod events;
mod readings;

pub(crate) use events::{
    DOUBLE_BIT_ECC, EventSet, RawEvent, SINGLE_BIT_ECC, XID, supported_events,
};
pub(crate) use readings::*;

/// The version word of a struct (`NVML_STRUCT_VERSION`).
const fn struct_version<T>(version: u32) -> u32 {
    size_of::<T>() as u32 | (version << 24)
}

fn text(bytes: &[c_char]) -> String {
    let bytes: Vec<u8> = bytes
        .iter()
        .take_while(|c| **c != 0)
        .map(|c| *c as u8)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The handle behind a device of the safe wrapper.
pub(crate) fn handle(device: &Device<'_>) -> DeviceHandle {
    // SAFETY: only copied; it is used with the library that it came from.
    DeviceHandle(unsafe { device.handle() })
}

/// `nvmlDeviceGetHandleByPciBusId_v2`.
pub(crate) fn device_by_pci(nvml: &Nvml, address: &str) -> Result<DeviceHandle> {
    let mut device = std::ptr::null_mut();
    let address = CString::new(address).map_err(|_| Failed {
        call: "nvmlDeviceGetHandleByPciBusId_v2",
        code: NvmlCode::InvalidArgument,
    })?;
    nvml!(
        nvml,
        nvmlDeviceGetHandleByPciBusId_v2(address.as_ptr(), &mut device)
    )?;
    Ok(DeviceHandle(device))
}

/// `nvmlDeviceGetMigMode`: (current, pending).
pub(crate) fn mig_mode(nvml: &Nvml, device: DeviceHandle) -> Result<(bool, bool)> {
    let (mut current, mut pending) = (0, 0);
    nvml!(
        nvml,
        nvmlDeviceGetMigMode(device.0, &mut current, &mut pending)
    )?;
    Ok((current != 0, pending != 0))
}

/// `nvmlDeviceSetMigMode`: the activation status, where it is not success, is an error too.
pub(crate) fn set_mig_mode(nvml: &Nvml, device: DeviceHandle, on: bool) -> Result<()> {
    let mut activation = 0;
    nvml!(
        nvml,
        nvmlDeviceSetMigMode(device.0, on.into(), &mut activation)
    )?;
    match NvmlCode::of(activation) {
        None => Ok(()),
        Some(code) => Err(Failed {
            call: "nvmlDeviceSetMigMode",
            code,
        }),
    }
}

/// What NVML says about a GPU instance profile.
#[derive(Debug, Clone)]
pub(crate) struct ProfileInfo {
    pub(crate) id: u32,
    /// Empty where the driver does not tell names.
    pub(crate) name: String,
    pub(crate) slices: u32,
    pub(crate) max_instances: u32,
    pub(crate) multiprocessors: u32,
    pub(crate) copy_engines: u32,
    pub(crate) decoders: u32,
    pub(crate) encoders: u32,
    pub(crate) jpeg_engines: u32,
    pub(crate) ofa_engines: u32,
    pub(crate) memory_mib: u64,
}

macro_rules! profile_info {
    ($info:expr, $name:expr) => {
        ProfileInfo {
            id: $info.id,
            name: $name,
            slices: $info.sliceCount,
            max_instances: $info.instanceCount,
            multiprocessors: $info.multiprocessorCount,
            copy_engines: $info.copyEngineCount,
            decoders: $info.decoderCount,
            encoders: $info.encoderCount,
            jpeg_engines: $info.jpegCount,
            ofa_engines: $info.ofaCount,
            memory_mib: $info.memorySizeMB,
        }
    };
}

/// `nvmlDeviceGetGpuInstanceProfileInfoV`, the newest version the driver has, else the
/// call without a name. `value` is the enum of `nvml.h`, not the profile id.
pub(crate) fn profile_info(nvml: &Nvml, device: DeviceHandle, value: u32) -> Result<ProfileInfo> {
    let mut v3 = zeroed!(sys::nvmlGpuInstanceProfileInfo_v3_t);
    v3.version = struct_version::<sys::nvmlGpuInstanceProfileInfo_v3_t>(3);
    // The declared type is version 2; the version word tells the library which it is.
    let place = (&raw mut v3).cast::<sys::nvmlGpuInstanceProfileInfo_v2_t>();
    match nvml!(
        nvml,
        nvmlDeviceGetGpuInstanceProfileInfoV(device.0, value, place)
    ) {
        Ok(()) => return Ok(profile_info!(v3, text(&v3.name))),
        Err(failed) if !is_version_trouble(failed.code) => return Err(failed),
        Err(_) => {}
    }
    let mut v2 = zeroed!(sys::nvmlGpuInstanceProfileInfo_v2_t);
    v2.version = struct_version::<sys::nvmlGpuInstanceProfileInfo_v2_t>(2);
    match nvml!(
        nvml,
        nvmlDeviceGetGpuInstanceProfileInfoV(device.0, value, &mut v2)
    ) {
        Ok(()) => return Ok(profile_info!(v2, text(&v2.name))),
        Err(failed) if !is_version_trouble(failed.code) => return Err(failed),
        Err(_) => {}
    }
    let mut v1 = zeroed!(sys::nvmlGpuInstanceProfileInfo_t);
    nvml!(
        nvml,
        nvmlDeviceGetGpuInstanceProfileInfo(device.0, value, &mut v1)
    )?;
    Ok(profile_info!(v1, String::new()))
}

/// Whether an older struct may be understood. Drivers answer INVALID_ARGUMENT too to a
/// version that they do not know.
fn is_version_trouble(code: NvmlCode) -> bool {
    matches!(
        code,
        NvmlCode::VersionMismatch | NvmlCode::MissingSymbol | NvmlCode::InvalidArgument
    )
}

/// `nvmlDeviceGetGpuInstancePossiblePlacements_v2`, which the wrapper returns empty.
pub(crate) fn placements(
    nvml: &Nvml,
    device: DeviceHandle,
    profile_id: u32,
) -> Result<Vec<Placement>> {
    let mut count: c_uint = 0;
    let none = std::ptr::null_mut();
    nvml!(
        nvml,
        nvmlDeviceGetGpuInstancePossiblePlacements_v2(device.0, profile_id, none, &mut count)
    )?;
    let empty = sys::nvmlGpuInstancePlacement_t { start: 0, size: 0 };
    let mut found = vec![empty; count as usize];
    nvml!(
        nvml,
        nvmlDeviceGetGpuInstancePossiblePlacements_v2(
            device.0,
            profile_id,
            found.as_mut_ptr(),
            &mut count
        )
    )?;
    found.truncate(count as usize);
    Ok(found
        .iter()
        .map(|p| Placement {
            start: p.start,
            size: p.size,
        })
        .collect())
}

/// `nvmlDeviceCreateGpuInstanceWithPlacement`.
pub(crate) fn create_gpu_instance(
    nvml: &Nvml,
    device: DeviceHandle,
    profile_id: u32,
    placement: Placement,
) -> Result<GpuInstanceHandle> {
    let wanted = sys::nvmlGpuInstancePlacement_t {
        start: placement.start,
        size: placement.size,
    };
    let mut instance = std::ptr::null_mut();
    nvml!(
        nvml,
        nvmlDeviceCreateGpuInstanceWithPlacement(device.0, profile_id, &wanted, &mut instance)
    )?;
    Ok(GpuInstanceHandle(instance))
}

/// `nvmlGpuInstanceDestroy`.
pub(crate) fn destroy_gpu_instance(nvml: &Nvml, instance: GpuInstanceHandle) -> Result<()> {
    nvml!(nvml, nvmlGpuInstanceDestroy(instance.0))
}

/// More GPU instances than any GPU holds: the list calls tell no size beforehand.
const MOST_INSTANCES: usize = 64;

/// `nvmlDeviceGetGpuInstances`: the instances of one profile.
pub(crate) fn gpu_instances(
    nvml: &Nvml,
    device: DeviceHandle,
    profile_id: u32,
) -> Result<Vec<GpuInstanceHandle>> {
    let mut found = vec![std::ptr::null_mut(); MOST_INSTANCES];
    let mut count: c_uint = 0;
    nvml!(
        nvml,
        nvmlDeviceGetGpuInstances(device.0, profile_id, found.as_mut_ptr(), &mut count)
    )?;
    Ok(found
        .into_iter()
        .take(count as usize)
        .map(GpuInstanceHandle)
        .collect())
}

/// `nvmlDeviceGetGpuInstanceById`.
pub(crate) fn gpu_instance_by_id(
    nvml: &Nvml,
    device: DeviceHandle,
    id: u32,
) -> Result<GpuInstanceHandle> {
    let mut instance = std::ptr::null_mut();
    nvml!(
        nvml,
        nvmlDeviceGetGpuInstanceById(device.0, id, &mut instance)
    )?;
    Ok(GpuInstanceHandle(instance))
}

/// `nvmlGpuInstanceGetInfo`: id, profile id and placement.
pub(crate) fn gpu_instance_info(
    nvml: &Nvml,
    instance: GpuInstanceHandle,
) -> Result<(u32, u32, Placement)> {
    let mut info = zeroed!(sys::nvmlGpuInstanceInfo_t);
    nvml!(nvml, nvmlGpuInstanceGetInfo(instance.0, &mut info))?;
    let placement = Placement {
        start: info.placement.start,
        size: info.placement.size,
    };
    Ok((info.id, info.profileId, placement))
}

/// `nvmlGpuInstanceGetComputeInstanceProfileInfo`: (profile id, slices). `value` is the
/// enum of `nvml.h`.
pub(crate) fn compute_profile(
    nvml: &Nvml,
    instance: GpuInstanceHandle,
    value: u32,
) -> Result<(u32, u32)> {
    let mut info = zeroed!(sys::nvmlComputeInstanceProfileInfo_t);
    let engines = sys::NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED;
    nvml!(
        nvml,
        nvmlGpuInstanceGetComputeInstanceProfileInfo(instance.0, value, engines, &mut info)
    )?;
    Ok((info.id, info.sliceCount))
}

/// `nvmlGpuInstanceCreateComputeInstance`.
pub(crate) fn create_compute_instance(
    nvml: &Nvml,
    instance: GpuInstanceHandle,
    profile_id: u32,
) -> Result<ComputeInstanceHandle> {
    let mut compute = std::ptr::null_mut();
    nvml!(
        nvml,
        nvmlGpuInstanceCreateComputeInstance(instance.0, profile_id, &mut compute)
    )?;
    Ok(ComputeInstanceHandle(compute))
}

/// `nvmlComputeInstanceDestroy`.
pub(crate) fn destroy_compute_instance(nvml: &Nvml, compute: ComputeInstanceHandle) -> Result<()> {
    nvml!(nvml, nvmlComputeInstanceDestroy(compute.0))
}

/// `nvmlGpuInstanceGetComputeInstances`: the compute instances of one profile.
pub(crate) fn compute_instances(
    nvml: &Nvml,
    instance: GpuInstanceHandle,
    profile_id: u32,
) -> Result<Vec<ComputeInstanceHandle>> {
    let mut found = vec![std::ptr::null_mut(); MOST_INSTANCES];
    let mut count: c_uint = 0;
    nvml!(
        nvml,
        nvmlGpuInstanceGetComputeInstances(instance.0, profile_id, found.as_mut_ptr(), &mut count)
    )?;
    Ok(found
        .into_iter()
        .take(count as usize)
        .map(ComputeInstanceHandle)
        .collect())
}

/// `nvmlComputeInstanceGetInfo_v2`: id, profile id and the MIG device.
pub(crate) fn compute_instance_info(
    nvml: &Nvml,
    compute: ComputeInstanceHandle,
) -> Result<(u32, u32, DeviceHandle)> {
    let mut info = zeroed!(sys::nvmlComputeInstanceInfo_t);
    nvml!(nvml, nvmlComputeInstanceGetInfo_v2(compute.0, &mut info))?;
    Ok((info.id, info.profileId, DeviceHandle(info.device)))
}

/// `nvmlDeviceGetUUID`, also of a MIG device.
pub(crate) fn uuid(nvml: &Nvml, device: DeviceHandle) -> Result<String> {
    let mut buffer = [0 as c_char; sys::NVML_DEVICE_UUID_V2_BUFFER_SIZE as usize];
    let length = buffer.len() as c_uint;
    nvml!(
        nvml,
        nvmlDeviceGetUUID(device.0, buffer.as_mut_ptr(), length)
    )?;
    // Ends inside the buffer also if the library forgot to end it.
    buffer[sys::NVML_DEVICE_UUID_V2_BUFFER_SIZE as usize - 1] = 0;
    // SAFETY: the buffer is live and ends with a zero.
    let uuid = unsafe { CStr::from_ptr(buffer.as_ptr()) };
    Ok(uuid.to_string_lossy().into_owned())
}

/// `nvmlDeviceGetCudaComputeCapability`: (major, minor).
pub(crate) fn compute_capability(nvml: &Nvml, device: DeviceHandle) -> Result<(i32, i32)> {
    let (mut major, mut minor) = (0, 0);
    nvml!(
        nvml,
        nvmlDeviceGetCudaComputeCapability(device.0, &mut major, &mut minor)
    )?;
    Ok((major, minor))
}
