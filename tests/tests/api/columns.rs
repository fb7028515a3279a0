//! What `kubectl get` shows of orders and classes, and under which names it finds them.

use anyhow::{Context, Result};
use e2e::control_plane::{ControlPlane, get};
use inference_api::{
    ClassCondition, ClassReason, InferenceService, InferenceServiceClass,
    InferenceServiceClassStatus, InferenceServiceStatus, OrderCondition, OrderReason,
    ReplicasStatus, set_condition,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

/// The table that `kubectl get` prints: its heads with their priorities, and its rows.
async fn table(plane: &ControlPlane, path: &str) -> Result<Value> {
    let request = get(path, "application/json;as=Table;v=v1;g=meta.k8s.io")?;
    Ok(plane.client()?.request(request).await?)
}

fn heads(table: &Value, priority: i64) -> Vec<&str> {
    table["columnDefinitions"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|column| column["priority"] == priority)
        .filter_map(|column| column["name"].as_str())
        .collect()
}

/// The cell under `head` in the row of `name`.
fn cell<'a>(table: &'a Value, name: &str, head: &str) -> Result<&'a Value> {
    let column = table["columnDefinitions"]
        .as_array()
        .and_then(|columns| columns.iter().position(|column| column["name"] == head))
        .with_context(|| format!("no column {head}"))?;
    table["rows"]
        .as_array()
        .and_then(|rows| rows.iter().find(|row| row["cells"][0] == name))
        .map(|row| &row["cells"][column])
        .with_context(|| format!("no row {name}"))
}

fn now() -> Time {
    Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH)
}

/// An order with the status of one that serves and cannot grow.
async fn degraded_order(plane: &ControlPlane, namespace: &str) -> Result<()> {
    let yaml = "
apiVersion: ai.deckhouse.io/v1alpha1
kind: InferenceService
metadata: { name: support-llm }
spec:
  inferenceServiceClassName: night-shift
  model: { src: HuggingFace, huggingFace: { repository: Qwen/Qwen3-8B } }
";
    plane.apply_yaml(namespace, yaml).await?;
    let mut status = InferenceServiceStatus {
        phase: Some(inference_api::Phase::Degraded),
        replicas: Some(ReplicasStatus::new(2, 2, 1)),
        model: Some(inference_api::ModelStatus {
            endpoint_type: Some(inference_api::EndpointType::Chat),
            ..Default::default()
        }),
        ..Default::default()
    };
    let blocked = OrderCondition::Ready.unmet(OrderReason::ScaleUpBlocked, "no room for copy 2");
    set_condition(&mut status.conditions, blocked, Some(1), &now());
    Api::<InferenceService>::namespaced(plane.client()?, namespace)
        .patch_status(
            "support-llm",
            &PatchParams::default(),
            &Patch::Merge(json!({ "status": status })),
        )
        .await?;
    Ok(())
}

#[tokio::test]
async fn a_104_orders_are_listed_with_class_contract_copies_phase_and_reason() -> Result<()> {
    let plane = ControlPlane::shared()?;
    let namespace = plane.namespace("order-columns").await?;
    degraded_order(plane, &namespace).await?;
    // `kubectl get inferenceservice -A` asks for this.
    let table = table(plane, "/apis/ai.deckhouse.io/v1alpha1/inferenceservices").await?;
    assert_eq!(
        heads(&table, 0),
        [
            "Name", "Class", "Contract", "Ready", "Phase", "Reason", "Age"
        ]
    );
    assert_eq!(
        heads(&table, 1),
        ["Model", "Placement", "Profile", "Address"]
    );
    for (head, value) in [
        ("Class", "night-shift"),
        ("Contract", "Chat"),
        ("Ready", "1/2"),
        ("Phase", "Degraded"),
        ("Reason", "ScaleUpBlocked"),
    ] {
        assert_eq!(cell(&table, "support-llm", head)?, value, "{head}");
    }
    Ok(())
}

/// A class called `name` that passed validation and finds no devices.
async fn unready_class(plane: &ControlPlane, name: &str) -> Result<()> {
    let yaml = format!(
        "
apiVersion: ai.deckhouse.io/v1alpha1
kind: InferenceServiceClass
metadata: {{ name: {name} }}
spec:
  modelPolicy: {{ allowedEndpointTypes: [Chat, Rerank] }}
  scalingPolicy: {{ minReplicas: 2, maxReplicas: 3 }}
"
    );
    plane.apply_yaml("default", &yaml).await?;
    let mut status = InferenceServiceClassStatus {
        orders: Some(7),
        ..Default::default()
    };
    for update in [
        ClassCondition::Validated.met(ClassReason::Validated, ""),
        ClassCondition::Ready.unmet(ClassReason::NoDeviceClass, "the cluster has no DeviceClass"),
    ] {
        set_condition(&mut status.conditions, update, Some(1), &now());
    }
    Api::<InferenceServiceClass>::all(plane.client()?)
        .patch_status(
            name,
            &PatchParams::default(),
            &Patch::Merge(json!({ "status": status })),
        )
        .await?;
    Ok(())
}

#[tokio::test]
async fn a_103_classes_are_listed_with_whether_they_are_validated_and_ready() -> Result<()> {
    let plane = ControlPlane::shared()?;
    unready_class(plane, "listed").await?;
    let table = table(
        plane,
        "/apis/ai.deckhouse.io/v1alpha1/inferenceserviceclasses",
    )
    .await?;
    assert_eq!(
        heads(&table, 0),
        [
            "Name",
            "Validated",
            "Ready",
            "Contracts",
            "Min",
            "Max",
            "Orders",
            "Age"
        ]
    );
    for (head, value) in [
        ("Validated", json!("True")),
        ("Ready", json!("False")),
        ("Contracts", json!("[\"Chat\",\"Rerank\"]")),
        ("Min", json!(2)),
        ("Max", json!(3)),
        ("Orders", json!(7)),
        ("Reason", json!("NoDeviceClass")),
    ] {
        assert_eq!(*cell(&table, "listed", head)?, value, "{head}");
    }
    Ok(())
}

/// What kubectl prints.
fn kubectl(plane: &ControlPlane, arguments: &[&str]) -> Result<String> {
    let output = plane.kubectl()?.args(arguments).output()?;
    anyhow::ensure!(
        output.status.success(),
        "kubectl {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}

#[tokio::test]
async fn a_105_a_class_says_why_it_is_not_ready() -> Result<()> {
    let plane = ControlPlane::shared()?;
    unready_class(plane, "explained").await?;
    let path = r#"jsonpath={range .status.conditions[*]}{.type}={.status} {.reason}{"\n"}{end}"#;
    let printed = kubectl(
        plane,
        &["get", "inferenceserviceclass", "explained", "-o", path],
    )?;
    assert_eq!(
        printed,
        "Validated=True Validated\nReady=False NoDeviceClass\n"
    );
    Ok(())
}

#[tokio::test]
async fn kubectl_knows_the_short_names_and_the_category() -> Result<()> {
    let plane = ControlPlane::shared()?;
    let namespace = plane.namespace("names").await?;
    degraded_order(plane, &namespace).await?;
    unready_class(plane, "short").await?;
    let by = |what: &str| kubectl(plane, &["get", what, "-n", &namespace, "-o", "name"]);
    let order = "inferenceservice.ai.deckhouse.io/support-llm\n";
    let class = "inferenceserviceclass.ai.deckhouse.io/short\n";
    assert_eq!(by("infsvc")?, order);
    assert_eq!(by("inferenceservice")?, order);
    assert!(by("infclass")?.contains(class));
    let all = by("ai")?;
    assert!(all.contains(order) && all.contains(class), "{all}");
    Ok(())
}
