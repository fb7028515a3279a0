//! Status: who may write what, and that several writers do not undo each other.

use anyhow::{Context, Result};
use e2e::control_plane::ControlPlane;
use inference_api::{InferenceService, OrderCondition, OrderReason, set_condition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::api::{Patch, PatchParams};
use kube::{Api, Error};
use serde_json::{Value, json};

/// An order of its own for a test.
async fn order(test: &str) -> Result<Api<InferenceService>> {
    let plane = ControlPlane::shared()?;
    let namespace = plane.namespace(test).await?;
    plane.apply_yaml(&namespace, ORDER).await?;
    Ok(Api::namespaced(plane.client()?, &namespace))
}

const ORDER: &str = "
apiVersion: ai.deckhouse.io/v1alpha1
kind: InferenceService
metadata: { name: support-llm }
spec:
  inferenceServiceClassName: default-llm
  model: { src: HuggingFace, huggingFace: { repository: Qwen/Qwen3-8B } }
status: { phase: Ready }
";

/// What a writer applies that sets one condition.
fn apply(condition: OrderCondition, reason: OrderReason) -> Result<Value> {
    let now = Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH);
    let mut conditions = Vec::new();
    set_condition(
        &mut conditions,
        condition.met(reason, "so it is"),
        Some(1),
        &now,
    );
    Ok(status(&serde_json::to_value(conditions)?))
}

fn status(conditions: &Value) -> Value {
    json!({
        "apiVersion": "ai.deckhouse.io/v1alpha1",
        "kind": "InferenceService",
        "status": { "conditions": conditions },
    })
}

fn types(order: &InferenceService) -> Vec<&str> {
    let conditions: &[Condition] = order
        .status
        .as_ref()
        .map_or(&[], |status| &status.conditions);
    conditions
        .iter()
        .map(|condition| condition.type_.as_str())
        .collect()
}

#[tokio::test]
async fn two_managers_keep_each_others_conditions() -> Result<()> {
    let orders = order("two-managers").await?;
    let controller = PatchParams::apply("controller");
    let planner = PatchParams::apply("planner");
    let resolved = apply(OrderCondition::ClassResolved, OrderReason::ClassResolved)?;
    let planned = apply(OrderCondition::Planned, OrderReason::LaunchPlanCalculated)?;
    orders
        .patch_status("support-llm", &controller, &Patch::Apply(&resolved))
        .await?;
    let both = orders
        .patch_status("support-llm", &planner, &Patch::Apply(&planned))
        .await?;
    assert_eq!(types(&both), ["ClassResolved", "Planned"]);
    // Each takes back its own and nothing else.
    let taken_back = status(&json!([]));
    let left = orders
        .patch_status("support-llm", &controller, &Patch::Apply(&taken_back))
        .await?;
    assert_eq!(types(&left), ["Planned"]);
    Ok(())
}

#[tokio::test]
async fn a_manager_does_not_overwrite_another_ones_condition_unforced() -> Result<()> {
    let orders = order("conflict").await?;
    let ready = apply(OrderCondition::Ready, OrderReason::Ready)?;
    orders
        .patch_status(
            "support-llm",
            &PatchParams::apply("controller"),
            &Patch::Apply(&ready),
        )
        .await?;
    let other = apply(OrderCondition::Ready, OrderReason::ScaleUpBlocked)?;
    match orders
        .patch_status(
            "support-llm",
            &PatchParams::apply("planner"),
            &Patch::Apply(&other),
        )
        .await
    {
        Err(Error::Api(status)) => assert_eq!(status.code, 409, "{}", status.message),
        answer => anyhow::bail!("not refused: {answer:?}"),
    }
    Ok(())
}

#[tokio::test]
async fn applying_the_same_status_again_changes_nothing() -> Result<()> {
    let orders = order("same-again").await?;
    let ready = apply(OrderCondition::Ready, OrderReason::Ready)?;
    let manager = PatchParams::apply("controller");
    let first = orders
        .patch_status("support-llm", &manager, &Patch::Apply(&ready))
        .await?;
    let second = orders
        .patch_status("support-llm", &manager, &Patch::Apply(&ready))
        .await?;
    assert_eq!(
        first.metadata.resource_version,
        second.metadata.resource_version
    );
    Ok(())
}

#[tokio::test]
async fn a_condition_is_there_once() -> Result<()> {
    let orders = order("once").await?;
    let ready = apply(OrderCondition::Ready, OrderReason::Ready)?;
    let condition = &ready["status"]["conditions"][0];
    let twice = json!({ "status": { "conditions": [condition, condition] } });
    match orders
        .patch_status(
            "support-llm",
            &PatchParams::default(),
            &Patch::Merge(&twice),
        )
        .await
    {
        Err(Error::Api(status)) => assert!(
            status.message.contains("Duplicate value"),
            "{}",
            status.message
        ),
        answer => anyhow::bail!("not refused: {answer:?}"),
    }
    Ok(())
}

/// Status is a subresource of its own, so that a person who may edit orders cannot write it.
#[tokio::test]
async fn a_091_whoever_writes_the_order_does_not_write_its_status() -> Result<()> {
    let orders = order("own-right").await?;
    let order = orders.get("support-llm").await?;
    assert_eq!(
        order.status, None,
        "the status in the manifest was not taken"
    );
    Ok(())
}

#[tokio::test]
async fn a_phase_is_one_of_five_words() -> Result<()> {
    let orders = order("phases").await?;
    for phase in ["Pending", "Ready", "Degraded", "Failed", "Deleting"] {
        let patch = json!({ "status": { "phase": phase } });
        let order = orders
            .patch_status(
                "support-llm",
                &PatchParams::default(),
                &Patch::Merge(&patch),
            )
            .await?;
        let read = order
            .status
            .and_then(|status| status.phase)
            .context("no phase")?;
        assert_eq!(read.as_str(), phase);
    }
    let patch = json!({ "status": { "phase": "Running" } });
    let answer = orders
        .patch_status(
            "support-llm",
            &PatchParams::default(),
            &Patch::Merge(&patch),
        )
        .await;
    assert!(
        matches!(answer, Err(Error::Api(status)) if status.message.contains("Unsupported value: \"Running\""))
    );
    Ok(())
}
