//! Histories of a node, a few hundred of them, each a different mix of what happens to one: what must hold
//! is held against a model after every event.
//!
//! The model is as simple as the promise: a claim that was prepared keeps its hardware until it has ended,
//! no two have the same, an administrator's instances are nobody else's, and in the end nothing is left.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gpu::Inventory;
use node_plugin::claims::checkpoint::{ClaimRef, Target};
use node_plugin::claims::core::StepHook;
use node_plugin::claims::hardware::Hardware;
use node_plugin::claims::{Claims, Loaded, Settings, driver};
use serde_json::json;
use tempfile::TempDir;
use tokio::sync::watch;

use crate::double::Double;
use crate::node::{MemoryClaims, NODE, TestNode, claim_object};
use crate::random::Random;

/// How many histories, and how long each.
const HISTORIES: u64 = 200;
const EVENTS: usize = 30;
/// The partitions of a GPU that claims ask for: name, first memory slice, number of them.
const PARTS: [(&str, u32, u32); 7] = [
    ("-mig-1g10gb-6", 6, 1),
    ("-mig-1g10gb-5", 5, 1),
    ("-mig-1g10gb-0", 0, 1),
    ("-mig-2g20gb-2", 2, 2),
    ("-mig-3g40gb-4", 4, 4),
    ("-mig-3g40gb-0", 0, 4),
    ("", 0, 8),
];

/// A device: the GPU and its slices.
#[derive(Debug, Clone, PartialEq)]
struct Device {
    name: String,
    gpu: usize,
    start: u32,
    end: u32,
}

impl Device {
    fn overlaps(&self, other: &Self) -> bool {
        self.gpu == other.gpu && self.start < other.end && other.start < self.end
    }
}

/// What the model knows of a claim.
struct Known {
    claim: ClaimRef,
    device: Device,
    /// The API server has it.
    exists: bool,
    /// The kubelet was told that it is prepared, in this boot, with this instance.
    held: Option<Option<String>>,
}

struct History {
    random: Random,
    folder: TempDir,
    inventory: Inventory,
    double: Arc<Double>,
    source: Arc<MemoryClaims>,
    plugin: Claims,
    claims: BTreeMap<String, Known>,
    /// An administrator's instances by UUID.
    statics: BTreeMap<String, Device>,
    lost: [bool; 2],
    made: usize,
    boots: usize,
    log: Vec<String>,
}

/// Dies at the nth step.
fn dies_after(steps: usize) -> StepHook {
    let left = AtomicUsize::new(steps);
    Arc::new(move |_| {
        assert!(
            left.fetch_sub(1, Ordering::Relaxed) != 0,
            "the process dies here"
        )
    })
}

impl History {
    async fn new(node: &TestNode, inventory: &Inventory, seed: u64) -> Self {
        let memory = PathBuf::from("/dev/shm");
        let folder = if memory.is_dir() {
            TempDir::new_in(memory) // Each of thousands of writes is synced.
        } else {
            TempDir::new()
        };
        let folder = folder.unwrap();
        let minors = "proc/driver/nvidia-caps";
        std::fs::create_dir_all(folder.path().join(minors)).unwrap();
        let minors = format!("{minors}/mig-minors");
        std::fs::copy(
            node.path("driver").join(&minors),
            folder.path().join(minors),
        )
        .unwrap();
        let double = Double::new(inventory.clone());
        let source = Arc::new(MemoryClaims::default());
        let boot = folder.path().join("proc/sys/kernel/random");
        std::fs::create_dir_all(&boot).unwrap();
        std::fs::write(boot.join("boot_id"), "0").unwrap();
        let plugin = start(&folder, node, &double, &source, Arc::new(|_| ()));
        let mut history = Self {
            random: Random::seeded(seed),
            folder,
            inventory: inventory.clone(),
            double,
            source,
            plugin,
            claims: BTreeMap::new(),
            statics: BTreeMap::new(),
            lost: [false; 2],
            made: 0,
            boots: 0,
            log: Vec::new(),
        };
        history.settle().await;
        history
    }

    /// Looks as a plugin does that runs.
    async fn settle(&mut self) {
        for _ in 0..2 {
            self.plugin.inventory(self.double.clone()).await.unwrap();
        }
    }

    fn restart(&mut self, node: &TestNode) {
        let (double, source) = (&self.double, &self.source);
        self.plugin = start(&self.folder, node, double, source, Arc::new(|_| ()));
    }

    fn any_device(&mut self) -> Device {
        let gpu = self.random.below(2);
        let (part, start, size) = PARTS[self.random.below(PARTS.len())];
        let pci = self.inventory.gpus[gpu].pci.dns_label();
        Device {
            name: format!("gpu-{pci}{part}"),
            gpu,
            start,
            end: start + size,
        }
    }

    /// A claim that exists, by chance.
    fn any_claim(&mut self, wanted: impl Fn(&Known) -> bool) -> Option<String> {
        let claims = self.claims.iter().filter(|(_, known)| wanted(known));
        let uids: Vec<String> = claims.map(|(uid, _)| uid.clone()).collect();
        (!uids.is_empty()).then(|| uids[self.random.below(uids.len())].clone())
    }

    /// Puts a claim there, as the scheduler does for a device that is free.
    fn allocate(&mut self, device: Device) -> String {
        self.made += 1;
        let (name, uid) = (format!("claim-{}", self.made), format!("uid-{}", self.made));
        let object = claim_object(&name, &uid, &[&device.name], &json!([]));
        self.source.put(&name, object);
        let claim = ClaimRef {
            namespace: "team".to_owned(),
            name,
            uid: uid.clone(),
        };
        let known = Known {
            claim,
            device,
            exists: true,
            held: None,
        };
        self.claims.insert(uid.clone(), known);
        uid
    }

    fn in_use(&self, device: &Device) -> bool {
        // Whatever was not ended yet: a claim that is gone is waited for.
        let mut claims = self.claims.values();
        claims.any(|known| known.device.overlaps(device))
            || self.statics.values().any(|other| other.overlaps(device))
    }

    async fn prepare(&mut self, uid: &str, plugin: &Claims) {
        let known = &self.claims[uid];
        let (claim, device) = (known.claim.clone(), known.device.clone());
        let answer = plugin.prepare(claim).await;
        self.log
            .push(format!("prepare {uid} {}: {answer:?}", device.name));
        let Ok(devices) = answer else {
            return;
        };
        assert!(!self.lost[device.gpu], "a lost GPU was given away");
        let instance = match &devices[0].target {
            Target::Partition { instance, .. } => Some(instance.clone().unwrap().uuid),
            _ => None,
        };
        for (other, known) in &self.claims {
            let both = known.held.is_some() && known.device.overlaps(&device);
            assert!(other == uid || !both, "{uid} has what {other} has");
        }
        let before = self
            .claims
            .get_mut(uid)
            .unwrap()
            .held
            .replace(instance.clone());
        if let Some(before) = before {
            assert_eq!(before, instance, "another instance than before");
        }
    }

    async fn unprepare(&mut self, uid: &str, plugin: &Claims) -> bool {
        let claim = self.claims[uid].claim.clone();
        let answer = plugin.unprepare(claim).await;
        self.log.push(format!("unprepare {uid}: {answer:?}"));
        answer.is_ok()
    }

    fn delete(&mut self, uid: &str) {
        let name = self.claims[uid].claim.name.clone();
        self.source.delete(&name);
        self.claims.get_mut(uid).unwrap().exists = false;
        self.log.push(format!("delete {uid}"));
    }

    async fn event(&mut self, node: &TestNode) {
        match self.random.below(16) {
            0..=3 => {
                let device = self.any_device();
                if !self.in_use(&device) {
                    let uid = self.allocate(device);
                    let plugin = self.plugin.clone();
                    self.prepare(&uid, &plugin).await;
                }
            }
            4 => {
                // The scheduler errs: what somebody has is allocated twice.
                let holder = self.any_claim(|known| known.exists && known.held.is_some());
                if let Some(holder) = holder {
                    let device = self.claims[&holder].device.clone();
                    let uid = self.allocate(device);
                    let plugin = self.plugin.clone();
                    self.prepare(&uid, &plugin).await;
                    self.unprepare(&uid, &plugin).await;
                    self.delete(&uid);
                    self.claims.remove(&uid);
                }
            }
            5 => {
                if let Some(uid) = self.any_claim(|known| known.exists) {
                    let plugin = self.plugin.clone();
                    self.prepare(&uid, &plugin).await;
                }
            }
            6 | 7 => {
                if let Some(uid) = self.any_claim(|_| true) {
                    let plugin = self.plugin.clone();
                    if self.unprepare(&uid, &plugin).await {
                        self.delete(&uid);
                        self.claims.remove(&uid);
                    }
                }
            }
            8 => {
                if let Some(uid) = self.any_claim(|known| known.exists) {
                    self.delete(&uid);
                    self.plugin.collect_garbage().await;
                    let name = format!("{uid}.json");
                    let left = self.folder.path().join("plugin/claims").join(name);
                    if !left.exists() {
                        self.claims.remove(&uid);
                    } else if self.lost.contains(&true) {
                        // Its instance waits for the GPU; for the claim it is over.
                        self.claims.get_mut(&uid).unwrap().held = None;
                    }
                }
            }
            9 | 10 => self.crash(node).await,
            11 => self.damage(),
            12 => {
                if self.random.below(3) == 0 {
                    self.reboot(node).await;
                }
            }
            13 => {
                let gpu = self.random.below(2);
                self.lost[gpu] = !self.lost[gpu];
                self.double.lose(gpu, self.lost[gpu]);
                self.log.push(format!("GPU {gpu} lost: {}", self.lost[gpu]));
            }
            14 => self.administer().await,
            _ => {
                self.log.push("restart".to_owned());
                self.restart(node);
                let reports = self.plugin.reconcile(Some(loaded(&self.double))).await;
                self.log.push(format!("{reports:?}"));
                self.settle().await;
            }
        }
    }

    /// The plugin dies in the middle of a call; the kubelet calls again, or not.
    async fn crash(&mut self, node: &TestNode) {
        let Some(uid) = self.any_claim(|known| known.exists) else {
            return;
        };
        let steps = self.random.below(5);
        let hook = dies_after(steps);
        let dying = start(&self.folder, node, &self.double, &self.source, hook);
        let prepares = self.random.below(2) == 0;
        self.log.push(format!("crash after {steps} steps"));
        if prepares {
            self.prepare(&uid, &dying).await;
        } else {
            // Whatever was left of it: the kubelet ends it again until that succeeds.
            self.claims.get_mut(&uid).unwrap().held = None;
            if self.unprepare(&uid, &dying).await {
                self.delete(&uid);
                self.claims.remove(&uid);
            }
        }
        self.restart(node);
        if self.random.below(2) == 0 {
            self.plugin.reconcile(Some(loaded(&self.double))).await;
        }
    }

    /// The disk damages a record that was completed.
    fn damage(&mut self) {
        let Some(uid) = self.any_claim(|known| known.held.is_some()) else {
            return;
        };
        let path = self
            .folder
            .path()
            .join("plugin/claims")
            .join(format!("{uid}.json"));
        let mut bytes = std::fs::read(&path).unwrap();
        if bytes.is_empty() {
            return;
        }
        match self.random.below(3) {
            0 => bytes.truncate(self.random.below(bytes.len())),
            1 => bytes.fill(0),
            _ => {
                let at = self.random.below(bytes.len());
                bytes[at] ^= 1 << self.random.below(8);
            }
        }
        std::fs::write(path, bytes).unwrap();
        self.log.push(format!("damage {uid}"));
    }

    async fn reboot(&mut self, node: &TestNode) {
        self.boots += 1;
        self.log.push("reboot".to_owned());
        self.double.reboot();
        self.lost = [false; 2];
        self.statics.clear();
        std::fs::remove_dir_all(self.folder.path().join("cdi")).unwrap();
        let boot = self.folder.path().join("proc/sys/kernel/random/boot_id");
        std::fs::write(boot, self.boots.to_string()).unwrap();
        for known in self.claims.values_mut() {
            known.held = None;
        }
        self.restart(node);
        self.settle().await;
        self.plugin.reconcile(Some(loaded(&self.double))).await;
    }

    /// An administrator makes an instance where nobody has one.
    async fn administer(&mut self) {
        let device = self.any_device();
        let whole = device.end == 8;
        if whole || self.in_use(&device) || self.lost[device.gpu] {
            return;
        }
        let gpu = &self.inventory.gpus[device.gpu];
        let named = node_plugin::slices::names::resolve(std::slice::from_ref(gpu), &device.name);
        let Some(node_plugin::slices::names::Named::Partition(gpu, profile, at)) = named else {
            panic!("{} is no partition", device.name)
        };
        // An ended claim's instance may still be there.
        if let Ok(made) = self.double.create_instance(gpu.pci, profile.id, at) {
            let uuid = made.compute_instances[0].uuid.clone();
            self.log
                .push(format!("administrator makes {uuid} as {}", device.name));
            self.statics.insert(uuid, device);
            self.settle().await;
        }
    }

    /// What must hold at any time.
    fn check(&self) {
        let there = self.double.instances();
        for (uuid, device) in &self.statics {
            assert!(
                there.contains_key(uuid),
                "an administrator's {} is gone",
                device.name
            );
        }
        for (uid, known) in &self.claims {
            if let Some(Some(uuid)) = &known.held {
                assert!(there.contains_key(uuid), "the instance of {uid} is gone");
            }
        }
    }

    /// In the end every pod is gone: nothing may be left.
    async fn end(&mut self, node: &TestNode) {
        self.log.push("the end".to_owned());
        for gpu in 0..2 {
            self.double.lose(gpu, false);
        }
        self.lost = [false; 2];
        self.restart(node);
        self.plugin.reconcile(Some(loaded(&self.double))).await;
        let uids: Vec<String> = self.claims.keys().cloned().collect();
        for uid in uids {
            let plugin = self.plugin.clone();
            assert!(self.unprepare(&uid, &plugin).await);
            self.delete(&uid);
        }
        self.plugin.collect_garbage().await;
        self.plugin.collect_garbage().await;
        self.claims.clear();
        self.check();
        let there = self.double.instances();
        let left: Vec<_> = there
            .keys()
            .filter(|uuid| !self.statics.contains_key(*uuid))
            .collect();
        assert!(left.is_empty(), "instances that nobody made: {left:?}");
        for folder in ["plugin/claims", "cdi", "plugin/dra-device-metadata"] {
            let files = std::fs::read_dir(self.folder.path().join(folder));
            let names = files
                .into_iter()
                .flatten()
                .map(|file| file.unwrap().file_name());
            let names: Vec<_> = names
                .filter(|name| !name.to_string_lossy().ends_with(".corrupt"))
                .collect();
            assert!(names.is_empty(), "{folder}: {names:?}");
        }
    }
}

fn loaded(double: &Arc<Double>) -> Loaded {
    Loaded {
        hardware: double.clone(),
        driver_version: "1.0".to_owned(),
    }
}

/// A plugin on the node of a history; the driver's files are another node's, which all histories share.
fn start(
    folder: &TempDir,
    node: &TestNode,
    double: &Arc<Double>,
    source: &Arc<MemoryClaims>,
    after: StepHook,
) -> Claims {
    let (_sender, loaded) = watch::channel(Some(loaded(double)));
    let root = node.path("driver");
    let settings = Settings {
        node: NODE.to_owned(),
        folder: folder.path().join("plugin"),
        cdi: folder.path().join("cdi"),
        roots: driver::Roots {
            host_driver: root.clone(),
            dev: root.join("dev"),
            proc: folder.path().join("proc"),
            driver: root,
        },
        sharing: node.settings().sharing,
    };
    Claims::open(settings, source.clone(), loaded, after).unwrap()
}

/// Says what happened before a failure, which the seed makes again.
struct Told<'a>(&'a mut History, u64);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("history {}:\n{}", self.1, self.0.log.join("\n"));
        }
    }
}

#[tokio::test]
async fn in_every_history_of_a_node_nothing_is_lost_or_given_twice_or_left() {
    let node = TestNode::with_gpus(2);
    let inventory = node.inventory();
    let only = std::env::var("HISTORY")
        .ok()
        .map(|seed| seed.parse().unwrap());
    for seed in only.map_or(0..HISTORIES, |seed| seed..seed + 1) {
        let mut history = History::new(&node, &inventory, seed).await;
        let told = Told(&mut history, seed);
        for _ in 0..EVENTS {
            told.0.event(&node).await;
            told.0.check();
        }
        told.0.end(&node).await;
    }
}
