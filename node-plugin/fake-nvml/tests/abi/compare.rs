//! The recorder of a real NVML, tried on the fake one.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use fake_nvml::control::Hardware;

use super::{root, stderr, stdout, topology};

fn nvml_compare(arguments: &[&Path]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_nvml-compare"))
        .env_remove("FAKE_NVML_TOPOLOGY")
        .env_remove("FAKE_NVML_STATE")
        .args(arguments)
        .output()
        .unwrap()
}

/// The record of a root's library, in the root.
fn record(root: &Path, options: &[&str]) -> PathBuf {
    let library = root.join("lib/libnvidia-ml.so.1");
    let mut arguments = vec![Path::new("record"), &library];
    arguments.extend(options.iter().map(Path::new));
    let said = nvml_compare(&arguments);
    assert!(said.status.success(), "{}", stderr(&said));
    let path = root.join("record.json");
    std::fs::write(&path, said.stdout).unwrap();
    path
}

#[test]
fn a_record_of_the_fake_does_not_differ_from_the_fake_and_nothing_is_left_behind() {
    let root = root();
    let recorded = record(root.path(), &["--change"]);
    let compared = nvml_compare(&[Path::new("compare"), &recorded, &topology()]);
    assert!(
        compared.status.success(),
        "{}{}",
        stdout(&compared),
        stderr(&compared)
    );
    let state = std::fs::read_to_string(root.path().join("state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_str(&state).unwrap();
    for gpu in state["gpus"].as_object().unwrap().values() {
        assert_eq!(gpu["mig"], false);
        assert_eq!(gpu["computeMode"], 0);
        assert!(gpu["instances"].as_object().unwrap().is_empty());
    }
}

#[test]
fn a_record_holds_the_calls_that_only_a_change_can_make() {
    let root = root();
    let text = std::fs::read_to_string(record(root.path(), &["--change"])).unwrap();
    let record: serde_json::Value = serde_json::from_str(&text).unwrap();
    let answers = record["answers"].as_object().unwrap();
    let code = |key: &str| answers[key]["code"].as_u64();
    let at = "gpu0/profile 9 at 4";
    assert_eq!(
        code(&format!(
            "{at}/nvmlDeviceCreateGpuInstanceWithPlacement again"
        )),
        Some(23)
    );
    assert_eq!(
        code(&format!("{at}/nvmlGpuInstanceDestroy too early")),
        Some(19)
    );
    assert_eq!(code("gpu0/nvmlDeviceGetNvLinkState 18"), Some(2));
    assert_eq!(code("gpu0/nvmlEventSetWait_v2"), Some(10));
    assert!(answers.len() > 500, "{}", answers.len());
}

#[test]
fn what_a_real_card_does_otherwise_is_told_and_what_differs_between_cards_is_not() {
    let root = root();
    let hardware = Hardware::of(root.path()).unwrap();
    hardware
        .fail(None, "nvmlDeviceGetRemappedRows", Some(3))
        .unwrap();
    // No difference: a warm card with a process on it.
    hardware.heat("0", Some(71), Default::default()).unwrap();
    hardware.start_process("0", 77, 10, None).unwrap();
    let recorded = record(root.path(), &[]);
    let text = std::fs::read_to_string(topology()).unwrap();
    let other = root.path().join("other.yaml");
    let text = text.replace("seed: h100-80gb-8", "seed: another").replace(
        "name: 1g.10gb,    slices: 1, memoryMib: 9984",
        "name: 1g.10gb,    slices: 1, memoryMib: 9000",
    );
    std::fs::write(&other, text).unwrap();
    let compared = nvml_compare(&[Path::new("compare"), &recorded, &other]);
    assert_eq!(compared.status.code(), Some(1), "{}", stderr(&compared));
    let said = stdout(&compared);
    assert!(
        said.contains("gpu0/nvmlDeviceGetRemappedRows: the real says code 3, the fake {"),
        "{said}"
    );
    let memory =
        "gpu7/nvmlDeviceGetGpuInstanceProfileInfo 0.memoryMib: the real says 9984, the fake 9000";
    assert!(said.contains(memory), "{said}");
    // Eight GPUs: the rows, and the memory by each of three versions of the call.
    assert!(said.contains("\n32 differences"), "{said}");
}

#[test]
fn a_library_that_is_not_there_is_named() {
    let said = nvml_compare(&[Path::new("record"), Path::new("/nowhere/libnvidia-ml.so.1")]);
    assert_eq!(said.status.code(), Some(2));
    assert!(stderr(&said).contains("/nowhere/libnvidia-ml.so.1 cannot be loaded"));
}
