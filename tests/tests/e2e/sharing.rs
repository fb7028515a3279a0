//! Shares of one GPU: two pods of two namespaces, their limits, and the daemon between them.

use std::time::Duration;

use anyhow::{Context, ensure};
use e2e::cluster::devices::{self, DRIVER, attribute};
use e2e::cluster::{Cluster, PLATFORM_NAMESPACE, container_environment, wait};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::scene::*;

const MPS: &str = "/run/gpu.ai.deckhouse.io/mps";

/// A GPU that tests share, on one node.
struct Shared {
    cluster: Cluster,
    node: String,
    /// Its PCI address.
    gpu: String,
    /// The name of its shared device.
    device: String,
}

#[tokio::test]
async fn two_namespaces_share_a_gpu_under_limits_that_outlive_the_plugin() -> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let shared = Shared::find(&cluster).await?;
    let (one, other) = (
        cluster.create_namespace("share-a").await?,
        cluster.create_namespace("share-b").await?,
    );

    // Each has what it asked for, on one device, and knows its own limit.
    shared.pod(&one, "half", "40Gi", "50").await?;
    shared.pod(&other, "third", "20Gi", "30").await?;
    let (half, third) = (
        shared.serving(&one, "half").await?,
        shared.serving(&other, "third").await?,
    );
    let (a, b) = (
        shared.allocated(&one, "half").await?,
        shared.allocated(&other, "third").await?,
    );
    ensure!(a.device == shared.device && b.device == shared.device);
    ensure!(
        a.share_id.is_some() && a.share_id != b.share_id,
        "the shares are {:?} and {:?}",
        a.share_id,
        b.share_id
    );
    shared.expect_limits(&half, "0=40960M", "50").await?;
    shared.expect_limits(&third, "0=20480M", "30").await?;
    let daemon = shared.daemon().await?;
    ensure!(shared.lives(daemon).await?, "the daemon does not live");

    // A third that does not fit waits for room.
    shared.pod(&one, "late", "40Gi", "10").await?;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &one);
    wait::until(&pods, "late", "wait for room", wait::LONG, unschedulable).await?;

    // The plugin is replaced; the daemon is the same process, and so are its clients.
    shared.replace_plugin().await?;
    ensure!(shared.daemon().await? == daemon, "another daemon runs");
    ensure!(shared.lives(daemon).await?, "the daemon ended with its pod");
    ensure!(container(&shared.serving(&one, "half").await?)? == container(&half)?);

    // Room appears, and the one that waited gets it, from the daemon that was adopted.
    shared.delete(&one, "half").await?;
    shared.serving(&one, "late").await?;
    ensure!(shared.daemon().await? == daemon, "another daemon runs");

    // With the last share the daemon ends, and the whole GPU can be had.
    shared.delete(&one, "late").await?;
    shared.delete(&other, "third").await?;
    shared.expect_no_daemon(daemon).await?;
    let (claim, pod) = whole_gpu_pod(&shared.gpu, &shared.node)?;
    let claims: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), &one);
    claims.create(&PostParams::default(), &claim).await?;
    pods.create(&PostParams::default(), &pod).await?;
    shared.serving(&one, "whole").await?;
    cluster.delete_namespace(&one).await?;
    cluster.delete_namespace(&other).await
}

impl Shared {
    /// The last GPU of some node: orders take the first ones.
    async fn find(cluster: &Cluster) -> anyhow::Result<Self> {
        let published = devices::published(cluster).await?;
        let (node, device) = published
            .into_iter()
            .rfind(|(_, device)| {
                attribute(device, "type") == Some("share") && !device.name.contains("-mig-")
            })
            .context("no shared device is published")?;
        ensure!(
            attribute(&device, "sharing") == Some("mps"),
            "{} is shared by {:?}",
            device.name,
            attribute(&device, "sharing")
        );
        let gpu = attribute(&device, "pciAddress").context("a share without pciAddress")?;
        Ok(Self {
            cluster: cluster.clone(),
            gpu: gpu.to_owned(),
            device: device.name.clone(),
            node,
        })
    }

    /// A pod with a share of the GPU.
    async fn pod(&self, namespace: &str, name: &str, memory: &str, cores: &str) -> Outcome {
        let selector = format!(
            r#"device.attributes["{DRIVER}"].pciAddress == "{}""#,
            self.gpu
        );
        let claim: ResourceClaim = serde_json::from_value(json!({
            "metadata": { "name": name },
            "spec": { "devices": { "requests": [{
                "name": "share",
                "exactly": {
                    "deviceClassName": "share.ai.deckhouse.io",
                    "selectors": [{ "cel": { "expression": selector } }],
                    "capacity": { "requests": {
                        "memory": memory, "cores": cores,
                    } },
                },
            }] } },
        }))?;
        let claims = json!({ "name": "gpu", "resourceClaimName": name });
        let pod = idle_pod(name, &claims, Some(&self.node))?;
        let client = self.cluster.client.clone();
        Api::namespaced(client.clone(), namespace)
            .create(&PostParams::default(), &claim)
            .await?;
        Api::namespaced(client, namespace)
            .create(&PostParams::default(), &pod)
            .await?;
        Ok(())
    }

    async fn serving(&self, namespace: &str, name: &str) -> anyhow::Result<Pod> {
        let pods: Api<Pod> = Api::namespaced(self.cluster.client.clone(), namespace);
        wait::until(&pods, name, "run", wait::LONG, running).await
    }

    async fn delete(&self, namespace: &str, name: &str) -> Outcome {
        let client = self.cluster.client.clone();
        let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
        pods.delete(name, &DeleteParams::default()).await?;
        wait::gone(&pods, name, wait::LONG).await?;
        let claims: Api<ResourceClaim> = Api::namespaced(client, namespace);
        claims.delete(name, &DeleteParams::default()).await?;
        wait::gone(&claims, name, wait::LONG).await
    }

    async fn allocated(
        &self,
        namespace: &str,
        name: &str,
    ) -> anyhow::Result<DeviceRequestAllocationResult> {
        let claims: Api<ResourceClaim> = Api::namespaced(self.cluster.client.clone(), namespace);
        let status = claims.get(name).await?.status;
        let allocation = status.and_then(|status| status.allocation);
        let devices = allocation.and_then(|allocation| allocation.devices);
        let results = devices.and_then(|devices| devices.results);
        let mut results = results.into_iter().flatten();
        results.next().context("the claim is not allocated")
    }

    async fn expect_limits(&self, pod: &Pod, memory: &str, threads: &str) -> Outcome {
        let environment = container_environment(&self.cluster, &self.node, container(pod)?).await?;
        let value = |name: &str| {
            let mut pairs = environment.iter();
            pairs.find(|(key, _)| key == name).map(|(_, v)| v.as_str())
        };
        for (name, expected) in [
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", memory),
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", threads),
            ("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"),
        ] {
            ensure!(
                value(name) == Some(expected),
                "{name} of {} is {:?}, not {expected}",
                pod.name_any(),
                value(name)
            );
        }
        Ok(())
    }

    /// The folder of the GPU's daemon on the node.
    fn folder(&self) -> String {
        let device = self.device.trim_start_matches("gpu-");
        format!("{MPS}/{}", device.trim_end_matches("-shared"))
    }

    /// The process id of the GPU's daemon, as the node counts.
    async fn daemon(&self) -> anyhow::Result<u32> {
        let path = format!("{}/process.json", self.folder());
        let text = self.cluster.on_node(&self.node, &["cat", &path]).await?;
        let process: serde_json::Value = serde_json::from_str(&text)?;
        let pid = process["pid"].as_u64().context("no process id")?;
        Ok(u32::try_from(pid)?)
    }

    async fn lives(&self, pid: u32) -> anyhow::Result<bool> {
        let path = format!("/proc/{pid}/cmdline");
        let text = self.cluster.on_node(&self.node, &["cat", &path]).await;
        Ok(text.is_ok_and(|text| text.contains("nvidia-cuda-mps-control")))
    }

    async fn expect_no_daemon(&self, pid: u32) -> Outcome {
        // The kubelet unprepares after the pod's object is gone, and nothing announces it.
        for _ in 0..60 {
            if !self.lives(pid).await? {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        anyhow::bail!("the daemon {pid} of {} still runs", self.device)
    }

    /// Deletes the plugin's pod on the node and waits for the next one.
    async fn replace_plugin(&self) -> Outcome {
        let pods: Api<Pod> = Api::namespaced(self.cluster.client.clone(), PLATFORM_NAMESPACE);
        let here = ListParams::default()
            .labels("app.kubernetes.io/name=ai-inference-node-plugin")
            .fields(&format!("spec.nodeName={}", self.node));
        for pod in pods.list(&here).await? {
            let name = pod.name_any();
            pods.delete(&name, &DeleteParams::default()).await?;
            wait::gone(&pods, &name, wait::LONG).await?;
        }
        for _ in 0..240 {
            let list = pods.list(&here).await?;
            if list.iter().any(ready) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        anyhow::bail!("no plugin is ready on {}", self.node)
    }
}

fn ready(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|c| c.type_ == "Ready" && c.status == "True")
}

fn container(pod: &Pod) -> anyhow::Result<&str> {
    let status = pod.status.as_ref().context("no status")?;
    let statuses = status.container_statuses.as_ref().context("no container")?;
    let id = statuses.first().and_then(|s| s.container_id.as_deref());
    id.context("no container id")
}
