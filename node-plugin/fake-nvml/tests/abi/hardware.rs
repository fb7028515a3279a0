//! What is made to happen to the hardware, as other processes see it.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use fake_nvml::control::{Hardware, KillAt};
use nvml_wrapper_sys::bindings::*;

use super::{load, other_process, root, start, stdout};

const SET_MIG: &str = "nvmlDeviceSetMigMode";
const SET_COMPUTE: &str = "nvmlDeviceSetComputeMode";

/// What the other process does for the tests below.
pub(crate) fn other(lib: &NvmlLib, device: nvmlDevice_t) {
    for mode in [2, 3] {
        println!(
            "set {mode}: {}",
            nvml!(lib, nvmlDeviceSetComputeMode(device, mode))
        );
    }
}

fn compute_mode(root: &Path) -> nvmlComputeMode_t {
    let lib = load(root);
    let mut device = std::ptr::null_mut();
    nvml!(lib, nvmlInit_v2());
    nvml!(lib, nvmlDeviceGetHandleByIndex_v2(0, &mut device));
    let mut mode = 99;
    nvml!(lib, nvmlDeviceGetComputeMode(device, &mut mode));
    nvml!(lib, nvmlShutdown());
    mode
}

#[test]
fn the_nth_call_kills_its_process_once_before_or_after_it_acts() {
    // At the second call: the first has set 2, the second would set 3.
    for (at, kept) in [(KillAt::Begin, 2), (KillAt::End, 3)] {
        let root = root();
        let library = root.path().join("lib/libnvidia-ml.so.1");
        let hardware = Hardware::of(root.path()).unwrap();
        hardware.kill(SET_COMPUTE, 2, at).unwrap();
        let killed = other_process("hardware", &library, &[]);
        assert_eq!(killed.status.signal(), Some(9), "{at:?}");
        let said = stdout(&killed);
        assert!(
            said.contains("set 2: 0") && !said.contains("set 3"),
            "{said}"
        );
        assert_eq!(compute_mode(root.path()), kept, "{at:?}");
        let next = other_process("hardware", &library, &[]);
        assert!(next.status.success(), "{at:?}");
        assert!(stdout(&next).contains("set 3: 0"), "{}", stdout(&next));
    }
}

#[test]
fn a_count_goes_on_from_process_to_process() {
    let root = root();
    let library = root.path().join("lib/libnvidia-ml.so.1");
    let hardware = Hardware::of(root.path()).unwrap();
    hardware.kill(SET_COMPUTE, 3, KillAt::Begin).unwrap();
    let lives = other_process("hardware", &library, &[]);
    assert!(lives.status.success());
    let dies = other_process("hardware", &library, &[]);
    assert_eq!(dies.status.signal(), Some(9));
    assert!(!stdout(&dies).contains("set"), "{}", stdout(&dies));
}

#[test]
fn a_delay_of_one_gpu_holds_up_its_call_once_and_no_other_gpu() {
    let (root, lib, device) = start();
    let mut neighbour = std::ptr::null_mut();
    nvml!(lib, nvmlDeviceGetHandleByIndex_v2(1, &mut neighbour));
    let hardware = Hardware::of(root.path()).unwrap();
    let delay = Duration::from_millis(400);
    hardware.delay(Some("0"), SET_MIG, delay).unwrap();
    let took = |device| {
        let mut activation = 0;
        let start = Instant::now();
        let code = nvml!(lib, nvmlDeviceSetMigMode(device, 1, &mut activation));
        assert_eq!(code, nvmlReturn_enum_NVML_SUCCESS);
        start.elapsed()
    };
    let (hung, other) = (took(device), took(neighbour));
    assert!(hung >= delay && hung < 2 * delay, "{hung:?}");
    assert!(other < delay, "{other:?}");
    hardware.delay(Some("0"), SET_MIG, Duration::ZERO).unwrap();
    assert!(took(device) < delay);
}

#[test]
fn a_call_on_no_gpu_can_fail_too_and_so_can_the_start() {
    let (root, lib, _) = start();
    let hardware = Hardware::of(root.path()).unwrap();
    hardware
        .fail(None, "nvmlDeviceGetCount_v2", Some(999))
        .unwrap();
    let mut count = 0;
    assert_eq!(nvml!(lib, nvmlDeviceGetCount_v2(&mut count)), 999);
    hardware.fail(None, "nvmlInitWithFlags", Some(9)).unwrap();
    assert_eq!(nvml!(lib, nvmlInitWithFlags(0)), 9);
    hardware.clear(None).unwrap();
    assert_eq!(nvml!(lib, nvmlInitWithFlags(0)), 0);
    assert_eq!(nvml!(lib, nvmlDeviceGetCount_v2(&mut count)), 0);
}

#[test]
fn a_boot_ends_what_happened_but_not_the_remapped_rows() {
    let root = root();
    let tool = |arguments: &[&str]| {
        let done = tool(root.path(), arguments);
        assert!(done.status.success(), "{}", super::stderr(&done));
    };
    tool(&["row-remap", "0", "--uncorrectable", "1", "--pending"]);
    tool(&["ecc", "0"]);
    tool(&["lost", "0"]);
    let path = root.path().join("state.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut state: serde_json::Value = serde_json::from_str(&text).unwrap();
    state["bootId"] = "an earlier boot".into();
    std::fs::write(&path, state.to_string()).unwrap();
    let lib = load(root.path());
    nvml!(lib, nvmlInit_v2());
    let mut device = std::ptr::null_mut();
    nvml!(lib, nvmlDeviceGetHandleByIndex_v2(0, &mut device));
    let (mut errors, mut rows) = (99, [99; 4]);
    let [correctable, uncorrectable, pending, failed] = &mut rows;
    let codes = [
        nvml!(lib, nvmlDeviceGetTotalEccErrors(device, 1, 0, &mut errors)),
        nvml!(
            lib,
            nvmlDeviceGetRemappedRows(device, correctable, uncorrectable, pending, failed)
        ),
    ];
    assert_eq!(codes, [0, 0]);
    assert_eq!((errors, rows), (0, [0, 1, 0, 0]));
}

fn tool(root: &Path, arguments: &[&str]) -> Output {
    let (command, rest) = arguments.split_first().unwrap();
    Command::new(env!("CARGO_BIN_EXE_fake-nvml"))
        .env_remove("FAKE_NVML_STATE")
        .arg(command)
        .arg(root)
        .args(rest)
        .output()
        .unwrap()
}

#[test]
fn every_command_of_the_tool_changes_the_state_and_clear_takes_it_back() {
    let root = root();
    let state = || std::fs::read_to_string(root.path().join("state.json")).unwrap_or_default();
    for (arguments, mark) in [
        (&["xid", "0", "79", "--instance", "9:0"][..], "\"data\": 79"),
        (
            &["ecc", "gpu-0000-1b-00-0", "--count", "3"],
            "\"eccUncorrected\": 3",
        ),
        (&["ecc", "0", "--corrected"], "\"eccCorrected\": 1"),
        (&["row-remap", "0", "--failed"], "\"failed\": true"),
        (
            &["thermal", "0", "--celsius", "95", "--hw"],
            "\"temperature\": 95",
        ),
        (&["action", "0", "node-reboot"], "\"recoveryAction\": 2"),
        (&["lost", "0000:1b:00.0"], "\"lost\": true"),
        (&["process", "0", "4242", "--memory", "7"], "\"pid\": 4242"),
        (
            &["fail", SET_MIG, "19", "--gpu", "0"],
            "\"nvmlDeviceSetMigMode\": 19",
        ),
        (
            &["delay", "nvmlDeviceGetUUID", "0.25"],
            "\"nvmlDeviceGetUUID\": 250",
        ),
        (
            &["kill", SET_COMPUTE, "--nth", "5"],
            "\"nvmlDeviceSetComputeMode\": 5",
        ),
        (&["kill", SET_MIG, "--after"], "\"killAfter\""),
    ] {
        assert!(!state().contains(mark), "{arguments:?}");
        let done = tool(root.path(), arguments);
        assert!(
            done.status.success(),
            "{arguments:?}: {}",
            super::stderr(&done)
        );
        assert!(state().contains(mark), "{arguments:?}: {}", state());
    }
    assert!(tool(root.path(), &["clear"]).status.success());
    for left in [
        "health",
        "lost",
        "processes",
        "faults",
        "delaysMs",
        "kill",
        "events\"",
    ] {
        assert!(!state().contains(left), "{left}: {}", state());
    }
}

#[test]
fn the_tool_names_what_it_does_not_understand() {
    let root = root();
    for (arguments, says) in [
        (&["explode", "0"][..], "there is no command explode"),
        (&["lost"], "GPU is missing"),
        (
            &["lost", "99"],
            "name one by index, UUID or PCI address: 0000:1b:00.0, ",
        ),
        (
            &["xid", "0", "many"],
            "XID has to be a number, not \"many\"",
        ),
        (
            &["xid", "0", "79", "--instance"],
            "--instance is not understood here",
        ),
        (&["ecc", "0", "--colour"], "--colour is not understood here"),
        (&["action", "0", "pray"], "ACTION is one of none, gpu-reset"),
        (&["delay", "nvmlInit_v2", "-1"], "SECONDS is missing"),
    ] {
        let refused = tool(root.path(), arguments);
        assert!(!refused.status.success(), "{arguments:?}");
        let said = super::stderr(&refused);
        assert!(said.contains(says), "{arguments:?}: {said}");
    }
    let nowhere = tool(Path::new("/nowhere"), &["lost", "0"]);
    assert!(super::stderr(&nowhere).contains("/nowhere/topology.yaml: cannot be read"));
    let help = tool(root.path(), &["--help"]);
    assert!(help.status.success() && stdout(&help).contains("row-remap ROOT GPU"));
}
