//! A plugin that is killed at any step of its work: the kubelet carries on with the next one.
//!
//! The plugin is a process of its own, this test binary run anew, and is ended by SIGKILL at its nth step,
//! for n = 1, 2, 3 … until it gets through. A step is any change to something that outlives the process,
//! and any call to NVML; the library names them itself, so a new one is covered without a word here.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fake_nvml::control::KillAt;
use futures::FutureExt;
use futures::future::BoxFuture;
use gpu::{
    ComputeMode, Gpu, HealthReading, Inventory, MigInstance, PciAddress, Placement, Process,
};
use k8s_openapi::api::resource::v1::ResourceClaim;
use node_plugin::claims::checkpoint::ClaimRef;
use node_plugin::claims::hardware::{GpuEvents, Hardware, HardwareError};
use node_plugin::claims::{ClaimSource, Claims, Loaded, files};
use node_plugin::slices::Described;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::node::{TestNode, loaded_at, settings_at};
use crate::sharing::MpsNode;

/// What the process is told.
#[derive(Serialize, Deserialize)]
struct Order {
    folder: std::path::PathBuf,
    claim: ClaimRef,
    object: ResourceClaim,
    prepare: bool,
    /// At which step it dies.
    kill_at: usize,
}

const ORDER: &str = "NODE_PLUGIN_TEST_ORDER";

/// Counts steps, and dies at one.
#[derive(Clone)]
struct Steps {
    count: Arc<AtomicUsize>,
    kill_at: usize,
}

impl Steps {
    fn step(&self, name: &str) {
        if self.count.fetch_add(1, Ordering::SeqCst) + 1 == self.kill_at {
            println!("step {name}");
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
                .unwrap();
            std::thread::sleep(Duration::from_secs(60));
        }
    }
}

/// Every call to NVML is a step before and after it.
struct Stepping {
    gpus: Arc<dyn Hardware>,
    steps: Steps,
}

impl Stepping {
    fn make<T>(&self, name: &str, call: impl FnOnce() -> T) -> T {
        self.steps.step(&format!("before {name}"));
        let answer = call();
        self.steps.step(&format!("after {name}"));
        answer
    }
}

impl Hardware for Stepping {
    fn inventory(&self) -> Result<Inventory, HardwareError> {
        self.gpus.inventory()
    }

    fn gpu(&self, pci: PciAddress) -> Result<Gpu, HardwareError> {
        self.gpus.gpu(pci)
    }

    fn described(&self) -> Arc<Described> {
        self.gpus.described()
    }

    fn create_instance(
        &self,
        pci: PciAddress,
        profile: u32,
        at: Placement,
    ) -> Result<MigInstance, HardwareError> {
        self.make("create", || self.gpus.create_instance(pci, profile, at))
    }

    fn destroy_instance(&self, pci: PciAddress, id: u32) -> Result<(), HardwareError> {
        self.make("destroy", || self.gpus.destroy_instance(pci, id))
    }

    fn disable_mig(&self, pci: PciAddress) -> Result<(), HardwareError> {
        self.make("disable MIG", || self.gpus.disable_mig(pci))
    }

    fn health(&self, pci: PciAddress) -> Result<HealthReading, HardwareError> {
        self.gpus.health(pci)
    }

    fn set_compute_mode(&self, pci: PciAddress, mode: ComputeMode) -> Result<(), HardwareError> {
        self.make("compute mode", || self.gpus.set_compute_mode(pci, mode))
    }

    fn processes(&self, pci: PciAddress) -> Result<Vec<Process>, HardwareError> {
        self.gpus.processes(pci)
    }

    fn events(&self, gpus: &[PciAddress]) -> Result<Box<dyn GpuEvents>, HardwareError> {
        self.gpus.events(gpus)
    }
}

/// The one claim there is.
struct OneClaim(ResourceClaim);

impl ClaimSource for OneClaim {
    fn get<'a>(
        &'a self,
        _: &'a str,
        _: &'a str,
    ) -> BoxFuture<'a, Result<Option<ResourceClaim>, String>> {
        async { Ok(Some(self.0.clone())) }.boxed()
    }
}

/// The process that is killed; without an order it is nothing.
#[tokio::test]
async fn the_process_that_is_killed() {
    let Ok(order) = std::env::var(ORDER) else {
        return;
    };
    let order: Order = serde_json::from_str(&order).unwrap();
    let steps = Steps {
        count: Arc::default(),
        kill_at: order.kill_at,
    };
    let loaded = loaded_at(&order.folder);
    let loaded = Loaded {
        hardware: Arc::new(Stepping {
            gpus: loaded.hardware,
            steps: steps.clone(),
        }),
        ..loaded
    };
    let (_sender, loaded) = watch::channel(Some(loaded));
    let (written, durable) = (steps.clone(), steps.clone());
    files::at_each_step(Box::new(move |name| written.step(name)));
    let after = Arc::new(move |step| durable.step(&format!("{step:?}")));
    let source = Arc::new(OneClaim(order.object));
    let plugin = Claims::open(settings_at(&order.folder), source, loaded, after).unwrap();
    if order.prepare {
        plugin.prepare(order.claim).await.unwrap();
    } else {
        plugin.unprepare(order.claim).await.unwrap();
    }
    println!("through after {} steps", steps.count.load(Ordering::SeqCst));
}

/// Has a process prepare or unprepare a claim and kills it at a step; says at which. `None` when it got
/// through first.
fn killed(node: &TestNode, claim: &ClaimRef, prepare: bool, kill_at: usize) -> Option<String> {
    let order = Order {
        folder: node.folder.path().to_owned(),
        claim: claim.clone(),
        object: node.object(&claim.name),
        prepare,
        kill_at,
    };
    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            "killed::the_process_that_is_killed",
            "--exact",
            "--nocapture",
        ])
        .env(ORDER, serde_json::to_string(&order).unwrap())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.signal() == Some(9) {
        let step = said.lines().find_map(|line| line.split_once("step "));
        return Some(step.map_or("inside NVML", |step| step.1).to_owned());
    }
    assert!(
        output.status.success() && said.contains("through after"),
        "{said}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    None
}

/// What the node and the kubelet do after the plugin died.
#[derive(Debug, Clone, Copy)]
enum Then {
    /// The next plugin starts, and the kubelet asks for the same again.
    Again,
    /// The kubelet is quicker than the next plugin's start, and ends the claim.
    Unprepare,
    /// The pod is gone and the kubelet has forgotten it.
    Forget,
}

async fn carry_on(node: &TestNode, claim: &ClaimRef, prepare: bool, then: Then) {
    let plugin = node.plugin();
    match then {
        Then::Again => {
            plugin.reconcile(Some(node.loaded())).await;
            if prepare {
                plugin.prepare(claim.clone()).await.unwrap();
                node.agrees(&[claim]);
            }
            plugin.unprepare(claim.clone()).await.unwrap();
        }
        Then::Unprepare => {
            if !prepare {
                // The same pod has a new sandbox.
                plugin.prepare(claim.clone()).await.unwrap();
                node.agrees(&[claim]);
            }
            plugin.unprepare(claim.clone()).await.unwrap();
            node.plugin().reconcile(Some(node.loaded())).await;
        }
        Then::Forget => {
            node.delete_claim(&claim.name);
            plugin.reconcile(Some(node.loaded())).await;
            plugin.collect_garbage().await;
        }
    }
    node.agrees(&[]);
}

/// Kills at each step in turn; returns the steps.
async fn at_every_step(node: &TestNode, devices: &[&str], prepare: bool) -> Vec<String> {
    let mut steps = Vec::new();
    for kill_at in 1.. {
        for then in [Then::Again, Then::Unprepare, Then::Forget] {
            // No two have the same UID or name, as in a cluster.
            let id = format!("{prepare}-{kill_at}-{then:?}").to_lowercase();
            let claim = node.claim(&format!("claim-{id}"), &format!("uid-{id}"), devices);
            if !prepare {
                node.plugin().prepare(claim.clone()).await.unwrap();
            }
            let Some(step) = killed(node, &claim, prepare, kill_at) else {
                let plugin = node.plugin();
                if prepare {
                    node.agrees(&[&claim]);
                    plugin.unprepare(claim).await.unwrap();
                }
                node.agrees(&[]);
                return steps;
            };
            carry_on(node, &claim, prepare, then).await;
            if matches!(then, Then::Again) {
                steps.push(step);
            }
        }
    }
    steps
}

/// A daemon takes a while to start, so each step is followed by one of the three here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plugin_that_is_killed_at_any_step_of_a_share_leaves_no_daemon_and_no_limit_behind() {
    let node = MpsNode::on(TestNode::with_gpus(1));
    let ways = [Then::Again, Then::Unprepare, Then::Forget];
    for prepare in [true, false] {
        let mut steps = Vec::new();
        for kill_at in 1.. {
            let then = ways[kill_at % ways.len()];
            let claim = node.share(0, &format!("share-{prepare}-{kill_at}"), 8 << 30, 10);
            if !prepare {
                node.plugin().prepare(claim.clone()).await.unwrap();
            }
            let step = killed(&node, &claim, prepare, kill_at);
            let is_through = step.is_none();
            steps.extend(step);
            if is_through && prepare {
                node.agrees(&[&claim]);
            }
            carry_on(&node, &claim, prepare, then).await;
            if is_through {
                break;
            }
        }
        let expected: &[&str] = if prepare {
            &[
                "Started",
                "after compute mode",
                "daemon launched",
                "daemon told",
                "Completed",
            ]
        } else {
            &[
                "CdiRemoved",
                "daemon ended",
                "daemon's folder removed",
                "Forgotten",
            ]
        };
        assert_steps(&steps, expected);
    }
}

/// The functions of NVML that change something.
const CHANGES: [&str; 5] = [
    "nvmlDeviceSetMigMode",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
];

#[tokio::test]
async fn a_plugin_that_is_killed_inside_any_call_that_changes_the_hardware_leaves_nothing_behind() {
    let node = TestNode::with_gpus(2);
    let control = node.control();
    let parts = [node.device(0, "1g10gb-6"), node.device(0, "1g10gb-5")];
    let whole = node.device(0, "");
    let mut died = BTreeMap::new();
    for function in CHANGES {
        for at in [KillAt::Begin, KillAt::End] {
            for prepare in [true, false] {
                for then in [Then::Again, Then::Unprepare, Then::Forget] {
                    let id = format!("{function}-{at:?}-{prepare}-{then:?}").to_lowercase();
                    let (name, uid) = (format!("claim-{id}"), format!("uid-{id}"));
                    let claim = node.claim(&name, &uid, &[&parts[0], &parts[1]]);
                    // MIG is off after a whole device, and has to be switched on.
                    let whole = node.claim("whole", &format!("whole-{uid}"), &[&whole]);
                    node.plugin().prepare(whole.clone()).await.unwrap();
                    node.plugin().unprepare(whole).await.unwrap();
                    if !prepare {
                        node.plugin().prepare(claim.clone()).await.unwrap();
                    }
                    // The second call: the first instance is there, the second is half made.
                    let nth = if function == "nvmlDeviceSetMigMode" {
                        1
                    } else {
                        2
                    };
                    control.kill(function, nth, at).unwrap();
                    let killed = killed(&node, &claim, prepare, usize::MAX).is_some();
                    control.clear(None).unwrap();
                    if killed {
                        *died.entry(function).or_insert(0) += 1;
                        carry_on(&node, &claim, prepare, then).await;
                    } else {
                        node.plugin().unprepare(claim).await.unwrap();
                        node.agrees(&[]);
                        break; // This call never makes it.
                    }
                }
            }
        }
    }
    assert_eq!(died.len(), CHANGES.len(), "{died:?}");
}

fn assert_steps(steps: &[String], expected: &[&str]) {
    for name in expected {
        assert!(
            steps.iter().any(|step| step == name),
            "{name} is not among {steps:?}"
        );
    }
}

#[tokio::test]
async fn a_plugin_that_is_killed_at_any_step_of_a_partition_leaves_nothing_behind() {
    let node = TestNode::with_gpus(2);
    let devices = [node.device(0, "1g10gb-6"), node.device(1, "3g40gb-4")];
    let devices = [devices[0].as_str(), devices[1].as_str()];
    let prepare = at_every_step(&node, &devices, true).await;
    assert_steps(
        &prepare,
        &[
            "temporary file made",
            "temporary file written",
            "temporary file synced",
            "file renamed",
            "Started",
            "before create",
            "after create",
            "Acted",
            "CdiWritten",
            "Completed",
        ],
    );
    let unprepare = at_every_step(&node, &devices, false).await;
    let expected = [
        "file removed",
        "metadata removed",
        "CdiRemoved",
        "before destroy",
        "after destroy",
    ];
    assert_steps(&unprepare, &expected);
    assert_steps(&unprepare, &["Released", "Forgotten"]);
}

#[tokio::test]
async fn a_plugin_that_is_killed_at_any_step_of_a_whole_device_leaves_nothing_behind() {
    let node = TestNode::with_gpus(2);
    let device = node.device(1, "");
    let prepare = at_every_step(&node, &[&device], true).await;
    assert_steps(&prepare, &["before disable MIG", "CdiWritten", "Completed"]);
    let unprepare = at_every_step(&node, &[&device], false).await;
    assert_steps(&unprepare, &["CdiRemoved", "Forgotten"]);
}
