//! What the plugin's account may do: what the plugin does, and nothing else.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use e2e::control_plane::ControlPlane;
use e2e::control_plane::recorder::{self, Recorder, Right, right};
use e2e::kubelet::Kubelet;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, ResourceExt as _};
use node_plugin::events::NodeEvents;
use serde_json::{Value, json};

use crate::chart::render;
use crate::node::{TestNode, repository};
use crate::server::{
    LIMIT, Running, allocated_claim, complete, create_node, wait_for, wait_until_ready,
};
use crate::status::devices_when;

const ACCOUNT: &str = "ai-inference-node-plugin";
const DRIVER: &str = "gpu.ai.deckhouse.io";

/// How to reach the API server with a token of the plugin's account; bound to a pod on a
/// node, as a kubelet asks for it, or to nothing.
pub(crate) async fn plugin_config(namespace: &str, node: Option<&str>) -> Config {
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
    Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
        .await
        .unwrap()
}

/// The namespace in which the chart is installed, as an administrator does it. There is
/// one: its cluster-scoped objects name it.
pub(crate) async fn installed() -> String {
    static ONE: tokio::sync::OnceCell<String> = tokio::sync::OnceCell::const_new();
    let install = async || {
        let plane = ControlPlane::shared().unwrap();
        let namespace = plane.namespace("chart").await.unwrap();
        let rendered = render(&namespace, &[]);
        plane.apply_yaml(&namespace, &rendered).await.unwrap();
        namespace
    };
    ONE.get_or_init(install).await.clone()
}

/// Every right of the chart's roles.
fn granted() -> BTreeSet<Right> {
    recorder::granted(&render("x", &[]), |_| true).unwrap()
}

/// Rights that no request shows: the API server checks them behind another one.
const BEHIND: &[(&str, &str)] = &[("resourceclaims/driver", "associated-node:patch")];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_plugin_uses_every_right_that_the_chart_grants_and_is_refused_none() {
    let namespace = installed().await;
    let admin = ControlPlane::shared().unwrap().client().unwrap();
    create_node(&admin, "righteous").await;
    let record = Recorder::default();
    let config = plugin_config(&namespace, Some("righteous")).await;
    let client = ClientBuilder::try_from(config)
        .unwrap()
        .with_layer(&record)
        .build();

    // A slice that an earlier release left, for the plugin to delete.
    let left = slice("left", &json!({"nodeName": "righteous"}));
    let slices: Api<ResourceSlice> = Api::all(admin.clone());
    slices.create(&PostParams::default(), &left).await.unwrap();

    let node = TestNode::new("a30-2");
    let running = Running::start(&node, "righteous", client.clone());
    let plugin = Kubelet::new(node.path("r"))
        .register(DRIVER, LIMIT)
        .await
        .unwrap();
    wait_for(&admin, "righteous", |slices| {
        complete(slices) && !slices.contains_key("left")
    })
    .await;
    wait_until_ready(&running).await;
    let device = node.device(0, "1g6gb-3");
    let claim = allocated_claim(&admin, &namespace, "righteous", &device).await;
    plugin.prepare_claim(&claim).await.unwrap();
    devices_when(&claim, |devices| !devices.is_empty()).await;
    plugin.unprepare_claim(&claim).await.unwrap();
    // The second of two equal events counts up the first.
    let events = NodeEvents::new(client, "righteous");
    events.warn("Tested", "Test", "This is a test.").await;
    events.warn("Tested", "Test", "This is a test.").await;
    running.stop().await;

    // The plugin asks for nothing but resources, not even for what the server serves.
    for asked in record.asked() {
        asked.rights().unwrap();
    }
    let mut used = record.used().unwrap();
    for (behind, verb) in BEHIND {
        used.insert(right("resource.k8s.io", behind, verb));
    }
    let granted = granted();
    assert_eq!(record.refused(), Vec::<String>::new(), "refused");
    let unused: Vec<_> = granted.difference(&used).collect();
    assert!(unused.is_empty(), "granted and never used: {unused:?}");
    let missing: Vec<_> = used.difference(&granted).collect();
    assert!(missing.is_empty(), "used and not granted: {missing:?}");
}

fn slice(name: &str, spec: &Value) -> ResourceSlice {
    let mut slice = json!({
        "metadata": {"name": name},
        "spec": {"driver": DRIVER,
                 "pool": {"name": "pool", "generation": 1, "resourceSliceCount": 1}},
    });
    for (field, value) in spec.as_object().unwrap() {
        slice["spec"][field] = value.clone();
    }
    serde_json::from_value(slice).unwrap()
}

/// Tries until it is refused: a new policy takes a moment to be in force.
async fn refusal(slices: &Api<ResourceSlice>, name: &str, spec: Value) -> String {
    let dry = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let made = slice(name, &spec);
    let deadline = Instant::now() + LIMIT;
    loop {
        match slices.create(&dry, &made).await {
            Err(error) => {
                let error = error.to_string();
                assert!(
                    error.contains("ValidatingAdmissionPolicy"),
                    "{spec}: {error}"
                );
                return error;
            }
            Ok(_) => assert!(Instant::now() < deadline, "{spec} is accepted"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plugins_own_token_writes_and_deletes_slices_of_its_node_and_driver_only() {
    let namespace = installed().await;
    let admin = ControlPlane::shared().unwrap().client().unwrap();
    create_node(&admin, "charted").await;
    create_node(&admin, "neighbour").await;
    let config = plugin_config(&namespace, Some("charted")).await;
    let slices: Api<ResourceSlice> = Api::all(Client::try_from(config).unwrap());
    let all: Api<ResourceSlice> = Api::all(admin);

    let error = refusal(&slices, "other", json!({"nodeName": "neighbour"})).await;
    assert!(
        error.contains("of this node only") && error.contains("neighbour"),
        "{error}"
    );
    let charted = json!({"matchFields": [
        {"key": "metadata.name", "operator": "In", "values": ["charted"]},
    ]});
    for wider in [
        json!({"allNodes": true}),
        json!({"nodeSelector": {"nodeSelectorTerms": [charted]}}),
        json!({"perDeviceNodeSelection": true,
               "devices": [{"name": "device", "nodeName": "charted"}]}),
        json!({"perDeviceNodeSelection": true,
               "devices": [{"name": "device", "allNodes": true}]}),
    ] {
        refusal(&slices, "wider", wider).await;
    }
    let foreign = json!({"nodeName": "charted", "driver": "gpu.nvidia.com"});
    let error = refusal(&slices, "foreign", foreign.clone()).await;
    assert!(error.contains("gpu.ai.deckhouse.io only"), "{error}");

    // What is there already and is not its own.
    for (name, spec) in [
        ("of-neighbour", json!({"nodeName": "neighbour"})),
        ("of-all", json!({"allNodes": true})),
        ("of-nvidia", foreign),
    ] {
        let plain = PostParams::default();
        let mut theirs = all.create(&plain, &slice(name, &spec)).await.unwrap();
        theirs.labels_mut().insert("touched".into(), "true".into());
        for error in [
            slices
                .delete(name, &DeleteParams::default())
                .await
                .unwrap_err(),
            slices.replace(name, &plain, &theirs).await.unwrap_err(),
        ] {
            let error = error.to_string();
            assert!(
                error.contains("ValidatingAdmissionPolicy"),
                "{name}: {error}"
            );
        }
        assert!(all.get_opt(name).await.unwrap().is_some());
    }
    let own = ListParams::default().fields("spec.nodeName=neighbour");
    let error = slices
        .delete_collection(&DeleteParams::default(), &own)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("forbidden"), "{error}");

    // Its own, from making to deleting.
    let plain = PostParams::default();
    let mine = slice("own", &json!({"nodeName": "charted"}));
    let mut mine = slices.create(&plain, &mine).await.unwrap();
    mine.spec.pool.generation = 2;
    let mine = slices.replace("own", &plain, &mine).await.unwrap();

    let unbound = plugin_config(&namespace, None).await;
    let unbound: Api<ResourceSlice> = Api::all(Client::try_from(unbound).unwrap());
    for error in [
        unbound.replace("own", &plain, &mine).await.unwrap_err(),
        unbound
            .delete("own", &DeleteParams::default())
            .await
            .unwrap_err(),
    ] {
        let error = error.to_string();
        assert!(error.contains("not bound to a pod"), "{error}");
    }
    slices
        .delete("own", &DeleteParams::default())
        .await
        .unwrap();
}

/// Why each right is needed; a right without a reason fails the test.
const REASONS: &[(&str, &str)] = &[
    (
        "resourceclaims",
        "a claim is read by name when the kubelet asks for it",
    ),
    (
        "resourceclaims/status",
        "what a claim's devices are is written into its `status.devices`",
    ),
    (
        "resourceclaims/driver",
        "from 1.36 that needs this right too, which holds for devices of this driver in claims of the pod's own node",
    ),
    (
        "resourceslices",
        "this node's slices are watched and written",
    ),
    ("nodes", "the node is the owner of its slices"),
    (
        "events",
        "what a person should know is an event on the node",
    ),
];

#[test]
fn the_documentation_lists_the_rights_as_the_chart_grants_them() {
    let mut table = String::from("| API group | Resource | Verbs | Why |\n|---|---|---|---|\n");
    let rights = granted();
    let resources: BTreeSet<(&String, &String)> = rights.iter().map(|(g, r, _)| (g, r)).collect();
    for (group, resource) in resources {
        let own = rights
            .iter()
            .filter(|(g, r, _)| (g, r) == (group, resource));
        let verbs: Vec<&str> = own.map(|(_, _, verb)| verb.as_str()).collect();
        let (_, why) = REASONS.iter().find(|(of, _)| of == resource).unwrap();
        let group = if group.is_empty() { "core" } else { group };
        let verbs = verbs.join(", ");
        table.push_str(&format!("| `{group}` | `{resource}` | {verbs} | {why} |\n"));
    }
    let path = repository().join("docs/operations.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (start, end) = ("<!-- rights:start -->\n", "<!-- rights:end -->");
    let (before, rest) = text.split_once(start).unwrap();
    let (kept, after) = rest.split_once(end).unwrap();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, format!("{before}{start}{table}{end}{after}")).unwrap();
        return;
    }
    assert!(
        kept == table,
        "docs/operations.md is stale; UPDATE_GOLDEN=1 makes it:\n{table}"
    );
}
