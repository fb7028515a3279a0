#!/usr/bin/env python3
"""nvml_walk.py LIBRARY [--event]: walks an NVML with NVIDIA's own Python client.

Lists devices and MIG profiles, creates an instance at every placement, looks at it
from every side, and destroys it again. Fails on the first answer that is not NVML's.

With --event it says "waiting for an event", and then has to be given XID 31 of the first
GPU's GPU instance 9.

Needs what hack/lib/test/requirements.txt pins.
"""

import ctypes
import sys

import pynvml as nvml


def refused(code, call, *arguments):
    """The call must fail with exactly this code."""
    try:
        call(*arguments)
    except nvml.NVMLError as error:
        assert error.value == code, f"{call.__name__}: {error}, expected code {code}"
    else:
        raise AssertionError(f"{call.__name__} succeeded, expected code {code}")


def placements(device, profile_id):
    """Count first, then fill."""
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(device, profile_id, None, ctypes.byref(count))
    array = (nvml.c_nvmlGpuInstancePlacement_t * count.value)()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(device, profile_id, array, ctypes.byref(count))
    return [(placement.start, placement.size) for placement in array]


def gpu_instances(device, profile_id):
    array = (nvml.c_nvmlGpuInstance_t * 16)()
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetGpuInstances(device, profile_id, array, ctypes.byref(count))
    return list(array)[: count.value]


def mig_devices(device):
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index))
        except nvml.NVMLError_NotFound:
            pass
    return found


def profiles(device):
    """(profile info, compute slices) of each profile, by all versions of the call."""
    found = []
    for value in range(18):
        try:
            info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, value, version=2)
        except nvml.NVMLError_NotSupported:
            continue
        old = nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, value, version=1)
        assert (old.id, old.memorySizeMB) == (info.id, info.memorySizeMB)
        assert info.name.startswith("MIG "), info.name
        found.append(info)
    refused(nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.nvmlDeviceGetGpuInstanceProfileInfo, device, 99)
    return found


def walk_device(index):
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = nvml.nvmlDeviceGetUUID(device)
    address = nvml.nvmlDeviceGetPciInfo(device).busId
    assert uuid.startswith("GPU-") and len(uuid) == 40, uuid
    by_uuid = nvml.nvmlDeviceGetHandleByUUID(uuid)
    by_address = nvml.nvmlDeviceGetHandleByPciBusId(address)
    for other in (by_uuid, by_address):
        assert nvml.nvmlDeviceGetIndex(other) == index
    extended = nvml.nvmlPciInfoExt_v1_t()
    place = ctypes.byref(extended)
    refused(
        nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH, nvml.nvmlDeviceGetPciInfoExt, device, place
    )
    extended.version = nvml.nvmlPciInfoExt_v1
    nvml.nvmlDeviceGetPciInfoExt(device, place)
    assert extended.busId == address
    old = nvml.nvmlDeviceGetMemoryInfo(device)
    new = nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
    assert old.total == new.total == new.free + new.reserved + new.used
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device)
    assert major >= 7 and minor >= 0
    assert not nvml.nvmlDeviceIsMigDeviceHandle(device)
    assert nvml.nvmlDeviceGetMinorNumber(device) == index
    assert nvml.nvmlDeviceGetArchitecture(device) >= nvml.NVML_DEVICE_ARCH_TURING
    assert nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU) > 0
    assert nvml.nvmlDeviceGetTemperatureV(device, nvml.NVML_TEMPERATURE_GPU) > 0
    assert 0 < nvml.nvmlDeviceGetPowerUsage(device) <= nvml.nvmlDeviceGetEnforcedPowerLimit(device)
    assert nvml.nvmlDeviceGetComputeMode(device) == nvml.NVML_COMPUTEMODE_DEFAULT
    assert nvml.nvmlDeviceGetEccMode(device) == [1, 1]
    assert nvml.nvmlDeviceGetPersistenceMode(device) == 1
    print(index, nvml.nvmlDeviceGetName(device), uuid, address)
    return device


def told(call, *arguments):
    """The answer, or None from a card that does not have it."""
    try:
        return call(*arguments)
    except nvml.NVMLError_NotSupported:
        return None


def walk_readings(device):
    uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    assert nvml.nvmlDeviceGetTotalEccErrors(device, uncorrected, volatile) == 0
    rows = told(nvml.nvmlDeviceGetRemappedRows, device)
    new = nvml.nvmlDeviceGetArchitecture(device) >= nvml.NVML_DEVICE_ARCH_AMPERE
    assert rows == ((0, 0, 0, 0) if new else None), rows
    slowdowns = nvml.nvmlClocksEventReasonSwThermalSlowdown
    slowdowns |= nvml.nvmlClocksThrottleReasonHwThermalSlowdown
    assert nvml.nvmlDeviceGetCurrentClocksEventReasons(device) & slowdowns == 0
    assert nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device) & slowdowns == 0
    assert nvml.nvmlDeviceGetMemoryBusWidth(device) % 64 == 0
    assert nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_MEM) > 1000
    generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(device)
    assert generation >= nvml.nvmlDeviceGetCurrPcieLinkGeneration(device)
    width = nvml.nvmlDeviceGetMaxPcieLinkWidth(device)
    assert width == nvml.nvmlDeviceGetCurrPcieLinkWidth(device)
    assert nvml.nvmlDeviceGetComputeRunningProcesses(device) == []
    fields = [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, nvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER]
    action, unknown = nvml.nvmlDeviceGetFieldValues(device, fields)
    assert (action.nvmlReturn == nvml.NVML_SUCCESS) == new
    assert action.value.uiVal == nvml.NVML_GPU_RECOVERY_ACTION_NONE
    assert unknown.nvmlReturn == nvml.NVML_ERROR_NOT_SUPPORTED
    for mode in (nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, nvml.NVML_COMPUTEMODE_DEFAULT):
        nvml.nvmlDeviceSetComputeMode(device, mode)
        assert nvml.nvmlDeviceGetComputeMode(device) == mode
    refused(nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.nvmlDeviceSetComputeMode, device, 99)


def walk_links(device):
    """Every link, and whether the fabric and the peers fit together."""
    links = 0
    remotes = set()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active = nvml.nvmlDeviceGetNvLinkState(device, link)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
            break
        assert active == nvml.NVML_FEATURE_ENABLED
        version = nvml.nvmlDeviceGetNvLinkVersion(device, link)
        assert version >= nvml.NVML_NVLINK_VERSION_3_0
        fields = [
            (nvml.NVML_FI_DEV_NVLINK_GET_SPEED, link),
            (nvml.NVML_FI_DEV_NVLINK_GET_VERSION, link),
            (nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, 0),
        ]
        speed, told_version, common = nvml.nvmlDeviceGetFieldValues(device, fields)
        assert speed.value.uiVal == common.value.uiVal >= 25000
        assert told_version.value.uiVal == version
        kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(device, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
            remotes.add(nvml.nvmlDeviceGetNvLinkRemotePciInfo(device, link).busId)
        links += 1
    own = nvml.nvmlDeviceGetPciInfo(device).busId
    assert own not in remotes
    for remote in remotes:
        nvml.nvmlDeviceGetHandleByPciBusId(remote)
    fabric = nvml.c_nvmlGpuFabricInfo_v2_t()
    joined = told(nvml.nvmlDeviceGetGpuFabricInfoV, device, ctypes.byref(fabric)) is not None
    assert joined == (links > 0 and not remotes), (links, remotes)
    if joined:
        assert fabric.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED
        assert fabric.status == nvml.NVML_SUCCESS
    print(links, "links")


def walk_mig(device):
    """Creates and destroys an instance at every placement of every profile."""
    parent = nvml.nvmlDeviceGetUUID(device)
    current, pending = nvml.nvmlDeviceGetMigMode(device)
    assert current == pending
    if not current:
        assert nvml.nvmlDeviceGetMaxMigDeviceCount(device) == 0
        refused(
            nvml.NVML_ERROR_NOT_SUPPORTED, nvml.nvmlDeviceCreateGpuInstance, device, 0
        )
        assert nvml.nvmlDeviceSetMigMode(device, 1) == nvml.NVML_SUCCESS
        assert nvml.nvmlDeviceGetMigMode(device) == [1, 1]
    made = 0
    for profile in profiles(device):
        for start, size in placements(device, profile.id):
            placement = ctypes.byref(nvml.c_nvmlGpuInstancePlacement_t(start, size))
            before = nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(device, profile.id)
            assert before == profile.instanceCount
            gi = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(device, profile.id, placement)
            refused(
                nvml.NVML_ERROR_INSUFFICIENT_RESOURCES,
                nvml.nvmlDeviceCreateGpuInstanceWithPlacement,
                device,
                profile.id,
                placement,
            )
            assert nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(device, profile.id) < before
            walk_instance(device, parent, profile, gi, (start, size))
            made += 1
    if not current:
        assert nvml.nvmlDeviceSetMigMode(device, 0) == nvml.NVML_SUCCESS
    return made


def walk_instance(device, parent, profile, gi, placement):
    info = nvml.nvmlGpuInstanceGetInfo(gi)
    assert (info.placement.start, info.placement.size) == placement
    assert info.profileId == profile.id
    assert len(gpu_instances(device, profile.id)) == 1
    assert mig_devices(device) == [], "a GPU instance alone is no MIG device"
    spanning = None
    for value in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            offer = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, value, 0)
        except nvml.NVMLError_NotSupported:
            continue
        if offer.sliceCount == profile.sliceCount:
            spanning = offer
    assert spanning is not None, f"no compute instance spans {profile.name}"
    assert spanning.multiprocessorCount == profile.multiprocessorCount
    ci = nvml.nvmlGpuInstanceCreateComputeInstance(gi, spanning.id)
    refused(nvml.NVML_ERROR_IN_USE, nvml.nvmlGpuInstanceDestroy, gi)
    refused(
        nvml.NVML_ERROR_INSUFFICIENT_RESOURCES,
        nvml.nvmlGpuInstanceCreateComputeInstance,
        gi,
        spanning.id,
    )
    compute = nvml.nvmlComputeInstanceGetInfo(ci)
    (mig,) = mig_devices(device)
    uuid = nvml.nvmlDeviceGetUUID(mig)
    assert uuid.startswith("MIG-"), uuid
    assert nvml.nvmlDeviceGetUUID(compute.device) == uuid
    assert nvml.nvmlDeviceIsMigDeviceHandle(mig)
    assert nvml.nvmlDeviceGetGpuInstanceId(mig) == info.id
    assert nvml.nvmlDeviceGetComputeInstanceId(mig) == compute.id
    assert profile.name in nvml.nvmlDeviceGetName(mig)
    owner = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)
    assert nvml.nvmlDeviceGetUUID(owner) == parent
    attributes = nvml.nvmlDeviceGetAttributes(mig)
    assert attributes.memorySizeMB == profile.memorySizeMB
    assert attributes.gpuInstanceSliceCount == profile.sliceCount
    assert nvml.nvmlDeviceGetMemoryInfo(mig).total == profile.memorySizeMB << 20
    assert nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByUUID(uuid)) == uuid
    refused(nvml.NVML_ERROR_IN_USE, checked_mig_off, device)
    nvml.nvmlComputeInstanceDestroy(ci)
    nvml.nvmlGpuInstanceDestroy(gi)
    refused(nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.nvmlGpuInstanceGetInfo, gi)
    refused(nvml.NVML_ERROR_NOT_FOUND, nvml.nvmlDeviceGetGpuInstanceById, device, info.id)
    refused(nvml.NVML_ERROR_NOT_FOUND, nvml.nvmlDeviceGetHandleByUUID, uuid)


def checked_mig_off(device):
    """The activation status as an error."""
    nvml._nvmlCheckReturn(nvml.nvmlDeviceSetMigMode(device, 0))


def walk_events(device, expected):
    events = nvml.nvmlEventSetCreate()
    assert nvml.nvmlDeviceGetSupportedEventTypes(device) & nvml.nvmlEventTypeXidCriticalError
    nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, events)
    refused(nvml.NVML_ERROR_TIMEOUT, nvml.nvmlEventSetWait_v2, events, 1)
    if expected:
        print("waiting for an event", flush=True)
        event = nvml.nvmlEventSetWait_v2(events, 60_000)
        assert event.eventType == nvml.nvmlEventTypeXidCriticalError
        assert event.eventData == 31
        assert (event.gpuInstanceId, event.computeInstanceId) == (9, 0xFFFFFFFF)
        assert nvml.nvmlDeviceGetIndex(event.device) == 0
    nvml.nvmlEventSetFree(events)
    refused(nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.nvmlEventSetWait_v2, events, 1)


def main(library, event):
    # The client loads by name only; this is its own place for the loaded library.
    nvml.nvmlLib = ctypes.CDLL(library)
    refused(nvml.NVML_ERROR_UNINITIALIZED, nvml.nvmlDeviceGetCount)
    nvml.nvmlInit()
    nvml.nvmlInit()
    nvml.nvmlShutdown()
    assert nvml.nvmlSystemGetDriverVersion().count(".") == 2
    assert nvml.nvmlSystemGetNVMLVersion().endswith(nvml.nvmlSystemGetDriverVersion())
    assert nvml.nvmlSystemGetCudaDriverVersion() >= 12000
    count = nvml.nvmlDeviceGetCount()
    refused(nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.nvmlDeviceGetHandleByIndex, count)
    refused(nvml.NVML_ERROR_NOT_FOUND, nvml.nvmlDeviceGetHandleByPciBusId, "0000:fe:1f.0")
    refused(nvml.NVML_ERROR_NOT_FOUND, nvml.nvmlDeviceGetHandleByUUID, "GPU-none")
    devices = [walk_device(index) for index in range(count)]
    for device in devices:
        walk_readings(device)
        walk_links(device)
    walk_events(devices[0], event)
    same = nvml.nvmlDeviceGetTopologyCommonAncestor(devices[0], devices[0])
    assert same == nvml.NVML_TOPOLOGY_INTERNAL
    # One GPU stands for all: they share the tables.
    try:
        nvml.nvmlDeviceGetMigMode(devices[0])
    except nvml.NVMLError_NotSupported:
        print("no MIG")
    else:
        print(walk_mig(devices[0]), "MIG instances created and destroyed")
    nvml.nvmlShutdown()
    refused(nvml.NVML_ERROR_UNINITIALIZED, nvml.nvmlShutdown)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[2:] not in ([], ["--event"]):
        sys.exit(__doc__)
    main(sys.argv[1], bool(sys.argv[2:]))
