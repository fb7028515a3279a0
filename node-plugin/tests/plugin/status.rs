//! The status of claims' devices, written to a real API server with the plugin's own
//! account.

use std::time::{Duration, Instant};

use e2e::control_plane::ControlPlane;
use e2e::kubelet::Kubelet;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use kubelet_api::dra::v1::Claim;
use serde_json::{Value, json};

use crate::node::TestNode;
use crate::rights::{installed, plugin_config};
use crate::server::{LIMIT, Running, create_node, wait_until_ready};

const DRIVER: &str = "gpu.ai.deckhouse.io";

/// The plugin's own way to the API server, from this node.
async fn plugin_client(namespace: &str, node: &str) -> Client {
    Client::try_from(plugin_config(namespace, Some(node)).await).unwrap()
}

fn admin() -> Client {
    ControlPlane::shared().unwrap().client().unwrap()
}

/// What the scheduler says of a claim for devices of one node.
fn allocation(node: &str, results: &Value) -> Value {
    json!({"status": {"allocation": {
        "devices": {"results": results},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": [node]},
        ]}]},
    }}})
}

fn result(pool: &str, device: &str) -> Value {
    json!({"request": "gpu", "driver": DRIVER, "pool": pool, "device": device})
}

/// A claim as the scheduler leaves it.
async fn allocated(namespace: &str, name: &str, node: &str, results: &Value) -> Claim {
    let api: Api<ResourceClaim> = Api::namespaced(admin(), namespace);
    let administrative = results[0]["adminAccess"].as_bool().unwrap_or(false);
    let claim: ResourceClaim = serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [
            {"name": "gpu", "exactly": {"deviceClassName": "mig.ai.deckhouse.io",
                                        "adminAccess": administrative}},
        ]}},
    }))
    .unwrap();
    let created = api.create(&PostParams::default(), &claim).await.unwrap();
    let status = Patch::Merge(allocation(node, results));
    api.patch_status(name, &PatchParams::default(), &status)
        .await
        .unwrap();
    Claim {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: created.uid().unwrap(),
    }
}

/// Waits until a claim's devices have a status that is as it should be.
pub(crate) async fn devices_when(
    claim: &Claim,
    ready: impl Fn(&[AllocatedDeviceStatus]) -> bool,
) -> (Vec<AllocatedDeviceStatus>, Option<String>) {
    let api: Api<ResourceClaim> = Api::namespaced(admin(), &claim.namespace);
    let deadline = Instant::now() + LIMIT;
    loop {
        let object = api.get(&claim.name).await.unwrap();
        let version = object.resource_version();
        let devices = object.status.and_then(|s| s.devices).unwrap_or_default();
        if ready(&devices) {
            return (devices, version);
        }
        assert!(Instant::now() < deadline, "{devices:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn registered(node: &TestNode) -> e2e::kubelet::Plugin {
    Kubelet::new(node.path("r"))
        .register(DRIVER, LIMIT)
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claims_status_names_its_instance_once_and_is_cleared_when_it_is_deallocated() {
    let (name, charted) = ("reporting", installed().await);
    create_node(&admin(), name).await;
    let plane = ControlPlane::shared().unwrap();
    let namespace = plane.namespace("status").await.unwrap();
    let node = TestNode::new("a30-2");
    let client = plugin_client(&charted, name).await;
    let running = Running::start(&node, name, client.clone());
    let plugin = registered(&node).await;
    wait_until_ready(&running).await;

    let device = node.device(0, "1g6gb-3");
    let claim = allocated(&namespace, "order-0", name, &json!([result(name, &device)])).await;
    plugin.prepare_claim(&claim).await.unwrap();
    let (devices, version) = devices_when(&claim, |devices| !devices.is_empty()).await;
    let inventory = node.inventory();
    let gpu = &inventory.gpus[0];
    let profile = gpu.profiles.iter().find(|p| p.name == "1g.6gb").unwrap();
    assert_eq!(
        devices[0].data.as_ref().unwrap().0,
        json!({
            "uuid": gpu.instances[0].compute_instances[0].uuid,
            "parentUUID": gpu.uuid,
            "profile": "1g.6gb",
            "placement": {"start": 3, "size": 1},
            "memoryBytes": profile.memory_bytes,
            "multiprocessors": profile.multiprocessors,
        })
    );
    assert_eq!(
        (&*devices[0].driver, &*devices[0].pool, &*devices[0].device),
        (DRIVER, name, &*device)
    );
    let ready = &devices[0].conditions.as_ref().unwrap()[0];
    assert_eq!(
        (&*ready.type_, &*ready.status, &*ready.reason),
        ("Ready", "True", "Prepared")
    );

    // Asked again, and after a restart, nothing is written.
    plugin.prepare_claim(&claim).await.unwrap();
    running.stop().await;
    let running = Running::start(&node, name, client);
    let plugin = registered(&node).await;
    wait_until_ready(&running).await;
    plugin.prepare_claim(&claim).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(
        devices_when(&claim, |_| true).await,
        (devices.clone(), version)
    );

    // The status of another driver's device is nobody's business but its own.
    plugin.unprepare_claim(&claim).await.unwrap();
    let api: Api<ResourceClaim> = Api::namespaced(admin(), &namespace);
    let none = Patch::Merge(json!({"status": {"allocation": null}}));
    api.patch_status("order-0", &PatchParams::default(), &none)
        .await
        .unwrap();
    devices_when(&claim, <[_]>::is_empty).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_status_that_is_missing_is_written_when_the_plugin_starts() {
    let (name, charted) = ("catching-up", installed().await);
    create_node(&admin(), name).await;
    let plane = ControlPlane::shared().unwrap();
    let namespace = plane.namespace("status").await.unwrap();
    let node = TestNode::new("t4-1");
    let client = plugin_client(&charted, name).await;
    let running = Running::start(&node, name, client.clone());
    let plugin = registered(&node).await;
    wait_until_ready(&running).await;
    let results = json!([result(name, &node.device(0, ""))]);
    let claim = allocated(&namespace, "order-0", name, &results).await;
    plugin.prepare_claim(&claim).await.unwrap();
    let (devices, _) = devices_when(&claim, |devices| !devices.is_empty()).await;
    running.stop().await;

    let api: Api<ResourceClaim> = Api::namespaced(admin(), &namespace);
    let none = Patch::Merge(json!({"status": {"devices": null}}));
    api.patch_status("order-0", &PatchParams::default(), &none)
        .await
        .unwrap();
    devices_when(&claim, <[_]>::is_empty).await;
    let running = Running::start(&node, name, client);
    let (again, _) = devices_when(&claim, |devices| !devices.is_empty()).await;
    assert_eq!(again[0].data, devices[0].data);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plugin_may_write_only_the_status_of_its_own_devices_in_claims_of_its_node() {
    let (name, charted) = ("modest", installed().await);
    create_node(&admin(), name).await;
    let plane = ControlPlane::shared().unwrap();
    let namespace = plane.namespace("status").await.unwrap();
    let foreign = json!({"request": "gpu", "driver": "nic.example.com", "pool": name,
                         "device": "nic-0"});
    let own = json!([result(name, "gpu-0"), foreign]);
    allocated(&namespace, "own", name, &own).await;
    let theirs = json!([result("neighbour", "gpu-0")]);
    allocated(&namespace, "theirs", "neighbour", &theirs).await;

    let plugin = plugin_client(&charted, name).await;
    let api: Api<ResourceClaim> = Api::namespaced(plugin, &namespace);
    let apply = |status: Value| {
        Patch::Apply(
            json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
                            "metadata": {}, "status": status}),
        )
    };
    let entry = |driver: &str, pool: &str, device: &str| {
        apply(
            json!({"devices": [{"driver": driver, "pool": pool, "device": device,
                                  "conditions": [], "data": {"uuid": "GPU-1"}}]}),
        )
    };
    let reserved = json!({"reservedFor": [{"resource": "pods", "name": "x", "uid": "y"}]});
    let deallocated = Patch::Merge(json!({"status": {"allocation": null}}));
    let not_allowed = [
        (
            "theirs",
            entry(DRIVER, "neighbour", "gpu-0"),
            "allocated to it only",
        ),
        (
            "own",
            entry("nic.example.com", name, "nic-0"),
            "of driver gpu.ai.deckhouse.io only",
        ),
        ("own", apply(reserved), "may not change the allocation"),
        ("own", deallocated, "may not change the allocation"),
    ];
    let mut dry = PatchParams::apply("test").force();
    dry.dry_run = true;
    let own = entry(DRIVER, name, "gpu-0");
    api.patch_status("own", &dry, &own).await.unwrap();
    for (claim, patch, _) in &not_allowed {
        let params = params_of(patch, &dry);
        let result = api.patch_status(claim, &params, patch).await;
        assert!(result.is_err(), "{claim}: {patch:?} is accepted");
    }

    // Before 1.36 the API server asks for no further right; then the policy is all there is.
    let plane = ControlPlane::shared().unwrap();
    plane
        .apply_yaml(&namespace, &rights_of_before(&charted))
        .await
        .unwrap();
    for (claim, patch, reason) in &not_allowed {
        let params = params_of(patch, &dry);
        let deadline = Instant::now() + LIMIT;
        // The rights, and the policy, take a moment to be in force.
        loop {
            let result = api.patch_status(claim, &params, patch).await;
            let said = result.err().map(|error| error.to_string());
            if said.as_ref().is_some_and(|said| said.contains(reason)) {
                break;
            }
            assert!(Instant::now() < deadline, "{claim}: {said:?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

/// Only an apply may be forced.
fn params_of(patch: &Patch<Value>, apply: &PatchParams) -> PatchParams {
    let mut params = apply.clone();
    params.force = matches!(patch, Patch::Apply(_));
    params
}

/// What gives the plugin's account every right that 1.36 has made granular.
fn rights_of_before(namespace: &str) -> String {
    format!(
        "\
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{name: rights-of-before}}
rules:
- {{apiGroups: [resource.k8s.io], resources: [resourceclaims/driver], verbs: ['arbitrary-node:patch']}}
- {{apiGroups: [resource.k8s.io], resources: [resourceclaims/binding], verbs: [patch]}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: rights-of-before}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: rights-of-before}}
subjects:
- {{kind: ServiceAccount, name: ai-inference-node-plugin, namespace: {namespace}}}
"
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_status_that_is_refused_fails_no_prepare() {
    let (name, charted) = ("refused", installed().await);
    create_node(&admin(), name).await;
    let plane = ControlPlane::shared().unwrap();
    let namespace = plane.namespace("status").await.unwrap();
    let node = TestNode::new("t4-1");
    let running = Running::start(&node, name, plugin_client(&charted, name).await);
    let plugin = registered(&node).await;
    wait_until_ready(&running).await;
    // Allocated to another node, as far as its selector says: not this plugin's to write.
    let results = json!([result(name, &node.device(0, ""))]);
    let claim = allocated(&namespace, "order-0", "elsewhere", &results).await;
    plugin.prepare_claim(&claim).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (devices, _) = devices_when(&claim, |_| true).await;
    assert_eq!(devices, []);
    plugin.unprepare_claim(&claim).await.unwrap();
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_administrators_claim_looks_at_a_device_in_use_and_its_user_notices_nothing() {
    let (name, charted) = ("watched", installed().await);
    create_node(&admin(), name).await;
    let plane = ControlPlane::shared().unwrap();
    let namespace = plane.namespace("status").await.unwrap();
    let node = TestNode::new("a30-2");
    let running = Running::start(&node, name, plugin_client(&charted, name).await);
    let plugin = registered(&node).await;
    wait_until_ready(&running).await;
    let device = node.device(0, "1g6gb-3");
    let user = allocated(&namespace, "user", name, &json!([result(name, &device)])).await;
    plugin.prepare_claim(&user).await.unwrap();
    let before = node.inventory();

    // Administrative access is for namespaces that are marked for it.
    let mut look = result(name, &device);
    look["adminAccess"] = true.into();
    let whole = json!({"request": "gpu", "driver": DRIVER, "pool": name,
                       "device": node.device(0, ""), "adminAccess": true});
    let labels = json!({"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}});
    let operators = plane.namespace("operators").await.unwrap();
    Api::<Namespace>::all(admin())
        .patch(&operators, &PatchParams::default(), &Patch::Merge(&labels))
        .await
        .unwrap();
    let watcher = allocated(&operators, "watcher", name, &json!([look, whole])).await;
    let prepared = plugin.prepare_claim(&watcher).await.unwrap();
    assert_eq!(prepared.len(), 2);
    assert_eq!(node.inventory(), before);
    let (seen, _) = devices_when(&watcher, |devices| devices.len() == 2).await;
    let uuid = before.gpus[0].instances[0].compute_instances[0]
        .uuid
        .clone();
    let part = seen.iter().find(|d| d.device == device).unwrap();
    let data = &part.data.as_ref().unwrap().0;
    assert_eq!(
        (&data["uuid"], &data["adminAccess"]),
        (&json!(uuid), &json!(true))
    );

    plugin.unprepare_claim(&watcher).await.unwrap();
    assert_eq!(node.inventory(), before);
    plugin.prepare_claim(&user).await.unwrap();
    plugin.unprepare_claim(&user).await.unwrap();
    assert_eq!(node.instances(), 0);
    running.stop().await;
}
