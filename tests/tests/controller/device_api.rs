//! A cluster without resource.k8s.io/v1, and what happens when it gets it.

use anyhow::{Context, Result, anyhow};
use controller::run::{Options, run};
use e2e::control_plane::ControlPlane;
use inference_api::{InferenceService, InferenceServiceClass};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::runtime::wait::await_condition;
use kube::{Api, Client};
use tokio_util::sync::CancellationToken;

use crate::setup::{options, serve_hub};

/// An API server that was replaced is found again with growing pauses.
const LATER: std::time::Duration = std::time::Duration::from_secs(90);

fn has(conditions: Option<&[Condition]>, of: &str, reason: &str) -> bool {
    let mut all = conditions.unwrap_or_default().iter();
    all.any(|c| c.type_ == of && c.reason == reason)
}

async fn order_says(client: &Client, namespace: &str, reason: &str) -> Result<InferenceService> {
    let orders: Api<InferenceService> = Api::namespaced(client.clone(), namespace);
    let told = |o: Option<&InferenceService>| {
        let status = o.and_then(|o| o.status.as_ref());
        has(status.map(|s| s.conditions.as_slice()), "Planned", reason)
    };
    let waited = tokio::time::timeout(LATER, await_condition(orders.clone(), "chat", told)).await;
    match waited {
        Ok(order) => order?.context("the order is gone"),
        Err(_) => Err(anyhow!(
            "never {reason}: {:?}",
            orders.get("chat").await?.status
        )),
    }
}

async fn class_says(client: &Client, reason: &str) -> Result<()> {
    let classes: Api<InferenceServiceClass> = Api::all(client.clone());
    let told = |c: Option<&InferenceServiceClass>| {
        let status = c.and_then(|c| c.status.as_ref());
        has(status.map(|s| s.conditions.as_slice()), "Ready", reason)
    };
    tokio::time::timeout(LATER, await_condition(classes, "apiless", told))
        .await
        .with_context(|| format!("the class never said {reason}"))??;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_api_of_devices_it_is_said_and_with_it_orders_go_on_a_014() -> Result<()> {
    let mut plane = ControlPlane::start_without("resource.k8s.io/v1")?;
    let namespace = plane.namespace("apiless").await?;
    plane
        .apply_yaml(
            &namespace,
            "
apiVersion: ai.deckhouse.io/v1alpha1
kind: InferenceServiceClass
metadata: { name: apiless }
spec:
  modelPolicy: { allowedEndpointTypes: [Chat] }
  acceleratorPolicy: { allowedPlacementTypes: [WholeDevice] }
---
apiVersion: ai.deckhouse.io/v1alpha1
kind: InferenceService
metadata: { name: chat }
spec:
  inferenceServiceClassName: apiless
  model: { src: HuggingFace, huggingFace: { repository: acme/tiny } }
---
apiVersion: v1
kind: Node
metadata: { name: apiless }
",
        )
        .await?;
    // The tokens of accounts die with the API server that is replaced below.
    let client = plane.client()?;
    let stop = CancellationToken::new();
    let options = Options {
        election: None,
        ..options(serve_hub().await?)?
    };
    let running = tokio::spawn(run(client.clone(), options, stop.clone()));
    order_says(&client, &namespace, "DeviceApiUnavailable").await?;
    class_says(&client, "DeviceApiUnavailable").await?;
    let sets: Api<StatefulSet> = Api::namespaced(client.clone(), &namespace);
    assert!(
        sets.get_opt("chat").await?.is_none(),
        "there is no silent way around it"
    );

    plane.replace_api_server("").await?;
    order_says(&client, &namespace, "NoDeviceClass").await?;
    class_says(&client, "NoDeviceClass").await?;
    assert!(sets.get_opt("chat").await?.is_none());
    plane
        .apply_yaml(
            "",
            "
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: { name: apiless }
spec: { selectors: [{ cel: { expression: 'true' } }] }
---
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: { name: apiless }
spec:
  driver: apiless.example.com
  nodeName: apiless
  pool: { name: apiless, generation: 1, resourceSliceCount: 1 }
  devices: [{ name: gpu-0, attributes: { type: { string: gpu } }, capacity: { memory: { value: 80Gi } } }]
",
        )
        .await?;
    let nodes: Api<k8s_openapi::api::core::v1::Node> = Api::all(client.clone());
    let ready =
        serde_json::json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}});
    let patch = kube::api::Patch::Merge(&ready);
    nodes
        .patch_status("apiless", &Default::default(), &patch)
        .await?;
    let untainted = serde_json::json!({"spec": {"taints": null}});
    let patch = kube::api::Patch::Merge(&untainted);
    nodes.patch("apiless", &Default::default(), &patch).await?;
    order_says(&client, &namespace, "LaunchPlanCalculated").await?;
    class_says(&client, "Ready").await?;
    stop.cancel();
    running.await??;
    Ok(())
}
