//! Liveness: what a restart mends, and what it does not.

use std::time::Duration;

use e2e::control_plane::ControlPlane;
use e2e::kubelet::Kubelet;
use fake_nvml::control::Hardware;
use node_plugin::kubelet::{Servers, Settings};
use node_plugin::liveness::Liveness;
use node_plugin::metrics::{Call, Calls};
use node_plugin::readiness::Readiness;
use tokio::sync::watch;

use crate::node::{NODE, TestNode};
use crate::server::{LIMIT, Running, create_node, until};

const LONG: Duration = Duration::from_secs(600);

async fn serve(node: &TestNode) -> Servers {
    let settings = Settings {
        plugins: node.path("p"),
        registry: node.path("r"),
        pod_uid: "pod-1".to_owned(),
        pool: NODE.to_owned(),
    };
    let (_, wanted) = watch::channel(None);
    Servers::start(&settings, node.plugin(), Readiness::default(), wanted)
        .await
        .unwrap()
}

fn liveness(servers: &Servers, calls: &Calls, hung: Duration) -> Liveness {
    Liveness {
        calls: calls.clone(),
        sockets: servers.sockets().clone(),
        hung,
        answered: watch::channel(false).1,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_call_of_nvml_is_alive_a_hung_one_is_not_and_one_that_returned_is_again() {
    let node = TestNode::new("t4-1");
    let servers = serve(&node).await;
    let calls = Calls::default();
    let (sender, receiver) = std::sync::mpsc::channel::<()>();
    let hanging = std::thread::spawn({
        let calls = calls.clone();
        move || calls.make(Call::Inventory, || receiver.recv())
    });
    while calls.oldest().is_none() {
        tokio::task::yield_now().await;
    }
    assert_eq!(liveness(&servers, &calls, LONG).check().await, Ok(()));
    let strict = liveness(&servers, &calls, Duration::ZERO);
    let reason = strict.check().await.unwrap_err();
    assert!(
        reason.contains("NVML hangs: its call inventory has not returned"),
        "{reason}"
    );
    // One broken card: NVML answers about another.
    let others = Liveness {
        answered: watch::channel(true).1,
        ..strict.clone()
    };
    assert_eq!(others.check().await, Ok(()));
    sender.send(()).unwrap();
    hanging.join().unwrap().unwrap();
    assert_eq!(strict.check().await, Ok(()));
    servers.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_that_answers_late_is_alive_and_one_that_does_not_is_not() {
    let client = ControlPlane::shared().unwrap().client().unwrap();
    create_node(&client, "hanging").await;
    let node = TestNode::new("t4-1");
    let strict = ["--nvml-hung-seconds=2", "--health-interval-seconds=1"];
    let running = Running::start_with(&node, "hanging", "pod-1", client, &strict);
    Kubelet::new(node.path("r"))
        .register("gpu.ai.deckhouse.io", LIMIT)
        .await
        .unwrap();
    until(&running, "/readyz", "200 OK").await;

    // Each look takes half a second more, which is slow and not hung.
    let hardware = Hardware::of(&node.path("driver")).unwrap();
    // The first is of each look, the second of each reading of a GPU's health: a card that
    // hangs alone is no reason for a restart.
    let delay = |time| {
        for function in ["nvmlDeviceGetCount_v2", "nvmlDeviceGetUUID"] {
            hardware.delay(None, function, time).unwrap();
        }
    };
    delay(Duration::from_millis(500));
    for _ in 0..20 {
        let answer = running.get("/livez").await;
        assert!(answer.contains("200 OK"), "{answer}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    delay(Duration::from_secs(20));
    until(&running, "/livez", "NVML hangs").await;
    delay(Duration::ZERO);
    until(&running, "/livez", "200 OK").await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_socket_that_somebody_removed_and_a_server_that_ended_are_not_alive() {
    let node = TestNode::new("t4-1");
    let servers = serve(&node).await;
    let alive = liveness(&servers, &Calls::default(), LONG);
    assert_eq!(alive.check().await, Ok(()));

    let (there, away) = (&servers.sockets().endpoint, node.path("away"));
    std::fs::rename(there, &away).unwrap();
    let reason = alive.check().await.unwrap_err();
    assert!(reason.contains("node service"), "{reason}");
    std::fs::rename(&away, there).unwrap();
    assert_eq!(alive.check().await, Ok(()));

    // The file stays and nobody listens, as after a task that died.
    let there = servers.sockets().registration.clone();
    std::fs::rename(&there, node.path("kept")).unwrap();
    drop(std::os::unix::net::UnixListener::bind(&there).unwrap());
    let reason = alive.check().await.unwrap_err();
    assert!(reason.contains("registration service"), "{reason}");
    servers.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_answers_the_call_under_way_before_it_deregisters() {
    let node = TestNode::new("h100-80gb-8");
    let servers = serve(&node).await;
    let plugin = Kubelet::new(node.path("r"))
        .register("gpu.ai.deckhouse.io", Duration::from_secs(5))
        .await
        .unwrap();
    let claim = node.claim("order-0", "uid-1", &[&node.device(0, "1g10gb-6")]);
    // Another instance works on this claim, so the call has to wait.
    let lock = lock_of_the_gpu(&node);
    let waiting = tokio::spawn(async move {
        let claim = kubelet_api::dra::v1::Claim {
            namespace: claim.namespace,
            name: claim.name,
            uid: claim.uid,
        };
        plugin.prepare_claim(&claim).await
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waiting.is_finished());
    let registration = servers.sockets().registration.clone();
    let stopping = tokio::spawn(servers.stop());
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(
        registration.exists(),
        "deregistered while a call is under way"
    );
    drop(lock);
    assert_eq!(waiting.await.unwrap().unwrap().len(), 1);
    stopping.await.unwrap();
    assert!(!registration.exists());
}

/// Holds the lock of the first GPU as another process would.
fn lock_of_the_gpu(node: &TestNode) -> std::fs::File {
    let folder = node.path("plugin/locks");
    std::fs::create_dir_all(&folder).unwrap();
    let file = std::fs::File::options()
        .create(true)
        .append(true)
        .open(folder.join(format!("{}.lock", node.device(0, ""))))
        .unwrap();
    file.lock().unwrap();
    file
}
