//! The library as a C client sees it: return codes, struct versions, buffers, handles,
//! environment, and state between processes.

// clippy.toml allows these in tests, but not in what several tests share.
#![allow(clippy::unwrap_used, clippy::expect_used)]
#![allow(unsafe_code)]

/// Calls a function of the library and gives its return value.
macro_rules! nvml {
    ($lib:expr, $symbol:ident($($argument:expr),* $(,)?)) => {{
        let function = $lib.$symbol.as_ref().unwrap();
        // SAFETY: every pointer is null or to a live local of the declared type, or a
        // handle, which the library does not follow.
        unsafe { function($($argument),*) }
    }};
}

mod compare;
mod hardware;
mod readings;

use std::ffi::{CString, c_char, c_uint};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::ptr::{null, null_mut, without_provenance_mut};

use fake_nvml::node::{self, DeviceNodes};
use nvml_wrapper_sys::bindings::*;

fn topology() -> PathBuf {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    fixtures.join("topologies/h100-80gb-8.yaml")
}

fn root() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let library = node::library_beside_executable().expect("cargo builds the cdylib");
    node::build(&topology(), root.path(), &library, None, DeviceNodes::Files).unwrap();
    root
}

fn load(root: &Path) -> NvmlLib {
    // SAFETY: the library's initialisers do nothing.
    unsafe { NvmlLib::new(root.join("lib/libnvidia-ml.so.1")).unwrap() }
}

/// An initialised library and its first GPU.
fn start() -> (tempfile::TempDir, NvmlLib, nvmlDevice_t) {
    let root = root();
    let lib = load(root.path());
    assert_eq!(nvml!(lib, nvmlInit_v2()), nvmlReturn_enum_NVML_SUCCESS);
    let mut device = null_mut();
    let code = nvml!(lib, nvmlDeviceGetHandleByIndex_v2(0, &mut device));
    assert_eq!(code, nvmlReturn_enum_NVML_SUCCESS);
    (root, lib, device)
}

fn zeroed<T>() -> T {
    // SAFETY: only used for C structs of integers, arrays and pointers.
    unsafe { std::mem::zeroed() }
}

#[test]
fn calls_before_the_first_init_and_after_the_last_shutdown_are_uninitialized() {
    let root = root();
    let lib = load(root.path());
    let mut count: c_uint = 0;
    let mut get = || nvml!(lib, nvmlDeviceGetCount_v2(&mut count));
    assert_eq!(get(), nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
    assert_eq!(nvml!(lib, nvmlInit_v2()), nvmlReturn_enum_NVML_SUCCESS);
    assert_eq!(
        nvml!(lib, nvmlInitWithFlags(0)),
        nvmlReturn_enum_NVML_SUCCESS
    );
    assert_eq!(nvml!(lib, nvmlShutdown()), nvmlReturn_enum_NVML_SUCCESS);
    assert_eq!(get(), nvmlReturn_enum_NVML_SUCCESS);
    assert_eq!(nvml!(lib, nvmlShutdown()), nvmlReturn_enum_NVML_SUCCESS);
    assert_eq!(get(), nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
    assert_eq!(
        nvml!(lib, nvmlShutdown()),
        nvmlReturn_enum_NVML_ERROR_UNINITIALIZED
    );
    assert_eq!(count, 8);
}

#[test]
fn an_unknown_struct_version_is_refused_and_nothing_is_written() {
    let (_root, lib, device) = start();
    let size = size_of::<nvmlMemory_v2_t>() as u32;
    for version in [
        0,
        size,
        size | 1 << 24,
        size | 3 << 24,
        (size + 8) | 2 << 24,
    ] {
        let mut memory: nvmlMemory_v2_t = zeroed();
        memory.version = version;
        let code = nvml!(lib, nvmlDeviceGetMemoryInfo_v2(device, &mut memory));
        assert_eq!(
            code, nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            "{version:#x}"
        );
        assert_eq!((memory.version, memory.total), (version, 0));
    }
    let mut profile: nvmlGpuInstanceProfileInfo_v2_t = zeroed();
    profile.version = size_of::<nvmlGpuInstanceProfileInfo_v2_t>() as u32 | 4 << 24;
    let code = nvml!(
        lib,
        nvmlDeviceGetGpuInstanceProfileInfoV(device, 0, &mut profile)
    );
    assert_eq!(code, nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
}

#[test]
fn a_profile_is_the_same_in_each_version_of_the_struct() {
    let (_root, lib, device) = start();
    let mut v1: nvmlGpuInstanceProfileInfo_t = zeroed();
    let mut v2: nvmlGpuInstanceProfileInfo_v2_t = zeroed();
    let mut v3: nvmlGpuInstanceProfileInfo_v3_t = zeroed();
    v2.version = size_of::<nvmlGpuInstanceProfileInfo_v2_t>() as u32 | 2 << 24;
    v3.version = size_of::<nvmlGpuInstanceProfileInfo_v3_t>() as u32 | 3 << 24;
    let place = (&raw mut v3).cast();
    let codes = [
        nvml!(lib, nvmlDeviceGetGpuInstanceProfileInfo(device, 2, &mut v1)),
        nvml!(
            lib,
            nvmlDeviceGetGpuInstanceProfileInfoV(device, 2, &mut v2)
        ),
        nvml!(lib, nvmlDeviceGetGpuInstanceProfileInfoV(device, 2, place)),
    ];
    assert_eq!(codes, [nvmlReturn_enum_NVML_SUCCESS; 3]);
    assert_eq!((v1.id, v1.sliceCount, v1.memorySizeMB), (9, 3, 40448));
    assert_eq!((v2.id, v2.sliceCount, v2.memorySizeMB), (9, 3, 40448));
    assert_eq!((v3.id, v3.sliceCount, v3.memorySizeMB), (9, 3, 40448));
    assert_eq!(v2.name, v3.name);
}

#[test]
fn a_short_buffer_is_insufficient_size_and_one_that_just_fits_is_not() {
    let (_root, lib, device) = start();
    let mut buffer = [0x7f as c_char; 64];
    let mut get = |length| nvml!(lib, nvmlDeviceGetUUID(device, buffer.as_mut_ptr(), length));
    assert_eq!(get(40), nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
    assert_eq!(get(0), nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
    assert_eq!(get(41), nvmlReturn_enum_NVML_SUCCESS);
    assert_eq!((buffer[40], buffer[41]), (0, 0x7f));
}

#[test]
fn null_pointers_are_invalid_arguments() {
    let (_root, lib, device) = start();
    let codes = [
        nvml!(lib, nvmlDeviceGetCount_v2(null_mut())),
        nvml!(lib, nvmlDeviceGetHandleByUUID(null(), null_mut())),
        nvml!(lib, nvmlDeviceGetName(device, null_mut(), 96)),
        nvml!(lib, nvmlDeviceGetMemoryInfo_v2(device, null_mut())),
        nvml!(
            lib,
            nvmlDeviceCreateGpuInstanceWithPlacement(device, 19, null(), null_mut())
        ),
        nvml!(lib, nvmlDeviceGetName(null_mut(), null_mut(), 96)),
    ];
    assert_eq!(codes, [nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT; 6]);
}

#[test]
fn invented_and_mistaken_handles_are_invalid_arguments() {
    let (_root, lib, device) = start();
    let mut index = 0;
    for handle in [1, 0xdead_beef, device.addr() | 0xffff << 24, usize::MAX] {
        let code = nvml!(
            lib,
            nvmlDeviceGetIndex(without_provenance_mut(handle), &mut index)
        );
        assert_eq!(
            code, nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT,
            "{handle:#x}"
        );
    }
    let as_instance: nvmlGpuInstance_t = device.cast();
    let code = nvml!(lib, nvmlGpuInstanceDestroy(as_instance));
    assert_eq!(code, nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
}

#[test]
fn placements_are_counted_with_a_null_buffer_and_then_filled() {
    let (_root, lib, device) = start();
    let mut count: c_uint = 77;
    let code = nvml!(
        lib,
        nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, 15, null_mut(), &mut count)
    );
    assert_eq!((code, count), (nvmlReturn_enum_NVML_SUCCESS, 4));
    let mut placements = [nvmlGpuInstancePlacement_t {
        start: 99,
        size: 99,
    }; 5];
    let array = placements.as_mut_ptr();
    let code = nvml!(
        lib,
        nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, 15, array, &mut count)
    );
    assert_eq!(code, nvmlReturn_enum_NVML_SUCCESS);
    assert_eq!(
        placements.map(|placement| placement.start),
        [0, 2, 4, 6, 99]
    );
}

#[test]
fn an_address_is_found_in_every_form_that_nvml_takes() {
    let (_root, lib, device) = start();
    for address in ["00000000:1B:00.0", "0000:1b:00.0", "1b:00.0"] {
        let text = CString::new(address).unwrap();
        let mut found = null_mut();
        let code = nvml!(
            lib,
            nvmlDeviceGetHandleByPciBusId_v2(text.as_ptr(), &mut found)
        );
        assert_eq!(
            (code, found),
            (nvmlReturn_enum_NVML_SUCCESS, device),
            "{address}"
        );
    }
}

#[test]
fn a_symbol_that_is_not_there_is_missing_and_no_crash() {
    let (_root, lib, _) = start();
    assert!(lib.nvmlDeviceGetFanSpeed.is_err());
}

/// Runs the test `the_other_process` of this executable as another process.
fn other_process(task: &str, library: &Path, environment: &[(&str, &Path)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--ignored", "--exact", "the_other_process", "--nocapture"])
        .env("CHILD_TASK", task)
        .env("CHILD_LIBRARY", library)
        .env_remove("FAKE_NVML_TOPOLOGY")
        .env_remove("FAKE_NVML_STATE")
        .envs(environment.iter().copied());
    command.output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
#[ignore = "the other process of the tests below"]
fn the_other_process() {
    let library = PathBuf::from(std::env::var_os("CHILD_LIBRARY").unwrap());
    // SAFETY: the library's initialisers do nothing.
    let lib = unsafe { NvmlLib::new(library).unwrap() };
    println!("init {}", nvml!(lib, nvmlInit_v2()));
    println!("again {}", nvml!(lib, nvmlInit_v2()));
    let mut device = null_mut();
    nvml!(lib, nvmlDeviceGetHandleByIndex_v2(0, &mut device));
    match std::env::var("CHILD_TASK").unwrap().as_str() {
        "create" => {
            let (mut activation, mut made) = (0, 0);
            nvml!(lib, nvmlDeviceSetMigMode(device, 1, &mut activation));
            for start in 0..7 {
                let placement = nvmlGpuInstancePlacement_t { start, size: 1 };
                let mut gi = null_mut();
                let code = nvml!(
                    lib,
                    nvmlDeviceCreateGpuInstanceWithPlacement(device, 19, &placement, &mut gi)
                );
                made += u32::from(code == nvmlReturn_enum_NVML_SUCCESS);
            }
            println!("made {made}");
        }
        "hardware" => hardware::other(&lib, device),
        "count" => {
            let mut count = 0;
            let code = nvml!(
                lib,
                nvmlDeviceGetGpuInstances(device, 19, null_mut(), &mut count)
            );
            println!("count {count} {code}");
        }
        _ => {}
    }
}

fn made(output: &Output) -> u32 {
    let said = stdout(output);
    let made = said
        .lines()
        .find_map(|line| line.strip_prefix("made "))
        .unwrap();
    made.parse().unwrap()
}

#[test]
fn instances_are_seen_by_the_next_process_and_two_at_once_share_no_slice() {
    let root = root();
    let library = root.path().join("lib/libnvidia-ml.so.1");
    let counts: Vec<u32> = std::thread::scope(|scope| {
        let children: Vec<_> = (0..2)
            .map(|_| scope.spawn(|| made(&other_process("create", &library, &[]))))
            .collect();
        children
            .into_iter()
            .map(|child| child.join().unwrap())
            .collect()
    });
    assert_eq!(counts.iter().sum::<u32>(), 7, "{counts:?}");
    let seen = other_process("count", &library, &[]);
    assert!(stdout(&seen).contains("count 7 0"), "{}", stdout(&seen));
}

#[test]
fn the_environment_names_topology_and_state() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libnvidia-ml.so.1");
    std::fs::copy(node::library_beside_executable().unwrap(), &library).unwrap();
    let (topology, state) = (topology(), folder.path().join("kept.json"));
    let environment: [(&str, &Path); 2] = [
        ("FAKE_NVML_TOPOLOGY", &topology),
        ("FAKE_NVML_STATE", &state),
    ];
    assert_eq!(made(&other_process("create", &library, &environment)), 7);
    assert!(state.exists());
    // Without a state file, the state is the process's.
    let seen = other_process("count", &library, &environment[..1]);
    assert!(stdout(&seen).contains("count 0 3"), "{}", stdout(&seen));
}

#[test]
fn without_a_topology_no_driver_is_loaded_and_the_reason_is_said_once() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libnvidia-ml.so.1");
    std::fs::copy(node::library_beside_executable().unwrap(), &library).unwrap();
    let output = other_process("none", &library, &[]);
    assert!(
        stdout(&output).contains("init 9\nagain 9"),
        "{}",
        stdout(&output)
    );
    assert_eq!(
        stderr(&output)
            .matches("FAKE_NVML_TOPOLOGY is unset")
            .count(),
        1
    );
}

#[test]
fn a_broken_topology_fails_init_with_file_line_and_remedy_said_once() {
    let root = root();
    let topology = root.path().join("topology.yaml");
    let text = std::fs::read_to_string(&topology).unwrap();
    std::fs::write(&topology, text.replace("starts: [0, 4]", "starts: [0, 6]")).unwrap();
    let output = other_process("none", &root.path().join("lib/libnvidia-ml.so.1"), &[]);
    assert!(
        stdout(&output).contains("init 999\nagain 999"),
        "{}",
        stdout(&output)
    );
    let said = stderr(&output);
    assert!(said.contains("topology.yaml, line "), "{said}");
    assert_eq!(
        said.matches("3g.40gb of model \"h100-80gb\" is placed at 6:4")
            .count(),
        1,
        "{said}"
    );
    assert!(
        said.contains("use starts that are multiples of size"),
        "{said}"
    );
}

#[test]
fn a_driver_root_made_again_keeps_its_instances_and_a_name_makes_other_gpus() {
    let root = root();
    let library = root.path().join("lib/libnvidia-ml.so.1");
    assert_eq!(made(&other_process("create", &library, &[])), 7);
    let built = node::library_beside_executable().unwrap();
    let again = |name| {
        node::build(&topology(), root.path(), &built, name, DeviceNodes::Files).unwrap();
        stdout(&other_process("count", &library, &[]))
    };
    assert!(again(None).contains("count 7 0"));
    // Other GPUs: their MIG is off still.
    let renamed = again(Some("worker-2"));
    assert!(renamed.contains("count 0 3"), "{renamed}");
    let link = root
        .path()
        .join("sys/bus/pci/devices/0000:1b:00.0/numa_node");
    assert_eq!(std::fs::read_to_string(link).unwrap(), "0\n");
}

#[test]
fn a_broken_state_file_fails_init_and_is_named() {
    let root = root();
    std::fs::write(root.path().join("state.json"), "{").unwrap();
    let output = other_process("none", &root.path().join("lib/libnvidia-ml.so.1"), &[]);
    assert!(stdout(&output).contains("init 999"), "{}", stdout(&output));
    assert!(
        stderr(&output).contains("state.json cannot be used"),
        "{}",
        stderr(&output)
    );
}
