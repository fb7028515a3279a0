//! Restarts of every part under a serving copy.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use e2e::cluster::devices::gpu_of;
use e2e::cluster::hub::SMOLLM;
use e2e::cluster::order::Order;
use e2e::cluster::{Cluster, PLATFORM_NAMESPACE, wait};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, ListParams};
use kube::{Api, ResourceExt};

use crate::scene::*;

#[tokio::test]
async fn restarts_under_a_serving_copy_disturb_nothing() -> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("restarts").await?;
    let alone = class_without_shares(&cluster).await?;
    let order = Order::file(&cluster, &namespace, "steady", alone, SMOLLM).await?;
    order.ready().await?;
    let before = order.first_copy().await?;
    let devices = order.devices().await?;
    let undisturbed = async |what: &str| -> Outcome {
        let now = order.first_copy().await?;
        ensure!(
            now.container_id == before.container_id,
            "{what} replaced the container"
        );
        ensure!(order.devices().await? == devices, "{what} moved the claim");
        // The copy itself never stops; the kubelet may take it off the Service until its next probe.
        let itself = order.chat_with_first_copy(QUESTION).await;
        let itself = itself.with_context(|| format!("the copy after {what}"))?;
        order.ready().await?;
        let answer = order.chat(QUESTION).await;
        let answer = answer.with_context(|| format!("the Service after {what}"))?;
        ensure!(
            itself.contains("Paris") && answer.contains("Paris"),
            "after {what} the copy answered: {itself}, the Service: {answer}"
        );
        Ok(())
    };

    restart_pods(&cluster, "ai-inference-node-plugin", Some(&before.node)).await?;
    undisturbed("a restart of the node plugin").await?;

    restart_kubelet(&cluster, &before.node).await?;
    undisturbed("a restart of the kubelet").await?;

    restart_pods(&cluster, "controller", None).await?;
    undisturbed("a restart of the controller").await?;

    // What was prepared before the restarts is still known: it can be given back.
    let (node, device) = devices.first().context("the order holds no device")?;
    order.delete().await?;
    expect_instances(&cluster, node, gpu_of(device), &BTreeMap::new()).await?;
    cluster.delete_namespace(&namespace).await
}

/// Deletes the platform's pods of one component and waits until it is available again.
async fn restart_pods(cluster: &Cluster, component: &str, node: Option<&str>) -> Outcome {
    let client = cluster.client.clone();
    let pods: Api<Pod> = Api::namespaced(client.clone(), PLATFORM_NAMESPACE);
    let mut selected = ListParams::default().labels(&format!("app.kubernetes.io/name={component}"));
    if let Some(node) = node {
        selected = selected.fields(&format!("spec.nodeName={node}"));
    }
    let old = pods.list(&selected).await?;
    ensure!(
        !old.items.is_empty(),
        "{component} has no pod in {PLATFORM_NAMESPACE}"
    );
    for pod in &old {
        pods.delete(&pod.name_any(), &DeleteParams::default())
            .await?;
    }
    for pod in &old {
        wait::gone(&pods, &pod.name_any(), wait::LONG).await?;
    }
    if node.is_some() {
        let daemons: Api<DaemonSet> = Api::namespaced(client, PLATFORM_NAMESPACE);
        wait::until(
            &daemons,
            component,
            "be available on every node",
            wait::LONG,
            |daemon| {
                daemon.status.as_ref().is_some_and(|status| {
                    status.number_available == Some(status.desired_number_scheduled)
                })
            },
        )
        .await?;
    } else {
        let deployments: Api<Deployment> = Api::namespaced(client, PLATFORM_NAMESPACE);
        wait::until(
            &deployments,
            component,
            "be available",
            wait::LONG,
            |deployment| {
                let wanted = deployment.spec.replicas;
                deployment
                    .status
                    .as_ref()
                    .and_then(|status| status.available_replicas)
                    == wanted
            },
        )
        .await?;
    }
    Ok(())
}

async fn restart_kubelet(cluster: &Cluster, node: &str) -> Outcome {
    let heartbeat = |node: &Node| {
        let conditions = node
            .status
            .as_ref()
            .and_then(|status| status.conditions.as_ref());
        conditions
            .into_iter()
            .flatten()
            .find(|condition| condition.type_ == "Ready" && condition.status == "True")
            .and_then(|condition| condition.last_heartbeat_time.clone())
    };
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let before = heartbeat(&nodes.get(node).await?);
    cluster
        .on_node(node, &["systemctl", "restart", "kubelet"])
        .await?;
    wait::until(
        &nodes,
        node,
        "report again after its kubelet restarted",
        wait::LONG,
        |state| {
            let now = heartbeat(state);
            now.is_some() && now != before
        },
    )
    .await?;
    Ok(())
}
