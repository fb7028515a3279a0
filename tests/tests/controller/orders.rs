//! What becomes of orders.

use anyhow::{Context, Result};
use controller::order::settled::SETTLED;
use e2e::control_plane::ControlPlane;
use inference_api::{InferenceService, InferenceServiceClass, Phase};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Pod, Secret, Service};
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::setup::{Corner, setup};

/// What is made for an order, by kind and version.
async fn versions(corner: &Corner, order: &str) -> Result<Vec<String>> {
    let version = |v: Option<String>| v.unwrap_or_default();
    let mut found = vec![
        version(
            corner
                .api::<InferenceService>()
                .get(order)
                .await?
                .resource_version(),
        ),
        version(
            corner
                .api::<StatefulSet>()
                .get(order)
                .await?
                .resource_version(),
        ),
        version(corner.api::<Service>().get(order).await?.resource_version()),
        version(
            corner
                .api::<Secret>()
                .get(&format!("{order}-token"))
                .await?
                .resource_version(),
        ),
    ];
    for template in corner
        .api::<ResourceClaimTemplate>()
        .list(&Default::default())
        .await?
    {
        found.push(version(template.resource_version()));
    }
    Ok(found)
}

/// Makes the copy's pod as the StatefulSet's controller, the scheduler and the kubelet would.
pub(crate) async fn pod(
    corner: &Corner,
    order: &str,
    status: serde_json::Value,
    scheduled: bool,
) -> Result<Pod> {
    let set = corner.api::<StatefulSet>().get(order).await?;
    let mut template = serde_json::to_value(&set.spec.template)?;
    template["metadata"]["name"] = json!(format!("{order}-0"));
    template["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "apps/v1", "kind": "StatefulSet", "name": order, "uid": set.uid(), "controller": true,
    }]);
    template["apiVersion"] = json!("v1");
    template["kind"] = json!("Pod");
    if scheduled {
        template["spec"]["nodeName"] = json!(corner.name);
    }
    // The volume of the claim template; there is no controller that would add it.
    let volumes = template["spec"]["volumes"]
        .as_array_mut()
        .context("no volumes")?;
    volumes.push(json!({"name": "storage", "emptyDir": {}}));
    let pod: Pod = serde_json::from_value(template)?;
    let pods = corner.api::<Pod>();
    pods.create(&PostParams::default(), &pod).await?;
    Ok(pods
        .patch_status(
            &format!("{order}-0"),
            &PatchParams::default(),
            &Patch::Merge(json!({"status": status})),
        )
        .await?)
}

pub(crate) fn ready() -> serde_json::Value {
    json!({"phase": "Running", "podIP": "10.0.0.9", "conditions": [
        {"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]})
}

#[tokio::test]
async fn an_order_becomes_a_workload_and_its_status_says_why_a_059_a_070() -> Result<()> {
    let corner = Corner::new("served", None).await?;
    corner.slice("80Gi").await?;
    corner.order("chat", "acme/tiny").await?;
    let order = corner
        .reason("chat", "Planned", "LaunchPlanCalculated")
        .await?;
    let status = order.status.context("no status")?;
    let model = status.model.context("no model")?;
    assert_eq!(model.endpoint_type.map(|t| t.as_str()), Some("Chat"));
    assert_eq!(
        model.revision.map(|r| r.len()),
        Some(40),
        "pinned to a commit"
    );
    let plan = status.plan.context("no plan")?;
    assert_eq!(plan.device_class_name.as_deref(), Some("served"));
    assert_eq!(plan.memory_per_device_bytes, Some(80 << 30));
    corner
        .reason("chat", "WorkloadReady", "WorkloadCreating")
        .await?;

    let set = corner.api::<StatefulSet>().get("chat").await?;
    assert!(set.annotations().contains_key(SETTLED));
    let claims = set
        .spec
        .template
        .spec
        .context("no pod")?
        .resource_claims
        .context("no claims")?;
    let template = claims[0]
        .resource_claim_template_name
        .clone()
        .context("no template")?;
    let template = corner.api::<ResourceClaimTemplate>().get(&template).await?;
    assert!(template.name_any().starts_with("chat-"));
    corner.api::<Service>().get("chat").await?;
    let token = corner
        .api::<Secret>()
        .get("chat-token")
        .await?
        .data
        .context("no data")?;
    assert_eq!(token["token"].0.len(), 64);

    pod(&corner, "chat", ready(), true).await?;
    let order = corner.reason("chat", "Ready", "Ready").await?;
    let status = order.status.context("no status")?;
    assert_eq!(status.phase, Some(Phase::Ready));
    assert!(
        status.conditions.iter().all(|c| c.status == "True"),
        "{:?}",
        status.conditions
    );
    assert_eq!(status.replicas.map(|r| r.summary).as_deref(), Some("1/1"));
    let endpoint = status.endpoint.context("no endpoint")?;
    assert_eq!(
        endpoint.address,
        format!("http://chat.{}.svc", corner.namespace)
    );
    Ok(())
}

#[tokio::test]
async fn a_reconcile_that_changes_nothing_writes_nothing() -> Result<()> {
    let corner = Corner::new("idle", None).await?;
    corner.slice("80Gi").await?;
    corner.order("chat", "acme/tiny").await?;
    corner
        .reason("chat", "Planned", "LaunchPlanCalculated")
        .await?;
    corner
        .until::<StatefulSet>("chat", "exist", |_| true)
        .await?;
    let made = pod(&corner, "chat", ready(), true).await?;
    corner.reason("chat", "Ready", "Ready").await?;
    let before = versions(&corner, "chat").await?;
    // Each of these wakes the order; a marker order behind them shows that they were worked off.
    for value in ["a", "b", "c"] {
        let touch = json!({"metadata": {"annotations": {"test": value}}});
        corner
            .api::<Pod>()
            .patch(
                &made.name_any(),
                &PatchParams::default(),
                &Patch::Merge(&touch),
            )
            .await?;
    }
    corner.order("marker", "acme/notes").await?;
    corner
        .reason("marker", "ModelResolved", "ModelNotSupported")
        .await?;
    assert_eq!(versions(&corner, "chat").await?, before);
    Ok(())
}

#[tokio::test]
async fn somebody_elses_change_of_the_workload_is_undone() -> Result<()> {
    let corner = Corner::new("drift", None).await?;
    corner.slice("80Gi").await?;
    corner.order("chat", "acme/tiny").await?;
    corner.until::<Service>("chat", "exist", |_| true).await?;
    let drift =
        json!({"spec": {"ports": [{"name": "service-port", "port": 80, "targetPort": 1234}]}});
    corner
        .api::<Service>()
        .patch("chat", &PatchParams::default(), &Patch::Merge(&drift))
        .await?;
    let named = |s: &Service| {
        let ports = s
            .spec
            .as_ref()
            .and_then(|s| s.ports.clone())
            .unwrap_or_default();
        ports.iter().any(|p| {
            p.target_port
                == Some(
                    k8s_openapi::apimachinery::pkg::util::intstr::IntOrString::String(
                        "http".into(),
                    ),
                )
        })
    };
    corner
        .until::<Service>("chat", "point to the runtime again", named)
        .await?;
    Ok(())
}

#[tokio::test]
async fn an_order_without_room_says_so_and_goes_on_when_there_is_a_106() -> Result<()> {
    let corner = Corner::new("full", None).await?;
    corner.slice("512Mi").await?;
    corner.order("chat", "acme/tiny").await?;
    let order = corner
        .reason("chat", "Planned", "ResourceClaimExhausted")
        .await?;
    assert_eq!(order.status.and_then(|s| s.phase), Some(Phase::Pending));
    assert!(
        corner.api::<StatefulSet>().get_opt("chat").await?.is_none(),
        "nothing is made that can't run"
    );
    // A larger device appears; the slice's change wakes the order.
    corner.slice("80Gi").await?;
    corner
        .reason("chat", "Planned", "LaunchPlanCalculated")
        .await?;
    Ok(())
}

#[tokio::test]
async fn a_selector_that_cant_be_judged_points_at_the_class_a_106() -> Result<()> {
    let corner = Corner::new(
        "broken",
        Some("device.attributes['broken.example.com'].absent == 'x'"),
    )
    .await?;
    corner.slice("80Gi").await?;
    corner.order("chat", "acme/tiny").await?;
    let order = corner
        .reason("chat", "Planned", "PlacementUndecidable")
        .await?;
    let status = order.status.context("no status")?;
    assert_eq!(status.phase, Some(Phase::Failed));
    Ok(())
}

#[tokio::test]
async fn a_model_that_cant_be_had_is_refused_by_name() -> Result<()> {
    let corner = Corner::new("sources", None).await?;
    corner.slice("80Gi").await?;
    for (name, repository, reason) in [
        ("gone", "acme/none", "ModelSourceNotFound"),
        ("notes", "acme/notes", "ModelNotSupported"),
        ("gated", "acme/gated", "AccessDenied"),
    ] {
        corner.order(name, repository).await?;
        let order = corner.reason(name, "ModelResolved", reason).await?;
        let ready = order.status.context("no status")?.conditions;
        let message = &ready
            .iter()
            .find(|c| c.type_ == "Ready")
            .context("no Ready")?
            .message;
        assert!(message.contains(repository), "{message}");
    }
    Ok(())
}

#[tokio::test]
async fn a_copy_without_a_node_and_a_crashing_runtime_are_reported_in_their_own_words() -> Result<()>
{
    let corner = Corner::new("pods", None).await?;
    corner.slice("80Gi").await?;
    corner.order("chat", "acme/tiny").await?;
    corner
        .until::<StatefulSet>("chat", "exist", |_| true)
        .await?;
    let unscheduled = json!({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/3 nodes are available: cannot allocate all claims."}]});
    pod(&corner, "chat", unscheduled, false).await?;
    corner
        .reason("chat", "WorkloadReady", "ReplicasUnschedulable")
        .await?;
    corner
        .api::<Pod>()
        .delete("chat-0", &DeleteParams::default().grace_period(0))
        .await?;
    await_condition(corner.api::<Pod>(), "chat-0", conditions::is_deleted(""))
        .await
        .ok();

    let crash = json!({"containerStatuses": [{"name": "runtime", "ready": false, "restartCount": 2, "image": "i", "imageID": "i",
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": 3, "reason": "Error", "message": "no kernel image is available"}}}]});
    pod(&corner, "chat", crash, true).await?;
    let order = corner.reason("chat", "Ready", "RuntimeCrashing").await?;
    let conditions = order.status.context("no status")?.conditions;
    let message = &conditions
        .iter()
        .find(|c| c.type_ == "Ready")
        .context("no Ready")?
        .message;
    assert!(
        message.contains("exit code 3") && message.contains("no kernel image"),
        "{message}"
    );
    Ok(())
}

#[tokio::test]
async fn an_edit_moves_the_copy_and_a_foreign_object_is_left_alone_a_113() -> Result<()> {
    let corner = Corner::new("edits", None).await?;
    corner.slice("80Gi").await?;
    corner
        .plane
        .apply_yaml(&corner.namespace, "apiVersion: v1\nkind: Service\nmetadata: { name: taken }\nspec: { ports: [{ port: 1 }] }\n")
        .await?;
    corner.order("taken", "acme/tiny").await?;
    corner.reason("taken", "WorkloadReady", "NameTaken").await?;
    // No watch sees what is not the platform's: the order comes back to it by itself.
    corner
        .api::<Service>()
        .delete("taken", &DeleteParams::default())
        .await?;
    corner
        .until::<StatefulSet>("taken", "exist once the name is free", |_| true)
        .await?;

    corner.order("chat", "acme/tiny").await?;
    corner
        .until::<StatefulSet>("chat", "exist", |_| true)
        .await?;
    let copy = pod(&corner, "chat", ready(), true).await?;
    corner.reason("chat", "Ready", "Ready").await?;
    corner.edit_moves("chat", &copy).await
}

#[tokio::test]
async fn deleting_an_order_is_never_held_up_a_123() -> Result<()> {
    let corner = Corner::new("deletion", None).await?;
    corner.slice("80Gi").await?;
    corner.order("chat", "acme/tiny").await?;
    corner
        .reason("chat", "Planned", "LaunchPlanCalculated")
        .await?;
    Api::<InferenceServiceClass>::all(corner.client.clone())
        .delete("deletion", &DeleteParams::default())
        .await?;
    corner
        .reason("chat", "ClassResolved", "ClassNotFound")
        .await?;
    let order = corner.api::<InferenceService>().get("chat").await?;
    assert!(order.finalizers().is_empty());
    let owned = corner.api::<StatefulSet>().get("chat").await?;
    assert_eq!(
        owned.owner_references()[0].uid,
        order.uid().unwrap_or_default(),
        "garbage collection takes it along"
    );
    corner
        .api::<InferenceService>()
        .delete("chat", &DeleteParams::default())
        .await?;
    assert!(
        corner
            .api::<InferenceService>()
            .get_opt("chat")
            .await?
            .is_none()
    );
    Ok(())
}

#[tokio::test]
async fn the_built_in_class_is_made_and_classes_are_judged_a_070_a_105() -> Result<()> {
    let corner = Corner::new("classes", None).await?;
    let classes: Api<InferenceServiceClass> = Api::all(corner.client.clone());
    let judged = |reason: &'static str| {
        move |c: Option<&InferenceServiceClass>| {
            let conditions = c
                .and_then(|c| c.status.as_ref())
                .map(|s| s.conditions.as_slice())
                .unwrap_or_default();
            conditions.iter().any(|c| c.reason == reason)
        }
    };
    let soon = std::time::Duration::from_secs(30);
    for (name, reason) in [("default-llm", "Ready"), ("classes", "Ready")] {
        tokio::time::timeout(soon, await_condition(classes.clone(), name, judged(reason)))
            .await
            .with_context(|| format!("{name} is not {reason}"))??;
    }
    let broken = "apiVersion: ai.deckhouse.io/v1alpha1\nkind: InferenceServiceClass\nmetadata: { name: broken-selector }\nspec: { modelPolicy: { allowedEndpointTypes: [Chat] }, acceleratorPolicy: { selectors: [{ cel: { expression: 'device.driver ==' } }] } }\n";
    corner.plane.apply_yaml(&corner.namespace, broken).await?;
    tokio::time::timeout(
        soon,
        await_condition(
            classes.clone(),
            "broken-selector",
            judged("SelectorInvalid"),
        ),
    )
    .await
    .context("not judged")??;
    Ok(())
}

#[tokio::test]
async fn the_controller_may_not_read_secrets_and_can_do_its_work_all_the_same_a_091() -> Result<()>
{
    let plane: &ControlPlane = setup()?.plane;
    let client = plane
        .client_for_service_account("d8-ai-inference", "ai-inference-controller")
        .await?;
    let secrets: Api<Secret> = Api::all(client);
    match secrets.list(&Default::default()).await {
        Err(kube::Error::Api(status)) => assert_eq!(status.code, 403),
        other => panic!("{:?}", other.map(|list| list.items.len())),
    }
    Ok(())
}
