//! Orders from the first to the last answer.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, ensure};
use e2e::cluster::devices::{DRIVER, gpu_of, wipe_slices};
use e2e::cluster::hub::{SMOLLM, arm_fault, disarm_faults, put_repository, requests};
use e2e::cluster::order::{Order, put_class};
use e2e::cluster::{Cluster, wait};
use inference_api::InferenceServiceClass;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::PostParams;
use serde_json::json;

use crate::scene::*;

#[tokio::test]
async fn orders_share_a_gpu_by_partitions_and_give_it_back_when_they_are_deleted_a_013_a_087()
-> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("sharing").await?;
    put_class(
        &cluster.client,
        "e2e-whole",
        json!({ "allowedPlacementTypes": ["WholeDevice"] }),
    )
    .await?;

    let alone = class_without_shares(&cluster).await?;

    // The scheduler spreads pods over nodes; the plan's preference brings both to one GPU.
    let first = Order::file(&cluster, &namespace, "first", alone, SMOLLM).await?;
    let second = Order::file(&cluster, &namespace, "second", alone, SMOLLM).await?;
    let whole = Order::file(&cluster, &namespace, "whole-llm", "e2e-whole", SMOLLM).await?;
    let served = first.ready().await?;
    second.ready().await?;
    whole.ready().await?;

    // A-070: the smallest partition that holds the model, not a whole card.
    let plan = served
        .status
        .as_ref()
        .and_then(|status| status.plan.as_ref());
    let plan = plan.context("the order has no plan")?;
    ensure!(
        plan.profile.as_deref() == Some("1g.10gb"),
        "planned {plan:?}"
    );

    let mut devices = Vec::new();
    for order in [&first, &second, &whole] {
        let allocated = order.devices().await?;
        ensure!(allocated.len() == 1, "{} holds {allocated:?}", order.name);
        let copy = order.first_copy().await?;
        let (node, device) = &allocated[0];
        ensure!(
            copy.node == *node,
            "{} runs on {}, its device is on {node}",
            order.name,
            copy.node
        );
        ensure!(
            devices_in(&copy) == [device.as_str()],
            "{} is told {:?}, its claim holds {device}",
            order.name,
            devices_in(&copy)
        );
        let answer = order.chat(QUESTION).await?;
        ensure!(
            answer.contains("Paris"),
            "{} answered: {answer}",
            order.name
        );
        devices.push(allocated[0].clone());
    }
    let [(node, one), (second_node, two), (_, third)] = &devices[..] else {
        anyhow::bail!("three devices were expected: {devices:?}");
    };
    let gpu = gpu_of(one);
    ensure!(
        one != two && node == second_node && gpu == gpu_of(two),
        "two GPUs for two small orders: {devices:?}"
    );
    ensure!(
        gpu_of(third) == third,
        "the third is no whole device: {third}"
    );

    let status = first.status_without_token().await?;
    ensure!(
        status == "401",
        "without a token the order answered {status}"
    );

    // The hardware holds what the claims say, and loses it with the order.
    let (start_one, start_two) = (start_of(one)?, start_of(two)?);
    expect_instances(
        &cluster,
        node,
        gpu,
        &BTreeMap::from([(start_one, 1), (start_two, 1)]),
    )
    .await?;
    first.delete().await?;
    expect_instances(&cluster, node, gpu, &BTreeMap::from([(start_two, 1)])).await?;
    ensure!(
        first.devices().await?.is_empty(),
        "a deleted order holds a claim"
    );

    // While one partition stands, the whole card cannot be had; afterwards it can.
    let (claim, pod) = whole_gpu_pod(&pci_address(gpu)?, node)?;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &namespace);
    let claims: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), &namespace);
    claims.create(&PostParams::default(), &claim).await?;
    pods.create(&PostParams::default(), &pod).await?;
    wait::until(
        &pods,
        "whole",
        "wait for the card",
        wait::SHORT,
        unschedulable,
    )
    .await?;
    second.delete().await?;
    expect_instances(&cluster, node, gpu, &BTreeMap::new()).await?;
    wait::until(&pods, "whole", "run on the freed card", wait::LONG, running).await?;

    cluster.delete_namespace(&namespace).await
}

#[tokio::test]
async fn small_orders_of_the_built_in_class_are_served_by_shares_of_one_gpu_a_034_a_070() -> Outcome
{
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("small").await?;
    let first = Order::file(&cluster, &namespace, "first", "default-llm", SMOLLM).await?;
    let second = Order::file(&cluster, &namespace, "second", "default-llm", SMOLLM).await?;
    let mut devices = Vec::new();
    for order in [&first, &second] {
        let served = order.ready().await?;
        // A-034: no bounds, so the smallest share that holds the model.
        let plan = served.status.and_then(|status| status.plan);
        let plan = plan.context("the order has no plan")?;
        let granted = plan.memory_per_device_bytes.unwrap_or_default();
        let needed = plan.required_memory_bytes.unwrap_or_default();
        ensure!(
            plan.sharing_mode == Some(inference_api::SharingMode::Shared)
                && (needed..needed + (1 << 20)).contains(&granted)
                && plan.share_percent.is_some_and(|percent| percent < 5),
            "planned {plan:?}"
        );
        let allocated = order.devices().await?;
        ensure!(allocated.len() == 1, "{} holds {allocated:?}", order.name);
        let answer = order.chat(QUESTION).await?;
        ensure!(
            answer.contains("Paris"),
            "{} answered: {answer}",
            order.name
        );
        devices.extend(allocated);
    }
    ensure!(
        devices[0] == devices[1] && devices[0].1.ends_with("-shared"),
        "two GPUs for two small orders: {devices:?}"
    );
    cluster.delete_namespace(&namespace).await?;
    Ok(())
}

#[tokio::test]
async fn a_model_that_fits_nowhere_is_refused_for_capacity_a_106() -> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("exhausted").await?;
    put_repository(&cluster, "acme/giant", giant_model()).await?;
    let order = Order::file(&cluster, &namespace, "giant", "default-llm", "acme/giant").await?;
    // A-106: every allowed device class was searched; this is about capacity.
    let message = order.refused("Planned", "ResourceClaimExhausted").await?;
    ensure!(
        message.contains("gpu.ai.deckhouse.io") && message.contains("short"),
        "neither device class nor lack is named: {message}"
    );
    ensure!(
        order.devices().await?.is_empty(),
        "a refused order holds a device"
    );
    cluster.delete_namespace(&namespace).await
}

/// A Llama of 400 GB, more than any card has: sizes and headers alone.
fn giant_model() -> serde_json::Value {
    let bytes: u64 = 400_000_000_000;
    json!({
        "config.json": { "text": json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 8192,
            "vocab_size": 128256,
            "torch_dtype": "bfloat16",
        }).to_string() },
        "tokenizer.json": { "text": "{}" },
        "model.safetensors": {
            "safetensorsHeader": {
                "model.embed_tokens.weight": {
                    "dtype": "BF16",
                    "shape": [bytes / 2],
                    "data_offsets": [0, bytes],
                },
            },
            "size": bytes + 8 + safetensors_header_length(bytes),
        },
    })
}

fn safetensors_header_length(bytes: u64) -> u64 {
    let header = json!({ "model.embed_tokens.weight": {
        "dtype": "BF16", "shape": [bytes / 2], "data_offsets": [0, bytes],
    } });
    header.to_string().len() as u64
}

#[tokio::test]
async fn a_selector_that_cannot_be_judged_points_at_the_class_and_not_at_capacity_a_106() -> Outcome
{
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("undecidable").await?;
    // It compiles, and fails on every device: nothing publishes this attribute.
    let expression = format!(r#"device.attributes["{DRIVER}"].colour == "green""#);
    let policy = json!({
        "allowedPlacementTypes": ["WholeDevice", "Partition"],
        "selectors": [{ "cel": { "expression": expression } }],
    });
    put_class(&cluster.client, "e2e-broken", policy).await?;
    let order = Order::file(&cluster, &namespace, "undecided", "e2e-broken", SMOLLM).await?;
    let message = order.refused("Planned", "PlacementUndecidable").await?;
    ensure!(
        message.contains("e2e-broken"),
        "the class is not named: {message}"
    );
    // The expression is the administrator's, and stands where only the administrator reads.
    let order = serde_json::to_string(&order.api_object().await?.status)?;
    ensure!(!order.contains("colour"), "the order tells it: {order}");
    let classes: Api<InferenceServiceClass> = Api::all(cluster.client.clone());
    let told = |class: &InferenceServiceClass| {
        let conditions = class.status.as_ref().map(|status| &status.conditions);
        conditions.into_iter().flatten().any(|condition| {
            condition.reason == "SelectorUndecidable" && condition.message.contains("colour")
        })
    };
    wait::until(
        &classes,
        "e2e-broken",
        "tell the expression",
        wait::SHORT,
        told,
    )
    .await?;
    cluster.delete_namespace(&namespace).await
}

#[tokio::test]
async fn a_source_that_is_missing_or_no_model_is_refused_by_name() -> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("sources").await?;
    put_repository(
        &cluster,
        "acme/notes",
        json!({ "README.md": { "text": "Not a model." } }),
    )
    .await?;
    let missing = Order::file(&cluster, &namespace, "missing", "default-llm", "acme/none").await?;
    let notes = Order::file(&cluster, &namespace, "notes", "default-llm", "acme/notes").await?;
    let message = missing
        .refused("ModelResolved", "ModelSourceNotFound")
        .await?;
    ensure!(
        message.contains("acme/none"),
        "the repository is not named: {message}"
    );
    let message = notes.refused("ModelResolved", "ModelNotSupported").await?;
    ensure!(
        message.contains("acme/notes"),
        "the repository is not named: {message}"
    );
    cluster.delete_namespace(&namespace).await
}

#[tokio::test]
async fn wiped_slices_are_published_again_within_seconds() -> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let took = wipe_slices(&cluster, wait::SHORT).await?;
    ensure!(
        took < Duration::from_secs(10),
        "the slices came back after {took:?}"
    );
    Ok(())
}

#[tokio::test]
async fn a_download_that_breaks_off_goes_on_where_it_stopped() -> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("resume").await?;
    let seen = requests(&cluster).await?.len();
    // Every answer breaks off after 100 MB of a file of 271 MB.
    arm_fault(
        &cluster,
        json!({ "pathContains": "/resolve/", "cutAfterBytes": 100_000_000 }),
    )
    .await?;
    let order = Order::file(&cluster, &namespace, "resumed", "default-llm", SMOLLM).await?;
    let served = order.ready().await?;
    disarm_faults(&cluster).await?;
    let download = served
        .status
        .and_then(|status| status.model)
        .and_then(|model| model.download);
    let percent = download.map(|download| download.percent);
    ensure!(
        percent == Some(100),
        "a served model is downloaded by {percent:?} percent"
    );
    let journal = requests(&cluster).await?;
    let resumed = journal.iter().skip(seen).any(|request| {
        let start = request
            .range
            .as_deref()
            .and_then(|range| range.strip_prefix("bytes="));
        let start = start
            .and_then(|range| range.split('-').next())
            .and_then(|first| first.parse().ok());
        request.status == 206 && start.is_some_and(|start: u64| start >= 50_000_000)
    });
    ensure!(
        resumed,
        "no download went on from where it stopped: {:?}",
        &journal[seen..]
    );
    cluster.delete_namespace(&namespace).await
}
