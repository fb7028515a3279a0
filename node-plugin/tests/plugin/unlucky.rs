//! What may change between two calls: allocations, boots, cards, other claims.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::resource::v1::ResourceClaim;
use node_plugin::claims::core::Step;
use node_plugin::claims::{ClaimSource, Claims};

use crate::node::{MemoryClaims, TestNode, dies_at, repository};

#[tokio::test]
async fn a_claim_that_was_allocated_elsewhere_since_is_collected() {
    let node = TestNode::new("h100-80gb-8");
    let plugin = node.plugin();
    let moved = node.claim("moved", "uid-1", &[&node.device(0, "1g10gb-6")]);
    plugin.prepare(moved).await.unwrap();
    node.claim("moved", "uid-1", &[]);
    assert_eq!(plugin.collect_garbage().await, 1);
    assert_eq!(node.instances(), 0);
}

/// Answers the first question with nothing: the claim is allocated anew after that.
struct Late {
    claims: Arc<MemoryClaims>,
    asked: AtomicBool,
}

impl ClaimSource for Late {
    fn get<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ResourceClaim>, String>> {
        if self.asked.swap(true, Ordering::Relaxed) {
            self.claims.get(namespace, name)
        } else {
            async { Ok(None) }.boxed()
        }
    }
}

#[tokio::test]
async fn a_claim_that_is_prepared_anew_while_it_is_collected_keeps_its_device() {
    let node = TestNode::new("h100-80gb-8");
    let claim = node.claim("order-0", "uid-1", &[&node.device(0, "1g10gb-6")]);
    node.plugin().prepare(claim).await.unwrap();
    let late = Arc::new(Late {
        claims: node.claims.clone(),
        asked: AtomicBool::new(false),
    });
    let (_sender, loaded) = tokio::sync::watch::channel(Some(node.loaded()));
    let plugin = Claims::open(node.settings(), late, loaded, Arc::new(|_| ())).unwrap();
    assert_eq!(plugin.collect_garbage().await, 0);
    assert_eq!(node.instances(), 1);
}

#[tokio::test]
async fn a_claim_from_before_a_reboot_ends_without_the_instance_of_the_claim_that_came_after() {
    let node = TestNode::new("h100-80gb-8");
    let device = node.device(0, "1g10gb-6");
    let old = node.claim("old", "uid-1", &[&device]);
    node.plugin().prepare(old.clone()).await.unwrap();
    node.reboot();

    let plugin = node.plugin();
    let new = node.claim("new", "uid-2", &[&device]);
    plugin.prepare(new.clone()).await.unwrap();
    plugin.unprepare(old).await.unwrap();
    assert_eq!(node.instances(), 1);
    plugin.unprepare(new).await.unwrap();
    assert_eq!(node.instances(), 0);
}

#[tokio::test]
async fn an_instance_that_a_crash_left_after_a_reboot_still_belongs_to_its_claim() {
    let node = TestNode::new("h100-80gb-8");
    let device = node.device(0, "1g10gb-6");
    let old = node.claim("old", "uid-1", &[&device]);
    node.plugin().prepare(old.clone()).await.unwrap();
    node.reboot();
    let dying = node.plugin_stopping(dies_at(Step::Acted));
    dying.prepare(old.clone()).await.unwrap_err();
    assert_eq!(node.instances(), 1);

    let plugin = node.plugin();
    let new = node.claim("new", "uid-2", &[&device]);
    let error = plugin.prepare(new.clone()).await.unwrap_err().to_string();
    assert!(error.contains("team/old"), "{error}");
    plugin.unprepare(old).await.unwrap();
    plugin.prepare(new.clone()).await.unwrap();
    plugin.unprepare(new).await.unwrap();
    assert_eq!(node.instances(), 0);
}

#[tokio::test]
async fn a_claim_whose_gpu_is_gone_can_end() {
    let node = TestNode::new("h100-80gb-8");
    let claim = node.claim("order-0", "uid-1", &[&node.device(0, "1g10gb-6")]);
    node.plugin().prepare(claim.clone()).await.unwrap();
    let other = repository().join("tests/fixtures/topologies/t4-1.yaml");
    std::fs::copy(other, node.path("driver/topology.yaml")).unwrap();
    std::fs::remove_file(node.path("driver/state.json")).unwrap();

    let plugin = node.plugin();
    let error = plugin.prepare(claim.clone()).await.unwrap_err().to_string();
    assert!(error.contains("there is no GPU at"), "{error}");
    plugin.unprepare(claim).await.unwrap();
    assert_eq!(node.cdi_files(), Vec::<String>::new());
}

#[tokio::test]
async fn administrative_access_sees_every_device_and_makes_or_takes_none() {
    let node = TestNode::new("h100-80gb-8");
    let plugin = node.plugin();
    let (held, free, whole) = (
        node.device(0, "1g10gb-6"),
        node.device(0, "4g40gb-0"),
        node.device(0, ""),
    );
    let user = node.claim("user", "uid-1", &[&held]);
    plugin.prepare(user.clone()).await.unwrap();
    let admin = node.admin_claim("admin", "uid-2", &[&held, &free, &whole]);
    plugin.prepare(admin.clone()).await.unwrap();
    assert_eq!(node.instances(), 1);
    let nodes: Vec<usize> = node
        .cdi("uid-2")
        .unwrap()
        .devices
        .iter()
        .map(|device| device.container_edits.device_nodes.len())
        .collect();
    // The last is the metadata of the request.
    assert_eq!(
        nodes,
        [3, 1, 1, 0],
        "the GPU's, and what opens the instance"
    );

    // Neither is in the other's way.
    let second = node.claim("second", "uid-3", &[&free]);
    plugin.prepare(second).await.unwrap();
    plugin.unprepare(admin).await.unwrap();
    assert_eq!(node.instances(), 2);
    plugin.unprepare(user).await.unwrap();
    assert_eq!(node.instances(), 1);
}
