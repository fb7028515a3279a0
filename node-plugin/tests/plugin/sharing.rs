//! Shares of devices: the stand-in for the MPS control daemon does what the real one does
//! with its environment, its pipe directory and its limits.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use fake_nvml::node as fake;
use gpu::ComputeMode;
use k8s_openapi::api::resource::v1::ResourceClaim;
use node_plugin::claims::cdi::Device;
use node_plugin::claims::checkpoint::ClaimRef;
use node_plugin::claims::sharing::process::Process;
use node_plugin::claims::sharing::{Places, Policy};
use serde_json::{Value, json};

use crate::node::{NODE, TestNode};

const GIB: u64 = 1 << 30;
const LIMIT: Duration = Duration::from_secs(60);

/// The stand-in, built once: cargo builds a dependency's library for tests, and no
/// executable of it.
pub(crate) fn control() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let status = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--package", "fake-nvml"])
            .args(["--bin", "fake-mps-control"])
            .current_dir(crate::node::repository())
            .status()
            .unwrap();
        assert!(status.success());
        let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
        let target = target.unwrap_or_else(|| crate::node::repository().join("target"));
        target.join("debug/fake-mps-control")
    })
}

/// A node whose driver has the control daemon. What it started is gone when it goes.
pub(crate) struct MpsNode {
    node: TestNode,
}

impl std::ops::Deref for MpsNode {
    type Target = TestNode;

    fn deref(&self) -> &TestNode {
        &self.node
    }
}

impl MpsNode {
    fn new(topology: &str) -> Self {
        Self::on(TestNode::new(topology))
    }

    pub(crate) fn on(node: TestNode) -> Self {
        fake::place_mps_control(control(), &node.path("driver")).unwrap();
        Self { node }
    }

    fn places(&self, gpu: usize) -> Places {
        let device = self.device(gpu, "");
        Places {
            folder: self.path("mps").join(device.strip_prefix("gpu-").unwrap()),
        }
    }

    /// The living daemon of a GPU.
    fn daemon(&self, gpu: usize) -> Option<Process> {
        Process::read(&self.places(gpu)).filter(Process::alive)
    }

    fn pid(&self, gpu: usize) -> u32 {
        self.daemon(gpu).expect("a daemon").pid
    }

    /// What the daemon of a GPU was told, with its answers.
    fn told(&self, gpu: usize) -> String {
        std::fs::read_to_string(self.places(gpu).log().join("control.log")).unwrap_or_default()
    }

    /// What a client would get that asks the daemon of a GPU for this.
    async fn attach(&self, gpu: usize, memory: &str, threads: u32) -> String {
        let launcher = self.settings().sharing.launcher;
        let command = format!("attach {memory} {threads}");
        let process = self.daemon(gpu).expect("a daemon");
        process.control(&launcher, &command).await.unwrap()
    }

    fn mode(&self, gpu: usize) -> ComputeMode {
        self.inventory().gpus[gpu].compute_mode
    }

    pub(crate) fn share(&self, gpu: usize, name: &str, memory: u64, cores: u32) -> ClaimRef {
        let device = format!("{}-shared", self.device(gpu, ""));
        self.put_shares(name, &[(&device, memory, cores)])
    }

    fn put_shares(&self, name: &str, shares: &[(&str, u64, u32)]) -> ClaimRef {
        let uid = format!("uid-{name}");
        self.put(name, &uid, shares_object(name, &uid, shares))
    }
}

impl Drop for MpsNode {
    fn drop(&mut self) {
        let folders = std::fs::read_dir(self.node.path("mps"));
        for folder in folders.into_iter().flatten().flatten() {
            let places = Places {
                folder: folder.path(),
            };
            if let Some(process) = Process::read(&places) {
                process.signal(rustix::process::Signal::KILL);
            }
        }
    }
}

/// A claim of shares as the scheduler leaves it.
fn shares_object(name: &str, uid: &str, shares: &[(&str, u64, u32)]) -> ResourceClaim {
    let results: Vec<Value> = shares
        .iter()
        .enumerate()
        .map(|(index, (device, memory, cores))| {
            json!({"request": "gpu", "driver": "gpu.ai.deckhouse.io", "pool": NODE,
                   "device": device, "shareID": format!("share-{name}-{index}"),
                   "consumedCapacity": {"memory": format!("{}Mi", memory >> 20),
                                        "cores": cores.to_string()}})
        })
        .collect();
    serde_json::from_value(json!({
        "metadata": {"namespace": "team", "name": name, "uid": uid},
        "spec": {"devices": {"requests": [
            {"name": "gpu", "exactly": {"deviceClassName": "share.ai.deckhouse.io"}},
        ]}},
        "status": {"allocation": {"devices": {"results": results}}},
    }))
    .unwrap()
}

fn env<'a>(device: &'a Device, name: &str) -> Option<&'a str> {
    let entries = device.container_edits.env.iter();
    let mut pairs = entries.filter_map(|entry| entry.split_once('='));
    pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
}

/// Waits until something is so; what other processes do is announced to nobody here.
async fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn two_claims_share_a_gpu_under_limits_and_the_last_one_out_stops_the_daemon() {
    let node = MpsNode::new("h100-80gb-8");
    let plugin = node.plugin();
    assert_eq!(node.mode(0), ComputeMode::Default);
    let (first, second) = (
        node.share(0, "first", 16 * GIB, 25),
        node.share(0, "second", 40 * GIB, 50),
    );
    let prepared = plugin.prepare(first.clone()).await.unwrap();
    let device = format!("{}-shared", node.device(0, ""));
    assert_eq!(prepared[0].device, device);
    assert_eq!(prepared[0].share_id.as_deref(), Some("share-first-0"));
    let id = format!("gpu.ai.deckhouse.io/claim=uid-first-{device}-share-first-0");
    assert_eq!(prepared[0].cdi_device_ids[0], id);
    let pid = node.pid(0);
    assert_eq!(node.mode(0), ComputeMode::ExclusiveProcess);

    // The container: limits in its environment, the daemon's folders, no device choice.
    let spec = node.cdi("uid-first").unwrap();
    let injected = &spec.devices[0];
    let expected = [
        ("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=16384M"),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25"),
        ("GPU_AI_DECKHOUSE_IO_SHARE_uid_first_GPU", "17179869184:25"),
    ];
    for (name, value) in expected {
        assert_eq!(env(injected, name), Some(value), "{name}");
    }
    assert_eq!(env(injected, "CUDA_VISIBLE_DEVICES"), None);
    let mounts = &injected.container_edits.mounts;
    let at = |path: &str| mounts.iter().find(|m| m.container_path == path).unwrap();
    assert_eq!(
        Path::new(&at("/tmp/nvidia-mps").host_path),
        node.places(0).pipe()
    );
    assert_eq!(Path::new(&at("/dev/shm").host_path), node.places(0).shm());
    for mount in mounts {
        assert!(Path::new(&mount.host_path).is_dir(), "{}", mount.host_path);
    }

    // On the daemon's side a client that sets no limit gets what the largest share has.
    assert_eq!(node.attach(0, "81000M", 100).await, "16384M 25.0");
    plugin.prepare(second.clone()).await.unwrap();
    assert_eq!(node.pid(0), pid, "one daemon for both");
    assert_eq!(node.attach(0, "81000M", 100).await, "40960M 50.0");

    plugin.unprepare(second).await.unwrap();
    assert_eq!(node.pid(0), pid, "the other claim keeps its daemon");
    assert_eq!(node.attach(0, "81000M", 100).await, "16384M 25.0");
    plugin.unprepare(first).await.unwrap();
    assert_eq!(node.daemon(0), None);
    assert!(!node.places(0).folder.exists());
    assert_eq!(node.mode(0), ComputeMode::Default);

    let whole = node.claim("whole", "uid-whole", &[&node.device(0, "")]);
    plugin.prepare(whole).await.unwrap();
}

#[tokio::test]
async fn limits_reach_servers_that_run_already() {
    let node = MpsNode::new("h100-80gb-8");
    let plugin = node.plugin();
    let first = node.share(0, "first", 8 * GIB, 10);
    plugin.prepare(first).await.unwrap();
    let launcher = node.settings().sharing.launcher;
    let daemon = node.daemon(0).unwrap();
    daemon
        .control(&launcher, "start_server -uid 7")
        .await
        .unwrap();
    let second = node.share(0, "second", 20 * GIB, 30);
    plugin.prepare(second).await.unwrap();
    let memory = daemon.control(&launcher, "get_device_pinned_mem_limit 100007 0");
    assert_eq!(memory.await.unwrap(), "20480M");
    let threads = daemon.control(&launcher, "get_active_thread_percentage 100007");
    assert_eq!(threads.await.unwrap(), "30.0");
}

#[tokio::test]
async fn more_than_there_is_is_refused_with_the_holders_and_leaves_nothing_behind() {
    let node = MpsNode::new("h100-80gb-8");
    let plugin = node.plugin();
    let holder = node.share(0, "holder", 60 * GIB, 50);
    plugin.prepare(holder.clone()).await.unwrap();
    for (name, memory, cores) in [("memory", 30 * GIB, 10), ("cores", GIB, 51)] {
        let claim = node.share(0, name, memory, cores);
        let error = plugin.prepare(claim.clone()).await.unwrap_err().to_string();
        assert!(error.contains("team/holder"), "{error}");
        assert!(error.contains("61440 MiB and 50 %"), "{error}");
        assert!(node.cdi(&claim.uid).is_none());
    }
    let rest = node.share(0, "rest", 19 * GIB, 50);
    plugin.prepare(rest).await.unwrap();
    // Whole device and partition stay away while the GPU is shared, and the other way round.
    for partition in ["", "1g10gb-0"] {
        let claim = node.claim("alone", "uid-alone", &[&node.device(0, partition)]);
        let error = plugin.prepare(claim).await.unwrap_err().to_string();
        assert!(error.contains("-shared"), "{error}");
    }
    let whole = node.claim("whole", "uid-whole", &[&node.device(1, "")]);
    plugin.prepare(whole).await.unwrap();
    let error = plugin.prepare(node.share(1, "late", GIB, 1)).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("team/whole"), "{error}");
}

#[tokio::test]
async fn a_claim_that_names_no_amount_has_the_whole_device() {
    let node = MpsNode::new("h100-80gb-8");
    let plugin = node.plugin();
    let device = format!("{}-shared", node.device(0, ""));
    let all = node.claim("all", "uid-all", &[&device]);
    plugin.prepare(all).await.unwrap();
    let gpu_memory = node.inventory().gpus[0].memory_bytes >> 20;
    let spec = node.cdi("uid-all").unwrap();
    assert_eq!(
        env(&spec.devices[0], "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"),
        Some(format!("0={gpu_memory}M").as_str())
    );
    let one_more = plugin.prepare(node.share(0, "more", 1 << 20, 1)).await;
    assert!(one_more.unwrap_err().to_string().contains("team/all"));
}

#[tokio::test]
async fn a_daemon_that_is_killed_is_started_again_with_its_limits() {
    let node = MpsNode::new("h100-80gb-8");
    let plugin = node.plugin();
    plugin
        .prepare(node.share(0, "first", 8 * GIB, 20))
        .await
        .unwrap();
    let before = node.daemon(0).unwrap();
    before.signal(rustix::process::Signal::KILL);
    eventually("another daemon took its limits", || {
        let told = node.told(0);
        node.daemon(0).is_some_and(|now| now.pid != before.pid)
            && told
                .matches("set_default_active_thread_percentage 20")
                .count()
                == 2
    })
    .await;
    assert_eq!(node.attach(0, "81000M", 100).await, "8192M 20.0");
    assert_eq!(node.mode(0), ComputeMode::ExclusiveProcess);
}

#[tokio::test]
async fn a_restarted_plugin_adopts_the_daemon_and_supervises_it() {
    let node = MpsNode::new("h100-80gb-8");
    let claim = node.share(0, "first", 8 * GIB, 20);
    node.plugin().prepare(claim.clone()).await.unwrap();
    let pid = node.pid(0);

    let plugin = node.plugin();
    plugin.reconcile(Some(node.loaded())).await;
    plugin.converge_daemons().await;
    assert_eq!(node.pid(0), pid);
    let again = plugin.prepare(claim.clone()).await.unwrap();
    assert_eq!(again.len(), 1);
    assert_eq!(node.pid(0), pid);
    assert_eq!(node.told(0).matches("set_default_device_pinned").count(), 1);

    plugin.unprepare(claim).await.unwrap();
    assert_eq!(node.daemon(0), None);
    assert_eq!(
        node.mode(0),
        ComputeMode::Default,
        "as it was before the restart"
    );
}

#[tokio::test]
async fn what_is_left_of_a_daemon_without_claims_is_removed() {
    let node = MpsNode::new("h100-80gb-8");
    let plugin = node.plugin();
    plugin
        .prepare(node.share(0, "first", 8 * GIB, 20))
        .await
        .unwrap();
    let daemon = node.daemon(0).unwrap();
    // As after a crash between the daemon's start and the claim's record.
    std::fs::remove_file(node.path("plugin/claims/uid-first.json")).unwrap();
    node.plugin().converge_daemons().await;
    assert!(!daemon.alive());
    assert!(!node.places(0).folder.exists());
    assert_eq!(node.mode(0), ComputeMode::Default);
}

#[tokio::test]
async fn after_a_reboot_the_daemon_is_started_again_when_the_kubelet_asks() {
    let node = MpsNode::new("h100-80gb-8");
    let claim = node.share(0, "first", 8 * GIB, 20);
    let before = node.plugin().prepare(claim.clone()).await.unwrap();
    let daemon = node.daemon(0).unwrap();
    daemon.signal(rustix::process::Signal::KILL);
    daemon.ended().await.unwrap();
    node.reboot();

    let plugin = node.plugin();
    plugin.reconcile(Some(node.loaded())).await;
    plugin.converge_daemons().await;
    assert_eq!(node.daemon(0), None, "nobody uses the device yet");
    let after = plugin.prepare(claim).await.unwrap();
    assert_eq!(after[0].cdi_device_ids, before[0].cdi_device_ids);
    assert_eq!(node.attach(0, "81000M", 100).await, "8192M 20.0");
}

#[tokio::test]
async fn without_nvml_a_share_is_given_back_and_the_compute_mode_follows_later() {
    let node = MpsNode::new("h100-80gb-8");
    let claim = node.share(0, "first", 8 * GIB, 20);
    // An instance that is gone when its runtime is: its watch would see to the rest.
    let (first, prepared) = (node.plugin(), claim.clone());
    let instance = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = { runtime }.enable_all().build().unwrap();
        runtime.block_on(first.prepare(prepared)).unwrap();
    });
    instance.join().unwrap();
    let (loaded, receiver) = tokio::sync::watch::channel(None);
    let plugin = node.plugin_on(receiver);
    plugin.unprepare(claim).await.unwrap();
    assert_eq!(node.daemon(0), None);
    assert_eq!(node.mode(0), ComputeMode::ExclusiveProcess);
    loaded.send_replace(Some(node.loaded()));
    plugin.converge_daemons().await;
    assert_eq!(node.mode(0), ComputeMode::Default);
    assert!(!node.places(0).folder.exists());
}

#[tokio::test]
async fn a_daemon_that_is_slow_to_start_delays_no_claim_but_those_that_share_its_device() {
    let node = MpsNode::new("h100-80gb-8");
    let plugin = node.plugin();
    let uuid = node.inventory().gpus[0].uuid.clone();
    let hold = node.path("driver/mps-hold").join(uuid);
    std::fs::create_dir_all(hold.parent().unwrap()).unwrap();
    std::fs::write(&hold, "").unwrap();

    let slow = node.share(0, "slow", 8 * GIB, 20);
    let beside = node.share(0, "beside", 8 * GIB, 20);
    let waiting: Vec<_> = [slow, beside]
        .into_iter()
        .map(|claim| {
            let plugin = plugin.clone();
            tokio::spawn(async move { plugin.prepare(claim).await })
        })
        .collect();
    eventually("the daemon is being started", || node.daemon(0).is_some()).await;
    // All of it happens while the first GPU's daemon does not answer.
    plugin
        .prepare(node.share(1, "other", 8 * GIB, 20))
        .await
        .unwrap();
    let part = node.claim("part", "uid-part", &[&node.device(2, "1g10gb-6")]);
    plugin.prepare(part.clone()).await.unwrap();
    plugin.unprepare(part).await.unwrap();
    // The same GPU is refused at once, and not after a wait for a lock.
    let whole = node.claim("whole", "uid-whole", &[&node.device(0, "")]);
    let error = plugin.prepare(whole).await.unwrap_err().to_string();
    assert!(error.contains("-shared"), "{error}");
    assert!(waiting.iter().all(|task| !task.is_finished()));

    std::fs::remove_file(&hold).unwrap();
    for task in waiting {
        task.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_daemon_that_does_not_start_fails_its_claim_with_its_words_and_the_retry_succeeds() {
    let node = MpsNode::new("h100-80gb-8");
    let plugin = node.plugin();
    let program = node.path("driver/usr/bin/nvidia-cuda-mps-control");
    let kept = node.path("kept");
    std::fs::rename(&program, &kept).unwrap();
    std::fs::write(&program, "#!/bin/sh\necho no such luck >&2\nexit 3\n").unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&program, executable).unwrap();
    let claim = node.share(0, "first", 8 * GIB, 20);
    let error = plugin.prepare(claim.clone()).await.unwrap_err().to_string();
    assert!(error.contains("no such luck"), "{error}");
    assert!(node.cdi("uid-first").is_none());
    assert_eq!(node.mode(0), ComputeMode::Default, "nothing is left");

    std::fs::rename(&kept, &program).unwrap();
    plugin.prepare(claim).await.unwrap();
    assert!(node.daemon(0).is_some());
}

#[tokio::test]
async fn a_compute_mode_that_was_refused_is_set_by_the_next_attempt_and_put_back_as_it_was() {
    let node = MpsNode::new("h100-80gb-8");
    let plugin = node.plugin();
    let hardware = fake_nvml::control::Hardware::of(&node.path("driver")).unwrap();
    let function = "nvmlDeviceSetComputeMode";
    hardware.fail(None, function, Some(999)).unwrap();
    let claim = node.share(0, "first", 8 * GIB, 20);
    let error = plugin.prepare(claim.clone()).await.unwrap_err().to_string();
    assert!(error.contains("refuses the compute mode"), "{error}");
    assert_eq!(node.daemon(0), None);

    hardware.fail(None, function, None).unwrap();
    plugin.prepare(claim.clone()).await.unwrap();
    assert_eq!(node.mode(0), ComputeMode::ExclusiveProcess);
    plugin.unprepare(claim).await.unwrap();
    assert_eq!(node.mode(0), ComputeMode::Default);
}

#[tokio::test]
async fn where_mps_cannot_run_shares_are_counted_and_no_daemon_is_started() {
    let node = TestNode::new("h100-80gb-8");
    let plugin = node.plugin();
    let device = format!("{}-shared", node.device(0, ""));
    let object = |name: &str, memory: u64| {
        let uid = format!("uid-{name}");
        node.put(
            name,
            &uid,
            shares_object(name, &uid, &[(&device, memory, 10)]),
        )
    };
    let claim = object("first", 60 * GIB);
    plugin.prepare(claim.clone()).await.unwrap();
    let spec = node.cdi("uid-first").unwrap();
    let granted = env(&spec.devices[0], "GPU_AI_DECKHOUSE_IO_SHARE_uid_first_GPU");
    assert_eq!(granted, Some(format!("{}:10", 60 * GIB).as_str()));
    assert_eq!(env(&spec.devices[0], "CUDA_MPS_PIPE_DIRECTORY"), None);
    assert!(!node.path("mps").exists());
    let error = plugin.prepare(object("second", 30 * GIB)).await;
    assert!(error.unwrap_err().to_string().contains("team/first"));
    plugin.prepare(object("third", 10 * GIB)).await.unwrap();
    plugin.unprepare(claim).await.unwrap();

    // A daemon that the driver gets meanwhile is for devices that nobody shares.
    fake::place_mps_control(control(), &node.path("driver")).unwrap();
    plugin.prepare(object("fourth", 10 * GIB)).await.unwrap();
    assert!(!node.path("mps").exists());
}

#[tokio::test]
async fn the_policy_decides_how_gpus_are_shared() {
    let node = MpsNode::new("h100-80gb-8");
    let inventory = node.inventory();
    let mut settings = node.settings().sharing;
    let root = node.path("driver");
    assert_eq!(settings.kinds(&inventory, &root).len(), 8);
    settings.policy = Policy::Off;
    assert!(settings.kinds(&inventory, &root).is_empty());

    let mut off = node.settings();
    off.sharing.policy = Policy::Off;
    let plugin = node.plugin_with(off);
    let error = plugin.prepare(node.share(0, "first", GIB, 1)).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("--sharing=off"), "{error}");
}

#[tokio::test]
async fn shares_of_an_administrators_partition_have_a_daemon_of_their_own() {
    let node = MpsNode::new("h100-80gb-8");
    let [(pci, low), (_, high)] = [0, 1].map(|nth| node.make_instance("3g.40gb", nth));
    let uuids = [low, high].map(|made| made.compute_instances[0].uuid.clone());
    let plugin = node.plugin();
    let device = |start: u32| format!("{}-shared", node.device(0, &format!("3g40gb-{start}")));
    let (low, high) = (device(0), device(4));
    plugin
        .prepare(node.put_shares("a", &[(&low, 10 * GIB, 50)]))
        .await
        .unwrap();
    plugin
        .prepare(node.put_shares("b", &[(&low, 10 * GIB, 50)]))
        .await
        .unwrap();
    plugin
        .prepare(node.put_shares("c", &[(&high, 30 * GIB, 50)]))
        .await
        .unwrap();
    let pci = pci.dns_label();
    let daemon = |start: u32| {
        let folder = node.path("mps").join(format!("{pci}-{start}-4"));
        Process::read(&Places { folder }).filter(Process::alive)
    };
    let (first, second) = (daemon(0).unwrap(), daemon(4).unwrap());
    assert_ne!(first.pid, second.pid);
    assert_eq!([first.uuid, second.uuid], uuids);
    // The partition's memory is what is shared, not the GPU's.
    let over = plugin
        .prepare(node.put_shares("d", &[(&high, 20 * GIB, 10)]))
        .await;
    assert!(over.unwrap_err().to_string().contains("team/c"));
    // Two daemons in one container cannot be.
    let both = node.put_shares("both", &[(&low, GIB, 0), (&high, GIB, 0)]);
    let error = plugin.prepare(both).await.unwrap_err().to_string();
    assert!(error.contains("one device only"), "{error}");
    // One that does not exist is the administrator's to make.
    let none = format!("{}-shared", node.device(1, "3g40gb-4"));
    let error = plugin
        .prepare(node.put_shares("e", &[(&none, GIB, 1)]))
        .await;
    assert!(error.unwrap_err().to_string().contains("create it"));

    let c = ClaimRef {
        namespace: "team".into(),
        name: "c".into(),
        uid: "uid-c".into(),
    };
    plugin.unprepare(c).await.unwrap();
    assert_eq!(daemon(4), None);
    assert!(daemon(0).is_some());
    assert_eq!(node.instances(), 2, "the administrator's instances stay");
}

#[tokio::test]
async fn an_administrator_looks_at_shared_devices_without_a_limit_and_starts_no_daemon() {
    let node = MpsNode::new("h100-80gb-8");
    let plugin = node.plugin();
    let user = node.share(0, "user", 8 * GIB, 20);
    plugin.prepare(user.clone()).await.unwrap();
    let (pid, told) = (node.pid(0), node.told(0));
    let before = node.inventory();

    let shared = |gpu| format!("{}-shared", node.device(gpu, ""));
    let admin = node.admin_claim("admin", "uid-admin", &[&shared(0), &shared(1)]);
    plugin.prepare(admin.clone()).await.unwrap();
    let spec = node.cdi("uid-admin").unwrap();
    for device in &spec.devices {
        let edits = &device.container_edits;
        let limits = edits.env.iter().filter(|env| env.starts_with("CUDA_MPS"));
        assert_eq!(limits.count(), 0, "{:?}", edits.env);
        let mounts = edits.mounts.iter();
        assert!(mounts.clone().all(|m| !m.container_path.contains("mps")));
    }
    assert_eq!(spec.devices[0].container_edits.device_nodes.len(), 1);
    assert_eq!((node.pid(0), node.told(0)), (pid, told));
    assert!(node.daemon(1).is_none());
    assert_eq!(node.inventory(), before);

    plugin.unprepare(admin).await.unwrap();
    assert_eq!(node.pid(0), pid);
    plugin.unprepare(user).await.unwrap();
    assert!(node.daemon(0).is_none());
}
