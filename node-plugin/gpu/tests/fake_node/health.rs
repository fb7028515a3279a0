//! Health readings, compute modes and processes.

use std::time::{Duration, Instant};

use fake_nvml::control::{RowRemap, Slowdown as Heat};
use gpu::{ComputeMode, NvmlCode, Process, RecoveryAction, RemappedRows, Slowdown};

use super::{FakeNode, at, h100};

#[test]
fn a_healthy_gpu_reads_as_such() {
    let (node, gpus, pci) = h100();
    let reading = gpus.health(pci).unwrap();
    assert_eq!(reading.uuid, node.inventory().gpus[0].uuid);
    assert_eq!(reading.ecc_uncorrected_volatile, Some(0));
    let no_rows = RemappedRows {
        correctable: 0,
        uncorrectable: 0,
        pending: false,
        failed: false,
    };
    assert_eq!(reading.remapped_rows, Some(no_rows));
    assert_eq!(reading.slowdown, Slowdown::default());
    assert_eq!(reading.temperature_celsius, Some(34));
    assert_eq!(reading.recovery_action, Some(RecoveryAction::None));
}

#[test]
fn what_happens_to_a_gpu_is_in_its_next_reading_and_in_no_other_gpus() {
    let (node, gpus, pci) = h100();
    let hardware = node.hardware();
    hardware.ecc("0", true, 3).unwrap();
    hardware.ecc("0", false, 40).unwrap();
    let rows = RowRemap {
        uncorrectable: 2,
        pending: true,
        ..RowRemap::default()
    };
    hardware.remap_rows("0", rows).unwrap();
    let failed = RowRemap {
        failed: true,
        ..RowRemap::default()
    };
    hardware.remap_rows("gpu-0000-1b-00-0", failed).unwrap();
    let heat = Heat {
        hw_thermal: true,
        sw_thermal: false,
        power_brake: true,
    };
    hardware.heat("0000:1b:00.0", Some(93), heat).unwrap();
    hardware.recovery_action("0", 4).unwrap();
    let reading = gpus.health(pci).unwrap();
    assert_eq!(reading.ecc_uncorrected_volatile, Some(3));
    let rows = reading.remapped_rows.unwrap();
    assert_eq!((rows.correctable, rows.uncorrectable), (0, 2));
    assert!(rows.pending && rows.failed);
    assert!(reading.slowdown.hw_thermal && reading.slowdown.hw_power_brake);
    assert!(!reading.slowdown.sw_thermal);
    assert_eq!(reading.temperature_celsius, Some(93));
    assert_eq!(reading.recovery_action, Some(RecoveryAction::DrainAndReset));
    let neighbour = gpus.health("0000:43:00.0".parse().unwrap()).unwrap();
    assert_eq!(neighbour.ecc_uncorrected_volatile, Some(0));
    assert_eq!(neighbour.recovery_action, Some(RecoveryAction::None));
}

#[test]
fn an_action_that_only_a_newer_driver_names_is_kept_as_its_number() {
    let (node, gpus, pci) = h100();
    node.hardware().recovery_action("0", 6).unwrap();
    let reading = gpus.health(pci).unwrap();
    assert_eq!(reading.recovery_action, Some(RecoveryAction::Other(6)));
}

#[test]
fn a_card_without_ecc_and_row_remapping_has_a_reading_all_the_same() {
    let text = std::fs::read_to_string(super::fixture("t4-1")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("no-ecc.yaml");
    std::fs::write(
        &path,
        text.replace("    name: Tesla T4", "    name: Tesla T4\n    ecc: false"),
    )
    .unwrap();
    let node = FakeNode::of(&path);
    let pci = node.inventory().gpus[0].pci;
    let reading = node.open().health(pci).unwrap();
    assert_eq!(reading.ecc_uncorrected_volatile, None);
    assert_eq!(reading.remapped_rows, None);
    assert_eq!(reading.recovery_action, None);
    assert_eq!(reading.temperature_celsius, Some(34));
}

#[test]
fn a_driver_that_refuses_readings_gives_none_of_them_and_no_error() {
    let (node, gpus, pci) = h100();
    let hardware = node.hardware();
    for function in [
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetMemoryBusWidth",
        "nvmlDeviceGetMaxPcieLinkWidth",
        "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetComputeMode",
    ] {
        hardware.fail(None, function, Some(3)).unwrap();
    }
    let reading = gpus.health(pci).unwrap();
    assert_eq!(reading.temperature_celsius, None);
    assert_eq!(reading.slowdown, Slowdown::default());
    let gpu = &node.inventory().gpus[0];
    assert_eq!(gpu.memory_bandwidth_mbps, None);
    assert_eq!(gpu.pcie, None);
    assert_eq!(gpu.fabric_clique, None);
    assert!(gpu.nvlinks.is_empty());
    assert_eq!(gpu.compute_mode, ComputeMode::Default);
}

#[test]
fn a_driver_without_the_newer_functions_tells_what_it_can() {
    let node = FakeNode::new("h100-80gb-8");
    node.hardware()
        .heat(
            "0",
            Some(80),
            Heat {
                sw_thermal: true,
                ..Heat::default()
            },
        )
        .unwrap();
    node.without(&[
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetNvLinkRemoteDeviceType",
        "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetMemoryBusWidth",
        "nvmlDeviceGetMaxPcieLinkWidth",
    ]);
    let gpus = node.open();
    let gpu = &gpus.inventory(&node.roots()).unwrap().gpus[0];
    assert_eq!((gpu.memory_bandwidth_mbps, gpu.pcie), (None, None));
    assert_eq!(gpu.nvlinks.len(), 18);
    let link = &gpu.nvlinks[0];
    assert_eq!((link.version, link.mbps), (Some(4), 0));
    assert_eq!(link.remote, gpu::NvLinkRemote::Other);
    // By the older calls.
    assert!(gpu.fabric_clique.is_some());
    let reading = gpus.health(gpu.pci).unwrap();
    assert_eq!(reading.temperature_celsius, Some(80));
    assert!(reading.slowdown.sw_thermal);
    assert_eq!(reading.ecc_uncorrected_volatile, None);
    assert_eq!(reading.remapped_rows, None);
    assert_eq!(reading.recovery_action, None);
}

#[test]
fn a_lost_gpu_says_so_and_answers_again_after_a_reset() {
    let (node, gpus, pci) = h100();
    let hardware = node.hardware();
    gpus.create_instance(pci, 19, at(0, 1)).unwrap();
    hardware.ecc("0", true, 1).unwrap();
    let rows = RowRemap {
        uncorrectable: 1,
        pending: true,
        ..RowRemap::default()
    };
    hardware.remap_rows("0", rows).unwrap();
    hardware.lose("0").unwrap();
    let error = gpus.health(pci).unwrap_err();
    assert!(error.is_lost(), "{error}");
    assert_eq!(error.code(), Some(NvmlCode::GpuLost));
    // Looked up again, for the handle is not kept: still lost.
    assert!(gpus.health(pci).unwrap_err().is_lost());
    assert!(gpus.instances(pci).unwrap_err().is_lost());
    hardware.reset("0").unwrap();
    let reading = gpus.health(pci).unwrap();
    assert_eq!(reading.ecc_uncorrected_volatile, Some(0));
    let rows = reading.remapped_rows.unwrap();
    assert_eq!((rows.uncorrectable, rows.pending), (1, false));
    assert!(gpus.instances(pci).unwrap().is_empty());
}

#[test]
fn clearing_takes_back_what_happened_and_leaves_the_instances() {
    let (node, gpus, pci) = h100();
    let hardware = node.hardware();
    let made = gpus.create_instance(pci, 19, at(0, 1)).unwrap();
    hardware.ecc("0", true, 1).unwrap();
    hardware.lose("0").unwrap();
    hardware.fail(None, "nvmlDeviceGetUUID", Some(999)).unwrap();
    hardware.clear(None).unwrap();
    let reading = gpus.health(pci).unwrap();
    assert_eq!(reading.ecc_uncorrected_volatile, Some(0));
    assert_eq!(gpus.instances(pci).unwrap(), [made]);
}

#[test]
fn another_failure_is_an_error_and_not_a_lost_gpu() {
    let (node, gpus, pci) = h100();
    node.hardware()
        .fail(Some("0"), "nvmlDeviceGetTotalEccErrors", Some(999))
        .unwrap();
    let error = gpus.health(pci).unwrap_err();
    assert!(!error.is_lost());
    assert!(
        error
            .to_string()
            .contains("0000:1b:00.0: nvmlDeviceGetTotalEccErrors"),
        "{error}"
    );
}

#[test]
fn a_call_that_hangs_on_one_gpu_keeps_no_other_waiting() {
    let (node, gpus, pci) = h100();
    let neighbour = "0000:43:00.0".parse().unwrap();
    let hang = Duration::from_secs(3);
    let create = "nvmlDeviceCreateGpuInstanceWithPlacement";
    let hardware = node.hardware();
    hardware.delay(Some("0"), create, hang).unwrap();
    std::thread::scope(|scope| {
        let hung = scope.spawn(|| {
            let start = Instant::now();
            gpus.create_instance(pci, 19, at(0, 1)).unwrap();
            start.elapsed()
        });
        let start = Instant::now();
        gpus.create_instance(neighbour, 19, at(0, 1)).unwrap();
        gpus.health(pci).unwrap();
        gpus.inventory(&node.roots()).unwrap();
        let others = start.elapsed();
        let hung = hung.join().unwrap();
        assert!(hung >= hang, "{hung:?}");
        assert!(others < hung, "{others:?} of {hung:?}");
    });
}

#[test]
fn a_call_hangs_once_however_often_it_looks_at_its_gpu() {
    let (node, gpus, pci) = h100();
    gpus.create_instance(pci, 19, at(0, 1)).unwrap();
    let hang = Duration::from_secs(2);
    node.hardware()
        .delay(Some("0"), "nvmlDeviceGetUUID", hang)
        .unwrap();
    // One such call, for one MIG device.
    let start = Instant::now();
    gpus.instances(pci).unwrap();
    let took = start.elapsed();
    assert!(took >= hang && took < 2 * hang, "{took:?}");
}

#[test]
fn the_compute_mode_is_set_read_and_kept_over_sessions() {
    let (node, gpus, pci) = h100();
    let mode = || node.inventory().gpus[0].compute_mode;
    assert_eq!(mode(), ComputeMode::Default);
    for wanted in [
        ComputeMode::ExclusiveProcess,
        ComputeMode::Prohibited,
        ComputeMode::Default,
    ] {
        gpus.set_compute_mode(pci, wanted).unwrap();
        assert_eq!(mode(), wanted);
    }
    node.hardware()
        .fail(None, "nvmlDeviceSetComputeMode", Some(4))
        .unwrap();
    let refused = gpus.set_compute_mode(pci, ComputeMode::Prohibited);
    assert_eq!(refused.unwrap_err().code(), Some(NvmlCode::NoPermission));
}

#[test]
fn processes_are_listed_with_their_instance_which_is_in_use() {
    let (node, gpus, pci) = h100();
    assert!(gpus.processes(pci).unwrap().is_empty());
    let made = gpus.create_instance(pci, 19, at(0, 1)).unwrap();
    let (gi, ci) = (made.gpu_instance_id, made.compute_instances[0].id);
    let hardware = node.hardware();
    // More than are asked for at first.
    for pid in 1..=100 {
        hardware
            .start_process("0", pid, 512, Some((gi, ci)))
            .unwrap();
    }
    hardware.start_process("1", 7, 1, None).unwrap();
    let processes = gpus.processes(pci).unwrap();
    assert_eq!(processes.len(), 100);
    let Process {
        pid,
        memory_bytes,
        instance,
    } = processes[0];
    assert_eq!((pid, memory_bytes), (1, Some(512 << 20)));
    let instance = instance.unwrap();
    assert_eq!(
        (instance.gpu_instance, instance.compute_instance),
        (gi, Some(ci))
    );
    let whole = gpus.processes("0000:43:00.0".parse().unwrap()).unwrap();
    assert_eq!(whole[0].instance, None);
    let error = gpus.destroy_instance(pci, gi).unwrap_err();
    assert_eq!(error.code(), Some(NvmlCode::InUse));
    for pid in 1..=100 {
        hardware.end_process("0", pid).unwrap();
    }
    gpus.destroy_instance(pci, gi).unwrap();
}
