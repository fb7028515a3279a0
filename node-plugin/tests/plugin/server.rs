//! The whole plugin against a real API server.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Parser;
use e2e::control_plane::ControlPlane;
use e2e::kubelet::Kubelet;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, ResourceExt};
use kubelet_api::dra::v1::Claim;
use node_plugin::options::Options;
use node_plugin::slices::publisher::UNSERVED;
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::golden;
use crate::node::TestNode;

pub(crate) const LIMIT: Duration = Duration::from_secs(30);

pub(crate) fn client() -> Client {
    ControlPlane::shared().unwrap().client().unwrap()
}

pub(crate) async fn create_node(client: &Client, name: &str) {
    let node: Node = serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
    Api::all(client.clone())
        .create(&PostParams::default(), &node)
        .await
        .unwrap();
}

pub(crate) struct Running {
    stop: CancellationToken,
    task: JoinHandle<anyhow::Result<()>>,
    admin: SocketAddr,
}

impl Running {
    pub(crate) fn start(node: &TestNode, name: &str, client: Client) -> Self {
        Self::start_as(node, name, "pod-1", client)
    }

    fn start_as(node: &TestNode, name: &str, pod: &str, client: Client) -> Self {
        Self::start_with(node, name, pod, client, &[])
    }

    /// The same with further flags.
    pub(crate) fn start_with(
        node: &TestNode,
        name: &str,
        pod: &str,
        client: Client,
        more: &[&str],
    ) -> Self {
        // The port is free at this moment, and the kernel hands out others for a while.
        let admin = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        let root = node.path("driver");
        let flag = |flag: &str, path: &Path| format!("--{flag}={}", path.display());
        let flags = [
            "node-plugin".to_owned(),
            format!("--node-name={name}"),
            format!("--pod-uid={pod}"),
            flag("driver-root", &root),
            flag("dev-root", &root.join("dev")),
            flag("proc-root", &root.join("proc")),
            flag("sys-root", &root.join("sys")),
            flag("kubelet-plugins-dir", &node.path("p")),
            flag("kubelet-registry-dir", &node.path("r")),
            flag("cdi-dir", &node.path("cdi")),
            flag("mps-dir", &node.path("mps")),
            flag("mps-launcher", Path::new(crate::node::LAUNCHER)),
            format!("--admin-address={admin}"),
            "--resync-seconds=1".to_owned(),
        ];
        let more = more.iter().map(|flag| (*flag).to_owned());
        let options = Options::parse_from(flags.into_iter().chain(more));
        let stop = CancellationToken::new();
        let task = tokio::spawn(node_plugin::run(options, client, stop.clone()));
        Self { stop, task, admin }
    }

    pub(crate) async fn get(&self, path: &str) -> String {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let Ok(mut stream) = TcpStream::connect(self.admin).await else {
            return String::new();
        };
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    pub(crate) async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap().unwrap();
    }
}

pub(crate) async fn slices_of(client: &Client, node: &str) -> BTreeMap<String, ResourceSlice> {
    let selector = format!("spec.nodeName={node},spec.driver=gpu.ai.deckhouse.io");
    let api: Api<ResourceSlice> = Api::all(client.clone());
    let list = api
        .list(&ListParams::default().fields(&selector))
        .await
        .unwrap();
    list.items
        .into_iter()
        .map(|slice| (slice.name_any(), slice))
        .collect()
}

/// Waits until the slices of a node are as they should be.
pub(crate) async fn wait_for(
    client: &Client,
    node: &str,
    ready: impl Fn(&BTreeMap<String, ResourceSlice>) -> bool,
) -> BTreeMap<String, ResourceSlice> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let slices = slices_of(client, node).await;
        if ready(&slices) {
            return slices;
        }
        assert!(
            Instant::now() < deadline,
            "the slices of {node} are still {:?}",
            slices.keys()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Whether the pool is published to its last slice, all of one generation: slices are written one
/// after the other, and what stands between is no answer.
pub(crate) fn complete(slices: &BTreeMap<String, ResourceSlice>) -> bool {
    let pools: Vec<_> = slices.values().map(|slice| &slice.spec.pool).collect();
    pools.first().is_some_and(|first| {
        i64::try_from(pools.len()) == Ok(first.resource_slice_count)
            && pools.iter().all(|pool| pool.generation == first.generation)
    })
}

/// Asks until the answer is as expected.
pub(crate) async fn until(running: &Running, path: &str, expected: &str) -> String {
    let deadline = Instant::now() + LIMIT;
    let mut answer = String::new();
    while !answer.contains(expected) {
        assert!(
            Instant::now() < deadline,
            "no {expected} in {path}: {answer}"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
        answer = running.get(path).await;
    }
    answer
}

pub(crate) async fn wait_until_ready(running: &Running) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let answer = running.get("/readyz").await;
        if answer.starts_with("HTTP/1.1 200") {
            return;
        }
        assert!(
            Instant::now() < deadline && !running.task.is_finished(),
            "{answer}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

pub(crate) fn versions(slices: &BTreeMap<String, ResourceSlice>) -> Vec<Option<String>> {
    slices.values().map(ResourceExt::resource_version).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_api_server_takes_every_golden_slice_as_it_is() {
    let api: Api<ResourceSlice> = Api::all(client());
    let mut params = PatchParams::apply("test").force();
    params.dry_run = true;
    for (scene, slices) in golden::all() {
        for slice in slices {
            let stored = api
                .patch(&slice.name_any(), &params, &Patch::Apply(&slice))
                .await
                .unwrap();
            assert_eq!(stored.spec, slice.spec, "{scene}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slices_are_owned_by_the_node_written_once_and_back_at_once_after_a_wipe() {
    let (client, name) = (client(), "publishing");
    create_node(&client, name).await;
    let node = TestNode::new("h100-80gb-8");
    let running = Running::start(&node, name, client.clone());
    let plugin = Kubelet::new(node.path("r"))
        .register("gpu.ai.deckhouse.io", LIMIT)
        .await
        .unwrap();
    // One counter slice, two GPUs' partitions in each of four, the whole devices.
    let slices = wait_for(&client, name, |slices| slices.len() == 6).await;
    wait_until_ready(&running).await;
    let uid = Api::<Node>::all(client.clone())
        .get(name)
        .await
        .unwrap()
        .uid();
    for slice in slices.values() {
        assert_eq!(
            slice.metadata.owner_references.as_ref().unwrap()[0].uid,
            uid.clone().unwrap()
        );
        assert_eq!(
            (slice.spec.pool.name.as_str(), slice.spec.pool.generation),
            (name, 1)
        );
        assert_eq!(slice.spec.pool.resource_slice_count, 6);
    }

    // Preparing a claim, and several looks at the GPUs after it, write nothing.
    let namespace = ControlPlane::shared()
        .unwrap()
        .namespace("publishing")
        .await
        .unwrap();
    let device = node.device(0, "1g10gb-6");
    let claim = allocated_claim(&client, &namespace, name, &device).await;
    let prepared = plugin.prepare_claim(&claim).await.unwrap();
    assert_eq!(prepared[0].device_name, device);
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(versions(&slices_of(&client, name).await), versions(&slices));

    // As a kubelet does when it starts.
    let api: Api<ResourceSlice> = Api::all(client.clone());
    let own = ListParams::default().fields(&format!("spec.nodeName={name}"));
    let before = versions(&slices);
    api.delete_collection(&DeleteParams::default(), &own)
        .await
        .unwrap();
    let wiped = Instant::now();
    let new = wait_for(&client, name, |slices| {
        slices.len() == 6 && versions(slices).iter().all(|v| !before.contains(v))
    })
    .await;
    // One second on an idle machine; this one may be busy building.
    assert!(
        wiped.elapsed() < Duration::from_secs(5),
        "{:?}",
        wiped.elapsed()
    );
    assert!(new.values().all(|slice| slice.spec.pool.generation == 1));

    // Ended without a successor, its devices are marked: nobody would prepare them.
    running.stop().await;
    let left = slices_of(&client, name).await;
    assert!(complete(&left));
    let devices = |slices: &BTreeMap<String, ResourceSlice>| -> Vec<Device> {
        let all = slices.values().filter_map(|s| s.spec.devices.clone());
        all.flatten().collect()
    };
    assert!(devices(&left).iter().all(|device| {
        let taints = device.taints.iter().flatten();
        taints
            .filter(|taint| taint.key == UNSERVED && taint.effect == "NoSchedule")
            .count()
            == 1
    }));
    assert_eq!(devices(&left).len(), devices(&new).len());

    // A restart finds its world as it was but for that.
    let running = Running::start(&node, name, client.clone());
    let plugin = Kubelet::new(node.path("r"))
        .register("gpu.ai.deckhouse.io", LIMIT)
        .await
        .unwrap();
    let again = wait_for(&client, name, |slices| {
        complete(slices) && devices(slices) == devices(&new)
    })
    .await;
    // Taints come and go without a new generation: the pool is whole all the while.
    assert!(again.values().all(|s| s.spec.pool.generation == 1));
    wait_until_ready(&running).await;
    assert_eq!(plugin.prepare_claim(&claim).await.unwrap(), prepared);
    plugin.unprepare_claim(&claim).await.unwrap();
    assert_eq!(node.instances(), 0);
    // The next look finds the GPU empty again.
    let gpu = node.inventory().gpus.remove(0);
    let (address, room) = (gpu.pci, gpu.memory_bytes);
    let room = format!(r#"largest_placeable_device_bytes{{gpu="{address}"}} {room}"#);
    let metrics = until(&running, "/metrics", &room).await;
    assert!(
        metrics.contains("ai_inference_node_plugin_published_devices 216"),
        "{metrics}"
    );
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_nvml_that_does_not_load_gives_an_empty_pool_a_reason_and_a_second_chance() {
    let (client, name) = (client(), "broken");
    create_node(&client, name).await;
    let node = TestNode::new("t4-1");
    let library = node.path("driver/lib/libnvidia-ml.so.1");
    let good = std::fs::read(&library).unwrap();
    std::fs::remove_file(&library).unwrap();
    std::fs::write(&library, "not a library").unwrap();

    let running = Running::start(&node, name, client.clone());
    let slices = wait_for(&client, name, |slices| slices.len() == 1).await;
    assert!(slices.values().all(|slice| slice.spec.devices.is_none()));
    let answer = running.get("/readyz").await;
    assert!(
        answer.contains("503") && answer.contains("cannot be loaded as NVML"),
        "{answer}"
    );
    assert!(running.get("/livez").await.contains("200 OK"));

    std::fs::remove_file(&library).unwrap();
    std::fs::write(&library, good).unwrap();
    let has_device = |slices: &BTreeMap<String, ResourceSlice>| {
        slices
            .values()
            .any(|s| s.spec.devices.as_ref().is_some_and(|d| !d.is_empty()))
    };
    wait_for(&client, name, has_device).await;
    running.stop().await;

    let events: Api<k8s_openapi::api::events::v1::Event> = Api::namespaced(client, "default");
    let events = events.list(&ListParams::default()).await.unwrap();
    let about = |event: &&k8s_openapi::api::events::v1::Event| {
        event.regarding.as_ref().and_then(|r| r.name.as_deref()) == Some(name)
    };
    let event = events
        .items
        .iter()
        .find(about)
        .expect("an event about the node");
    assert_eq!(event.reason.as_deref(), Some("NVMLUnavailable"));
}

/// A claim as the scheduler leaves it.
pub(crate) async fn allocated_claim(
    client: &Client,
    namespace: &str,
    pool: &str,
    device: &str,
) -> Claim {
    let api: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
    let claim: ResourceClaim = serde_json::from_value(json!({
        "metadata": {"name": "order-0"},
        "spec": {"devices": {"requests": [
            {"name": "gpu", "exactly": {"deviceClassName": "mig.ai.deckhouse.io"}},
        ]}},
    }))
    .unwrap();
    let created = api.create(&PostParams::default(), &claim).await.unwrap();
    let status = json!({"status": {"allocation": {
        "devices": {"results": [{
            "request": "gpu", "driver": "gpu.ai.deckhouse.io", "pool": pool, "device": device,
        }]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": [pool]},
        ]}]},
    }}});
    api.patch_status("order-0", &PatchParams::default(), &Patch::Merge(&status))
        .await
        .unwrap();
    Claim {
        namespace: namespace.to_owned(),
        name: "order-0".to_owned(),
        uid: created.uid().unwrap(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_instance_is_ready_beside_the_first_and_publishes_when_that_ends() {
    let (client, name) = (client(), "updating");
    create_node(&client, name).await;
    let node = TestNode::new("a30-2");
    let kubelet = Kubelet::new(node.path("r"));
    let old = Running::start_as(&node, name, "old", client.clone());
    kubelet
        .register("gpu.ai.deckhouse.io", LIMIT)
        .await
        .unwrap();
    wait_until_ready(&old).await;
    let before = slices_of(&client, name).await;

    let new = Running::start_as(&node, name, "new", client.clone());
    let socket = node.path("r/gpu.ai.deckhouse.io@new-reg.sock");
    let deadline = Instant::now() + LIMIT;
    while kubelet.register_socket(&socket).await.is_err() {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    wait_until_ready(&new).await;
    assert_eq!(versions(&slices_of(&client, name).await), versions(&before));
    old.stop().await;
    assert_eq!(versions(&slices_of(&client, name).await), versions(&before));

    let api: Api<ResourceSlice> = Api::all(client.clone());
    let own = ListParams::default().fields(&format!("spec.nodeName={name}"));
    api.delete_collection(&DeleteParams::default(), &own)
        .await
        .unwrap();
    let after = wait_for(&client, name, |slices| slices.len() == before.len()).await;
    // The old one was replaced and marked nothing.
    let devices = after.values().flat_map(|s| s.spec.devices.iter().flatten());
    assert!(devices.into_iter().all(|device| device.taints.is_none()));
    new.stop().await;
}

#[tokio::test]
async fn a_lost_gpu_stays_published_under_a_taint_that_goes_when_the_gpu_is_back() {
    let (client, name) = (client(), "lossy");
    create_node(&client, name).await;
    let node = TestNode::new("a30-2");
    let running = Running::start(&node, name, client.clone());
    let before = wait_for(&client, name, complete).await;
    let gpu = node.inventory().gpus.remove(1);
    let device = node.device(1, "");
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let lose = |lost: bool| {
        let gpus = json!({&gpu.uuid: {"mig": true, "migPending": true, "lost": lost}});
        let state = json!({"bootId": boot.trim(), "gpus": gpus});
        let new = node.path("driver/state.new");
        std::fs::write(&new, state.to_string()).unwrap();
        std::fs::rename(new, node.path("driver/state.json")).unwrap();
    };
    let tainted = |slices: &BTreeMap<String, ResourceSlice>| -> Vec<(String, bool)> {
        let devices = slices
            .values()
            .flat_map(|s| s.spec.devices.iter().flatten());
        devices
            .flat_map(|device| {
                let taints = device.taints.iter().flatten();
                taints.map(|taint| (device.name.clone(), taint.time_added.is_some()))
            })
            .collect()
    };

    let devices_of = |slices: &BTreeMap<String, ResourceSlice>, prefix: &str| {
        let devices = slices
            .values()
            .flat_map(|s| s.spec.devices.iter().flatten());
        devices.filter(|d| d.name.starts_with(prefix)).count()
    };

    lose(true);
    let lost = devices_of(&before, &device);
    let after = wait_for(&client, name, |slices| {
        complete(slices) && tainted(slices).len() == lost
    })
    .await;
    let all = tainted(&after);
    assert!(
        all.iter()
            .all(|(name, timed)| name.starts_with(&device) && *timed),
        "{all:?}"
    );
    let metrics = running.get("/metrics").await;
    assert!(metrics.contains("_unreadable_gpus 1"), "{metrics}");
    let answer = running.get("/readyz").await;
    assert!(
        answer.contains("gpus: ok"),
        "the other one is served: {answer}"
    );
    // Two more looks change nothing, the taint's time above all.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(slices_of(&client, name).await, after);
    lose(false);
    let again = wait_for(&client, name, |slices| {
        complete(slices) && tainted(slices).is_empty()
    })
    .await;
    let devices = |slices: &BTreeMap<String, ResourceSlice>| -> Vec<_> {
        slices.values().map(|s| s.spec.devices.clone()).collect()
    };
    assert_eq!(devices(&again), devices(&before));
    running.stop().await;
}

/// A road to the API server that can be closed: connections end, new ones too.
async fn road(to: String) -> (SocketAddr, watch::Sender<bool>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, open) = watch::channel(true);
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let (mut open, to) = (open.clone(), to.clone());
            tokio::spawn(async move {
                if !*open.borrow() {
                    return;
                }
                let mut far = TcpStream::connect(to).await.unwrap();
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                    _ = open.wait_for(|open| !open) => {}
                }
            });
        }
    });
    (address, sender)
}

#[tokio::test]
async fn an_api_server_that_was_away_leaves_no_doubt_behind_when_nothing_changed() {
    let plane = ControlPlane::shared().unwrap();
    let direct = client();
    create_node(&direct, "remote").await;
    let kubeconfig = Kubeconfig::read_from(plane.kubeconfig()).unwrap();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
        .await
        .unwrap();
    let to = config.cluster_url.authority().unwrap().to_string();
    let (address, open) = road(to).await;
    config.cluster_url = format!("https://{address}").parse().unwrap();
    let node = TestNode::new("t4-1");
    let running = Running::start(&node, "remote", Client::try_from(config).unwrap());
    let kubelet = Kubelet::new(node.path("r"));
    kubelet
        .register("gpu.ai.deckhouse.io", LIMIT)
        .await
        .unwrap();
    wait_until_ready(&running).await;

    open.send_replace(false);
    let deadline = Instant::now() + LIMIT;
    let mut answer = String::new();
    while answer.is_empty() || answer.contains("slices: ok") {
        assert!(Instant::now() < deadline, "{answer}");
        tokio::time::sleep(Duration::from_millis(50)).await;
        answer = running.get("/readyz").await;
    }
    let before = versions(&slices_of(&direct, "remote").await);
    open.send_replace(true);
    wait_until_ready(&running).await;
    assert_eq!(versions(&slices_of(&direct, "remote").await), before);
    running.stop().await;
}
