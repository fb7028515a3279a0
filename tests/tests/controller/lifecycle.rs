//! Copies move and workloads are raised anew with Kubernetes' own controllers at work: the
//! StatefulSet's, which makes pods, revisions and volumes, and the garbage collector. The test plays
//! the scheduler and the kubelet: each pod gets the corner's node and answers at once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result};
use futures::StreamExt;
use inference_api::{InferenceService, Phase};
use k8s_openapi::api::apps::v1::{ControllerRevision, StatefulSet};
use k8s_openapi::api::core::v1::{Binding, PersistentVolumeClaim, Pod};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::runtime::watcher::{self, Event};
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::setup::{Corner, Platform};
use crate::workload::{Workload, answers};

const CONTROLLERS: &[&str] = &[
    "garbage-collector-controller",
    "persistentvolumeclaim-protection-controller",
    "resourceclaim-controller",
    "statefulset-controller",
];
const LATER: std::time::Duration = std::time::Duration::from_secs(60);

/// The scheduler and the kubelet of a corner, until it is dropped.
struct Kubelet {
    /// Fewest copies that answered at once since the count was begun.
    fewest: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Kubelet {
    fn of(corner: &Corner) -> Self {
        let fewest = Arc::new(AtomicUsize::new(0));
        let (pods, node) = (corner.api::<Pod>(), corner.name.clone());
        Self {
            task: tokio::spawn({
                let fewest = fewest.clone();
                async move {
                    if let Err(error) = serve(pods, node, fewest).await {
                        eprintln!("the kubelet ended: {error:#}");
                    }
                }
            }),
            fewest,
        }
    }

    /// Begins to count anew, with so many.
    fn count_from(&self, answering: usize) {
        self.fewest.store(answering, Ordering::SeqCst);
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(pods: Api<Pod>, node: String, fewest: Arc<AtomicUsize>) -> Result<()> {
    let mut answering: BTreeMap<String, bool> = BTreeMap::new();
    let mut changes = watcher::watcher(pods.clone(), watcher::Config::default()).boxed();
    while let Some(change) = changes.next().await {
        match change? {
            Event::Apply(pod) | Event::InitApply(pod) => {
                let name = pod.name_any();
                let ends = pod.metadata.deletion_timestamp.is_some();
                let conditions = pod.status.as_ref().and_then(|s| s.conditions.clone());
                let ready = conditions
                    .unwrap_or_default()
                    .iter()
                    .any(|c| c.type_ == "Ready" && c.status == "True");
                answering.insert(name.clone(), ready && !ends);
                if ends {
                    // Another may have its name already.
                    let end = DeleteParams::default().grace_period(0).preconditions(
                        kube::api::Preconditions {
                            uid: pod.uid(),
                            resource_version: None,
                        },
                    );
                    unless_gone(pods.delete(&name, &end).await).context("ending a pod")?;
                } else if pod.spec.as_ref().is_some_and(|s| s.node_name.is_none()) {
                    let binding: Binding = serde_json::from_value(json!({
                        "metadata": {"name": name}, "target": {"kind": "Node", "name": node}}))?;
                    let bound: kube::Result<serde_json::Value> = pods
                        .create_subresource("binding", &name, &PostParams::default(), &binding)
                        .await;
                    unless_gone(bound).context("binding a pod")?;
                } else if !ready {
                    let status = Patch::Merge(json!({ "status": answers() }));
                    let told = pods
                        .patch_status(&name, &PatchParams::default(), &status)
                        .await;
                    unless_gone(told).context("reporting a pod")?;
                }
            }
            Event::Delete(pod) => {
                answering.remove(&pod.name_any());
            }
            Event::Init | Event::InitDone => {}
        }
        let now = answering.values().filter(|a| **a).count();
        fewest.fetch_min(now, Ordering::SeqCst);
    }
    Ok(())
}

/// What was written to a pod that is another one, or none, by now is no error.
fn unless_gone<T>(written: kube::Result<T>) -> Result<()> {
    match written {
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        written => Ok(written.map(drop)?),
    }
}

/// Waits until the order is served as wanted, so many copies being all there are.
async fn served(workload: &Workload<'_>, copies: i32, generation: i64) -> Result<()> {
    let served = |order: &InferenceService| {
        let Some(status) = &order.status else {
            return false;
        };
        let current = status
            .conditions
            .iter()
            .any(|c| c.type_ == "RuntimeCurrent" && c.status == "True");
        let replicas = status.replicas.as_ref();
        current
            && status.phase == Some(Phase::Ready)
            && status.observed_generation == Some(generation)
            && replicas.is_some_and(|r| r.ready == copies && r.current == copies)
    };
    let waited = workload
        .corner
        .until::<InferenceService>("chat", "be served", served)
        .await;
    if let Err(error) = waited {
        let order: InferenceService = workload.corner.api().get("chat").await?;
        return Err(error.context(serde_json::to_string_pretty(&order.status)?));
    }
    Ok(())
}

async fn volume(corner: &Corner, ordinal: i32) -> Result<Option<String>> {
    let name = format!("storage-chat-{ordinal}");
    let found = corner.api::<PersistentVolumeClaim>().get_opt(&name).await?;
    Ok(found.and_then(|v| v.uid()))
}

async fn volume_goes(corner: &Corner, ordinal: i32) -> Result<()> {
    let name = format!("storage-chat-{ordinal}");
    let api = corner.api::<PersistentVolumeClaim>();
    let gone = await_condition(api, &name, |v: Option<&PersistentVolumeClaim>| v.is_none());
    tokio::time::timeout(LATER, gone)
        .await
        .with_context(|| format!("{name} stays"))??;
    Ok(())
}

async fn revisions(corner: &Corner) -> Result<usize> {
    let found = corner.api::<ControllerRevision>();
    Ok(found.list(&ListParams::default()).await?.items.len())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spare_device_keeps_an_edited_order_served_and_scaling_makes_no_revision_a_113_a_116()
-> Result<()> {
    let mut platform = Platform::new().await?;
    let _controllers = platform.plane.controllers(CONTROLLERS)?;
    platform.start(|_| {}).await?;
    let corner = platform.corner("spare").await?;
    corner.devices(3, "80Gi").await?;
    let kubelet = Kubelet::of(&corner);
    corner.order("chat", "acme/tiny").await?;
    let workload = Workload { corner: &corner };
    served(&workload, 1, 1).await?;
    assert_eq!(revisions(&corner).await?, 1);
    for copies in [2, 1] {
        workload
            .class(json!({"scalingPolicy": {"minReplicas": copies, "maxReplicas": 2}}))
            .await?;
        served(&workload, copies, 1).await?;
        assert_eq!(revisions(&corner).await?, 1, "{copies} copies");
    }
    // A copy that goes takes its volume along.
    volume_goes(&corner, 1).await?;
    let kept = volume(&corner, 0).await?;
    assert!(kept.is_some());

    kubelet.count_from(1);
    let before = workload.pod(0).await?.uid();
    workload.edit("main").await?;
    served(&workload, 1, 2).await?;
    assert_ne!(workload.pod(0).await?.uid(), before, "it was moved");
    assert_eq!(
        kubelet.fewest.load(Ordering::SeqCst),
        1,
        "somebody answered all along"
    );
    assert_eq!(workload.set().await?.spec.replicas, Some(1));
    assert_eq!(revisions(&corner).await?, 2);
    assert_eq!(
        volume(&corner, 0).await?,
        kept,
        "its model was there already"
    );
    volume_goes(&corner, 1).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_workload_is_raised_anew_on_volumes_of_its_own_a_042_a_115() -> Result<()> {
    let mut platform = Platform::new().await?;
    let _controllers = platform.plane.controllers(CONTROLLERS)?;
    platform.start(|_| {}).await?;
    let corner = platform.corner("moved").await?;
    corner.devices(2, "80Gi").await?;
    corner
        .plane
        .apply_yaml(
            &corner.namespace,
            "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: { name: moved-other }\nspec:\n  selectors: [{ cel: { expression: \"device.driver == 'moved.example.com'\" } }]\n",
        )
        .await?;
    let _kubelet = Kubelet::of(&corner);
    corner.order("chat", "acme/tiny").await?;
    let workload = Workload { corner: &corner };
    served(&workload, 1, 1).await?;
    let (set, first) = (workload.set().await?.uid(), volume(&corner, 0).await?);
    assert!(first.is_some());
    workload
        .class(json!({
            "acceleratorPolicy": {"deviceClassNames": ["moved-other"]},
            "modelStorageClassName": "fast",
        }))
        .await?;
    workload
        .says("RuntimeCurrent", "ClassChangeHeld", "")
        .await?;
    workload.edit("main").await?;
    served(&workload, 1, 2).await?;
    assert_ne!(workload.set().await?.uid(), set);
    let second = volume(&corner, 0).await?;
    assert!(
        second.is_some() && second != first,
        "not the earlier one's: {first:?}"
    );

    // Somebody moves an order to another storage class: workload and volume go, and are made anew.
    workload
        .class(json!({"modelStorageClassName": "faster"}))
        .await?;
    let kept = |o: &InferenceService| {
        let storage = o.status.as_ref().and_then(|s| s.storage.as_ref());
        storage.is_some_and(|s| s.kept_in_spite_of.is_some())
    };
    corner.until("chat", "tell what is kept", kept).await?;
    corner
        .api::<StatefulSet>()
        .delete("chat", &DeleteParams::background())
        .await?;
    let anew = |o: &InferenceService| {
        let status = o.status.as_ref();
        let storage = status.and_then(|s| s.storage.as_ref());
        status.and_then(|s| s.phase) == Some(Phase::Ready)
            && storage.is_some_and(|s| s.storage_class_name.as_deref() == Some("faster"))
    };
    corner
        .until::<InferenceService>("chat", "be served on the class's storage", anew)
        .await?;
    let third = corner
        .api::<PersistentVolumeClaim>()
        .get("storage-chat-0")
        .await?;
    let class = third
        .spec
        .as_ref()
        .and_then(|s| s.storage_class_name.as_deref());
    assert_eq!(class, Some("faster"));
    assert_ne!(third.uid(), second);
    Ok(())
}
