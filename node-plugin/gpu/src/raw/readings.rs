//! Readings of a GPU: counters, clocks, links, modes, processes.
//!
//! In: a device's handle. Out: plain values as NVML gives them. Never: a call that
//! changes a GPU, but for its compute mode.

use std::ffi::{c_int, c_uint};

use nvml_wrapper::Nvml;
use nvml_wrapper_sys::bindings as sys;
use sys::field_id;

use super::{DeviceHandle, Failed, Result, struct_version, text};
use crate::error::NvmlCode;
use crate::{
    ComputeMode, EventInstance, NvLinkRemote, PciAddress, Process, RemappedRows, Slowdown,
};

/// `nvmlDeviceGetTotalEccErrors`: uncorrected, volatile.
pub(crate) fn ecc_uncorrected_volatile(nvml: &Nvml, device: DeviceHandle) -> Result<u64> {
    let mut count = 0;
    nvml!(
        nvml,
        nvmlDeviceGetTotalEccErrors(
            device.0,
            sys::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            sys::nvmlEccCounterType_enum_NVML_VOLATILE_ECC,
            &mut count
        )
    )?;
    Ok(count)
}

/// `nvmlDeviceGetRemappedRows`.
pub(crate) fn remapped_rows(nvml: &Nvml, device: DeviceHandle) -> Result<RemappedRows> {
    let (mut correctable, mut uncorrectable, mut pending, mut failed) = (0, 0, 0, 0);
    nvml!(
        nvml,
        nvmlDeviceGetRemappedRows(
            device.0,
            &mut correctable,
            &mut uncorrectable,
            &mut pending,
            &mut failed
        )
    )?;
    Ok(RemappedRows {
        correctable,
        uncorrectable,
        pending: pending != 0,
        failed: failed != 0,
    })
}

/// `nvmlDeviceGetCurrentClocksEventReasons`, before driver 535 `…ThrottleReasons`.
pub(crate) fn slowdown(nvml: &Nvml, device: DeviceHandle) -> Result<Slowdown> {
    let mut reasons = 0;
    let new = nvml!(
        nvml,
        nvmlDeviceGetCurrentClocksEventReasons(device.0, &mut reasons)
    );
    match new {
        Err(Failed {
            code: NvmlCode::MissingSymbol,
            ..
        }) => nvml!(
            nvml,
            nvmlDeviceGetCurrentClocksThrottleReasons(device.0, &mut reasons)
        )?,
        other => other?,
    }
    let has = |reason: u32| reasons & u64::from(reason) != 0;
    Ok(Slowdown {
        hw_thermal: has(sys::nvmlClocksThrottleReasonHwThermalSlowdown),
        sw_thermal: has(sys::nvmlClocksEventReasonSwThermalSlowdown),
        hw_power_brake: has(sys::nvmlClocksThrottleReasonHwPowerBrakeSlowdown),
    })
}

/// `nvmlDeviceGetTemperatureV`, before driver 570 `nvmlDeviceGetTemperature`; in °C.
pub(crate) fn temperature(nvml: &Nvml, device: DeviceHandle) -> Result<u32> {
    let sensor = sys::nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU;
    let mut asked = zeroed!(sys::nvmlTemperature_t);
    asked.version = struct_version::<sys::nvmlTemperature_t>(1);
    asked.sensorType = sensor;
    match nvml!(nvml, nvmlDeviceGetTemperatureV(device.0, &mut asked)) {
        Ok(()) => return Ok(asked.temperature.unsigned_abs()),
        Err(failed) if !super::is_version_trouble(failed.code) => return Err(failed),
        Err(_) => {}
    }
    let mut temperature = 0;
    nvml!(
        nvml,
        nvmlDeviceGetTemperature(device.0, sensor, &mut temperature)
    )?;
    Ok(temperature)
}

/// Field values, each with its own answer (`nvmlDeviceGetFieldValues`): (field, scope).
fn fields(nvml: &Nvml, device: DeviceHandle, wanted: &[(u32, u32)]) -> Result<Vec<Result<u64>>> {
    let call = "nvmlDeviceGetFieldValues";
    let mut values: Vec<sys::nvmlFieldValue_t> = wanted
        .iter()
        .map(|(field, scope)| {
            let mut value = zeroed!(sys::nvmlFieldValue_t);
            (value.fieldId, value.scopeId) = (*field, *scope);
            value
        })
        .collect();
    let count = values.len() as c_int;
    nvml!(
        nvml,
        nvmlDeviceGetFieldValues(device.0, count, values.as_mut_ptr())
    )?;
    let one = |value: &sys::nvmlFieldValue_t| match NvmlCode::of(value.nvmlReturn) {
        // A field that the driver does not know.
        Some(NvmlCode::InvalidArgument) => Err(Failed {
            call,
            code: NvmlCode::NotSupported,
        }),
        Some(code) => Err(Failed { call, code }),
        None => number(value).ok_or(Failed {
            call,
            code: NvmlCode::NotSupported,
        }),
    };
    Ok(values.iter().map(one).collect())
}

/// The value of a field as a number; a negative or a fractional one is none.
fn number(field: &sys::nvmlFieldValue_t) -> Option<u64> {
    // SAFETY: every field of the union is a number for which any bytes do, the union was
    // zero before NVML wrote it, and the one that is read is the one that NVML names.
    unsafe {
        match field.valueType {
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT => {
                Some(u64::from(field.value.uiVal))
            }
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG => Some(field.value.ulVal),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG => Some(field.value.ullVal),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_LONG_LONG => {
                field.value.sllVal.try_into().ok()
            }
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_INT => field.value.siVal.try_into().ok(),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_SHORT => {
                Some(u64::from(field.value.usVal))
            }
            _ => None,
        }
    }
}

/// The field `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`, as `nvmlDeviceGpuRecoveryAction_t`.
pub(crate) fn recovery_action(nvml: &Nvml, device: DeviceHandle) -> Result<u32> {
    let field = field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;
    let unsupported = Failed {
        call: "nvmlDeviceGetFieldValues",
        code: NvmlCode::NotSupported,
    };
    let action = fields(nvml, device, &[(field, 0)])?
        .pop()
        .ok_or(unsupported)??;
    Ok(u32::try_from(action).unwrap_or(u32::MAX))
}

/// `nvmlDeviceGetNvLinkState`.
pub(crate) fn nvlink_is_active(nvml: &Nvml, device: DeviceHandle, link: u32) -> Result<bool> {
    let mut active = 0;
    nvml!(nvml, nvmlDeviceGetNvLinkState(device.0, link, &mut active))?;
    Ok(active == sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED)
}

/// The speed of each link in MB/s, one direction (field `NVML_FI_DEV_NVLINK_GET_SPEED`, else
/// the one speed of all, `…SPEED_MBPS_COMMON`).
pub(crate) fn nvlink_speeds_mbps(
    nvml: &Nvml,
    device: DeviceHandle,
    links: &[u32],
) -> Result<Vec<Option<u64>>> {
    let common = (field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, 0);
    let each = |link: &u32| (field_id::NVML_FI_DEV_NVLINK_GET_SPEED, *link);
    let wanted: Vec<_> = links.iter().map(each).chain([common]).collect();
    let mut speeds = fields(nvml, device, &wanted)?;
    let common = speeds.pop().and_then(std::result::Result::ok);
    Ok(speeds
        .into_iter()
        .map(|speed| speed.ok().or(common))
        .collect())
}

/// `nvmlDeviceGetNvLinkVersion`, as `nvmlNvlinkVersion_t`.
pub(crate) fn nvlink_version(nvml: &Nvml, device: DeviceHandle, link: u32) -> Result<u32> {
    let mut version = 0;
    nvml!(
        nvml,
        nvmlDeviceGetNvLinkVersion(device.0, link, &mut version)
    )?;
    Ok(version)
}

/// `nvmlDeviceGetNvLinkRemoteDeviceType`, and for a GPU `nvmlDeviceGetNvLinkRemotePciInfo_v2`.
pub(crate) fn nvlink_remote(nvml: &Nvml, device: DeviceHandle, link: u32) -> Result<NvLinkRemote> {
    let mut kind = 0;
    nvml!(
        nvml,
        nvmlDeviceGetNvLinkRemoteDeviceType(device.0, link, &mut kind)
    )?;
    match kind {
        sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH => {
            Ok(NvLinkRemote::Switch)
        }
        sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU => {
            let mut info = zeroed!(sys::nvmlPciInfo_t);
            nvml!(
                nvml,
                nvmlDeviceGetNvLinkRemotePciInfo_v2(device.0, link, &mut info)
            )?;
            Ok(address(&info).map_or(NvLinkRemote::Other, NvLinkRemote::Gpu))
        }
        _ => Ok(NvLinkRemote::Other),
    }
}

/// The address in NVML's struct; hypervisors give all ones to what they hide.
fn address(info: &sys::nvmlPciInfo_t) -> Option<PciAddress> {
    let pci: PciAddress = text(&info.busId).parse().ok()?;
    (pci.domain != u32::MAX).then_some(pci)
}

/// `nvmlDeviceGetPciInfo_v3`.
pub(crate) fn pci_address(nvml: &Nvml, device: DeviceHandle) -> Result<Option<PciAddress>> {
    let mut info = zeroed!(sys::nvmlPciInfo_t);
    nvml!(nvml, nvmlDeviceGetPciInfo_v3(device.0, &mut info))?;
    Ok(address(&info))
}

/// `nvmlDeviceGetGpuFabricInfoV`, before driver 550 `nvmlDeviceGetGpuFabricInfo`: cluster UUID
/// and clique, once the fabric manager has finished.
pub(crate) fn fabric_clique(nvml: &Nvml, device: DeviceHandle) -> Result<Option<(String, u32)>> {
    // Version 2 is the first that a driver with the call understands; it is a beginning of
    // version 3, which is the declared type.
    let mut v2 = zeroed!(sys::nvmlGpuFabricInfo_v2_t);
    v2.version = struct_version::<sys::nvmlGpuFabricInfo_v2_t>(2);
    let place = (&raw mut v2).cast::<sys::nvmlGpuFabricInfoV_t>();
    match nvml!(nvml, nvmlDeviceGetGpuFabricInfoV(device.0, place)) {
        Ok(()) => return Ok(joined(v2.state, v2.status, v2.clusterUuid, v2.cliqueId)),
        Err(failed) if !super::is_version_trouble(failed.code) => return Err(failed),
        Err(_) => {}
    }
    let mut v1 = zeroed!(sys::nvmlGpuFabricInfo_t);
    nvml!(nvml, nvmlDeviceGetGpuFabricInfo(device.0, &mut v1))?;
    Ok(joined(v1.state, v1.status, v1.clusterUuid, v1.cliqueId))
}

fn joined(
    state: sys::nvmlGpuFabricState_t,
    status: sys::nvmlReturn_t,
    cluster: [u8; 16],
    clique: u32,
) -> Option<(String, u32)> {
    let completed = u32::from(state) == sys::NVML_GPU_FABRIC_STATE_COMPLETED;
    if !completed || status != sys::nvmlReturn_enum_NVML_SUCCESS {
        return None;
    }
    let hex: String = cluster.iter().map(|byte| format!("{byte:02x}")).collect();
    let uuid = format!(
        "{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    );
    Some((uuid, clique))
}

/// `nvmlDeviceGetMemoryBusWidth`, in bits.
pub(crate) fn memory_bus_bits(nvml: &Nvml, device: DeviceHandle) -> Result<u32> {
    let mut bits = 0;
    nvml!(nvml, nvmlDeviceGetMemoryBusWidth(device.0, &mut bits))?;
    Ok(bits)
}

/// `nvmlDeviceGetMaxClockInfo` of the memory, in MHz.
pub(crate) fn memory_clock_mhz(nvml: &Nvml, device: DeviceHandle) -> Result<u32> {
    let mut clock = 0;
    let memory = sys::nvmlClockType_enum_NVML_CLOCK_MEM;
    nvml!(
        nvml,
        nvmlDeviceGetMaxClockInfo(device.0, memory, &mut clock)
    )?;
    Ok(clock)
}

/// `nvmlDeviceGetMaxPcieLinkGeneration` and `…Width`: what card and slot can do together.
pub(crate) fn pcie_link(nvml: &Nvml, device: DeviceHandle) -> Result<(u32, u32)> {
    let (mut generation, mut width) = (0, 0);
    nvml!(
        nvml,
        nvmlDeviceGetMaxPcieLinkGeneration(device.0, &mut generation)
    )?;
    nvml!(nvml, nvmlDeviceGetMaxPcieLinkWidth(device.0, &mut width))?;
    Ok((generation, width))
}

/// `nvmlDeviceGetComputeMode`. The thread mode, which drivers treat as the process mode, is
/// read as that.
pub(crate) fn compute_mode(nvml: &Nvml, device: DeviceHandle) -> Result<ComputeMode> {
    let mut mode = 0;
    nvml!(nvml, nvmlDeviceGetComputeMode(device.0, &mut mode))?;
    Ok(match mode {
        sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_PROHIBITED => ComputeMode::Prohibited,
        sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_THREAD
        | sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_PROCESS => {
            ComputeMode::ExclusiveProcess
        }
        _ => ComputeMode::Default,
    })
}

/// `nvmlDeviceSetComputeMode`.
pub(crate) fn set_compute_mode(nvml: &Nvml, device: DeviceHandle, mode: ComputeMode) -> Result<()> {
    let mode = match mode {
        ComputeMode::Default => sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_DEFAULT,
        ComputeMode::ExclusiveProcess => {
            sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
        }
        ComputeMode::Prohibited => sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_PROHIBITED,
    };
    nvml!(nvml, nvmlDeviceSetComputeMode(device.0, mode))
}

/// `nvmlDeviceGetComputeRunningProcesses_v3`.
pub(crate) fn processes(nvml: &Nvml, device: DeviceHandle) -> Result<Vec<Process>> {
    let empty = zeroed!(sys::nvmlProcessInfo_t);
    // Processes come and go between the question for their number and the list.
    let mut room: usize = 64;
    loop {
        let mut found = vec![empty; room];
        let mut count = room as c_uint;
        let answer = nvml!(
            nvml,
            nvmlDeviceGetComputeRunningProcesses_v3(device.0, &mut count, found.as_mut_ptr())
        );
        match answer {
            Err(Failed {
                code: NvmlCode::Other(sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE),
                ..
            }) if room < 1 << 16 => room = room.max(count as usize) * 2,
            Err(failed) => return Err(failed),
            Ok(()) => {
                found.truncate(count as usize);
                return Ok(found.iter().map(process).collect());
            }
        }
    }
}

fn process(info: &sys::nvmlProcessInfo_t) -> Process {
    Process {
        pid: info.pid,
        // All ones: NVML_VALUE_NOT_AVAILABLE.
        memory_bytes: (info.usedGpuMemory != u64::MAX).then_some(info.usedGpuMemory),
        instance: EventInstance::of(info.gpuInstanceId, info.computeInstanceId),
    }
}
