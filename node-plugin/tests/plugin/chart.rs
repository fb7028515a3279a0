//! The chart's roles and admission policy: enough for the plugin, and for nothing more.

use std::process::Command;
use std::time::{Duration, Instant};

use e2e::control_plane::{ControlPlane, asset};
use e2e::kubelet::Kubelet;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde_json::{Value, json};

use crate::node::{TestNode, repository};
use crate::server::{LIMIT, Running, create_node, wait_for, wait_until_ready};

const ACCOUNT: &str = "ai-inference-node-plugin";

/// The chart as helm renders it.
fn render(namespace: &str, more: &[&str]) -> String {
    let output = Command::new(asset("helm").unwrap())
        .args(["template", "test"])
        .arg(repository().join("daemonset"))
        .args(["--namespace", namespace])
        .args(more)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// A client with a token of the plugin's account; bound to a pod on a node, as a
/// kubelet asks for it, or to nothing.
async fn plugin_client(namespace: &str, node: Option<&str>) -> Client {
    let plane = ControlPlane::shared().unwrap();
    let admin = plane.client().unwrap();
    let mut spec = json!({"audiences": [], "expirationSeconds": 3600});
    if let Some(node) = node {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": format!("plugin-on-{node}")},
            "spec": {"nodeName": node, "serviceAccountName": ACCOUNT,
                     "containers": [{"name": "node-plugin", "image": "none"}]},
        }))
        .unwrap();
        let pods: Api<Pod> = Api::namespaced(admin.clone(), namespace);
        let pod = pods.create(&PostParams::default(), &pod).await.unwrap();
        spec["boundObjectRef"] = json!({
            "apiVersion": "v1", "kind": "Pod",
            "name": pod.metadata.name, "uid": pod.metadata.uid,
        });
    }
    let request: TokenRequest =
        serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap();
    let accounts: Api<ServiceAccount> = Api::namespaced(admin, namespace);
    let answer = accounts
        .create_token_request(ACCOUNT, &PostParams::default(), &request)
        .await
        .unwrap();
    let token = answer.status.unwrap().token.unwrap();

    let mut kubeconfig = Kubeconfig::read_from(plane.kubeconfig()).unwrap();
    for user in &mut kubeconfig.auth_infos {
        let auth = user.auth_info.get_or_insert_default();
        auth.token = Some(token.clone().into());
        auth.impersonate = None;
    }
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(kubeconfig, &options)
        .await
        .unwrap();
    Client::try_from(config).unwrap()
}

fn slice(name: &str, spec: &Value) -> ResourceSlice {
    let mut slice = json!({
        "metadata": {"name": name},
        "spec": {"driver": "gpu.ai.deckhouse.io",
                 "pool": {"name": "pool", "generation": 1, "resourceSliceCount": 1}},
    });
    for (field, value) in spec.as_object().unwrap() {
        slice["spec"][field] = value.clone();
    }
    serde_json::from_value(slice).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_plugin_can_do_its_work_with_the_charts_account_and_nothing_beyond_its_node() {
    let plane = ControlPlane::shared().unwrap();
    let admin = plane.client().unwrap();
    let namespace = plane.namespace("chart").await.unwrap();
    plane
        .apply_yaml(&namespace, &render(&namespace, &[]))
        .await
        .unwrap();
    create_node(&admin, "charted").await;
    create_node(&admin, "neighbour").await;
    let client = plugin_client(&namespace, Some("charted")).await;

    // Enough.
    let node = TestNode::new("a30-2");
    let running = Running::start(&node, "charted", client.clone());
    Kubelet::new(node.path("r"))
        .register("gpu.ai.deckhouse.io", LIMIT)
        .await
        .unwrap();
    wait_for(&admin, "charted", |slices| !slices.is_empty()).await;
    wait_until_ready(&running).await;
    running.stop().await;

    // Not more. A new policy takes a moment; the first refusal shows it is in force.
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    let mut dry = PatchParams::apply("test").force();
    dry.dry_run = true;
    let refused = |name: &'static str, spec: Value| {
        let (slices, dry) = (slices.clone(), dry.clone());
        async move {
            let patch = slice(name, &spec);
            let deadline = Instant::now() + LIMIT;
            loop {
                match slices.patch(name, &dry, &Patch::Apply(&patch)).await {
                    Err(error) => return error.to_string(),
                    Ok(_) => assert!(Instant::now() < deadline, "{spec} is accepted"),
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    };
    let error = refused("other", json!({"nodeName": "neighbour"})).await;
    assert!(
        error.contains("of this node only") && error.contains("neighbour"),
        "{error}"
    );
    let error = refused("all", json!({"allNodes": true})).await;
    assert!(error.contains("node"), "{error}");
    let selector = json!({"nodeSelector": {"nodeSelectorTerms": [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["charted"]}]},
    ]}});
    refused("selected", selector).await;
    let driver = json!({"nodeName": "charted", "driver": "gpu.nvidia.com"});
    let error = refused("foreign", driver).await;
    assert!(error.contains("gpu.ai.deckhouse.io only"), "{error}");
    let own = slice("own", &json!({"nodeName": "charted"}));
    slices
        .patch("own", &dry, &Patch::Apply(&own))
        .await
        .unwrap();
    let foreign = slice("neighbours", &json!({"nodeName": "neighbour"}));
    let all: Api<ResourceSlice> = Api::all(admin);
    all.create(&PostParams::default(), &foreign).await.unwrap();
    slices
        .delete("neighbours", &Default::default())
        .await
        .unwrap_err();

    let unbound: Api<ResourceSlice> = Api::all(plugin_client(&namespace, None).await);
    let error = unbound
        .patch("own", &dry, &Patch::Apply(&own))
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("not bound to a pod"), "{error}");
    let claims: Api<ResourceClaim> = Api::all(client);
    claims.list(&ListParams::default()).await.unwrap_err();
}

#[test]
fn a_fake_gpu_node_needs_no_privilege_and_hardware_gets_it() {
    let fake = repository().join("daemonset/values-fake.yaml");
    let fake = render("x", &["--values", fake.to_str().unwrap()]);
    assert!(fake.contains("privileged: false") && !fake.contains("privileged: true"));
    let real = render("x", &[]);
    assert!(real.contains("privileged: true"));
}
