//! Readings: errors, rows, clocks, heat, power, memory, processes.

use std::ffi::{c_int, c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings as sys;

use super::call;
use super::handle::Device;
use super::ptr::{Fill, Out, struct_version};
use crate::call::Call;
use crate::session::Code;
use crate::topology::Gpu;

fn with_ecc(gpu: &Gpu) -> Result<(), Code> {
    gpu.model.ecc.then_some(()).ok_or(Code::NOT_SUPPORTED)
}

/// `NVML_DEVICE_ARCH_AMPERE`: the first that remaps rows.
const AMPERE: u32 = 7;

/// What a newer card has and an older one has not.
pub(super) fn since_ampere(gpu: &Gpu) -> Result<(), Code> {
    let new = gpu.model.architecture >= AMPERE;
    new.then_some(()).ok_or(Code::NOT_SUPPORTED)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetEccMode(
    device: sys::nvmlDevice_t,
    current: Out<sys::nvmlEnableState_t>,
    pending: Out<sys::nvmlEnableState_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetEccMode", |session| {
        let (_, gpu) = session.whole(device)?;
        with_ecc(gpu)?;
        current.set(sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED)?;
        pending.set(sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED)
    })
}

/// Every card is idle at this temperature, in degrees Celsius.
const IDLE: u32 = 34;

fn temperature_of(session: &Call, device: sys::nvmlDevice_t) -> Result<u32, Code> {
    let (_, gpu) = session.whole(device)?;
    Ok(session.state(gpu)?.health.temperature.unwrap_or(IDLE))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTemperature(
    device: sys::nvmlDevice_t,
    sensor: sys::nvmlTemperatureSensors_t,
    temperature: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetTemperature", |session| {
        let now = temperature_of(session, device)?;
        if sensor >= sys::nvmlTemperatureSensors_enum_NVML_TEMPERATURE_COUNT {
            return Err(Code::INVALID_ARGUMENT);
        }
        temperature.set(now)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTemperatureV(
    device: sys::nvmlDevice_t,
    temperature: Out<sys::nvmlTemperature_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetTemperatureV", |session| {
        let now = temperature_of(session, device)?;
        if temperature.version()? != struct_version::<sys::nvmlTemperature_t>(1) {
            return Err(Code::VERSION_MISMATCH);
        }
        let asked = temperature.get()?;
        if asked.sensorType >= sys::nvmlTemperatureSensors_enum_NVML_TEMPERATURE_COUNT {
            return Err(Code::INVALID_ARGUMENT);
        }
        temperature.set(sys::nvmlTemperature_t {
            temperature: now as c_int,
            ..asked
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPowerUsage(
    device: sys::nvmlDevice_t,
    milliwatts: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetPowerUsage", |session| {
        milliwatts.set(session.whole(device)?.1.model.idle_watts * 1000)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPowerManagementLimit(
    device: sys::nvmlDevice_t,
    milliwatts: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetPowerManagementLimit", |session| {
        milliwatts.set(session.whole(device)?.1.model.limit_watts * 1000)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetEnforcedPowerLimit(
    device: sys::nvmlDevice_t,
    milliwatts: Out<c_uint>,
) -> sys::nvmlReturn_t {
    nvmlDeviceGetPowerManagementLimit(device, milliwatts)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUtilizationRates(
    device: sys::nvmlDevice_t,
    rates: Out<sys::nvmlUtilization_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetUtilizationRates", |session| {
        let (_, gpu) = session.whole(device)?;
        // With MIG on, the whole GPU has no single figure.
        if session.state(gpu)?.mig {
            return Err(Code::NOT_SUPPORTED);
        }
        rates.set(sys::nvmlUtilization_t { gpu: 0, memory: 0 })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTotalEccErrors(
    device: sys::nvmlDevice_t,
    error: sys::nvmlMemoryErrorType_t,
    counter: sys::nvmlEccCounterType_t,
    count: Out<c_ulonglong>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetTotalEccErrors", |session| {
        let (_, gpu) = session.whole(device)?;
        with_ecc(gpu)?;
        if counter > sys::nvmlEccCounterType_enum_NVML_AGGREGATE_ECC {
            return Err(Code::INVALID_ARGUMENT);
        }
        // The counters of the card's whole life begin with the fake.
        let health = session.state(gpu)?.health;
        count.set(match error {
            sys::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_CORRECTED => health.ecc_corrected,
            sys::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_UNCORRECTED => {
                health.ecc_uncorrected
            }
            _ => return Err(Code::INVALID_ARGUMENT),
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetRemappedRows(
    device: sys::nvmlDevice_t,
    correctable: Out<c_uint>,
    uncorrectable: Out<c_uint>,
    pending: Out<c_uint>,
    failed: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetRemappedRows", |session| {
        let (_, gpu) = session.whole(device)?;
        since_ampere(gpu)?;
        let rows = session.state(gpu)?.health.rows;
        correctable.set(rows.correctable)?;
        uncorrectable.set(rows.uncorrectable)?;
        pending.set(rows.pending.into())?;
        failed.set(rows.failed.into())
    })
}

fn reasons(
    function: &'static str,
    device: sys::nvmlDevice_t,
    reasons: &Out<c_ulonglong>,
) -> sys::nvmlReturn_t {
    call(function, |session| {
        let (_, gpu) = session.whole(device)?;
        let told = session.state(gpu)?.health.clocks_event_reasons;
        // An idle card says so.
        reasons.set(told | u64::from(sys::nvmlClocksEventReasonGpuIdle))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCurrentClocksEventReasons(
    device: sys::nvmlDevice_t,
    told: Out<c_ulonglong>,
) -> sys::nvmlReturn_t {
    reasons("nvmlDeviceGetCurrentClocksEventReasons", device, &told)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCurrentClocksThrottleReasons(
    device: sys::nvmlDevice_t,
    told: Out<c_ulonglong>,
) -> sys::nvmlReturn_t {
    reasons("nvmlDeviceGetCurrentClocksThrottleReasons", device, &told)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryBusWidth(
    device: sys::nvmlDevice_t,
    bits: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetMemoryBusWidth", |session| {
        let (_, gpu) = session.whole(device)?;
        bits.set(gpu.model.memory_bus.ok_or(Code::NOT_SUPPORTED)?.bits)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMaxClockInfo(
    device: sys::nvmlDevice_t,
    clock: sys::nvmlClockType_t,
    mhz: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetMaxClockInfo", |session| {
        let (_, gpu) = session.whole(device)?;
        match clock {
            sys::nvmlClockType_enum_NVML_CLOCK_MEM => {
                mhz.set(gpu.model.memory_bus.ok_or(Code::NOT_SUPPORTED)?.mhz)
            }
            other if other < sys::nvmlClockType_enum_NVML_CLOCK_COUNT => Err(Code::NOT_SUPPORTED),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    })
}

fn write_processes(
    session: &Call,
    device: sys::nvmlDevice_t,
    count: &Out<c_uint>,
    infos: &Fill<sys::nvmlProcessInfo_t>,
) -> Result<(), Code> {
    let (gpu, within) = match session.device(device)? {
        Device::Whole(_, gpu) => (gpu, None),
        Device::Mig(mig) => (mig.gpu, Some((mig.gi, mig.ci))),
    };
    let found: Vec<_> = session
        .state(gpu)?
        .processes
        .iter()
        .filter(|process| {
            within.is_none_or(|(gi, ci)| (process.gi, process.ci) == (Some(gi), Some(ci)))
        })
        .map(|process| sys::nvmlProcessInfo_t {
            pid: process.pid,
            usedGpuMemory: process.memory_mib << 20,
            gpuInstanceId: process.gi.unwrap_or(u32::MAX),
            computeInstanceId: process.ci.unwrap_or(u32::MAX),
        })
        .collect();
    let room = count.get()? as usize;
    if found.len() > room {
        count.set(found.len() as c_uint)?;
        return Err(Code::INSUFFICIENT_SIZE);
    }
    infos.set(count, &found)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: sys::nvmlDevice_t,
    count: Out<c_uint>,
    infos: Fill<sys::nvmlProcessInfo_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetComputeRunningProcesses_v3", |session| {
        write_processes(session, device, &count, &infos)
    })
}
