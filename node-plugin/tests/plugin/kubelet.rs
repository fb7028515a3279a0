//! The wire contract, spoken by a client that does what the kubelet does.

use std::time::Duration;

use e2e::kubelet::{Kubelet, Plugin};
use kubelet_api::dra::{v1, v1beta1};
use node_plugin::claims::checkpoint::ClaimRef;
use node_plugin::kubelet::{Servers, Settings};
use node_plugin::readiness::Readiness;

use crate::node::{NODE, TestNode};

const LIMIT: Duration = Duration::from_secs(5);

async fn serve(node: &TestNode, uid: &str) -> (Servers, Readiness) {
    let settings = Settings {
        plugins: node.path("p"),
        registry: node.path("r"),
        pod_uid: uid.to_owned(),
        pool: NODE.to_owned(),
    };
    let (_, wanted) = tokio::sync::watch::channel(None);
    let readiness = Readiness::default();
    let servers = Servers::start(&settings, node.plugin(), readiness.clone(), wanted)
        .await
        .unwrap();
    (servers, readiness)
}

async fn register(node: &TestNode) -> Plugin {
    Kubelet::new(node.path("r"))
        .register("gpu.ai.deckhouse.io", LIMIT)
        .await
        .unwrap()
}

fn wire(claim: &ClaimRef) -> v1::Claim {
    let ClaimRef {
        namespace,
        name,
        uid,
    } = claim.clone();
    v1::Claim {
        namespace,
        uid,
        name,
    }
}

#[tokio::test]
async fn the_kubelet_registers_prepares_and_unprepares() {
    let node = TestNode::new("h100-80gb-8");
    let (servers, readiness) = serve(&node, "pod-1").await;
    assert!(readiness.check().unwrap_err().contains("not registered"));
    let plugin = register(&node).await;
    readiness.check().unwrap();
    assert_eq!(
        plugin.info.supported_versions,
        [
            "v1.DRAPlugin",
            "v1beta1.DRAPlugin",
            "v1.DRAResourceHealth",
            "v1alpha1.DRAResourceHealth"
        ]
    );

    let device = node.device(0, "1g10gb-6");
    let claim = wire(&node.claim("order-0", "uid-1", &[&device]));
    let devices = plugin.prepare_claim(&claim).await.unwrap();
    assert_eq!(devices[0].request_names, ["gpu"]);
    assert_eq!(
        (devices[0].pool_name.as_str(), &devices[0].device_name),
        (NODE, &device)
    );
    assert_eq!(plugin.prepare_claim(&claim).await.unwrap(), devices);
    plugin.unprepare_claim(&claim).await.unwrap();
    plugin.unprepare_claim(&claim).await.unwrap();
    assert_eq!(node.instances(), 0);
    servers.stop().await;
    assert!(!plugin.socket.exists());
}

#[tokio::test]
async fn one_bad_claim_does_not_fail_the_other() {
    let node = TestNode::new("h100-80gb-8");
    let (servers, _) = serve(&node, "pod-1").await;
    let plugin = register(&node).await;
    let good = wire(&node.claim("good", "uid-1", &[&node.device(0, "1g10gb-6")]));
    let mut bad = wire(&node.claim("bad", "uid-2", &[&node.device(0, "1g10gb-5")]));
    bad.uid = "uid-before".to_owned();
    let answers = plugin.prepare(&[good, bad]).await.unwrap();
    assert_eq!(answers["uid-1"].as_ref().unwrap().len(), 1);
    assert!(
        answers["uid-before"]
            .as_ref()
            .unwrap_err()
            .contains("replaced")
    );
    servers.stop().await;
}

#[tokio::test]
async fn a_new_instance_takes_over_while_the_old_one_still_serves() {
    let node = TestNode::new("h100-80gb-8");
    let (old, _) = serve(&node, "old").await;
    let claim = wire(&node.claim("order-0", "uid-1", &[&node.device(0, "1g10gb-6")]));
    let plugin = register(&node).await;
    let devices = plugin.prepare_claim(&claim).await.unwrap();

    let (new, _) = serve(&node, "new").await;
    assert_eq!(Kubelet::new(node.path("r")).sockets().unwrap().len(), 2);
    assert_eq!(plugin.prepare_claim(&claim).await.unwrap(), devices);
    old.stop().await;

    let plugin = register(&node).await;
    assert_eq!(plugin.prepare_claim(&claim).await.unwrap(), devices);
    plugin.unprepare_claim(&claim).await.unwrap();
    assert_eq!(node.instances(), 0);
    new.stop().await;
}

#[tokio::test]
async fn stopping_does_not_wait_for_the_kubelets_open_connection() {
    let node = TestNode::new("t4-1");
    let (servers, _) = serve(&node, "pod-1").await;
    let _connected = register(&node).await;
    tokio::time::timeout(Duration::from_secs(12), servers.stop())
        .await
        .unwrap();
}

#[tokio::test]
async fn an_older_kubelet_gets_the_same_in_v1beta1() {
    let node = TestNode::new("t4-1");
    let (servers, _) = serve(&node, "pod-1").await;
    let path = servers.sockets().endpoint.display().to_string();
    let endpoint = tonic::transport::Endpoint::try_from(format!("unix:{path}")).unwrap();
    let mut client =
        v1beta1::dra_plugin_client::DraPluginClient::new(endpoint.connect().await.unwrap());
    let ClaimRef {
        namespace,
        name,
        uid,
    } = node.claim("order-0", "uid-1", &[&node.device(0, "")]);
    let claims = vec![v1beta1::Claim {
        namespace,
        uid,
        name,
    }];
    let request = v1beta1::NodePrepareResourcesRequest {
        claims: claims.clone(),
    };
    let answer = client
        .node_prepare_resources(request)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        answer.claims["uid-1"].devices[0].device_name,
        node.device(0, "")
    );
    let request = v1beta1::NodeUnprepareResourcesRequest { claims };
    let answer = client
        .node_unprepare_resources(request)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(answer.claims["uid-1"].error, "");
    servers.stop().await;
}

#[tokio::test]
async fn a_kubelet_that_refuses_is_reported_and_the_plugin_keeps_serving() {
    use kubelet_api::registration::v1::RegistrationStatus;
    use kubelet_api::registration::v1::registration_client::RegistrationClient;

    let node = TestNode::new("t4-1");
    let (servers, readiness) = serve(&node, "pod-1").await;
    let path = servers.sockets().registration.display().to_string();
    let endpoint = tonic::transport::Endpoint::try_from(format!("unix:{path}")).unwrap();
    let mut client = RegistrationClient::new(endpoint.connect().await.unwrap());
    let status = RegistrationStatus {
        plugin_registered: false,
        error: "no DRA".to_owned(),
    };
    client.notify_registration_status(status).await.unwrap();
    let reason = readiness.check().unwrap_err();
    assert!(
        reason.contains("no DRA") && reason.contains("DynamicResourceAllocation"),
        "{reason}"
    );

    let plugin = register(&node).await;
    readiness.check().unwrap();
    let claim = wire(&node.claim("order-0", "uid-1", &[&node.device(0, "")]));
    plugin.prepare_claim(&claim).await.unwrap();
    servers.stop().await;
}
