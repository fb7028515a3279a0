//! The node plugin is upgraded while pods with claims start and stop.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, ensure};
use e2e::cluster::devices::{DRIVER, gpu_of, instances, published};
use e2e::cluster::{Cluster, PLATFORM_NAMESPACE, wait};
use futures::StreamExt;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaimTemplate, ResourceSlice};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::scene::*;

const PLUGIN: &str = "ai-inference-node-plugin";

/// The Node authorizer learns of a pod by a watch of its own. A kubelet that is faster is
/// refused the claim of its pod before the driver is called, and tries again about 75 s
/// later: no driver can help it. This is the authorizer's message.
const AUTHORIZER_RACE: &str = "no relationship found between node";

#[tokio::test]
async fn an_upgrade_while_pods_start_each_second_fails_no_prepare_and_wipes_no_slice() -> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("upgrade").await?;
    let node = a_node(&cluster).await?;
    let before = plugin_pod(&cluster, &node).await?;
    put_templates(&cluster, &namespace).await?;
    let refused = failed_calls(&cluster, &node).await?;
    let (slices, stop) = (SliceWatch::start(&cluster, &node), CancellationToken::new());

    // Prepared by the old release, and given back by the new one.
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &namespace);
    let long = pod("long", &node, "partition", &["--root", "/srv/hub"])?;
    pods.create(&PostParams::default(), &long).await?;
    wait::until(&pods, "long", "run", wait::LONG, running).await?;

    let starting = tokio::spawn(start_pods(pods.clone(), node.clone(), stop.clone()));
    tokio::time::sleep(Duration::from_secs(5)).await;
    let during = upgrade(&cluster, &node, &before).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    stop.cancel();
    let started = starting.await??;
    let (began, ended) = during?;

    let mut beside = 0;
    for name in &started {
        let ran = wait::until(&pods, name, "succeed", wait::LONG, |pod| {
            phase(pod) == Some("Succeeded")
        });
        let ran = ran.await?;
        let created = ran.metadata.creation_timestamp.context("no time")?.0;
        beside += usize::from(created >= began && created <= ended);
    }
    pods.delete("long", &DeleteParams::default()).await?;
    wait::gone(&pods, "long", wait::LONG).await?;

    slices.unharmed()?;
    let failures = failed_prepares(&cluster, &namespace).await?;
    ensure!(failures.is_empty(), "prepares failed: {failures:#?}");
    let now = failed_calls(&cluster, &node).await?;
    ensure!(
        now == refused,
        "the kubelet counts failed calls of the driver: {refused:?} before and {now:?} after"
    );
    ensure!(
        beside > 2,
        "{beside} of {} pods were made while the plugin was upgraded: that proves nothing",
        started.len()
    );
    nothing_left(&cluster, &node).await?;
    eprintln!(
        "{} pods ran, {beside} of them were made during the upgrade, which took {} s",
        started.len(),
        ended.duration_since(began).as_secs()
    );
    cluster.delete_namespace(&namespace).await
}

/// A node that has GPUs.
async fn a_node(cluster: &Cluster) -> anyhow::Result<String> {
    let devices = published(cluster).await?;
    let (node, _) = devices.into_iter().next().context("no device")?;
    Ok(node)
}

async fn plugin_pod(cluster: &Cluster, node: &str) -> anyhow::Result<String> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), PLATFORM_NAMESPACE);
    let selected = ListParams::default()
        .labels(&format!("app.kubernetes.io/name={PLUGIN}"))
        .fields(&format!("spec.nodeName={node}"));
    let list = pods.list(&selected).await?;
    ensure!(
        list.items.len() == 1,
        "{node} runs {} plugins",
        list.items.len()
    );
    list.items
        .first()
        .map(ResourceExt::name_any)
        .context("none")
}

/// Claims of a partition and of a whole GPU.
async fn put_templates(cluster: &Cluster, namespace: &str) -> Outcome {
    let api: Api<ResourceClaimTemplate> = Api::namespaced(cluster.client.clone(), namespace);
    let profile = format!(r#"device.attributes["{DRIVER}"].profile == "1g.10gb""#);
    for (name, class, selectors) in [
        (
            "partition",
            "mig.ai.deckhouse.io",
            json!([{ "cel": { "expression": profile } }]),
        ),
        ("whole", DRIVER, json!([])),
    ] {
        let template = serde_json::from_value(json!({
            "metadata": { "name": name },
            "spec": { "spec": { "devices": { "requests": [{
                "name": "gpu",
                "exactly": { "deviceClassName": class, "selectors": selectors },
            }] } } },
        }))?;
        api.create(&PostParams::default(), &template).await?;
    }
    Ok(())
}

fn pod(name: &str, node: &str, template: &str, arguments: &[&str]) -> anyhow::Result<Pod> {
    Ok(serde_json::from_value(json!({
        "metadata": { "name": name },
        "spec": {
            "nodeSelector": { "kubernetes.io/hostname": node },
            // A container runtime that fails to start one is not what is tested here.
            "restartPolicy": "OnFailure",
            "terminationGracePeriodSeconds": 1,
            "resourceClaims": [{ "name": "gpu", "resourceClaimTemplateName": template }],
            "containers": [{
                "name": "short",
                "image": "ai-inference/hub:dev",
                "imagePullPolicy": "Never",
                "command": ["/usr/local/bin/hub"],
                "args": arguments,
                "resources": { "claims": [{ "name": "gpu" }] },
            }],
        },
    }))?)
}

fn phase(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.phase.as_deref()
}

/// A pod each second that ends by itself; every fourth takes a whole GPU.
async fn start_pods(
    pods: Api<Pod>,
    node: String,
    stop: CancellationToken,
) -> anyhow::Result<Vec<String>> {
    let mut started = Vec::new();
    let mut seconds = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(started),
            _ = seconds.tick() => {}
        }
        let name = format!("short-{}", started.len());
        let template = if started.len() % 4 == 3 {
            "whole"
        } else {
            "partition"
        };
        let pod = pod(&name, &node, template, &["--help"])?;
        pods.create(&PostParams::default(), &pod).await?;
        started.push(name);
    }
}

/// Changes the DaemonSet's pods, as a new release does, and waits until the old one of
/// this node is gone. Answers when that began and ended.
async fn upgrade(
    cluster: &Cluster,
    node: &str,
    old: &str,
) -> anyhow::Result<(jiff::Timestamp, jiff::Timestamp)> {
    let daemons: Api<DaemonSet> = Api::namespaced(cluster.client.clone(), PLATFORM_NAMESPACE);
    let began = jiff::Timestamp::now();
    let annotations = json!({ "ai.deckhouse.io/upgraded": began.to_string() });
    let patch = json!({ "spec": { "template": { "metadata": { "annotations": annotations } } } });
    let patched = daemons
        .patch(PLUGIN, &PatchParams::default(), &Patch::Merge(&patch))
        .await?;
    let generation = patched.metadata.generation;
    wait::until(&daemons, PLUGIN, "be upgraded", wait::LONG, |daemons| {
        daemons.status.as_ref().is_some_and(|status| {
            status.observed_generation == generation
                && status.updated_number_scheduled == Some(status.desired_number_scheduled)
                && status.number_available == Some(status.desired_number_scheduled)
        })
    })
    .await?;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), PLATFORM_NAMESPACE);
    wait::gone(&pods, old, wait::LONG).await?;
    let ended = jiff::Timestamp::now();
    plugin_pod(cluster, node).await?;
    Ok((began, ended))
}

/// Every event about a prepare that failed, but for those that no driver can help.
async fn failed_prepares(cluster: &Cluster, namespace: &str) -> anyhow::Result<Vec<String>> {
    let events: Api<Event> = Api::namespaced(cluster.client.clone(), namespace);
    let failed = ListParams::default().fields("reason=FailedPrepareDynamicResources");
    let messages = events.list(&failed).await?.items.into_iter();
    let messages = messages.filter_map(|event| event.message);
    Ok(messages
        .filter(|message| {
            let raced = message.contains(AUTHORIZER_RACE);
            if raced {
                eprintln!("tolerated, the driver was never called: {message}");
            }
            !raced
        })
        .collect())
}

/// The kubelet's count of calls of our driver that did not end well, by method and code.
async fn failed_calls(cluster: &Cluster, node: &str) -> anyhow::Result<BTreeMap<String, String>> {
    let path = format!("/api/v1/nodes/{node}/proxy/metrics");
    let metrics = cluster.kubectl(&["get", "--raw", &path]).await?;
    let counts = metrics
        .lines()
        .filter(|line| line.starts_with("dra_grpc_operations_duration_seconds_count{"))
        .filter(|line| line.contains(&format!("driver_name=\"{DRIVER}\"")))
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(series, count)| (series.to_owned(), count.to_owned()));
    let (mut all, mut failed) = (0, BTreeMap::new());
    for (series, count) in counts {
        all += 1;
        if !series.contains("grpc_status_code=\"OK\"") {
            failed.insert(series, count);
        }
    }
    ensure!(
        all > 0 || failed.is_empty(),
        "the kubelet has no metric of calls to {DRIVER}"
    );
    Ok(failed)
}

/// Waits until the node's GPUs hold no instance: everything was given back.
async fn nothing_left(cluster: &Cluster, node: &str) -> Outcome {
    let devices = published(cluster).await?;
    let gpus = devices
        .iter()
        .filter(|(pool, device)| pool == node && device.name == gpu_of(&device.name));
    for (_, gpu) in gpus {
        if !instances(cluster, node, &gpu.name).await?.is_empty() {
            expect_instances(cluster, node, &gpu.name, &BTreeMap::new()).await?;
        }
    }
    Ok(())
}

/// A watch of one node's slices that remembers what must not happen.
struct SliceWatch {
    harm: Arc<Mutex<Vec<String>>>,
    task: tokio::task::JoinHandle<()>,
}

impl SliceWatch {
    fn start(cluster: &Cluster, node: &str) -> Self {
        let api: Api<ResourceSlice> = Api::all(cluster.client.clone());
        let selector = format!("spec.nodeName={node},spec.driver={DRIVER}");
        let config = watcher::Config::default().fields(&selector);
        let harm: Arc<Mutex<Vec<String>>> = Arc::default();
        let noted = harm.clone();
        let task = tokio::spawn(async move {
            let mut known: BTreeMap<String, (Option<String>, i64)> = BTreeMap::new();
            let mut events = Box::pin(watcher(api, config));
            let note = |what: String| {
                eprintln!("{what}");
                noted
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(what);
            };
            while let Some(event) = events.next().await {
                match event {
                    Ok(watcher::Event::Apply(slice) | watcher::Event::InitApply(slice)) => {
                        let (name, uid) = (slice.name_any(), slice.uid());
                        let generation = slice.spec.pool.generation;
                        let before = known.insert(name.clone(), (uid.clone(), generation));
                        if before.as_ref().is_some_and(|(before, _)| *before != uid) {
                            note(format!("slice {name} was deleted and made anew"));
                        }
                        if before.is_some_and(|(_, before)| before > generation) {
                            note(format!(
                                "the generation of {name} went back to {generation}"
                            ));
                        }
                    }
                    Ok(watcher::Event::Delete(slice)) => {
                        note(format!("slice {} was deleted", slice.name_any()));
                    }
                    Ok(watcher::Event::Init | watcher::Event::InitDone) => {}
                    Err(error) => note(format!("the watch of the slices broke: {error}")),
                }
            }
        });
        Self { harm, task }
    }

    fn unharmed(self) -> Outcome {
        ensure!(!self.task.is_finished(), "the watch of the slices ended");
        self.task.abort();
        let harm = self.harm.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(harm.is_empty(), "{harm:#?}");
        Ok(())
    }
}
