//! What an order says when the runtime of its copy ends by itself.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use e2e::cluster::Cluster;
use e2e::cluster::hub::SMOLLM;
use e2e::cluster::order::Order;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;

use crate::scene::*;

/// Period of the readiness probe: no later is it told.
const PROBE: Duration = Duration::from_secs(5);

#[tokio::test]
async fn a_runtime_that_ends_is_told_within_a_probe_period_with_its_exit_and_last_lines() -> Outcome
{
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("crash").await?;
    let order = Order::file(&cluster, &namespace, "chat", "default-llm", SMOLLM).await?;
    order.ready().await?;

    // Ready means that the runtime lists the order's name.
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &namespace);
    let statuses = pods.get("chat-0").await?.status.context("no status")?;
    let verified = statuses.container_statuses.into_iter().flatten();
    ensure!(
        verified
            .into_iter()
            .any(|container| container.name == "verify" && container.ready),
        "nobody asks the runtime for its model"
    );

    let copy = order.first_copy().await?;
    let id = copy.container_id.replace("containerd://", "");
    let template = "{{.info.pid}}";
    let inspect = [
        "crictl",
        "inspect",
        "--output",
        "go-template",
        "--template",
        template,
        &id,
    ];
    let pid = cluster.on_node(&copy.node, &inspect).await?;
    let killed = Instant::now();
    cluster
        .on_node(&copy.node, &["kill", "-9", pid.trim()])
        .await?;
    let message = order.refused("Ready", "RuntimeCrashing").await?;
    let told = killed.elapsed();
    println!("told after {} ms: {message}", told.as_millis());
    ensure!(told < PROBE, "it was told after {told:?} only");
    ensure!(message.contains("exit code 137"), "{message}");
    let (_, last) = message
        .split_once("its last words: ")
        .with_context(|| format!("no last words: {message}"))?;
    ensure!(last.len() > 20, "the last words are {last:?}");

    // It comes back by itself, and is Ready again only when the model is.
    order.ready().await?;
    let answer = order.chat(QUESTION).await?;
    ensure!(answer.contains("Paris"), "it answered: {answer}");
    cluster.delete_namespace(&namespace).await
}
