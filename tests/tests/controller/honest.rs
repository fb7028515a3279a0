//! What statuses admit, and to whom.

use anyhow::{Context, Result};
use inference_api::{InferenceService, InferenceServiceClass, Phase};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1::Event;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::runtime::wait::await_condition;
use kube::{Api, Client};
use serde_json::json;

use crate::setup::Corner;

const SOON: std::time::Duration = std::time::Duration::from_secs(30);

/// Waits for a condition of a class to have a reason; gives its message then.
async fn told(client: &Client, class: &str, reason: &str) -> Result<String> {
    let classes: Api<InferenceServiceClass> = Api::all(client.clone());
    let message = |class: &InferenceServiceClass| {
        let conditions = class.status.as_ref().map(|s| s.conditions.as_slice());
        let found = conditions.unwrap_or_default().iter();
        found
            .filter(|c| c.reason == reason)
            .map(|c| c.message.clone())
            .next()
    };
    let there = |c: Option<&InferenceServiceClass>| c.is_some_and(|c| message(c).is_some());
    let found = tokio::time::timeout(SOON, await_condition(classes, class, there))
        .await
        .with_context(|| format!("{class} never had the reason {reason}"))??;
    found.as_ref().and_then(message).context("it is gone")
}

async fn patch_class(client: &Client, name: &str, spec: serde_json::Value) -> Result<()> {
    let classes: Api<InferenceServiceClass> = Api::all(client.clone());
    let patch = Patch::Merge(json!({ "spec": spec }));
    classes.patch(name, &PatchParams::default(), &patch).await?;
    Ok(())
}

fn selectors(expression: &str) -> serde_json::Value {
    json!({"acceleratorPolicy": {"selectors": [{"cel": {"expression": expression}}]}})
}

#[tokio::test]
async fn a_class_with_an_invalid_selector_serves_nothing_until_it_is_corrected() -> Result<()> {
    let corner = Corner::new("invalid", None).await?;
    corner.slice("80Gi").await?;
    patch_class(&corner.client, "invalid", selectors("device.zebra ==")).await?;
    told(&corner.client, "invalid", "SelectorInvalid").await?;
    corner.order("chat", "acme/tiny").await?;
    let order = corner
        .reason("chat", "ClassResolved", "ClassNotReady")
        .await?;
    let status = serde_json::to_string(&order.status)?;
    assert!(!status.contains("zebra"), "{status}");
    patch_class(&corner.client, "invalid", selectors("true")).await?;
    corner
        .reason("chat", "Planned", "LaunchPlanCalculated")
        .await?;
    Ok(())
}

#[tokio::test]
async fn what_a_class_says_is_told_on_the_class_and_never_on_an_order_a_096_a_106() -> Result<()> {
    let corner = Corner::new("discreet", None).await?;
    corner.slice("80Gi").await?;
    // It compiles, and fails on every device.
    let expression = "device.attributes['discreet.example.com'].zebra == 'striped'";
    patch_class(&corner.client, "discreet", selectors(expression)).await?;
    let bounds = json!({"acceleratorPolicy": {"maxSharePercent": 37, "minSharePercent": 23, "allowedSharingModes": ["Shared", "Dedicated"]}});
    patch_class(&corner.client, "discreet", bounds).await?;
    corner.order("chat", "acme/tiny").await?;
    let order = corner
        .reason("chat", "Planned", "PlacementUndecidable")
        .await?;
    let conditions = &order.status.as_ref().context("no status")?.conditions;
    let planned = conditions.iter().find(|c| c.type_ == "Planned");
    let message = &planned.context("no Planned")?.message;
    assert!(message.contains("The class is discreet"), "{message}");

    let message = told(&corner.client, "discreet", "SelectorUndecidable").await?;
    assert!(message.contains(expression), "{message}");
    let events: Api<Event> = Api::all(corner.client.clone());
    let events = events.list(&Default::default()).await?;
    let about = |kind: &str, name: &str| {
        let found = events.iter().filter(|e| {
            e.regarding
                .as_ref()
                .is_some_and(|r| r.kind.as_deref() == Some(kind) && r.name.as_deref() == Some(name))
        });
        found.filter_map(|e| e.note.clone()).collect::<Vec<_>>()
    };
    let of_class = about("InferenceServiceClass", "discreet").join("\n");
    assert!(of_class.contains(expression), "{of_class}");

    // Nothing that the namespace's user reads says what the class says.
    let namespaced: Api<Event> = corner.api();
    let notes: Vec<_> = namespaced
        .list(&Default::default())
        .await?
        .into_iter()
        .filter_map(|e| e.note)
        .collect();
    let order = corner.api::<InferenceService>().get("chat").await?;
    let readable = format!("{}{notes:?}", serde_json::to_string(&order.status)?);
    assert!(!notes.is_empty(), "the refusal is an event too");
    for secret in ["zebra", "striped", "37", "23 %"] {
        assert!(!readable.contains(secret), "{secret}: {readable}");
    }

    patch_class(&corner.client, "discreet", selectors("true")).await?;
    corner
        .reason("chat", "Planned", "LaunchPlanCalculated")
        .await?;
    told(&corner.client, "discreet", "Ready").await?;
    Ok(())
}

#[tokio::test]
async fn a_deletion_that_is_held_says_by_what() -> Result<()> {
    let corner = Corner::new("held", None).await?;
    corner.slice("80Gi").await?;
    corner.order("chat", "acme/tiny").await?;
    corner
        .reason("chat", "Planned", "LaunchPlanCalculated")
        .await?;
    let orders = corner.api::<InferenceService>();
    let hold = |names: serde_json::Value| Patch::Merge(json!({"metadata": {"finalizers": names}}));
    let params = PatchParams::default();
    orders
        .patch("chat", &params, &hold(json!(["example.com/hold"])))
        .await?;
    orders.delete("chat", &DeleteParams::default()).await?;
    let order = corner.reason("chat", "Ready", "Deleting").await?;
    let status = order.status.context("no status")?;
    assert_eq!(status.phase, Some(Phase::Deleting));
    let ready = status.conditions.iter().find(|c| c.type_ == "Ready");
    let message = &ready.context("no Ready")?.message;
    assert!(message.contains("example.com/hold"), "{message}");
    orders.patch("chat", &params, &hold(json!(null))).await?;
    assert!(orders.get_opt("chat").await?.is_none());
    let left = corner.api::<Pod>().list(&Default::default()).await?;
    assert!(left.items.is_empty());
    Ok(())
}

#[tokio::test]
async fn a_class_says_what_this_version_does_not_do_and_an_order_its_bounds_a_062() -> Result<()> {
    let corner = Corner::new("ahead", None).await?;
    corner.slice("80Gi").await?;
    let spec = json!({
        "exposurePolicy": {"type": "External", "https": {"mode": "Disabled"}},
        "scalingPolicy": {"minReplicas": 1, "maxReplicas": 3},
    });
    patch_class(&corner.client, "ahead", spec).await?;
    let classes: Api<InferenceServiceClass> = Api::all(corner.client.clone());
    let current = |class: Option<&InferenceServiceClass>| {
        class.is_some_and(|c| {
            c.status.as_ref().and_then(|s| s.observed_generation) == c.metadata.generation
        })
    };
    tokio::time::timeout(SOON, await_condition(classes, "ahead", current)).await??;
    let message = told(&corner.client, "ahead", "Ready").await?;
    for part in ["not published", "https", "maxReplicas"] {
        assert!(message.contains(part), "{message}");
    }
    corner.order("chat", "acme/tiny").await?;
    let order = corner
        .reason("chat", "Planned", "LaunchPlanCalculated")
        .await?;
    let replicas = order.status.and_then(|s| s.replicas).context("no count")?;
    assert_eq!((replicas.minimum, replicas.maximum), (Some(1), Some(3)));
    assert_eq!(replicas.desired, 1);
    Ok(())
}
