//! A GPU that breaks under a serving order.

use anyhow::{Context, ensure};
use e2e::cluster::devices::{
    DRIVER, attribute, clear, gpu_of, hardware, inject_xid, published, reset,
};
use e2e::cluster::hub::SMOLLM;
use e2e::cluster::order::{Order, put_class};
use e2e::cluster::{Cluster, wait};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::scene::*;

#[tokio::test]
async fn a_broken_gpu_is_told_in_the_pods_status_and_a_fatal_error_moves_the_copy_to_another()
-> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("health").await?;
    let class = json!({ "allowedPlacementTypes": ["WholeDevice"] });
    put_class(&cluster.client, "e2e-health", class).await?;
    let order = Order::file(&cluster, &namespace, "order", "e2e-health", SMOLLM).await?;
    order.ready().await?;
    let before = order.first_copy().await?;
    let held = order.devices().await?;
    let (node, gpu) = held.first().context("the order holds no device")?.clone();
    // The driver asks for a reset from now on, as it does after such errors.
    hardware(&cluster, &node, &["action", &gpu, "gpu-reset"]).await?;

    // Not fatal: the copy stays, and its pod's status tells why it may not be well.
    inject_xid(&cluster, &node, &gpu, 74, None).await?;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &namespace);
    let first = format!("{}-0", order.name);
    let pod = wait::until(
        &pods,
        &first,
        "show its device as unhealthy because of XID 74",
        wait::LONG,
        |pod| {
            told(pod)
                .iter()
                .any(|(health, message)| health == "Unhealthy" && message.contains("XID 74"))
        },
    )
    .await?;
    ensure!(
        order.first_copy().await?.container_id == before.container_id,
        "an error that is not fatal replaced the container"
    );
    taints(&cluster, &node, &gpu, |taints| {
        taints.contains(&"xid=74 NoSchedule".to_owned())
    })
    .await?;

    // Fatal: the copy is evicted, and the next one gets another GPU and serves.
    inject_xid(&cluster, &node, &gpu, 119, None).await?;
    taints(&cluster, &node, &gpu, |taints| {
        taints.contains(&"xid=119 NoExecute".to_owned())
    })
    .await?;
    let uid = pod.uid();
    wait::until(
        &pods,
        &first,
        "be evicted and run again",
        wait::MODEL,
        |pod| pod.uid() != uid && running(pod),
    )
    .await?;
    order.ready().await?;
    let now = order.devices().await?;
    let (new_node, new) = now.first().context("the order holds no device")?;
    ensure!(
        (new_node, gpu_of(new)) != (&node, gpu_of(&gpu)),
        "the copy got the broken {gpu} of {node} again"
    );
    let answer = order.chat(QUESTION).await?;
    ensure!(answer.contains("Paris"), "the order answered: {answer}");

    // A reset ends it all.
    reset(&cluster, &node, &gpu).await?;
    taints(&cluster, &node, &gpu, |taints| taints.is_empty()).await?;
    clear(&cluster, &node).await?;
    order.delete().await?;
    cluster.delete_namespace(&namespace).await
}

/// What a pod's status tells of its devices, as (health, message).
fn told(pod: &Pod) -> Vec<(String, String)> {
    let statuses = pod
        .status
        .iter()
        .flat_map(|status| status.container_statuses.iter().flatten());
    statuses
        .flat_map(|status| status.allocated_resources_status.iter().flatten())
        .flat_map(|claim| claim.resources.iter().flatten())
        .map(|device| {
            (
                device.health.clone().unwrap_or_default(),
                device.message.clone().unwrap_or_default(),
            )
        })
        .collect()
}

/// Waits until the taints of every device of a GPU are as they should be, told as
/// `key=value effect`.
async fn taints(
    cluster: &Cluster,
    node: &str,
    gpu: &str,
    met: impl Fn(&[String]) -> bool,
) -> Outcome {
    let pci = pci_address(gpu_of(gpu))?;
    let mut last = Vec::new();
    for _ in 0..240 {
        let devices = published(cluster).await?;
        last = devices
            .iter()
            .filter(|(pool, device)| pool == node && attribute(device, "pciAddress") == Some(&pci))
            .map(|(_, device)| {
                let taints = device.taints.iter().flatten().map(|taint| {
                    let key = taint.key.strip_prefix(&format!("{DRIVER}/"));
                    let value = taint.value.as_deref().unwrap_or_default();
                    format!("{}={value} {}", key.unwrap_or(&taint.key), taint.effect)
                });
                taints.collect::<Vec<String>>()
            })
            .collect();
        if !last.is_empty() && last.iter().all(|taints| met(taints)) {
            return Ok(());
        }
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    }
    anyhow::bail!("the devices of {gpu} of {node} have the taints {last:?}")
}
