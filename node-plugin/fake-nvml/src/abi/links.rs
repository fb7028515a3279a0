//! How a GPU is connected: `NVLink`, fabric, PCIe; and the field values, which tell of
//! links and more.

use std::ffi::{c_int, c_uint};

use nvml_wrapper_sys::bindings as sys;
use sys::field_id;

use super::call;
use super::device::pci_info;
use super::handle::Device;
use super::ptr::{InOut, Out, struct_version};
use super::readings::since_ampere;
use crate::call::Call;
use crate::session::Code;
use crate::topology::{Fabric, Gpu, LinkEnd, NvLinks, Pcie};

/// The links of a GPU that has this one.
fn links(gpu: &Gpu, link: c_uint) -> Result<&NvLinks, Code> {
    let links = gpu.model.nvlink.as_ref().ok_or(Code::NOT_SUPPORTED)?;
    (link < links.count)
        .then_some(links)
        .ok_or(Code::INVALID_ARGUMENT)
}

/// `nvmlNvlinkVersion_t`, which counts half generations too.
fn version(links: &NvLinks) -> u32 {
    match links.generation {
        generation @ 0..=2 => generation,
        3 => 4,
        generation => generation + 2,
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkState(
    device: sys::nvmlDevice_t,
    link: c_uint,
    active: Out<sys::nvmlEnableState_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetNvLinkState", |session| {
        links(session.whole(device)?.1, link)?;
        active.set(sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkVersion(
    device: sys::nvmlDevice_t,
    link: c_uint,
    told: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetNvLinkVersion", |session| {
        told.set(version(links(session.whole(device)?.1, link)?))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkRemoteDeviceType(
    device: sys::nvmlDevice_t,
    link: c_uint,
    kind: Out<sys::nvmlIntNvLinkDeviceType_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetNvLinkRemoteDeviceType", |session| {
        let (_, gpu) = session.whole(device)?;
        links(gpu, link)?;
        kind.set(match session.node.link_end(gpu, link) {
            Some(LinkEnd::Gpu(_)) => sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU,
            Some(LinkEnd::Switch) => {
                sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH
            }
            None => sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN,
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
    device: sys::nvmlDevice_t,
    link: c_uint,
    info: Out<sys::nvmlPciInfo_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetNvLinkRemotePciInfo_v2", |session| {
        let (_, gpu) = session.whole(device)?;
        links(gpu, link)?;
        // The addresses of switches are not in the topology.
        let Some(LinkEnd::Gpu(pci)) = session.node.link_end(gpu, link) else {
            return Err(Code::NOT_SUPPORTED);
        };
        // Of the remote device, only its place is told.
        info.set(pci_info(pci, 0, 0))
    })
}

fn fabric(session: &Call, device: sys::nvmlDevice_t) -> Result<&Fabric, Code> {
    let (_, gpu) = session.whole(device)?;
    gpu.fabric.as_ref().ok_or(Code::NOT_SUPPORTED)
}

/// The fabric structs of `nvml.h`, where state and summary are bytes. Here they are words of
/// the same layout, so that what pads them is zero: NVIDIA's Python client reads them so.
#[repr(C)]
#[derive(Clone, Copy)]
struct FabricWords {
    cluster: [u8; 16],
    status: sys::nvmlReturn_t,
    clique: c_uint,
    state: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FabricWordsV2 {
    version: c_uint,
    words: FabricWords,
    health_mask: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FabricWordsV3 {
    v2: FabricWordsV2,
    health_summary: u32,
}

const _: () = {
    assert!(size_of::<FabricWords>() == size_of::<sys::nvmlGpuFabricInfo_t>());
    assert!(size_of::<FabricWordsV2>() == size_of::<sys::nvmlGpuFabricInfo_v2_t>());
    assert!(size_of::<FabricWordsV3>() == size_of::<sys::nvmlGpuFabricInfo_v3_t>());
    assert!(cfg!(target_endian = "little"));
};

fn words(fabric: &Fabric) -> FabricWords {
    FabricWords {
        cluster: fabric.cluster.0,
        status: sys::nvmlReturn_enum_NVML_SUCCESS,
        clique: fabric.clique,
        state: sys::NVML_GPU_FABRIC_STATE_COMPLETED,
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuFabricInfo(
    device: sys::nvmlDevice_t,
    info: Out<sys::nvmlGpuFabricInfo_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetGpuFabricInfo", |session| {
        info.as_version().set(words(fabric(session, device)?))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuFabricInfoV(
    device: sys::nvmlDevice_t,
    info: Out<sys::nvmlGpuFabricInfoV_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetGpuFabricInfoV", |session| {
        let words = words(fabric(session, device)?);
        let version = info.version()?;
        // Nothing is known of the links' health.
        let v2 = FabricWordsV2 {
            version,
            words,
            health_mask: 0,
        };
        if version == struct_version::<sys::nvmlGpuFabricInfo_v2_t>(2) {
            info.as_version().set(v2)
        } else if version == struct_version::<sys::nvmlGpuFabricInfo_v3_t>(3) {
            info.as_version().set(FabricWordsV3 {
                v2,
                health_summary: sys::NVML_GPU_FABRIC_HEALTH_SUMMARY_NOT_SUPPORTED,
            })
        } else {
            Err(Code::VERSION_MISMATCH)
        }
    })
}

fn pcie(
    function: &'static str,
    device: sys::nvmlDevice_t,
    answer: impl FnOnce(Pcie) -> Result<(), Code>,
) -> sys::nvmlReturn_t {
    call(function, |session| {
        let gpu = match session.device(device)? {
            Device::Whole(_, gpu) => gpu,
            Device::Mig(mig) => mig.gpu,
        };
        answer(gpu.model.pcie.ok_or(Code::NOT_SUPPORTED)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMaxPcieLinkGeneration(
    device: sys::nvmlDevice_t,
    generation: Out<c_uint>,
) -> sys::nvmlReturn_t {
    pcie("nvmlDeviceGetMaxPcieLinkGeneration", device, |link| {
        generation.set(link.generation)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMaxPcieLinkWidth(
    device: sys::nvmlDevice_t,
    width: Out<c_uint>,
) -> sys::nvmlReturn_t {
    pcie("nvmlDeviceGetMaxPcieLinkWidth", device, |link| {
        width.set(link.width)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCurrPcieLinkGeneration(
    device: sys::nvmlDevice_t,
    generation: Out<c_uint>,
) -> sys::nvmlReturn_t {
    // An idle card lowers its link.
    pcie("nvmlDeviceGetCurrPcieLinkGeneration", device, |_| {
        generation.set(1)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCurrPcieLinkWidth(
    device: sys::nvmlDevice_t,
    width: Out<c_uint>,
) -> sys::nvmlReturn_t {
    pcie("nvmlDeviceGetCurrPcieLinkWidth", device, |link| {
        width.set(link.width)
    })
}

/// The value of a field, as an unsigned integer.
fn field(session: &Call, gpu: &Gpu, id: u32, scope: u32) -> Result<u32, Code> {
    let health = session.state(gpu)?.health;
    Ok(match id {
        field_id::NVML_FI_DEV_NVLINK_GET_SPEED => links(gpu, scope)?.mbps,
        field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON => links(gpu, 0)?.mbps,
        field_id::NVML_FI_DEV_NVLINK_GET_STATE => {
            links(gpu, scope)?;
            1
        }
        field_id::NVML_FI_DEV_NVLINK_GET_VERSION => version(links(gpu, scope)?),
        field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION => {
            since_ampere(gpu)?;
            health.recovery_action
        }
        _ => return Err(Code::NOT_SUPPORTED),
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetFieldValues(
    device: sys::nvmlDevice_t,
    count: c_int,
    values: InOut<sys::nvmlFieldValue_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetFieldValues", |session| {
        let (_, gpu) = session.whole(device)?;
        let count = usize::try_from(count).map_err(|_| Code::INVALID_ARGUMENT)?;
        values.change(count, |value| {
            // The call succeeds; each field has an answer of its own.
            value.valueType = sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT;
            match field(session, gpu, value.fieldId, value.scopeId) {
                Ok(told) => {
                    value.nvmlReturn = sys::nvmlReturn_enum_NVML_SUCCESS;
                    value.value = sys::nvmlValue_t { uiVal: told };
                }
                Err(code) => value.nvmlReturn = code.0,
            }
        })
    })
}
