//! Orders are deleted, with Kubernetes' own controllers at work: whatever else is gone, nothing of an
//! order stays and nothing holds its namespace; and a drained node takes one copy at a time.

use std::time::Duration;

use anyhow::{Context, Result};
use controller::component::Component;
use e2e::control_plane::Controllers;
use inference_api::{InferenceService, InferenceServiceClass};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::api::{DeleteParams, EvictParams, ListParams};
use kube::runtime::wait::await_condition;
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;

use crate::processes::{Alone, namespaces};
use crate::setup::Corner;
use crate::workload::Workload;

const LATER: Duration = Duration::from_secs(60);
/// What makes and removes pods, volumes and claims in a cluster, and what ends namespaces.
const CONTROLLERS: &[&str] = &[
    "garbage-collector-controller",
    "namespace-controller",
    "persistentvolumeclaim-protection-controller",
    "resourceclaim-controller",
    "statefulset-controller",
];

/// Waits until as many objects of a kind stand in the corner as `met` wants.
async fn count<K>(
    corner: &Corner,
    controllers: &Controllers,
    met: impl Fn(usize) -> bool,
) -> Result<()>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug,
{
    let begun = std::time::Instant::now();
    loop {
        let found = corner.api::<K>().list(&ListParams::default()).await?.items;
        if met(found.len()) {
            return Ok(());
        }
        let names: Vec<String> = found.iter().map(ResourceExt::name_any).collect();
        anyhow::ensure!(
            begun.elapsed() < LATER,
            "{}: {names:?} after {LATER:?}; {}",
            K::kind(&()),
            controllers.log_tail()
        );
        // A count of objects is no condition of one.
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Files an order and waits until its copy waits for a node: workload, pod, claim and volume stand.
async fn stands(corner: &Corner, controllers: &Controllers, order: &str) -> Result<()> {
    corner.order(order, "acme/tiny").await?;
    corner
        .until::<StatefulSet>(order, "exist", |_| true)
        .await?;
    count::<Pod>(corner, controllers, |n| n == 1).await?;
    count::<ResourceClaim>(corner, controllers, |n| n == 1).await?;
    count::<PersistentVolumeClaim>(corner, controllers, |n| n == 1).await
}

/// Waits until nothing that was made for an order stands in the corner.
async fn nothing_stays(corner: &Corner, controllers: &Controllers) -> Result<()> {
    let none = |n: usize| n == 0;
    count::<InferenceService>(corner, controllers, none).await?;
    count::<StatefulSet>(corner, controllers, none).await?;
    count::<Pod>(corner, controllers, none).await?;
    count::<ResourceClaim>(corner, controllers, none).await?;
    count::<ResourceClaimTemplate>(corner, controllers, none).await?;
    count::<PersistentVolumeClaim>(corner, controllers, none).await?;
    count::<Service>(corner, controllers, none).await?;
    count::<Secret>(corner, controllers, none).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_order_and_all_that_was_made_for_it_go_whatever_else_is_gone_a_087_a_123() -> Result<()>
{
    let alone = Alone::new(&[]).await?;
    let controllers = alone.plane.controllers(CONTROLLERS)?;
    let (client, _) = alone.recorded(Component::Controller.name()).await?;
    let running = alone.start(client.clone(), &Component::ALL, "controller-0")?;
    let orders = |corner: &Corner| corner.api::<InferenceService>();

    let corner = alone.corner("gone-class").await?;
    corner.slice("80Gi").await?;
    stands(&corner, &controllers, "chat").await?;
    let classes: Api<InferenceServiceClass> = Api::all(corner.client.clone());
    // A class that is referred to can be deleted: its orders go on, and say so.
    classes
        .delete("gone-class", &DeleteParams::default())
        .await?;
    let order = corner
        .reason("chat", "ClassResolved", "ClassNotFound")
        .await?;
    assert!(order.finalizers().is_empty());
    corner.api::<StatefulSet>().get("chat").await?;
    orders(&corner)
        .delete("chat", &DeleteParams::default())
        .await?;
    nothing_stays(&corner, &controllers).await?;

    let corner = alone.corner("gone-controller").await?;
    corner.slice("80Gi").await?;
    stands(&corner, &controllers, "chat").await?;
    running.stop().await?;
    orders(&corner)
        .delete("chat", &DeleteParams::default())
        .await?;
    nothing_stays(&corner, &controllers).await?;

    // A namespace, with the controller at work and without.
    for works in [true, false] {
        let corner = alone
            .corner(if works { "gone-namespace" } else { "gone-both" })
            .await?;
        corner.slice("80Gi").await?;
        let running = alone.start(client.clone(), &Component::ALL, "controller-1")?;
        stands(&corner, &controllers, "chat").await?;
        let running = if works {
            Some(running)
        } else {
            running.stop().await?;
            None
        };
        let api = namespaces(corner.client.clone());
        api.delete(&corner.namespace, &DeleteParams::default())
            .await?;
        let gone = await_condition(api, &corner.namespace, |n: Option<&_>| n.is_none());
        tokio::time::timeout(LATER, gone)
            .await
            .with_context(|| format!("{} stays; {}", corner.namespace, controllers.log_tail()))??;
        if let Some(running) = running {
            running.stop().await?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_takes_one_of_two_copies_at_a_time() -> Result<()> {
    let alone = Alone::new(&[]).await?;
    let controllers = alone.plane.controllers(&["disruption-controller"])?;
    let (client, _) = alone.recorded(Component::Controller.name()).await?;
    let running = alone.start(client, &Component::ALL, "controller-0")?;
    let corner = alone.corner("drained").await?;
    corner.slice("80Gi").await?;
    Workload::served(&corner, 2).await?;
    let allows = |b: &PodDisruptionBudget| {
        b.status
            .as_ref()
            .is_some_and(|s| s.disruptions_allowed == Some(1))
    };
    corner
        .until::<PodDisruptionBudget>("chat", "allow one disruption", allows)
        .await
        .with_context(|| controllers.log_tail())?;
    let pods = corner.api::<Pod>();
    pods.evict("chat-0", &EvictParams::default()).await?;
    let spent = |b: &PodDisruptionBudget| {
        b.status
            .as_ref()
            .is_some_and(|s| s.disruptions_allowed == Some(0))
    };
    corner
        .until::<PodDisruptionBudget>("chat", "allow no further disruption", spent)
        .await?;
    // The server refuses with 429, which the client takes as a wish to be asked again.
    let params = EvictParams::default();
    let second = tokio::time::timeout(Duration::from_secs(3), pods.evict("chat-1", &params));
    anyhow::ensure!(!matches!(second.await, Ok(Ok(_))), "both copies may go");
    let second = pods.get("chat-1").await?;
    assert_eq!(second.metadata.deletion_timestamp, None);
    running.stop().await
}
