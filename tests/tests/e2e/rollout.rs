//! The platform is upgraded under orders that serve, and their copies move when they are asked to.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, ensure};
use e2e::charts::repository;
use e2e::cluster::devices::{DRIVER, attribute, gpu_of, published};
use e2e::cluster::hub::SMOLLM;
use e2e::cluster::order::{Order, condition, put_class_of};
use e2e::cluster::{Cluster, PLATFORM_NAMESPACE, wait};
use futures::StreamExt;
use inference_api::InferenceService;
use inference_api::names::RELEASE_LABEL;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::DeviceClass;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::runtime::{WatchStreamExt, reflector, watcher};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use crate::scene::*;

const NEXT: &str = "e2e-next";
const ORDERS: &str = "inferenceservices.ai.deckhouse.io";

#[tokio::test]
async fn an_upgrade_under_two_copies_holds_them_and_they_move_when_asked_without_a_spare_device_a_037_a_110_a_111_a_112_a_113()
-> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("rollout").await?;
    two_devices(&cluster, "e2e-two").await?;
    let spec = json!({
        "modelPolicy": { "allowedEndpointTypes": ["Chat"] },
        "scalingPolicy": { "minReplicas": 2, "maxReplicas": 2 },
        "acceleratorPolicy": {
            "allowedPlacementTypes": ["WholeDevice"],
            "deviceClassNames": ["e2e-two"],
        },
        "updatePolicy": { "strategy": "RollingUpdate" },
    });
    put_class_of(&cluster.client, "e2e-two-copies", spec).await?;
    let order = Order::file(&cluster, &namespace, "order", "e2e-two-copies", SMOLLM).await?;

    let outcome = upgraded(&cluster, &order).await;
    // Whatever came of it, the next test finds the platform as it was installed.
    let restored = upgrade(&cluster, &repository().join("controller/chart"), "").await;
    outcome?;
    restored?;
    cluster.delete_namespace(&namespace).await?;
    let device_classes: Api<DeviceClass> = Api::all(cluster.client.clone());
    device_classes
        .delete("e2e-two", &DeleteParams::default())
        .await?;
    Ok(())
}

async fn upgraded(cluster: &Cluster, order: &Order) -> Outcome {
    // An order that was served by the version before this one.
    let previous = tempfile::tempdir()?;
    previous_chart(previous.path())?;
    upgrade(cluster, previous.path(), "").await?;
    let served = order
        .until("serve with two copies", wait::MODEL, |order| {
            ready(order, "2/2")
        })
        .await?;
    let shipped = release(&served).context("status names no release")?;
    let pods: Api<Pod> = order.api();
    let before = [pods.get("order-0").await?, pods.get("order-1").await?];

    upgrade(cluster, &repository().join("controller/chart"), NEXT).await?;
    let columns = columns(cluster).await?;
    ensure!(
        columns.contains(&"Age".to_owned()),
        "the definitions were not upgraded: {columns:?}"
    );
    let held = order
        .until("be held", wait::LONG, |order| told(order, HELD, "0 of 2"))
        .await?;
    let message = message(&held);
    ensure!(
        message.contains(NEXT) && message.contains(&shipped),
        "not both of {shipped} and {NEXT}: {message}"
    );
    ensure!(ready(&held, "2/2"), "{:?}", held.status);
    for (ordinal, was) in before.iter().enumerate() {
        let now = pods.get(&format!("order-{ordinal}")).await?;
        ensure!(
            container(&now) == container(was) && label(&now) == Some(shipped.as_str()),
            "the upgrade touched copy {ordinal}"
        );
    }
    let answer = order.chat(QUESTION).await?;
    ensure!(answer.contains("Paris"), "the order answered: {answer}");

    // Whoever deletes a copy moves that one.
    pods.delete("order-0", &DeleteParams::default()).await?;
    let uid = before[0].uid();
    let what = "come up on the shipped release";
    wait::until(&pods, "order-0", what, wait::MODEL, |pod| {
        pod.uid() != uid && label(pod) == Some(NEXT) && is_ready(pod)
    })
    .await?;
    order
        .until("count the copy that moved", wait::LONG, |order| {
            told(order, HELD, "1 of 2")
        })
        .await?;
    let other = pods.get("order-1").await?;
    ensure!(
        container(&other) == container(&before[1]),
        "the other copy moved too"
    );

    // An edit moves both, one after the other, since there is no third device.
    let watched = Least::of(&pods);
    let edit =
        Patch::Merge(json!({ "spec": { "model": { "huggingFace": { "revision": "main" } } } }));
    let orders: Api<InferenceService> = order.api();
    let edited = orders
        .patch(&order.name, &PatchParams::default(), &edit)
        .await?;
    let moved = order
        .until("have moved every copy", wait::MODEL * 2, |order| {
            let status = order.status.as_ref();
            status.and_then(|status| status.observed_generation) == edited.metadata.generation
                && told(order, "RuntimeCurrent", "")
                && ready(order, "2/2")
        })
        .await?;
    ensure!(
        release(&moved).as_deref() == Some(NEXT),
        "{:?}",
        moved.status
    );
    for ordinal in [0, 1] {
        let pod = pods.get(&format!("order-{ordinal}")).await?;
        ensure!(
            label(&pod) == Some(NEXT),
            "copy {ordinal} is on {:?}",
            label(&pod)
        );
    }
    let least = watched.end();
    ensure!(
        least == 1,
        "{least} copies answered at the least, not one of the two"
    );
    let answer = order.chat(QUESTION).await?;
    ensure!(answer.contains("Paris"), "the order answered: {answer}");
    Ok(())
}

const HELD: &str = "ReplicasHeldOnPreviousRuntime";

/// Whether the order is Ready with so many copies.
fn ready(order: &InferenceService, summary: &str) -> bool {
    let replicas = order
        .status
        .as_ref()
        .and_then(|status| status.replicas.as_ref());
    replicas.is_some_and(|replicas| replicas.summary == summary)
        && condition(order, "Ready").is_some_and(|ready| ready.status == "True")
}

/// Whether the order says this of its runtime.
fn told(order: &InferenceService, reason: &str, words: &str) -> bool {
    condition(order, "RuntimeCurrent")
        .is_some_and(|current| current.reason == reason && current.message.contains(words))
}

fn message(order: &InferenceService) -> String {
    condition(order, "RuntimeCurrent")
        .map(|current| current.message.clone())
        .unwrap_or_default()
}

/// The release that the platform ships, as the order tells it.
fn release(order: &InferenceService) -> Option<String> {
    let status = order.status.as_ref()?;
    Some(status.release.as_ref()?.shipped.clone())
}

fn label(pod: &Pod) -> Option<&str> {
    pod.labels().get(RELEASE_LABEL).map(String::as_str)
}

/// The identity of a copy's containers: a restart changes it.
fn container(pod: &Pod) -> Vec<String> {
    let statuses = pod
        .status
        .as_ref()
        .and_then(|status| status.container_statuses.as_ref());
    let ids = statuses
        .into_iter()
        .flatten()
        .filter_map(|status| status.container_id.clone());
    ids.collect()
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .any(|one| one.type_ == "Ready" && one.status == "True")
}

/// A device class of two whole GPUs of one node, so that a third copy finds none.
async fn two_devices(cluster: &Cluster, name: &str) -> Outcome {
    let devices = published(cluster).await?;
    let (node, _) = devices.first().context("no device is published")?;
    let whole = devices
        .iter()
        .filter(|(pool, device)| pool == node && gpu_of(&device.name) == device.name);
    let two: Vec<&str> = whole
        .filter_map(|(_, device)| attribute(device, "uuid"))
        .take(2)
        .collect();
    ensure!(two.len() == 2, "{node} has no two GPUs");
    let expression = format!(
        r#"device.driver == "{DRIVER}" && device.attributes["{DRIVER}"].type == "gpu" && device.attributes["{DRIVER}"].uuid in ["{}", "{}"]"#,
        two[0], two[1]
    );
    let class = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": { "name": name },
        "spec": { "selectors": [{ "cel": { "expression": expression } }] },
    });
    let api: Api<DeviceClass> = Api::all(cluster.client.clone());
    api.patch(
        name,
        &PatchParams::apply("e2e").force(),
        &Patch::Apply(&class),
    )
    .await?;
    Ok(())
}

/// The controller's chart as a version before this one might have been: another number, and
/// definitions that lack a column.
fn previous_chart(folder: &Path) -> Outcome {
    copy(&repository().join("controller/chart"), folder)?;
    let file = folder.join("Chart.yaml");
    let text = std::fs::read_to_string(&file)?;
    let older = text.replace("\nversion: ", "\nversion: 0.0.1-before-");
    ensure!(older != text, "the chart has no version");
    std::fs::write(&file, older)?;
    let file = folder.join("files/crds/inferenceservices.yaml");
    let mut definition: Value = serde_saphyr::from_str(&std::fs::read_to_string(&file)?)?;
    let columns = definition["spec"]["versions"][0]["additionalPrinterColumns"].as_array_mut();
    let columns = columns.context("the definition has no columns")?;
    columns.retain(|column| column["name"] != "Age");
    // JSON is YAML.
    std::fs::write(&file, definition.to_string())?;
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Outcome {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// Upgrades the controller to a chart, with another name for the release of its llama.cpp.
async fn upgrade(cluster: &Cluster, chart: &Path, release: &str) -> Outcome {
    let release = format!("recipes.llamaCpp.release={release}");
    let chart = chart.to_string_lossy();
    let arguments = [
        "upgrade",
        "controller",
        &chart,
        "--namespace",
        PLATFORM_NAMESPACE,
        "--reset-then-reuse-values",
        "--set-string",
        &release,
        "--wait",
        "--timeout",
        "120s",
    ];
    cluster.helm(&arguments).await.map(drop)
}

async fn columns(cluster: &Cluster) -> anyhow::Result<Vec<String>> {
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client.clone());
    let versions = definitions.get(ORDERS).await?.spec.versions;
    let columns = versions
        .into_iter()
        .flat_map(|version| version.additional_printer_columns);
    Ok(columns.flatten().map(|column| column.name).collect())
}

/// How many pods were ready at the least, from now on.
struct Least {
    least: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Least {
    fn of(pods: &Api<Pod>) -> Self {
        let least = Arc::new(AtomicUsize::new(usize::MAX));
        let noted = least.clone();
        let (reader, writer) = reflector::store();
        let events = watcher(pods.clone(), watcher::Config::default());
        let mut events = Box::pin(events.reflect(writer));
        let task = tokio::spawn(async move {
            let mut whole = false;
            while let Some(event) = events.next().await {
                whole |= matches!(event, Ok(watcher::Event::InitDone));
                if whole {
                    let ready = reader.state().iter().filter(|pod| is_ready(pod)).count();
                    noted.fetch_min(ready, Ordering::Relaxed);
                }
            }
        });
        Self { least, task }
    }

    fn end(self) -> usize {
        self.task.abort();
        self.least.load(Ordering::Relaxed)
    }
}
