//! What the node plugin published and what the (fake) hardware of a node holds.
//!
//! In: ResourceSlices and a node's state file. Out: GPUs by device name, and their MIG instances.
//! The state file is the fake library's and stands for the hardware: nothing here writes it.

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
    device.split("-mig-").next().unwrap_or(device)
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
    let state = cluster
        .on_node(node, &["cat", "/opt/fake-gpu/state.json"])
        .await?;
    let state: Value = serde_json::from_str(&state)?;
    let instances = state["gpus"][uuid]["instances"].as_object();
    Ok(instances
        .into_iter()
        .flat_map(|all| all.values())
        .filter_map(|one| Some((one["start"].as_u64()?, one["size"].as_u64()?)))
        .collect())
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
