//! Every call, one after the other, with what it answered.
//!
//! In: a library. Out: a [`Record`]. Never: a call that a client of the node plugin does
//! not make, or one that a library may crash of.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_uint};
use std::fmt;
use std::path::Path;
use std::ptr::null_mut;

use nvml_wrapper_sys::bindings::*;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// What a library answered.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The library's file.
    pub(crate) library: String,
    /// The number of its GPUs.
    pub(crate) gpus: u32,
    /// Whether GPUs were changed for it.
    pub(crate) changed: bool,
    /// The answers by GPU, call and arguments.
    pub(crate) answers: BTreeMap<String, Answer>,
}

/// What one call answered.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// The return code; none where the library has no such function.
    pub(crate) code: Option<nvmlReturn_t>,
    /// What it filled in, where it succeeded.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub(crate) value: Value,
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            None => f.write_str("that it has no such function"),
            Some(0) => write!(f, "{}", self.value),
            Some(code) => write!(f, "code {code}"),
        }
    }
}

/// A library on its way through the calls.
pub(crate) struct Walk {
    pub(crate) lib: NvmlLib,
    answers: BTreeMap<String, Answer>,
}

impl Walk {
    /// Keeps an answer; whether it was a success.
    pub(crate) fn note(
        &mut self,
        at: &str,
        code: Option<nvmlReturn_t>,
        value: Option<Value>,
    ) -> bool {
        let answer = Answer {
            code,
            value: value.unwrap_or_default(),
        };
        self.answers.insert(at.to_owned(), answer);
        code == Some(nvmlReturn_enum_NVML_SUCCESS)
    }
}

/// Calls a function, keeps its answer under `at` and the function's name, and says whether it
/// succeeded. The value is looked at after a success only.
macro_rules! ask {
    ($walk:expr, $at:expr, $symbol:ident($($argument:expr),* $(,)?) => $value:expr) => {{
        let code = match $walk.lib.$symbol.as_ref() {
            Err(_) => None,
            // SAFETY: the signature is that of nvml.h, every pointer is to a live local of the
            // declared type (or null where nvml.h allows it), and handles are the library's.
            Ok(function) => Some(unsafe { function($($argument),*) }),
        };
        let value = (code == Some(nvmlReturn_enum_NVML_SUCCESS)).then(|| $value);
        let at = format!($at, stringify!($symbol));
        $walk.note(&at, code, value)
    }};
}
pub(crate) use ask;

/// A struct with every byte zero.
pub(crate) fn zeroed<T>() -> T {
    // SAFETY: only used for C structs of integers, arrays and pointers.
    unsafe { std::mem::zeroed() }
}

/// The version word of a struct.
pub(crate) const fn version<T>(version: u32) -> u32 {
    size_of::<T>() as u32 | version << 24
}

pub(crate) fn text(buffer: &[c_char]) -> String {
    let bytes = buffer.iter().take_while(|c| **c != 0).map(|c| *c as u8);
    String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
}

/// Asks a library everything; with `change` also what changes the first GPU.
pub(crate) fn record(library: &Path, change: bool) -> Result<Record, String> {
    // SAFETY: a library's initialisers run; that it is an NVML is the caller's word.
    let lib = unsafe { NvmlLib::new(library) }
        .map_err(|error| format!("{} cannot be loaded: {error}", library.display()))?;
    let mut walk = Walk {
        lib,
        answers: BTreeMap::new(),
    };
    if !ask!(walk, "node/{}", nvmlInitWithFlags(0) => Value::Null) {
        let code = walk.answers.values().next().and_then(|answer| answer.code);
        return Err(format!(
            "{} cannot be initialised: {code:?}",
            library.display()
        ));
    }
    let gpus = node(&mut walk);
    for index in 0..gpus {
        let mut device = null_mut();
        let handle = format!("gpu{index}");
        if ask!(walk, "{handle}/{}", nvmlDeviceGetHandleByIndex_v2(index, &mut device) => Value::Null)
        {
            gpu(&mut walk, &handle, device);
            crate::instances::profiles(&mut walk, &handle, device);
            if change && index == 0 {
                crate::instances::change(&mut walk, &handle, device);
            }
        }
    }
    ask!(walk, "node/{}", nvmlShutdown() => Value::Null);
    Ok(Record {
        library: library.display().to_string(),
        gpus,
        changed: change,
        answers: walk.answers,
    })
}

fn node(walk: &mut Walk) -> u32 {
    let mut buffer = [0; 96];
    let length = buffer.len() as c_uint;
    ask!(walk, "node/{}", nvmlSystemGetDriverVersion(buffer.as_mut_ptr(), length)
        => json!({ "version": text(&buffer) }));
    ask!(walk, "node/{}", nvmlSystemGetNVMLVersion(buffer.as_mut_ptr(), length)
        => json!({ "version": text(&buffer) }));
    let mut cuda = 0;
    ask!(walk, "node/{}", nvmlSystemGetCudaDriverVersion_v2(&mut cuda) => json!({ "version": cuda }));
    let mut count = 0;
    ask!(walk, "node/{}", nvmlDeviceGetCount_v2(&mut count) => json!({ "count": count }));
    let mut device = null_mut();
    ask!(walk, "node/{} beyond the last", nvmlDeviceGetHandleByIndex_v2(count, &mut device)
        => Value::Null);
    for address in ["0000:fe:1f.0", "nonsense"] {
        let Ok(address) = CString::new(address) else {
            continue;
        };
        let place = address.as_ptr();
        let name = address.to_string_lossy().into_owned();
        ask!(walk, "node/{} {name}", nvmlDeviceGetHandleByPciBusId_v2(place, &mut device)
            => Value::Null);
        ask!(walk, "node/{} {name}", nvmlDeviceGetHandleByUUID(place, &mut device) => Value::Null);
    }
    count
}

fn gpu(walk: &mut Walk, at: &str, device: nvmlDevice_t) {
    identity(walk, at, device);
    readings(walk, at, device);
    links(walk, at, device);
    events(walk, at, device);
}

fn identity(walk: &mut Walk, at: &str, device: nvmlDevice_t) {
    let mut buffer = [0; 96];
    let length = buffer.len() as c_uint;
    ask!(walk, "{at}/{}", nvmlDeviceGetName(device, buffer.as_mut_ptr(), length)
        => json!({ "name": text(&buffer) }));
    let told = ask!(walk, "{at}/{}", nvmlDeviceGetUUID(device, buffer.as_mut_ptr(), length)
        => json!({ "uuid": text(&buffer) }));
    let mut found = null_mut();
    if told {
        let uuid = buffer.as_ptr();
        ask!(walk, "{at}/{}", nvmlDeviceGetHandleByUUID(uuid, &mut found)
            => json!({ "same": found == device }));
    }
    ask!(walk, "{at}/{} in too little room", nvmlDeviceGetUUID(device, buffer.as_mut_ptr(), 8)
        => Value::Null);
    let mut pci: nvmlPciInfo_t = zeroed();
    let told = ask!(walk, "{at}/{}", nvmlDeviceGetPciInfo_v3(device, &mut pci) => json!({
        "busId": text(&pci.busId),
        "pciDeviceId": pci.pciDeviceId,
    }));
    if told {
        let address = pci.busId.as_ptr();
        ask!(walk, "{at}/{}", nvmlDeviceGetHandleByPciBusId_v2(address, &mut found)
            => json!({ "same": found == device }));
    }
    let mut number = 0;
    ask!(walk, "{at}/{}", nvmlDeviceGetMinorNumber(device, &mut number) => json!({ "minor": number }));
    ask!(walk, "{at}/{}", nvmlDeviceGetBrand(device, &mut number) => json!({ "brand": number }));
    ask!(walk, "{at}/{}", nvmlDeviceGetArchitecture(device, &mut number)
        => json!({ "architecture": number }));
    let (mut major, mut minor) = (0, 0);
    ask!(walk, "{at}/{}", nvmlDeviceGetCudaComputeCapability(device, &mut major, &mut minor)
        => json!({ "capability": format!("{major}.{minor}") }));
    let mut memory: nvmlMemory_v2_t = zeroed();
    memory.version = version::<nvmlMemory_v2_t>(2);
    ask!(walk, "{at}/{}", nvmlDeviceGetMemoryInfo_v2(device, &mut memory)
        => json!({ "total": memory.total, "reserved": memory.reserved }));
    memory.version = version::<nvmlMemory_v2_t>(9);
    ask!(walk, "{at}/{} of version 9", nvmlDeviceGetMemoryInfo_v2(device, &mut memory)
        => Value::Null);
    let (mut now, mut later) = (0, 0);
    ask!(walk, "{at}/{}", nvmlDeviceGetMigMode(device, &mut now, &mut later)
        => json!({ "now": now, "later": later }));
    ask!(walk, "{at}/{}", nvmlDeviceGetComputeMode(device, &mut now) => json!({ "mode": now }));
}

fn readings(walk: &mut Walk, at: &str, device: nvmlDevice_t) {
    let (mut now, mut later) = (0, 0);
    ask!(walk, "{at}/{}", nvmlDeviceGetEccMode(device, &mut now, &mut later)
        => json!({ "now": now, "later": later }));
    let mut count = 0;
    for (error, counter) in [(0, 0), (1, 0), (1, 1), (9, 0)] {
        ask!(walk, "{at}/{} {error} {counter}",
            nvmlDeviceGetTotalEccErrors(device, error, counter, &mut count)
            => json!({ "count": count }));
    }
    let [mut a, mut b, mut c, mut d] = [0; 4];
    ask!(walk, "{at}/{}", nvmlDeviceGetRemappedRows(device, &mut a, &mut b, &mut c, &mut d)
        => json!({ "count": [a, b], "pending": c, "failed": d }));
    ask!(walk, "{at}/{}", nvmlDeviceGetCurrentClocksEventReasons(device, &mut count)
        => json!({ "reasons": count }));
    let mut number = 0;
    ask!(walk, "{at}/{}", nvmlDeviceGetTemperature(device, 0, &mut number)
        => json!({ "temperature": number }));
    let mut temperature: nvmlTemperature_t = zeroed();
    temperature.version = version::<nvmlTemperature_t>(1);
    ask!(walk, "{at}/{}", nvmlDeviceGetTemperatureV(device, &mut temperature)
        => json!({ "temperature": temperature.temperature }));
    ask!(walk, "{at}/{}", nvmlDeviceGetMemoryBusWidth(device, &mut number)
        => json!({ "bits": number }));
    ask!(walk, "{at}/{} of the memory", nvmlDeviceGetMaxClockInfo(device, 2, &mut number)
        => json!({ "mhz": number }));
    ask!(walk, "{at}/{} of nothing", nvmlDeviceGetMaxClockInfo(device, 99, &mut number)
        => Value::Null);
    ask!(walk, "{at}/{}", nvmlDeviceGetMaxPcieLinkGeneration(device, &mut number)
        => json!({ "generation": number }));
    ask!(walk, "{at}/{}", nvmlDeviceGetMaxPcieLinkWidth(device, &mut number)
        => json!({ "width": number }));
    let mut processes: [nvmlProcessInfo_t; 64] = zeroed();
    let mut room = 64;
    ask!(walk, "{at}/{}",
        nvmlDeviceGetComputeRunningProcesses_v3(device, &mut room, processes.as_mut_ptr())
        => json!({ "count": room }));
    for (field, scope) in [
        (field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0),
        (field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, 0),
        (field_id::NVML_FI_DEV_NVLINK_GET_SPEED, 0),
        (field_id::NVML_FI_DEV_NVLINK_GET_SPEED, 99),
        (field_id::NVML_FI_DEV_NVLINK_GET_VERSION, 0),
        (99_999, 0),
    ] {
        let mut value: nvmlFieldValue_t = zeroed();
        (value.fieldId, value.scopeId) = (field, scope);
        ask!(walk, "{at}/{} {field} {scope}", nvmlDeviceGetFieldValues(device, 1, &mut value)
        => json!({
            "code": value.nvmlReturn,
            "type": value.valueType,
            // SAFETY: of a union of numbers, zero before; the lower half is there always.
            "value": unsafe { value.value.uiVal },
        }));
    }
}

fn links(walk: &mut Walk, at: &str, device: nvmlDevice_t) {
    let mut number = 0;
    for link in [0, 1, 5, 11, 17, 18, 35, 36] {
        ask!(walk, "{at}/{} {link}", nvmlDeviceGetNvLinkState(device, link, &mut number)
            => json!({ "active": number }));
        ask!(walk, "{at}/{} {link}", nvmlDeviceGetNvLinkVersion(device, link, &mut number)
            => json!({ "linkVersion": number }));
        ask!(walk, "{at}/{} {link}", nvmlDeviceGetNvLinkRemoteDeviceType(device, link, &mut number)
            => json!({ "kind": number }));
        let mut pci: nvmlPciInfo_t = zeroed();
        ask!(walk, "{at}/{} {link}", nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, &mut pci)
            => json!({ "busId": text(&pci.busId) }));
    }
    let mut v1: nvmlGpuFabricInfo_t = zeroed();
    ask!(walk, "{at}/{}", nvmlDeviceGetGpuFabricInfo(device, &mut v1)
        => json!({ "state": v1.state, "status": v1.status }));
    let mut v3: nvmlGpuFabricInfo_v3_t = zeroed();
    for (number, word) in [
        (2, version::<nvmlGpuFabricInfo_v2_t>(2)),
        (3, version::<nvmlGpuFabricInfo_v3_t>(3)),
        (9, version::<nvmlGpuFabricInfo_v3_t>(9)),
    ] {
        v3.version = word;
        ask!(walk, "{at}/{} {number}", nvmlDeviceGetGpuFabricInfoV(device, &mut v3) => json!({
            "state": v3.state,
            "status": v3.status,
            "clique": v3.cliqueId,
            "cluster": v3.clusterUuid,
        }));
    }
}

fn events(walk: &mut Walk, at: &str, device: nvmlDevice_t) {
    let mut supported = 0;
    ask!(walk, "{at}/{}", nvmlDeviceGetSupportedEventTypes(device, &mut supported) => json!({
        "events": supported,
        "xid": supported & 8 != 0,
        "ecc": supported & 3 == 3,
    }));
    let mut set = null_mut();
    if !ask!(walk, "{at}/{}", nvmlEventSetCreate(&mut set) => Value::Null) {
        return;
    }
    ask!(walk, "{at}/{}", nvmlDeviceRegisterEvents(device, supported & 11, set) => Value::Null);
    let mut data: nvmlEventData_t = zeroed();
    ask!(walk, "{at}/{}", nvmlEventSetWait_v2(set, &mut data, 10) => Value::Null);
    ask!(walk, "{at}/{}", nvmlEventSetFree(set) => Value::Null);
}
