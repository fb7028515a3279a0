//! What the tests have in common: pods beside the platform's, and what is there on a node.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use e2e::cluster::Cluster;
use e2e::cluster::devices::{DRIVER, instances};
use e2e::cluster::order::{Copy, put_class};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;

/// What a test ends with.
pub(crate) type Outcome = anyhow::Result<()>;

/// Tests take it for their whole run. Poisoning has no meaning: each test starts from its own namespace.
pub(crate) static GPUS: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

pub(crate) const QUESTION: &str = "What is the capital of France?";

/// The variable in which the container finds the devices of its claim.
pub(crate) fn devices_in(copy: &Copy) -> Vec<&str> {
    copy.environment
        .iter()
        .filter(|(name, _)| name == "GPU_AI_DECKHOUSE_IO_DEVICES")
        .flat_map(|(_, value)| value.split(','))
        .collect()
}

/// The PCI address, as attributes spell it, that a whole device's name tells.
pub(crate) fn pci_address(gpu: &str) -> anyhow::Result<String> {
    let address = gpu.strip_prefix("gpu-").context("a GPU's name")?;
    let parts: Vec<&str> = address.split('-').collect();
    let [domain, bus, device, function] = parts[..] else {
        anyhow::bail!("{gpu} does not hold a PCI address");
    };
    Ok(format!("{domain}:{bus}:{device}.{function}"))
}

/// A pod that does nothing with its claim, an entry of `resourceClaims`; on this node, or
/// on any.
pub(crate) fn idle_pod(
    name: &str,
    claim: &serde_json::Value,
    node: Option<&str>,
) -> anyhow::Result<Pod> {
    let node = node.map(|node| json!({ "kubernetes.io/hostname": node }));
    let pod = serde_json::from_value(json!({
        "metadata": { "name": name },
        "spec": {
            "nodeSelector": node,
            "terminationGracePeriodSeconds": 1,
            "resourceClaims": [claim],
            "containers": [{
                "name": "idle",
                "image": "ai-inference/hub:dev",
                "imagePullPolicy": "Never",
                "resources": { "claims": [{ "name": claim["name"] }] },
            }],
        },
    }))?;
    Ok(pod)
}

/// A pod that holds the whole of one GPU, as a workload beside the platform's would.
pub(crate) fn whole_gpu_pod(gpu_address: &str, node: &str) -> anyhow::Result<(ResourceClaim, Pod)> {
    let selector = format!(r#"device.attributes["{DRIVER}"].pciAddress == "{gpu_address}""#);
    let claim = serde_json::from_value(json!({
        "metadata": { "name": "whole" },
        "spec": { "devices": { "requests": [{
            "name": "gpu",
            "exactly": {
                "deviceClassName": DRIVER,
                "selectors": [{ "cel": { "expression": selector } }],
            },
        }] } },
    }))?;
    let claims = json!({ "name": "gpu", "resourceClaimName": "whole" });
    let pod = idle_pod("whole", &claims, Some(node))?;
    Ok((claim, pod))
}

pub(crate) fn running(pod: &Pod) -> bool {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        == Some("Running")
}

pub(crate) fn unschedulable(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| {
        condition.type_ == "PodScheduled" && condition.reason.as_deref() == Some("Unschedulable")
    })
}

/// Waits until a GPU's hardware holds exactly these instances: start → size.
pub(crate) async fn expect_instances(
    cluster: &Cluster,
    node: &str,
    gpu: &str,
    expected: &BTreeMap<u64, u64>,
) -> Outcome {
    // The kubelet unprepares after the pod's object is gone, and nothing announces it.
    let mut found = BTreeMap::new();
    for _ in 0..60 {
        found = instances(cluster, node, gpu).await?;
        if found == *expected {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    anyhow::bail!("{gpu} of {node} holds the instances {found:?}, not {expected:?}")
}

/// The placement in memory slices that a partition's name tells: its start.
pub(crate) fn start_of(device: &str) -> anyhow::Result<u64> {
    device
        .rsplit('-')
        .next()
        .context("an empty name")?
        .parse()
        .context("no start in the name")
}

/// A class whose orders have a partition or a device alone, and its name.
pub(crate) async fn class_without_shares(cluster: &Cluster) -> anyhow::Result<&'static str> {
    let name = "e2e-alone";
    let policy = json!({
        "allowedSharingModes": ["Dedicated"],
        "allowedPlacementTypes": ["WholeDevice", "Partition"],
    });
    put_class(&cluster.client, name, policy).await?;
    Ok(name)
}
