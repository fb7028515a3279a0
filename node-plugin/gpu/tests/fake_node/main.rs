//! The crate against the fake NVML: `nvml-wrapper` walks every topology, and MIG
//! instances behave as on hardware.

// clippy.toml allows these in tests, but not in what several tests share.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod events;
mod health;
mod links;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use fake_nvml::control::Hardware;
use fake_nvml::node::{self, DeviceNodes};
use gpu::{
    Error, Gpus, Inventory, Library, MigMinors, MigMode, MigProfile, NvmlCode, PciAddress,
    Placement, Roots,
};

const TOPOLOGIES: [&str; 6] = [
    "t4-1",
    "a30-2",
    "a100-80gb-4",
    "h100-80gb-8",
    "h200-141gb-8",
    "b200-180gb-8",
];

fn fixture(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/topologies");
    folder.join(name).with_extension("yaml")
}

/// A node's driver root. Each has its own copy of the library, so that several live in
/// this process, each with its own topology and state.
struct FakeNode {
    root: tempfile::TempDir,
}

impl FakeNode {
    fn new(name: &str) -> Self {
        Self::of(&fixture(name))
    }

    fn of(topology: &Path) -> Self {
        let root = tempfile::tempdir().unwrap();
        let library = node::library_beside_executable().expect("cargo builds the cdylib");
        node::build(topology, root.path(), &library, None, DeviceNodes::Files).unwrap();
        Self { root }
    }

    fn open(&self) -> Gpus {
        Gpus::open(&Library::InDriverRoot(self.root.path().to_owned())).unwrap()
    }

    fn roots(&self) -> Roots {
        Roots {
            proc: self.root.path().join("proc"),
            sys: self.root.path().join("sys"),
        }
    }

    fn inventory(&self) -> Inventory {
        self.open().inventory(&self.roots()).unwrap()
    }

    /// What stands for its hardware.
    fn hardware(&self) -> Hardware {
        Hardware::of(self.root.path()).unwrap()
    }

    /// Takes functions away from its library, as an older driver does not have them yet: their
    /// names are spoilt, so that the loader does not find them.
    fn without(&self, functions: &[&str]) {
        let path = self.root.path().join("lib/libnvidia-ml.so.1");
        let mut library = std::fs::read(&path).unwrap();
        for function in functions {
            let name = format!("\0{function}\0");
            let places: Vec<usize> = library
                .windows(name.len())
                .enumerate()
                .filter(|(_, window)| *window == name.as_bytes())
                .map(|(at, _)| at)
                .collect();
            assert!(!places.is_empty(), "{function}");
            for at in places {
                library[at + 1] = b'X';
            }
        }
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, library).unwrap();
    }

    fn edit_state(&self, edit: impl FnOnce(&mut serde_json::Value)) {
        let path = self.root.path().join("state.json");
        let mut state = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        edit(&mut state);
        std::fs::write(&path, serde_json::to_vec(&state).unwrap()).unwrap();
    }
}

fn profile<'a>(inventory: &'a Inventory, name: &str) -> &'a MigProfile {
    let profiles = &inventory.gpus[0].profiles;
    profiles
        .iter()
        .find(|profile| profile.name == name)
        .unwrap()
}

fn at(start: u32, size: u32) -> Placement {
    Placement { start, size }
}

/// The first GPU of an H100 node.
fn h100() -> (FakeNode, Gpus, PciAddress) {
    let node = FakeNode::new("h100-80gb-8");
    let gpus = node.open();
    (node, gpus, "0000:1b:00.0".parse().unwrap())
}

#[test]
fn the_inventory_of_each_topology_is_the_golden_one() {
    for name in TOPOLOGIES {
        insta::assert_yaml_snapshot!(name, FakeNode::new(name).inventory());
    }
}

#[test]
fn a_gpu_whose_instances_come_and_go_while_it_is_read_is_readable() {
    let (node, gpus, pci) = h100();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let made = gpus.create_instance(pci, 19, at(6, 1)).unwrap();
                gpus.destroy_instance(pci, made.gpu_instance_id).unwrap();
            }
        });
        let looks: Vec<_> = (0..60).map(|_| gpus.instances(pci)).collect();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let broken: Vec<_> = looks.into_iter().filter_map(Result::err).collect();
        assert!(broken.is_empty(), "{} of 60: {}", broken.len(), broken[0]);
    });
    assert!(node.inventory().unreadable.is_empty());
}

#[test]
fn seven_of_the_smallest_fit_on_a_gpu_and_an_eighth_does_not() {
    let (node, gpus, pci) = h100();
    for start in 0..7 {
        gpus.create_instance(pci, 19, at(start, 1)).unwrap();
    }
    let error = gpus.create_instance(pci, 19, at(3, 1)).unwrap_err();
    assert_eq!(error.code(), Some(NvmlCode::InsufficientResources));
    assert!(
        error
            .to_string()
            .contains("0000:1b:00.0: profile 19 at 3:1"),
        "{error}"
    );
    assert_eq!(node.inventory().gpus[0].instances.len(), 7);
}

#[test]
fn the_four_slice_profile_has_one_place_and_a_neighbour_in_it_blocks_it() {
    let (node, gpus, pci) = h100();
    assert_eq!(profile(&node.inventory(), "4g.40gb").placements, [at(0, 4)]);
    let neighbour = gpus.create_instance(pci, 19, at(3, 1)).unwrap();
    let error = gpus.create_instance(pci, 5, at(0, 4)).unwrap_err();
    assert_eq!(error.code(), Some(NvmlCode::InsufficientResources));
    gpus.destroy_instance(pci, neighbour.gpu_instance_id)
        .unwrap();
    gpus.create_instance(pci, 5, at(0, 4)).unwrap();
}

#[test]
fn two_three_slice_instances_fill_a_gpu() {
    let (_node, gpus, pci) = h100();
    let lower = gpus.create_instance(pci, 9, at(0, 4)).unwrap();
    let upper = gpus.create_instance(pci, 9, at(4, 4)).unwrap();
    // The ids that the real driver gives on 8-slice parts.
    assert_eq!((lower.gpu_instance_id, upper.gpu_instance_id), (2, 1));
    let error = gpus.create_instance(pci, 19, at(6, 1)).unwrap_err();
    assert_eq!(error.code(), Some(NvmlCode::InsufficientResources));
}

#[test]
fn a_placement_that_the_profile_does_not_have_is_an_invalid_argument() {
    let (_node, gpus, pci) = h100();
    for (profile, placement) in [
        (9, at(2, 4)),
        (19, at(7, 1)),
        (19, at(0, 2)),
        (77, at(0, 1)),
    ] {
        let error = gpus.create_instance(pci, profile, placement).unwrap_err();
        assert_eq!(error.code(), Some(NvmlCode::InvalidArgument), "{error}");
    }
}

#[test]
fn creating_turns_mig_on_and_disabling_waits_for_the_last_instance() {
    let (node, gpus, pci) = h100();
    assert_eq!(
        node.inventory().gpus[0].mig,
        MigMode::Disabled { switchable: true }
    );
    let instance = gpus.create_instance(pci, 14, at(4, 2)).unwrap();
    assert_eq!(instance.gpu_instance_id, 3);
    assert!(instance.compute_instances[0].uuid.starts_with("MIG-"));
    assert_eq!(
        node.inventory().gpus[0].mig,
        MigMode::Enabled { switchable: true }
    );
    assert_eq!(
        gpus.disable_mig(pci).unwrap_err().code(),
        Some(NvmlCode::InUse)
    );
    gpus.destroy_instance(pci, instance.gpu_instance_id)
        .unwrap();
    gpus.disable_mig(pci).unwrap();
    assert_eq!(
        node.inventory().gpus[0].mig,
        MigMode::Disabled { switchable: true }
    );
}

#[test]
fn an_ampere_gpu_with_mig_off_refuses_partitions_and_asks_for_a_reset() {
    let text = std::fs::read_to_string(fixture("a30-2")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("off.yaml");
    std::fs::write(&path, text.replace("migEnabled: true", "migEnabled: false")).unwrap();
    let node = FakeNode::of(&path);
    let gpu = &node.inventory().gpus[0];
    assert_eq!(gpu.mig, MigMode::Disabled { switchable: false });
    let error = node
        .open()
        .create_instance(gpu.pci, 14, at(0, 1))
        .unwrap_err();
    assert_eq!(error.code(), Some(NvmlCode::ResetRequired));
    assert!(
        error.to_string().contains("nvidia-smi --gpu-reset"),
        "{error}"
    );
}

#[test]
fn destroying_an_unknown_instance_succeeds_with_mig_on_off_and_absent() {
    let (_node, gpus, pci) = h100();
    gpus.destroy_instance(pci, 5).unwrap();
    let instance = gpus.create_instance(pci, 19, at(0, 1)).unwrap();
    gpus.destroy_instance(pci, instance.gpu_instance_id)
        .unwrap();
    gpus.destroy_instance(pci, instance.gpu_instance_id)
        .unwrap();
    let t4 = FakeNode::new("t4-1");
    let pci = t4.inventory().gpus[0].pci;
    t4.open().destroy_instance(pci, 5).unwrap();
}

#[test]
fn a_gpu_without_mig_refuses_a_partition() {
    let node = FakeNode::new("t4-1");
    let gpu = &node.inventory().gpus[0];
    assert_eq!(gpu.mig, MigMode::Unsupported);
    let error = node
        .open()
        .create_instance(gpu.pci, 19, at(0, 1))
        .unwrap_err();
    assert_eq!(error.code(), Some(NvmlCode::NotSupported));
}

#[test]
fn a_half_made_instance_is_listed_and_can_be_destroyed() {
    let (node, gpus, pci) = h100();
    let instance = gpus.create_instance(pci, 19, at(6, 1)).unwrap();
    let uuid = node.inventory().gpus[0].uuid.clone();
    node.edit_state(|state| {
        let instances = &mut state["gpus"][&uuid]["instances"];
        instances["9"]["computeInstances"] = serde_json::json!({});
    });
    let half = gpus.instances(pci).unwrap();
    assert_eq!(half.len(), 1);
    assert_eq!(half[0].placement, instance.placement);
    assert!(half[0].compute_instances.is_empty());
    gpus.destroy_instance(pci, half[0].gpu_instance_id).unwrap();
    assert!(gpus.instances(pci).unwrap().is_empty());
}

#[test]
fn a_gpu_instance_is_undone_when_no_compute_instance_spans_it() {
    let text = std::fs::read_to_string(fixture("h100-80gb-8")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("odd.yaml");
    // The spanning profile of 3g lies under another enum value than on real cards.
    std::fs::write(
        &path,
        text.replace("{ id: 2, nvmlProfile: 2,", "{ id: 2, nvmlProfile: 5,"),
    )
    .unwrap();
    let node = FakeNode::of(&path);
    let (gpus, pci) = (node.open(), node.inventory().gpus[0].pci);
    let error = gpus.create_instance(pci, 9, at(0, 4)).unwrap_err();
    assert!(
        matches!(
            error,
            Error::NoSpanningComputeInstance { profile_id: 9, .. }
        ),
        "{error}"
    );
    assert!(gpus.instances(pci).unwrap().is_empty());
}

#[test]
fn a_failed_compute_instance_undoes_its_gpu_instance_and_a_failed_undo_is_told() {
    let (node, gpus, pci) = h100();
    let uuid = node.inventory().gpus[0].uuid.clone();
    gpus.instances(pci).unwrap();
    let scratch = gpus.create_instance(pci, 19, at(0, 1)).unwrap();
    gpus.destroy_instance(pci, scratch.gpu_instance_id).unwrap();
    let fault = |faults| node.edit_state(|state| state["gpus"][&uuid]["faults"] = faults);
    fault(serde_json::json!({ "nvmlGpuInstanceCreateComputeInstance": 999 }));
    let error = gpus.create_instance(pci, 19, at(0, 1)).unwrap_err();
    assert_eq!(error.code(), Some(NvmlCode::Other(999)), "{error}");
    assert!(gpus.instances(pci).unwrap().is_empty());
    fault(serde_json::json!({
        "nvmlGpuInstanceCreateComputeInstance": 999,
        "nvmlGpuInstanceDestroy": 19,
    }));
    let error = gpus.create_instance(pci, 19, at(0, 1)).unwrap_err();
    assert!(
        matches!(
            error,
            Error::HalfMade {
                gpu_instance_id: 11,
                ..
            }
        ),
        "{error}"
    );
    fault(serde_json::json!({}));
    gpus.destroy_instance(pci, 11).unwrap();
}

#[test]
fn a_lost_gpu_is_unreadable_and_the_others_stay() {
    let (node, gpus, pci) = h100();
    let uuid = node.inventory().gpus[1].uuid.clone();
    gpus.create_instance(pci, 19, at(0, 1)).unwrap();
    node.edit_state(|state| state["gpus"][&uuid]["lost"] = true.into());
    let inventory = gpus.inventory(&node.roots()).unwrap();
    assert_eq!((inventory.gpus.len(), inventory.unreadable.len()), (7, 1));
    let lost = &inventory.unreadable[0];
    assert_eq!(lost.index, 1);
    assert!(lost.reason.contains("GPU_IS_LOST"), "{}", lost.reason);
    assert!(lost.reason.contains("drain the node"), "{}", lost.reason);
}

#[test]
fn instances_survive_a_new_session_and_end_with_the_boot() {
    let (node, gpus, pci) = h100();
    let made = gpus.create_instance(pci, 19, at(0, 1)).unwrap();
    drop(gpus);
    assert_eq!(node.open().instances(pci).unwrap(), [made]);
    node.edit_state(|state| state["bootId"] = "an earlier boot".into());
    let after = node.inventory();
    assert!(after.gpus[0].instances.is_empty());
    assert_eq!(after.gpus[0].mig, MigMode::Disabled { switchable: true });
}

#[test]
fn two_sessions_at_once_never_share_a_slice() {
    let (node, gpus, pci) = h100();
    let other = FakeNode { root: node.root };
    // A copy of the library is another instance of it, as in another process.
    let copy = other.root.path().join("copy/libnvidia-ml.so.1");
    std::fs::create_dir_all(copy.parent().unwrap()).unwrap();
    std::fs::copy(other.root.path().join("lib/libnvidia-ml.so.1"), &copy).unwrap();
    let second = Gpus::open(&Library::Path(copy)).unwrap();
    let made: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = [&gpus, &second, &gpus, &second]
            .into_iter()
            .map(|gpus| {
                let make = move |start| gpus.create_instance(pci, 19, at(start, 1)).is_ok();
                scope.spawn(move || (0..7).filter(|start| make(*start)).count())
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .sum()
    });
    assert_eq!(made, 7);
    assert_eq!(second.instances(pci).unwrap().len(), 7);
}

#[test]
fn the_drivers_mig_minors_lead_to_device_nodes_that_exist() {
    let node = FakeNode::new("h100-80gb-8");
    let path = node.roots().proc.join("driver/nvidia-caps/mig-minors");
    let minors = MigMinors::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(
        minors.access(1, 2, 0),
        Some((3 + 135 + 18, 3 + 135 + 18 + 1))
    );
    let (gi, ci) = minors.access(7, 14, 7).unwrap();
    for minor in [gi, ci] {
        let device = format!("dev/nvidia-caps/nvidia-cap{minor}");
        assert!(node.root.path().join(&device).exists(), "{device}");
    }
}

#[test]
fn a_node_without_the_library_has_no_driver() {
    let error = Gpus::open(&Library::InDriverRoot("/nowhere".into())).unwrap_err();
    assert!(matches!(error, Error::NoDriver { .. }), "{error}");
}

#[test]
fn a_library_that_is_none_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("libnvidia-ml.so.1");
    std::fs::write(&path, "not ELF").unwrap();
    let error = Gpus::open(&Library::Path(path.clone())).unwrap_err();
    assert!(matches!(error, Error::NotLoadable { .. }), "{error}");
    assert!(
        error.to_string().contains(path.to_str().unwrap()),
        "{error}"
    );
}

#[test]
fn a_driver_without_gpus_gives_an_empty_inventory() {
    let text = std::fs::read_to_string(fixture("t4-1")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("none.yaml");
    let (head, _) = text.split_once("\ngpus:").unwrap();
    std::fs::write(&path, format!("{head}\ngpus: []\n")).unwrap();
    let inventory = FakeNode::of(&path).inventory();
    assert!(inventory.gpus.is_empty() && inventory.unreadable.is_empty());
}

#[test]
fn a_broken_topology_fails_the_start_and_says_why_on_stderr() {
    let node = FakeNode::new("t4-1");
    std::fs::write(node.root.path().join("topology.yaml"), "driver: 7\n").unwrap();
    let error = node_open_error(&node);
    assert!(matches!(error, Error::NotInitialised { .. }), "{error}");
    assert!(error.to_string().contains("libnvidia-ml.so.1"), "{error}");
}

fn node_open_error(node: &FakeNode) -> Error {
    Gpus::open(&Library::InDriverRoot(node.root.path().to_owned())).unwrap_err()
}

/// `nvidia-ml-py` is NVIDIA's own client.
#[test]
fn nvidia_ml_py_walks_every_topology_and_is_given_an_event() {
    let python = std::env::var_os("FAKE_NVML_PYTHON").expect(
        "FAKE_NVML_PYTHON has to name a Python interpreter that has the packages of \
         hack/lib/test/requirements.txt; hack/test sets it",
    );
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/python/nvml_walk.py");
    for name in TOPOLOGIES {
        let node = FakeNode::new(name);
        let mut walk = Command::new(&python)
            .arg(&script)
            .arg(node.root.path().join("lib/libnvidia-ml.so.1"))
            .arg("--event")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(walk.stdout.take().unwrap()).lines();
        for line in said.map_while(Result::ok) {
            if line == "waiting for an event" {
                node.hardware().xid("0", 31, Some((9, None))).unwrap();
            }
        }
        let output = walk.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{name}: {said}");
    }
}
