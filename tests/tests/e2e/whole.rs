//! What every supported Kubernetes has to give: whole devices, from the order to the hardware and back.
//!
//! These run on the oldest version too, where the API server keeps no partitions, shares or taints.

use anyhow::{Context, ensure};
use e2e::cluster::devices::{attribute, gpu_of, published};
use e2e::cluster::hub::SMOLLM;
use e2e::cluster::order::{Order, put_class};
use e2e::cluster::{Cluster, wait};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::scene::*;

/// The first minor version of Kubernetes 1 whose API server keeps partitions by default.
const PARTITIONS_SINCE: u32 = 36;
/// Of the fake GPUs that the e2e cluster has on each worker.
const GPUS_OF_A_WORKER: usize = 8;

#[tokio::test]
async fn an_order_of_whole_devices_is_served_and_gives_its_device_back_a_013() -> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("whole").await?;
    put_class(
        &cluster.client,
        "e2e-whole-only",
        json!({ "allowedPlacementTypes": ["WholeDevice"] }),
    )
    .await?;
    let order = Order::file(&cluster, &namespace, "order", "e2e-whole-only", SMOLLM).await?;
    order.ready().await?;

    let devices = order.devices().await?;
    let [(node, device)] = &devices[..] else {
        anyhow::bail!("the order holds {devices:?} instead of one device");
    };
    ensure!(gpu_of(device) == device, "{device} is no whole device");
    let copy = order.first_copy().await?;
    ensure!(
        copy.node == *node && devices_in(&copy) == [device.as_str()],
        "the copy on {} is told {:?}, its claim holds {device} of {node}",
        copy.node,
        devices_in(&copy)
    );
    let answer = order.chat(QUESTION).await?;
    ensure!(answer.contains("Paris"), "the order answered: {answer}");

    // A pod beside the platform's waits for the very same card, and gets it once the order is gone.
    let (claim, pod) = whole_gpu_pod(&pci_address(device)?, node)?;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &namespace);
    let claims: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), &namespace);
    claims.create(&PostParams::default(), &claim).await?;
    pods.create(&PostParams::default(), &pod).await?;
    let waits = "wait for the card";
    wait::until(&pods, "whole", waits, wait::SHORT, unschedulable).await?;
    order.delete().await?;
    ensure!(
        order.devices().await?.is_empty(),
        "a deleted order holds a claim"
    );
    wait::until(&pods, "whole", "run on the freed card", wait::LONG, running).await?;
    cluster.delete_namespace(&namespace).await
}

#[tokio::test]
async fn what_is_published_is_what_the_api_server_keeps_and_an_event_says_what_it_drops() -> Outcome
{
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let minor = cluster.client.apiserver_version().await?.minor;
    let minor: u32 = minor.parse().context("the API server's minor version")?;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let workers = ListParams::default().labels("ai.deckhouse.io/gpu=true");
    let published = published(&cluster).await?;
    let events: Api<Event> = Api::all(cluster.client.clone());
    let reduced = ListParams::default().fields("reason=ReducedResourceSlices");
    let events = events.list(&reduced).await?;
    let workers = nodes.list(&workers).await?;
    ensure!(!workers.items.is_empty(), "the cluster has no GPU worker");
    for worker in &workers {
        let node = worker.name_any();
        let count = |kind: &str| {
            let of_node = published.iter().filter(|(pool, _)| *pool == node);
            of_node
                .filter(|(_, device)| attribute(device, "type") == Some(kind))
                .count()
        };
        let (whole, partitions) = (count("gpu"), count("mig"));
        ensure!(
            whole == GPUS_OF_A_WORKER,
            "{node} publishes {whole} whole devices, not {GPUS_OF_A_WORKER}"
        );
        let keeps = minor >= PARTITIONS_SINCE;
        ensure!(
            (partitions > 0) == keeps,
            "{node} publishes {partitions} partitions on Kubernetes 1.{minor}"
        );
        let told = events.iter().any(|event| {
            let regarding = event.regarding.as_ref().and_then(|to| to.name.as_deref());
            regarding == Some(&node)
        });
        ensure!(
            told != keeps,
            "on Kubernetes 1.{minor} an event of {node} about dropped fields is there: {told}; \
             the API server keeps events for an hour after the node plugin's start"
        );
    }
    Ok(())
}
