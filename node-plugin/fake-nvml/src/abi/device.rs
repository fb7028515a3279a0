//! What a device is: identity, place, memory, modes and readings.

use std::ffi::{c_int, c_uint};

use nvml_wrapper_sys::bindings as sys;

use super::call;
use super::handle::{self, Device};
use super::ptr::{InText, Out, OutText, chars, struct_version};
use crate::session::Code;
use crate::topology::{Gpu, Pci};

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCount_v2(count: Out<c_uint>) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetCount_v2", |session| {
        count.set(session.node.gpus.len() as c_uint)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByIndex_v2(
    index: c_uint,
    device: Out<sys::nvmlDevice_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetHandleByIndex_v2", |session| {
        session.present(index)?;
        device.set(handle::device(index))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByUUID(
    uuid: InText,
    device: Out<sys::nvmlDevice_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetHandleByUUID", |session| {
        let uuid = uuid.get()?;
        for (index, gpu) in (0..).zip(&session.node.gpus) {
            if gpu.uuid == uuid {
                return device.set(handle::device(index));
            }
            for (gi, instance) in session.state(gpu)?.instances {
                for (ci, compute) in instance.compute_instances {
                    if compute.uuid == uuid {
                        return device.set(handle::mig_device(index, gi, ci));
                    }
                }
            }
        }
        Err(Code::NOT_FOUND)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(
    address: InText,
    device: Out<sys::nvmlDevice_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetHandleByPciBusId_v2", |session| {
        let pci: Pci = address.get()?.parse().map_err(|_| Code::INVALID_ARGUMENT)?;
        let found = (0..)
            .zip(&session.node.gpus)
            .find(|(_, gpu)| gpu.pci == pci);
        let (index, _) = found.ok_or(Code::NOT_FOUND)?;
        session.present(index)?;
        device.set(handle::device(index))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleBySerial(
    serial: InText,
    device: Out<sys::nvmlDevice_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetHandleBySerial", |session| {
        let serial = serial.get()?;
        let found = (0..)
            .zip(&session.node.gpus)
            .find(|(_, gpu)| gpu.serial == serial);
        device.set(handle::device(found.ok_or(Code::NOT_FOUND)?.0))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetName(
    device: sys::nvmlDevice_t,
    name: OutText,
    length: c_uint,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetName", |session| {
        match session.device(device)? {
            Device::Whole(_, gpu) => name.set(length, &gpu.model.name),
            Device::Mig(mig) => name.set(
                length,
                &format!("{} MIG {}", mig.gpu.model.name, mig.profile.name),
            ),
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUUID(
    device: sys::nvmlDevice_t,
    uuid: OutText,
    length: c_uint,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetUUID", |session| {
        match session.device(device)? {
            Device::Whole(_, gpu) => uuid.set(length, &gpu.uuid),
            Device::Mig(mig) => uuid.set(length, &mig.compute.uuid),
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetIndex(
    device: sys::nvmlDevice_t,
    index: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetIndex", |session| {
        match session.device(device)? {
            Device::Whole(gpu, _) => index.set(gpu),
            Device::Mig(mig) => {
                let devices = super::mig_device::devices(session, mig.gpu)?;
                let position = devices
                    .iter()
                    .position(|(gi, ci)| (*gi, *ci) == (mig.gi, mig.ci));
                index.set(position.ok_or(Code::INVALID_ARGUMENT)? as c_uint)
            }
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMinorNumber(
    device: sys::nvmlDevice_t,
    minor: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetMinorNumber", |session| {
        minor.set(session.whole(device)?.1.minor)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetSerial(
    device: sys::nvmlDevice_t,
    serial: OutText,
    length: c_uint,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetSerial", |session| {
        serial.set(length, &session.whole(device)?.1.serial)
    })
}

/// The GPU of a device, which for a MIG device is the one it is part of.
macro_rules! physical {
    ($session:ident, $device:ident) => {
        match $session.device($device)? {
            Device::Whole(_, gpu) => gpu,
            Device::Mig(mig) => mig.gpu,
        }
    };
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetBrand(
    device: sys::nvmlDevice_t,
    brand: Out<sys::nvmlBrandType_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetBrand", |session| {
        brand.set(physical!(session, device).model.brand)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetArchitecture(
    device: sys::nvmlDevice_t,
    architecture: Out<c_uint>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetArchitecture", |session| {
        architecture.set(physical!(session, device).model.architecture)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCudaComputeCapability(
    device: sys::nvmlDevice_t,
    major: Out<c_int>,
    minor: Out<c_int>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetCudaComputeCapability", |session| {
        let capability = physical!(session, device).model.compute_capability;
        major.set(capability.major as c_int)?;
        minor.set(capability.minor as c_int)
    })
}

fn bus_id<const N: usize>(pci: Pci) -> [std::ffi::c_char; N] {
    let Pci {
        domain,
        bus,
        device,
        function,
    } = pci;
    chars(&format!("{domain:08X}:{bus:02X}:{device:02X}.{function:X}"))
}

/// Where a device is, with its ids.
pub(super) fn pci_info(pci: Pci, device_id: c_uint, subsystem_id: c_uint) -> sys::nvmlPciInfo_t {
    let Pci {
        domain,
        bus,
        device,
        function,
    } = pci;
    sys::nvmlPciInfo_t {
        // The old field has no room for a domain of eight digits.
        busIdLegacy: chars(&format!(
            "{:04X}:{bus:02X}:{device:02X}.{function:X}",
            domain & 0xffff
        )),
        domain,
        bus: bus.into(),
        device: device.into(),
        pciDeviceId: device_id,
        pciSubSystemId: subsystem_id,
        busId: bus_id(pci),
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPciInfo_v3(
    device: sys::nvmlDevice_t,
    info: Out<sys::nvmlPciInfo_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetPciInfo_v3", |session| {
        let Gpu { pci, model, .. } = physical!(session, device);
        info.set(pci_info(*pci, model.pci_device_id, model.pci_subsystem_id))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPciInfoExt(
    device: sys::nvmlDevice_t,
    info: Out<sys::nvmlPciInfoExt_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetPciInfoExt", |session| {
        let Gpu { pci, model, .. } = physical!(session, device);
        let version = struct_version::<sys::nvmlPciInfoExt_t>(1);
        if info.version()? != version {
            return Err(Code::VERSION_MISMATCH);
        }
        info.set(sys::nvmlPciInfoExt_t {
            version,
            domain: pci.domain,
            bus: pci.bus.into(),
            device: pci.device.into(),
            pciDeviceId: model.pci_device_id,
            pciSubSystemId: model.pci_subsystem_id,
            // A 3D controller.
            baseClass: 0x03,
            subClass: 0x02,
            busId: bus_id(*pci),
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNumaNodeId(
    device: sys::nvmlDevice_t,
    node: Out<c_uint>,
) -> sys::nvmlReturn_t {
    // The NUMA node of the GPU's own memory: only coherent systems have one.
    call("nvmlDeviceGetNumaNodeId", |session| {
        session.whole(device)?;
        let _ = &node;
        Err(Code::NOT_SUPPORTED)
    })
}

const MIB: u64 = 1 << 20;

/// Total and reserved bytes.
fn memory(device: &Device<'_>) -> (u64, u64) {
    match device {
        Device::Whole(_, gpu) => (gpu.model.memory_mib * MIB, gpu.model.reserved_mib * MIB),
        Device::Mig(mig) => (mig.profile.memory_mib * MIB, 0),
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo(
    device: sys::nvmlDevice_t,
    info: Out<sys::nvmlMemory_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetMemoryInfo", |session| {
        let (total, reserved) = memory(&session.device(device)?);
        info.set(sys::nvmlMemory_t {
            total,
            free: total - reserved,
            used: reserved,
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo_v2(
    device: sys::nvmlDevice_t,
    info: Out<sys::nvmlMemory_v2_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetMemoryInfo_v2", |session| {
        let (total, reserved) = memory(&session.device(device)?);
        let version = struct_version::<sys::nvmlMemory_v2_t>(2);
        if info.version()? != version {
            return Err(Code::VERSION_MISMATCH);
        }
        let free = total - reserved;
        info.set(sys::nvmlMemory_v2_t {
            version,
            total,
            reserved,
            free,
            used: 0,
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeMode(
    device: sys::nvmlDevice_t,
    mode: Out<sys::nvmlComputeMode_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetComputeMode", |session| {
        let (_, gpu) = session.whole(device)?;
        mode.set(session.state(gpu)?.compute_mode)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceSetComputeMode(
    device: sys::nvmlDevice_t,
    mode: sys::nvmlComputeMode_t,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceSetComputeMode", |session| {
        let (_, gpu) = session.whole(device)?;
        if mode >= sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_COUNT {
            return Err(Code::INVALID_ARGUMENT);
        }
        session.update(gpu, |state, _| {
            state.compute_mode = mode;
            Ok(())
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPersistenceMode(
    device: sys::nvmlDevice_t,
    mode: Out<sys::nvmlEnableState_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetPersistenceMode", |session| {
        session.whole(device)?;
        mode.set(sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTopologyCommonAncestor(
    first: sys::nvmlDevice_t,
    second: sys::nvmlDevice_t,
    level: Out<sys::nvmlGpuTopologyLevel_t>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetTopologyCommonAncestor", |session| {
        let (first, second) = (session.whole(first)?.1, session.whole(second)?.1);
        level.set(if first.pci == second.pci {
            sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_INTERNAL
        } else if first.root == second.root {
            sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_HOSTBRIDGE
        } else if first.numa == second.numa {
            sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_NODE
        } else {
            sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM
        })
    })
}
