//! How long a pod takes to start with a claim and without one, on the cluster of `hack/cluster`.
//!
//! In: that cluster with the node plugin installed. Pods are made one after the other on one node and take
//! turns; each is deleted, and its claim with it, before the next one. What is seen is what a watch of the
//! API server tells.

use std::time::Instant;

use anyhow::{Context, Result};
use e2e::cluster::{Cluster, wait};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::json;

use crate::driver::milliseconds;
use crate::report::{Comparison, Figure, Row};

/// Rounds that count, unless told otherwise; a round is a pod of each kind.
const ROUNDS: u32 = 50;
/// Rounds before them, which do not.
const WARM_UP: u32 = 2;
/// The kinds of pods: none, or the device class of the claim.
const KINDS: [(&str, Option<&str>); 3] = [
    ("no claim", None),
    ("a whole GPU", Some("gpu.ai.deckhouse.io")),
    ("a MIG partition", Some("mig.ai.deckhouse.io")),
];
/// Every kind cluster's nodes hold this image, which has a shell's tools in it.
const IMAGE: &str = "local-path-helper";

/// The samples of one kind of pod, in ms.
#[derive(Debug, Default, Clone)]
struct Samples {
    scheduled: Vec<f64>,
    running: Vec<f64>,
    gone: Vec<f64>,
}

/// Connects to the cluster and checks that the node plugin is installed there.
pub(crate) async fn connect() -> Result<Cluster> {
    let cluster = Cluster::connect().await?;
    let classes: Api<DeviceClass> = Api::all(cluster.client.clone());
    for class in KINDS.iter().filter_map(|(_, class)| *class) {
        classes.get(class).await.with_context(|| {
            format!("device class {class}: install the node plugin (hack/install)")
        })?;
    }
    Ok(cluster)
}

pub(crate) async fn measure(cluster: &Cluster, rounds: Option<u32>) -> Result<Comparison> {
    let rounds = rounds.unwrap_or(ROUNDS);
    let (node, image) = node_with_image(cluster).await?;
    let namespace = cluster.create_namespace("bench").await?;
    tracing::info!(node, rounds, "Starting pods.");
    let measured = measure_in(cluster, &namespace, &node, &image, rounds).await;
    cluster.delete_namespace(&namespace).await?;
    let [without, whole, partition] = measured?;
    let mut rows = rows_of("with a claim for a whole GPU", &whole, &without);
    rows.extend(rows_of(
        "with a claim for a MIG partition",
        &partition,
        &without,
    ));
    Ok(Comparison {
        title: "Start of a pod",
        sides: ["with a claim", "without a claim"],
        rows,
        notes: vec![
            format!(
                "kind cluster, fake NVML; one busybox pod at a time on one node, {rounds} of each \
                 kind in turn, {WARM_UP} rounds before that are discarded. The claim is made from a \
                 template, so its creation is included."
            ),
            "Times from the request to create or delete a pod until a watch tells.".to_owned(),
        ],
    })
}

/// A GPU node and the image on it that the pods run.
async fn node_with_image(cluster: &Cluster) -> Result<(String, String)> {
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let gpu_nodes = ListParams::default().labels("ai.deckhouse.io/gpu=true");
    let node = nodes
        .list(&gpu_nodes)
        .await?
        .items
        .into_iter()
        .next()
        .context("no node has the label ai.deckhouse.io/gpu=true")?;
    let name = node.metadata.name.context("a node has no name")?;
    let images = node
        .status
        .and_then(|status| status.images)
        .unwrap_or_default();
    let image = images
        .into_iter()
        .filter_map(|image| image.names)
        .flatten()
        .find(|image| image.contains(IMAGE) && !image.contains('@'))
        .with_context(|| format!("node {name} has no image {IMAGE}"))?;
    Ok((name, image))
}

async fn measure_in(
    cluster: &Cluster,
    namespace: &str,
    node: &str,
    image: &str,
    rounds: u32,
) -> Result<[Samples; 3]> {
    let templates: Api<ResourceClaimTemplate> = Api::namespaced(cluster.client.clone(), namespace);
    for class in KINDS.iter().filter_map(|(_, class)| *class) {
        let template = serde_json::from_value(json!({
            "metadata": {"name": class},
            "spec": {"spec": {"devices": {"requests": [
                {"name": "gpu", "exactly": {"deviceClassName": class}}
            ]}}},
        }))?;
        templates.create(&PostParams::default(), &template).await?;
    }
    let mut samples: [Samples; 3] = Default::default();
    for round in 0..WARM_UP + rounds {
        for turn in 0..KINDS.len() {
            // Who begins changes from round to round.
            let index = (turn + round as usize) % KINDS.len();
            let (kind, class) = KINDS[index];
            let pod = pod(&format!("{round}-{index}"), node, image, class)?;
            let taken = start_and_delete(cluster, namespace, &pod).await;
            let [scheduled, running, gone] = taken.with_context(|| format!("a pod with {kind}"))?;
            if round >= WARM_UP {
                samples[index].scheduled.push(scheduled);
                samples[index].running.push(running);
                samples[index].gone.push(gone);
            }
        }
        if round.is_multiple_of(10) {
            tracing::info!(round, "Pods have started.");
        }
    }
    Ok(samples)
}

fn pod(suffix: &str, node: &str, image: &str, class: Option<&str>) -> Result<Pod> {
    let mut pod = json!({
        "metadata": {"name": format!("bench-{suffix}")},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            // Not 0: that deletes the pod, and gives its device to the next one, before the kubelet
            // has ended it.
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "sleep",
                "image": image,
                "imagePullPolicy": "Never",
                "command": ["sleep", "3600"],
            }],
        },
    });
    if let Some(class) = class {
        pod["spec"]["resourceClaims"] =
            json!([{"name": "gpu", "resourceClaimTemplateName": class}]);
        pod["spec"]["containers"][0]["resources"] = json!({"claims": [{"name": "gpu"}]});
    }
    Ok(serde_json::from_value(pod)?)
}

/// Times of one pod in ms: created until scheduled, created until running, deleted until gone.
async fn start_and_delete(cluster: &Cluster, namespace: &str, pod: &Pod) -> Result<[f64; 3]> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    let name = pod.metadata.name.clone().context("a pod has no name")?;
    let begin = Instant::now();
    pods.create(&PostParams::default(), pod).await?;
    let mut scheduled = None;
    wait::until(&pods, &name, "run", wait::LONG, |pod| {
        if pod
            .spec
            .as_ref()
            .is_some_and(|spec| spec.node_name.is_some())
        {
            scheduled.get_or_insert_with(|| milliseconds(begin));
        }
        pod.status
            .as_ref()
            .and_then(|status| status.phase.as_deref())
            == Some("Running")
    })
    .await?;
    let running = milliseconds(begin);
    let begin = Instant::now();
    pods.delete(&name, &DeleteParams::default()).await?;
    wait::gone(&pods, &name, wait::LONG).await?;
    let gone = milliseconds(begin);
    all_claims_gone(cluster, namespace).await?;
    Ok([scheduled.unwrap_or(running), running, gone])
}

/// Waits until the pod's claim is gone, too: the next pod must find the GPU free.
async fn all_claims_gone(cluster: &Cluster, namespace: &str) -> Result<()> {
    let claims: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), namespace);
    for claim in claims.list(&ListParams::default()).await? {
        let name = claim.metadata.name.context("a claim has no name")?;
        wait::gone(&claims, &name, wait::LONG).await?;
    }
    Ok(())
}

fn rows_of(what: &str, with: &Samples, without: &Samples) -> Vec<Row> {
    let row = |measure, shown, pick: fn(&Samples) -> &Vec<f64>| Row {
        what: what.to_owned(),
        measure,
        unit: "ms",
        shown,
        samples: [pick(with).clone(), pick(without).clone()],
    };
    vec![
        row("created to scheduled", &[Figure::P50], |samples| {
            &samples.scheduled
        }),
        row(
            "created to running",
            &[Figure::P50, Figure::P90],
            |samples| &samples.running,
        ),
        row("deleted to gone", &[Figure::P50], |samples| &samples.gone),
    ]
}
