//! How copies move after an edit of the order, and what an edit of the class does to them.

use anyhow::{Context, Result};
use inference_api::{InferenceService, Phase};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::setup::{Corner, Platform};
use crate::workload::{Workload, answers, found, loads, without_image};

#[tokio::test]
async fn without_a_spare_device_copies_go_one_out_one_in_and_stop_by_one_that_fails_a_037_a_113_a_118()
-> Result<()> {
    let corner = Corner::new("one-by-one", None).await?;
    corner.devices(2, "80Gi").await?;
    let workload = Workload::served(&corner, 2).await?;
    workload.edit("main").await?;
    workload
        .says("RuntimeCurrent", "ReplicasMoving", "0 of 2")
        .await?;
    workload.goes(1).await?;
    assert_eq!(
        workload.set().await?.spec.replicas,
        Some(2),
        "none beside them"
    );
    workload.raise(1, loads()).await?;
    workload
        .says("RuntimeCurrent", "ReplicasMoving", "1 of 2")
        .await?;
    assert!(workload.stays(0).await?);
    workload.report(1, without_image()).await?;
    let stopped = workload
        .says("RuntimeCurrent", "MoveStopped", "no such image")
        .await?;
    assert_eq!(stopped.status.and_then(|s| s.phase), Some(Phase::Degraded));
    // The old copy falls silent for a moment: it is not taken down for that.
    workload.report(0, loads()).await?;
    workload
        .says("WorkloadReady", "ContainerNotStarted", "0 of 2")
        .await?;
    assert!(workload.stays(0).await?);
    workload.report(0, answers()).await?;
    workload.report(1, answers()).await?;
    workload.goes(0).await?;
    workload.raise(0, answers()).await?;
    let moved = workload
        .says("RuntimeCurrent", "RuntimeCurrent", "2 copies")
        .await?;
    let status = moved.status.context("no status")?;
    assert_eq!(status.phase, Some(Phase::Ready));
    assert_eq!(status.replicas.map(|r| r.summary).as_deref(), Some("2/2"));
    Ok(())
}

#[tokio::test]
async fn with_a_spare_device_one_copy_more_answers_before_an_old_one_goes_a_113() -> Result<()> {
    let corner = Corner::new("surge", None).await?;
    corner.devices(2, "80Gi").await?;
    let workload = Workload::served(&corner, 1).await?;
    workload.edit("main").await?;
    let replicas = |n| move |s: &StatefulSet| s.spec.replicas == Some(n);
    corner
        .until("chat", "have one copy more", replicas(2))
        .await?;
    workload
        .says("RuntimeCurrent", "ReplicasMoving", "room for one more")
        .await?;
    workload.raise(1, loads()).await?;
    // A marker: what the copy's state changed has been worked off.
    workload.report(1, without_image()).await?;
    workload
        .says("RuntimeCurrent", "MoveStopped", "chat-1")
        .await?;
    assert!(workload.stays(0).await?, "nobody else answers");
    workload.report(1, answers()).await?;
    workload.goes(0).await?;
    workload.raise(0, loads()).await?;
    workload
        .says("RuntimeCurrent", "ReplicasMoving", "1 of 1")
        .await?;
    assert_eq!(workload.set().await?.spec.replicas, Some(2), "it covers");
    workload.report(0, answers()).await?;
    corner
        .until("chat", "have its own copies again", replicas(1))
        .await?;
    workload.ends(1).await?;
    workload
        .says("RuntimeCurrent", "RuntimeCurrent", "1 copies")
        .await?;
    Ok(())
}

#[tokio::test]
async fn recreate_takes_every_copy_at_once_a_037() -> Result<()> {
    let corner = Corner::new("recreate", None).await?;
    corner.devices(3, "80Gi").await?;
    let workload = Workload::served(&corner, 2).await?;
    workload
        .class(json!({"updatePolicy": {"strategy": "Recreate"}}))
        .await?;
    workload.edit("main").await?;
    workload.goes(1).await?;
    workload.goes(0).await?;
    workload.raise(0, answers()).await?;
    workload.raise(1, loads()).await?;
    workload
        .says("RuntimeCurrent", "ReplicasMoving", "not all of them answer")
        .await?;
    workload.report(1, answers()).await?;
    workload
        .says("RuntimeCurrent", "RuntimeCurrent", "2 copies")
        .await?;
    Ok(())
}

#[tokio::test]
async fn bounds_of_a_class_hold_at_once_and_leave_the_template_as_it_is_a_116_a_117() -> Result<()>
{
    let corner = Corner::new("bounds", None).await?;
    corner.devices(3, "80Gi").await?;
    let workload = Workload::served(&corner, 1).await?;
    let before = workload.set().await?;
    workload
        .class(json!({"scalingPolicy": {"minReplicas": 2, "maxReplicas": 3}}))
        .await?;
    let two = |s: &StatefulSet| s.spec.replicas == Some(2);
    let after = corner.until("chat", "have two copies", two).await?;
    let bytes = |s: &StatefulSet| serde_json::to_vec(&s.spec.template);
    assert_eq!(
        bytes(&before)?,
        bytes(&after)?,
        "a copy would be another one"
    );
    assert!(workload.stays(0).await?);
    workload.raise(1, answers()).await?;
    workload
        .says("RuntimeCurrent", "RuntimeCurrent", "2 copies")
        .await?;
    workload
        .class(json!({"admissionPolicy": {"allowedNamespaces": []}}))
        .await?;
    workload
        .says("ClassResolved", "NamespaceNotAllowed", "bounds")
        .await?;
    assert!(
        workload.stays(0).await? && workload.stays(1).await?,
        "A-038"
    );
    Ok(())
}

#[tokio::test]
async fn a_contract_that_the_class_changed_is_held_until_the_order_is_edited_a_059_a_117()
-> Result<()> {
    let corner = Corner::new("contract", None).await?;
    corner.slice("80Gi").await?;
    let workload = Workload::served(&corner, 1).await?;
    let before = workload.set().await?;
    workload
        .class(json!({"modelPolicy": {"allowedEndpointTypes": ["Embeddings"]}}))
        .await?;
    let held = workload
        .says(
            "RuntimeCurrent",
            "ClassChangeHeld",
            "Embeddings instead of Chat",
        )
        .await?;
    let contract = |order: &InferenceService| {
        let status = order.status.as_ref()?;
        let path = status.endpoint.as_ref()?.path.clone()?;
        Some((status.model.as_ref()?.endpoint_type?.as_str(), path))
    };
    let chat = ("Chat", "/v1/chat/completions".to_owned());
    assert_eq!(
        contract(&held),
        Some(chat),
        "what serves is what the status says"
    );
    assert_eq!(workload.set().await?.spec.template, before.spec.template);
    assert!(workload.stays(0).await?);
    // A copy that is raised meanwhile speaks as the status says, too.
    workload.ends(0).await?;
    workload.raise(0, answers()).await?;
    workload
        .says("RuntimeCurrent", "ClassChangeHeld", "")
        .await?;
    workload.edit("main").await?;
    workload.goes(0).await?;
    let arguments = |s: &StatefulSet| {
        let pod = s.spec.template.spec.as_ref();
        let args = pod.and_then(|p| p.containers.first()?.args.clone());
        args.unwrap_or_default()
    };
    let set = workload.set().await?;
    assert!(
        arguments(&set).contains(&"--embeddings".to_owned()),
        "{:?}",
        arguments(&set)
    );
    workload.raise(0, answers()).await?;
    let moved = workload
        .says("RuntimeCurrent", "RuntimeCurrent", "1 copies")
        .await?;
    let embeddings = ("Embeddings", "/v1/embeddings".to_owned());
    assert_eq!(contract(&moved), Some(embeddings));
    Ok(())
}

/// Events of a reason on the order.
async fn told(corner: &Corner, reason: &str) -> Result<usize> {
    let events = corner.api::<Event>().list(&ListParams::default()).await?;
    let of_order = |e: &&Event| {
        let about = e.regarding.as_ref().and_then(|r| r.name.as_deref());
        about == Some("chat") && e.reason.as_deref() == Some(reason)
    };
    let counted = |e: &Event| e.series.as_ref().map_or(1, |s| s.count);
    let sum: i32 = events.iter().filter(of_order).map(counted).sum();
    Ok(usize::try_from(sum)?)
}

fn storage_class(set: &StatefulSet) -> Option<String> {
    let claims = set.spec.volume_claim_templates.as_ref()?;
    claims.first()?.spec.as_ref()?.storage_class_name.clone()
}

#[tokio::test]
async fn a_standing_volume_stays_on_its_storage_class_and_the_order_is_told_once_a_040_a_041_a_043()
-> Result<()> {
    let corner = Corner::new("regions", None).await?;
    corner.devices(2, "80Gi").await?;
    let workload = Workload { corner: &corner };
    workload
        .class(json!({"modelStorageClassName": "slow"}))
        .await?;
    let workload = Workload::served(&corner, 1).await?;
    workload
        .class(json!({"modelStorageClassName": "fast"}))
        .await?;
    let kept = |class: &'static str| {
        move |order: &InferenceService| {
            let storage = order.status.as_ref().and_then(|s| s.storage.clone());
            storage.is_some_and(|s| s.kept_in_spite_of.as_deref() == Some(class))
        }
    };
    corner.until("chat", "tell of it", kept("fast")).await?;
    assert_eq!(told(&corner, "SettledRegionKept").await?, 1);
    // Out of reach and back, it is the same divergence.
    workload
        .class(json!({"admissionPolicy": {"allowedNamespaces": []}}))
        .await?;
    workload
        .says("ClassResolved", "NamespaceNotAllowed", "")
        .await?;
    workload.class(json!({"admissionPolicy": null})).await?;
    workload.says("ClassResolved", "ClassResolved", "").await?;
    assert_eq!(told(&corner, "SettledRegionKept").await?, 1);
    // Another change of the template goes through meanwhile.
    workload.edit("main").await?;
    let moving = |s: &StatefulSet| s.spec.replicas == Some(2);
    let set = corner.until("chat", "move", moving).await?;
    assert_eq!(storage_class(&set).as_deref(), Some("slow"));
    // A new order takes what the class says now.
    corner.order("other", "acme/tiny").await?;
    let other = corner
        .until::<StatefulSet>("other", "exist", |_| true)
        .await?;
    assert_eq!(storage_class(&other).as_deref(), Some("fast"));
    workload
        .class(json!({"modelStorageClassName": "faster"}))
        .await?;
    corner.until("chat", "tell of it", kept("faster")).await?;
    // The event is written before the status is.
    assert_eq!(told(&corner, "SettledRegionKept").await?, 2);
    Ok(())
}

#[tokio::test]
async fn another_placement_raises_the_workload_anew_through_restarts_a_115_a_118() -> Result<()> {
    let mut platform = Platform::new().await?;
    platform.start(|_| {}).await?;
    let corner = platform.corner("anew").await?;
    corner.devices(2, "80Gi").await?;
    corner
        .plane
        .apply_yaml(
            &corner.namespace,
            "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: { name: anew-other }\nspec:\n  selectors: [{ cel: { expression: \"device.driver == 'anew.example.com'\" } }]\n",
        )
        .await?;
    let workload = Workload::served(&corner, 1).await?;
    let earlier = workload.set().await?;
    let uid = earlier.uid().context("no UID")?;
    let volume: PersistentVolumeClaim = serde_json::from_value(json!({
        "metadata": {"name": "storage-chat-0", "labels": earlier.labels(), "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "chat", "uid": uid}]},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }))?;
    let volumes = corner.api::<PersistentVolumeClaim>();
    volumes.create(&PostParams::default(), &volume).await?;
    workload
        .class(json!({"acceleratorPolicy": {"deviceClassNames": ["anew-other"]}}))
        .await?;
    workload
        .says("RuntimeCurrent", "ClassChangeHeld", "other accelerators")
        .await?;
    workload.edit("main").await?;
    // There is no garbage collection here: what it removes stays until the test does.
    let waits = workload
        .says(
            "RuntimeCurrent",
            "WorkloadRebuilding",
            "Pod chat-0, PersistentVolumeClaim storage-chat-0",
        )
        .await?;
    assert_eq!(
        waits.status.as_ref().and_then(|s| s.phase),
        Some(Phase::Pending)
    );
    assert_eq!(
        found(&waits, "Ready").map(|c| c.status.as_str()),
        Some("False")
    );
    let sets = corner.api::<StatefulSet>();
    assert!(
        sets.get_opt("chat").await?.is_none(),
        "it would get the old volume"
    );
    platform.start(|_| {}).await?;
    workload.ends(0).await?;
    workload
        .says(
            "RuntimeCurrent",
            "WorkloadRebuilding",
            "gone: PersistentVolumeClaim",
        )
        .await?;
    assert!(sets.get_opt("chat").await?.is_none());
    platform.stop().await?;
    volumes
        .delete("storage-chat-0", &DeleteParams::default())
        .await?;
    let released = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    volumes
        .patch("storage-chat-0", &PatchParams::default(), &released)
        .await?;
    platform.start(|_| {}).await?;
    let set = corner
        .until::<StatefulSet>("chat", "be made anew", |_| true)
        .await?;
    assert_ne!(set.uid().as_deref(), Some(uid.as_str()));
    let pod = set.spec.template.spec.context("no pod")?;
    let claim = pod.resource_claims.context("no claims")?[0]
        .resource_claim_template_name
        .clone()
        .context("no template")?;
    let claim = corner.api::<ResourceClaimTemplate>().get(&claim).await?;
    let json = serde_json::to_string(&claim.spec)?;
    assert!(json.contains("anew-other"), "{json}");
    let begun = workload
        .says(
            "RuntimeCurrent",
            "WorkloadRebuilding",
            "no copy of the new one answers",
        )
        .await?;
    assert_eq!(begun.status.and_then(|s| s.phase), Some(Phase::Pending));
    platform.start(|_| {}).await?;
    workload.raise(0, loads()).await?;
    workload
        .says("WorkloadReady", "ReplicasStarting", "loading")
        .await?;
    let order = corner.api::<InferenceService>().get("chat").await?;
    assert_eq!(
        found(&order, "RuntimeCurrent").map(|c| c.reason.as_str()),
        Some("WorkloadRebuilding"),
        "until it answers"
    );
    workload.report(0, answers()).await?;
    let back = workload
        .says("RuntimeCurrent", "RuntimeCurrent", "1 copies")
        .await?;
    assert_eq!(back.status.and_then(|s| s.phase), Some(Phase::Ready));
    assert_eq!(told(&corner, "WorkloadRebuilding").await?, 1);
    Ok(())
}

#[tokio::test]
async fn a_move_goes_on_after_a_restart_at_every_step_a_118() -> Result<()> {
    let mut platform = Platform::new().await?;
    platform.start(|_| {}).await?;
    let corner = platform.corner("restarts").await?;
    corner.devices(2, "80Gi").await?;
    let workload = Workload::served(&corner, 2).await?;
    platform.stop().await?;
    workload.edit("main").await?;
    platform.start(|_| {}).await?;
    let asked = |p: &Pod| p.metadata.deletion_timestamp.is_some();
    corner.until::<Pod>("chat-1", "go", asked).await?;
    // While it ends.
    platform.start(|_| {}).await?;
    workload
        .says("RuntimeCurrent", "ReplicasMoving", "0 of 2")
        .await?;
    workload.ends(1).await?;
    // Between the two pods.
    platform.start(|_| {}).await?;
    let gone = |o: &InferenceService| {
        let replicas = o.status.as_ref().and_then(|s| s.replicas.as_ref());
        replicas.is_some_and(|r| r.current == 1)
    };
    corner.until("chat", "miss a copy", gone).await?;
    assert!(workload.stays(0).await?, "one is missing already");
    workload.raise(1, loads()).await?;
    // While the new one starts.
    platform.start(|_| {}).await?;
    workload
        .says("RuntimeCurrent", "ReplicasMoving", "1 of 2")
        .await?;
    assert!(workload.stays(0).await?, "the new one does not answer yet");
    platform.stop().await?;
    workload.report(1, answers()).await?;
    platform.start(|_| {}).await?;
    workload.goes(0).await?;
    workload.raise(0, answers()).await?;
    workload
        .says("RuntimeCurrent", "RuntimeCurrent", "2 copies")
        .await?;
    Ok(())
}
