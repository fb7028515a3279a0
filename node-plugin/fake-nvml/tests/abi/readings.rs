//! Readings, links, events and processes as a C client sees them.

use std::ffi::{c_int, c_uint, c_ulonglong};
use std::ptr::null_mut;

use fake_nvml::control::Hardware;
use nvml_wrapper_sys::bindings::field_id::*;
use nvml_wrapper_sys::bindings::*;

use super::{start, zeroed};

#[test]
fn each_field_has_an_answer_of_its_own_and_the_call_succeeds() {
    let (_root, lib, device) = start();
    let ask = |field, scope| {
        let mut value: nvmlFieldValue_t = zeroed();
        (value.fieldId, value.scopeId) = (field, scope);
        value
    };
    let mut values = [
        ask(NVML_FI_DEV_NVLINK_GET_SPEED, 17),
        ask(NVML_FI_DEV_NVLINK_GET_SPEED, 18),
        ask(NVML_FI_DEV_NVLINK_GET_VERSION, 0),
        ask(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0),
        ask(NVML_FI_MAX, 0),
    ];
    let count = values.len() as c_int;
    let code = nvml!(
        lib,
        nvmlDeviceGetFieldValues(device, count, values.as_mut_ptr())
    );
    assert_eq!(code, nvmlReturn_enum_NVML_SUCCESS);
    let codes = values.map(|value| value.nvmlReturn);
    let (success, invalid, unsupported) = (
        nvmlReturn_enum_NVML_SUCCESS,
        nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT,
        nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED,
    );
    assert_eq!(codes, [success, invalid, success, success, unsupported]);
    // SAFETY: the library says that it wrote an unsigned integer.
    let told = [0, 2, 3].map(|index: usize| unsafe { values[index].value.uiVal });
    assert_eq!(told, [26562, 6, 0]);
    let code = nvml!(
        lib,
        nvmlDeviceGetFieldValues(device, 0, values.as_mut_ptr())
    );
    assert_eq!(code, nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
}

#[test]
fn an_unknown_version_of_the_fabric_struct_is_refused_and_two_are_known() {
    let (_root, lib, device) = start();
    let mut v3: nvmlGpuFabricInfo_v3_t = zeroed();
    v3.version = size_of::<nvmlGpuFabricInfo_v3_t>() as u32 | 3 << 24;
    let code = nvml!(lib, nvmlDeviceGetGpuFabricInfoV(device, &mut v3));
    assert_eq!((code, v3.state), (nvmlReturn_enum_NVML_SUCCESS, 3));
    let mut v2: nvmlGpuFabricInfo_v2_t = zeroed();
    v2.version = size_of::<nvmlGpuFabricInfo_v2_t>() as u32 | 2 << 24;
    let place = (&raw mut v2).cast();
    let code = nvml!(lib, nvmlDeviceGetGpuFabricInfoV(device, place));
    assert_eq!((code, v2.state), (nvmlReturn_enum_NVML_SUCCESS, 3));
    v3.version = size_of::<nvmlGpuFabricInfo_v3_t>() as u32 | 4 << 24;
    let code = nvml!(lib, nvmlDeviceGetGpuFabricInfoV(device, &mut v3));
    assert_eq!(code, nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
}

#[test]
fn too_little_room_for_processes_tells_how_many_there_are() {
    let (root, lib, device) = start();
    let hardware = Hardware::of(root.path()).unwrap();
    for pid in [11, 12, 13] {
        hardware.start_process("0", pid, 1, None).unwrap();
    }
    let mut count: c_uint = 0;
    let get = |count: &mut c_uint, infos| {
        nvml!(
            lib,
            nvmlDeviceGetComputeRunningProcesses_v3(device, count, infos)
        )
    };
    let short = get(&mut count, null_mut());
    assert_eq!(
        (short, count),
        (nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE, 3)
    );
    let mut infos: [nvmlProcessInfo_t; 4] = zeroed();
    let mut count: c_uint = 4;
    assert_eq!(
        get(&mut count, infos.as_mut_ptr()),
        nvmlReturn_enum_NVML_SUCCESS
    );
    assert_eq!((count, infos[2].pid, infos[3].pid), (3, 13, 0));
    assert_eq!(infos[0].gpuInstanceId, u32::MAX);
}

#[test]
fn an_event_of_the_whole_gpu_has_all_ones_for_instances_and_a_freed_set_is_refused() {
    let (root, lib, device) = start();
    let mut set = null_mut();
    assert_eq!(
        nvml!(lib, nvmlEventSetCreate(&mut set)),
        nvmlReturn_enum_NVML_SUCCESS
    );
    let xid = c_ulonglong::from(nvmlEventTypeXidCriticalError);
    let code = nvml!(lib, nvmlDeviceRegisterEvents(device, xid, set));
    assert_eq!(code, nvmlReturn_enum_NVML_SUCCESS);
    let code = nvml!(lib, nvmlDeviceRegisterEvents(device, 1 << 40, set));
    assert_eq!(code, nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED);
    let hardware = Hardware::of(root.path()).unwrap();
    // Not registered for this kind.
    hardware.ecc("0", true, 1).unwrap();
    hardware.xid("0", 79, None).unwrap();
    let mut data: nvmlEventData_t = zeroed();
    let code = nvml!(lib, nvmlEventSetWait_v2(set, &mut data, 1000));
    assert_eq!(code, nvmlReturn_enum_NVML_SUCCESS);
    assert_eq!(
        (data.device, data.eventType, data.eventData),
        (device, xid, 79)
    );
    assert_eq!(
        (data.gpuInstanceId, data.computeInstanceId),
        (u32::MAX, u32::MAX)
    );
    let code = nvml!(lib, nvmlEventSetWait_v2(set, &mut data, 0));
    assert_eq!(code, nvmlReturn_enum_NVML_ERROR_TIMEOUT);
    assert_eq!(
        nvml!(lib, nvmlEventSetFree(set)),
        nvmlReturn_enum_NVML_SUCCESS
    );
    let code = nvml!(lib, nvmlEventSetWait_v2(set, &mut data, 1000));
    assert_eq!(code, nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
}

#[test]
fn links_of_a_switch_have_a_kind_and_no_address_and_the_last_is_followed_by_none() {
    let (_root, lib, device) = start();
    let (mut kind, mut active, mut version) = (0, 0, 0);
    let mut pci: nvmlPciInfo_t = zeroed();
    let codes = [
        nvml!(lib, nvmlDeviceGetNvLinkState(device, 17, &mut active)),
        nvml!(lib, nvmlDeviceGetNvLinkVersion(device, 17, &mut version)),
        nvml!(
            lib,
            nvmlDeviceGetNvLinkRemoteDeviceType(device, 17, &mut kind)
        ),
        nvml!(
            lib,
            nvmlDeviceGetNvLinkRemotePciInfo_v2(device, 17, &mut pci)
        ),
        nvml!(lib, nvmlDeviceGetNvLinkState(device, 18, &mut active)),
    ];
    assert_eq!(codes, [0, 0, 0, 3, 2]);
    assert_eq!((active, version, kind), (1, 6, 2));
}
