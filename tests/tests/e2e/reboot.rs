//! A node that reboots under a serving copy.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use e2e::cluster::Cluster;
use e2e::cluster::devices::{gpu_of, instances};
use e2e::cluster::hub::SMOLLM;
use e2e::cluster::order::Order;

use crate::scene::*;

/// The kubelet tries each pod once before the node plugin has registered, and backs off.
const BACK: Duration = Duration::from_secs(300);

#[tokio::test]
async fn a_node_that_reboots_gives_its_pods_their_devices_back_and_their_copies_serve_again()
-> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("reboot").await?;
    let alone = class_without_shares(&cluster).await?;
    let order = Order::file(&cluster, &namespace, "steady", alone, SMOLLM).await?;
    order.ready().await?;
    let before = order.first_copy().await?;
    let devices = order.devices().await?;
    let (node, device) = devices.first().context("the order holds no device")?;
    let gpu = gpu_of(device);
    let held = instances(&cluster, node, gpu).await?;

    cluster.reboot(node).await?;
    let begin = Instant::now();
    let mut last = String::new();
    while begin.elapsed() < BACK {
        // No single object tells that all of it is back.
        match serves_anew(&order, &before.container_id).await {
            Ok(()) => {
                last.clear();
                break;
            }
            Err(error) => last = format!("{error:#}"),
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    ensure!(last.is_empty(), "{BACK:?} after the reboot: {last}");
    ensure!(
        order.devices().await? == devices,
        "the reboot moved the claim"
    );
    let after = order.first_copy().await?;
    ensure!(
        devices_in(&after) == [device.as_str()],
        "{:?}",
        after.environment
    );
    // The instance was made anew, where it was.
    expect_instances(&cluster, node, gpu, &held).await?;

    order.delete().await?;
    expect_instances(&cluster, node, gpu, &BTreeMap::new()).await?;
    let read = "cat /var/run/cdi/*.json 2>/dev/null || true";
    let files = cluster.on_node(node, &["sh", "-c", read]).await?;
    ensure!(
        !files.contains(device.as_str()),
        "a CDI file is left: {files}"
    );
    cluster.delete_namespace(&namespace).await
}

async fn serves_anew(order: &Order, before: &str) -> Outcome {
    let copy = order.first_copy().await?;
    ensure!(copy.container_id != before, "the container is the old one");
    let answer = order.chat_with_first_copy(QUESTION).await?;
    ensure!(answer.contains("Paris"), "{answer}");
    order.ready().await.map(drop)
}
