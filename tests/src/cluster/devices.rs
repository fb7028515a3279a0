//! What the node plugin published, what the (fake) hardware of a node holds, and what happens to it.
//!
//! In: ResourceSlices and a node's state file. Out: GPUs by device name, and their MIG instances.
//! The state file is the fake library's and stands for the hardware: only the library and its own
//! tool on the node (`fake-nvml`) write it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, ensure};
use futures::StreamExt;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use kube::api::{DeleteParams, ListParams};
use kube::runtime::{WatchStreamExt, reflector, watcher};
use kube::{Api, ResourceExt};
use serde_json::Value;

use super::Cluster;

/// The DRA driver.
pub const DRIVER: &str = "gpu.ai.deckhouse.io";

/// The name of the GPU that a device is, or is a partition of.
pub fn gpu_of(device: &str) -> &str {
    let gpu = device.split("-mig-").next().unwrap_or(device);
    gpu.strip_suffix("-shared").unwrap_or(gpu)
}

/// The driver's ResourceSlices.
///
/// # Errors
/// When the API server does not answer.
pub async fn slices(cluster: &Cluster) -> anyhow::Result<Vec<ResourceSlice>> {
    let api: Api<ResourceSlice> = Api::all(cluster.client.clone());
    let driver = ListParams::default().fields(&format!("spec.driver={DRIVER}"));
    Ok(api.list(&driver).await?.items)
}

/// Every published device as `(pool, device)`.
///
/// # Errors
/// When the API server does not answer.
pub async fn published(cluster: &Cluster) -> anyhow::Result<Vec<(String, Device)>> {
    let slices = slices(cluster).await?;
    Ok(slices
        .into_iter()
        .flat_map(|slice| {
            let pool = slice.spec.pool.name;
            slice
                .spec
                .devices
                .unwrap_or_default()
                .into_iter()
                .map(move |device| (pool.clone(), device))
        })
        .collect())
}

/// A string attribute of the driver's domain.
pub fn attribute<'a>(device: &'a Device, name: &str) -> Option<&'a str> {
    device.attributes.as_ref()?.get(name)?.string.as_deref()
}

/// The MIG instances of a GPU as the hardware of its node holds them: start → size, in memory slices.
///
/// # Errors
/// When the GPU is not published or the node's state cannot be read.
pub async fn instances(
    cluster: &Cluster,
    node: &str,
    gpu: &str,
) -> anyhow::Result<BTreeMap<u64, u64>> {
    let published = published(cluster).await?;
    let device = published
        .iter()
        .find(|(pool, device)| pool == node && device.name == gpu);
    let (_, device) = device.with_context(|| format!("{gpu} of node {node} is not published"))?;
    let uuid = attribute(device, "uuid").with_context(|| format!("{gpu} has no uuid"))?;
    // It is there from the first change of the hardware on.
    let read = "cat /opt/fake-gpu/state.json 2>/dev/null || echo '{}'";
    let state = cluster.on_node(node, &["sh", "-c", read]).await?;
    let state: Value = serde_json::from_str(&state)?;
    let instances = state["gpus"][uuid]["instances"].as_object();
    Ok(instances
        .into_iter()
        .flat_map(|all| all.values())
        .filter_map(|one| Some((one["start"].as_u64()?, one["size"].as_u64()?)))
        .collect())
}

/// Makes something happen to the hardware of a node: a command of `fake-nvml` and what follows the
/// driver root in its arguments (`fake-nvml --help`). A GPU may be named by its device's name.
///
/// # Errors
/// When the tool on the node refuses, or is not there: `hack/cluster up` puts it there.
pub async fn hardware(cluster: &Cluster, node: &str, command: &[&str]) -> anyhow::Result<()> {
    let (name, rest) = command.split_first().context("no command of fake-nvml")?;
    let mut arguments = vec!["/opt/fake-gpu/bin/fake-nvml", name, "/opt/fake-gpu"];
    arguments.extend(rest);
    cluster.on_node(node, &arguments).await?;
    Ok(())
}

/// A critical error of a GPU, or of a MIG instance of it (GPU instance id, compute instance id).
///
/// # Errors
/// As [`hardware`].
pub async fn inject_xid(
    cluster: &Cluster,
    node: &str,
    gpu: &str,
    xid: u64,
    instance: Option<(u32, u32)>,
) -> anyhow::Result<()> {
    let xid = xid.to_string();
    let mut command = vec!["xid", gpu, &xid];
    let instance = instance.map(|(gi, ci)| format!("{gi}:{ci}"));
    if let Some(instance) = &instance {
        command.extend(["--instance", instance]);
    }
    hardware(cluster, node, &command).await
}

/// So many uncorrectable ECC errors of a GPU.
///
/// # Errors
/// As [`hardware`].
pub async fn inject_ecc(
    cluster: &Cluster,
    node: &str,
    gpu: &str,
    count: u64,
) -> anyhow::Result<()> {
    let count = count.to_string();
    hardware(cluster, node, &["ecc", gpu, "--count", &count]).await
}

/// A row that could not be remapped.
///
/// # Errors
/// As [`hardware`].
pub async fn fail_row_remap(cluster: &Cluster, node: &str, gpu: &str) -> anyhow::Result<()> {
    let command = ["row-remap", gpu, "--uncorrectable", "1", "--failed"];
    hardware(cluster, node, &command).await
}

/// A GPU that is too hot, or (without a temperature) cool again.
///
/// # Errors
/// As [`hardware`].
pub async fn overheat(
    cluster: &Cluster,
    node: &str,
    gpu: &str,
    celsius: Option<u32>,
) -> anyhow::Result<()> {
    match celsius.map(|celsius| celsius.to_string()) {
        Some(celsius) => {
            let command = ["thermal", gpu, "--celsius", &celsius, "--hw"];
            hardware(cluster, node, &command).await
        }
        None => hardware(cluster, node, &["thermal", gpu]).await,
    }
}

/// A GPU that falls off the bus.
///
/// # Errors
/// As [`hardware`].
pub async fn lose(cluster: &Cluster, node: &str, gpu: &str) -> anyhow::Result<()> {
    hardware(cluster, node, &["lost", gpu]).await
}

/// A reset of a GPU: ends loss, errors, heat and its MIG instances.
///
/// # Errors
/// As [`hardware`].
pub async fn reset(cluster: &Cluster, node: &str, gpu: &str) -> anyhow::Result<()> {
    hardware(cluster, node, &["recover", gpu]).await
}

/// A function of `nvml.h` that hangs so long at each call, on one GPU or on all; zero ends it.
///
/// # Errors
/// As [`hardware`].
pub async fn delay(
    cluster: &Cluster,
    node: &str,
    gpu: Option<&str>,
    function: &str,
    delay: Duration,
) -> anyhow::Result<()> {
    let seconds = delay.as_secs_f64().to_string();
    let mut command = vec!["delay", function, &seconds];
    if let Some(gpu) = gpu {
        command.extend(["--gpu", gpu]);
    }
    hardware(cluster, node, &command).await
}

/// The nth call of a function of `nvml.h` from now on (counted from 1) kills its process, once;
/// before it acts, or after.
///
/// # Errors
/// As [`hardware`].
pub async fn kill_at(
    cluster: &Cluster,
    node: &str,
    function: &str,
    nth: u64,
    after: bool,
) -> anyhow::Result<()> {
    let nth = nth.to_string();
    let mut command = vec!["kill", function, "--nth", &nth];
    if after {
        command.push("--after");
    }
    hardware(cluster, node, &command).await
}

/// Takes back everything that was made to happen on a node; MIG mode and instances stay.
///
/// # Errors
/// As [`hardware`].
pub async fn clear(cluster: &Cluster, node: &str) -> anyhow::Result<()> {
    hardware(cluster, node, &["clear"]).await
}

/// Deletes every slice of the driver, and answers how long it took until as many devices were
/// published again.
///
/// # Errors
/// When they do not come back within the time.
pub async fn wipe_slices(cluster: &Cluster, within: Duration) -> anyhow::Result<Duration> {
    let api: Api<ResourceSlice> = Api::all(cluster.client.clone());
    let driver = format!("spec.driver={DRIVER}");
    let before = published(cluster).await?.len();
    ensure!(before > 0, "the driver {DRIVER} publishes nothing");
    let old: Vec<String> = slices(cluster)
        .await?
        .iter()
        .map(ResourceExt::uid)
        .map(Option::unwrap_or_default)
        .collect();
    api.delete_collection(
        &DeleteParams::default(),
        &ListParams::default().fields(&driver),
    )
    .await?;
    let wiped = std::time::Instant::now();
    let (store, writer) = reflector::store();
    let events = watcher(api, watcher::Config::default().fields(&driver));
    let mut events = Box::pin(reflector(writer, events).default_backoff());
    let back = async {
        while events.next().await.is_some() {
            let fresh = store.state();
            let devices: usize = fresh
                .iter()
                .filter(|slice| !old.contains(&slice.uid().unwrap_or_default()))
                .map(|slice| slice.spec.devices.as_ref().map_or(0, Vec::len))
                .sum();
            if devices == before {
                return;
            }
        }
    };
    tokio::time::timeout(within, back)
        .await
        .with_context(|| format!("{before} devices were not published again within {within:?}"))?;
    Ok(wiped.elapsed())
}
