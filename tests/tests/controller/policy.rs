//! What the installation and the administrator decide: the catalog, who may order, the built-in class.

use anyhow::{Context, Result};
use inference_api::names::{DEFAULT_CLASS, SHIPPED_VERSION_ANNOTATION};
use inference_api::{InferenceService, InferenceServiceClass, Phase};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1::Event;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::runtime::wait::await_condition;
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::setup::{Corner, Platform};
use crate::workload::{Workload, answers};

/// Files an order of a model of the catalog.
async fn of_the_catalog(corner: &Corner, name: &str) -> Result<()> {
    let order = format!(
        "apiVersion: ai.deckhouse.io/v1alpha1\nkind: InferenceService\nmetadata: {{ name: {name} }}\n\
         spec:\n  inferenceServiceClassName: {}\n  model: {{ src: ai-models, ref: {{ kind: ClusterModel, name: qwen }} }}\n",
        corner.name
    );
    corner.plane.apply_yaml(&corner.namespace, &order).await?;
    Ok(())
}

#[tokio::test]
async fn orders_of_a_hub_are_served_with_the_catalog_off_and_where_there_is_none_a_023_a_024()
-> Result<()> {
    let mut platform = Platform::new().await?;
    platform.start(|o| o.settings.catalog = false).await?;
    let corner = platform.corner("no-catalog").await?;
    corner.devices(2, "80Gi").await?;
    of_the_catalog(&corner, "catalog").await?;
    corner.order("hub", "acme/tiny").await?;
    corner
        .reason("catalog", "ModelResolved", "CatalogDisabled")
        .await?;
    corner
        .reason("hub", "Planned", "LaunchPlanCalculated")
        .await?;
    corner
        .until::<StatefulSet>("hub", "exist", |_| true)
        .await?;

    // On, and the cluster has no kinds of a catalog: the controller starts, and serves the others.
    platform.start(|o| o.settings.catalog = true).await?;
    corner
        .reason("catalog", "ModelResolved", "SourceNotSupported")
        .await?;
    corner.order("later", "acme/tiny").await?;
    corner
        .reason("later", "Planned", "LaunchPlanCalculated")
        .await?;
    Ok(())
}

#[tokio::test]
async fn a_namespace_that_is_taken_off_the_list_keeps_what_serves_and_orders_no_more_a_038()
-> Result<()> {
    let corner = Corner::new("admission", None).await?;
    corner.devices(2, "80Gi").await?;
    let workload = Workload { corner: &corner };
    let admitted = |namespaces: &[&str]| {
        workload.class(json!({ "admissionPolicy": { "allowedNamespaces": namespaces } }))
    };
    admitted(&["elsewhere"]).await?;
    corner.order("chat", "acme/tiny").await?;
    let refused = corner
        .reason("chat", "ClassResolved", "NamespaceNotAllowed")
        .await?;
    assert_eq!(refused.status.and_then(|s| s.phase), Some(Phase::Failed));
    assert!(corner.api::<StatefulSet>().get_opt("chat").await?.is_none());

    admitted(&["elsewhere", &corner.namespace]).await?;
    corner
        .until::<StatefulSet>("chat", "exist", |_| true)
        .await?;
    let copy = workload.raise(0, answers()).await?;
    corner.reason("chat", "Ready", "Ready").await?;
    let set = workload.set().await?;

    admitted(&[]).await?;
    let order = corner
        .reason("chat", "ClassResolved", "NamespaceNotAllowed")
        .await?;
    let status = order.status.context("no status")?;
    let ready = status.conditions.iter().find(|c| c.type_ == "Ready");
    assert_eq!(
        ready.map(|c| c.status.as_str()),
        Some("True"),
        "it keeps serving"
    );
    assert_eq!(workload.pod(0).await?.uid(), copy.uid());
    assert_eq!(workload.set().await?.spec, set.spec);
    corner.order("another", "acme/tiny").await?;
    corner
        .reason("another", "ClassResolved", "NamespaceNotAllowed")
        .await?;

    admitted(&[&corner.namespace]).await?;
    let back = corner
        .reason("chat", "ClassResolved", "ClassResolved")
        .await?;
    assert_eq!(back.status.and_then(|s| s.phase), Some(Phase::Ready));
    assert_eq!(corner.api::<Pod>().get("chat-0").await?.uid(), copy.uid());
    Ok(())
}

#[tokio::test]
async fn an_edited_built_in_class_stays_over_restarts_and_the_difference_is_an_event_a_072()
-> Result<()> {
    let mut platform = Platform::new().await?;
    platform.start(|_| {}).await?;
    let corner = platform.corner("built-in").await?;
    let classes: Api<InferenceServiceClass> = Api::all(corner.client.clone());
    let soon = std::time::Duration::from_secs(30);
    let there = |class: Option<&InferenceServiceClass>| class.is_some();
    tokio::time::timeout(soon, await_condition(classes.clone(), DEFAULT_CLASS, there))
        .await
        .context("the class is not made")??;
    let made = classes.get(DEFAULT_CLASS).await?;
    assert_eq!(
        made.annotations()
            .get(SHIPPED_VERSION_ANNOTATION)
            .map(String::as_str),
        Some(env!("CARGO_PKG_VERSION"))
    );
    let edit = json!({"spec": {"scalingPolicy": {"minReplicas": 1, "maxReplicas": 3}}});
    let edited = classes
        .patch(DEFAULT_CLASS, &PatchParams::default(), &Patch::Merge(&edit))
        .await?;

    platform.start(|_| {}).await?;
    // Events of what lies in no namespace lie in this one.
    let events: Api<Event> = Api::namespaced(corner.client.clone(), "default");
    let differs = ListParams::default().fields("reason=ShippedClassDiffers");
    let told = async {
        loop {
            let found = events.list(&differs).await?.items;
            let about = |e: &Event| {
                e.regarding.as_ref().and_then(|o| o.name.as_deref()) == Some(DEFAULT_CLASS)
            };
            if found.iter().any(about) {
                return anyhow::Ok(());
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(soon, told)
        .await
        .context("the difference is not told")??;
    let kept = classes.get(DEFAULT_CLASS).await?;
    assert_eq!((kept.uid(), &kept.spec), (edited.uid(), &edited.spec));

    // Whoever wants the shipped one deletes it, and it is made with the next start.
    classes
        .delete(DEFAULT_CLASS, &DeleteParams::default())
        .await?;
    platform.start(|_| {}).await?;
    tokio::time::timeout(soon, await_condition(classes.clone(), DEFAULT_CLASS, there))
        .await
        .context("the class is not made again")??;
    assert_eq!(classes.get(DEFAULT_CLASS).await?.spec, made.spec);
    let orders: Api<InferenceService> = corner.api();
    assert!(orders.list(&ListParams::default()).await?.items.is_empty());
    Ok(())
}
