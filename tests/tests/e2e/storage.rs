//! Volumes of models and the storage class that they are made on.

use anyhow::{Context, ensure};
use e2e::cluster::hub::{SMOLLM, requests};
use e2e::cluster::order::{Order, put_class_of};
use e2e::cluster::{Cluster, wait};
use inference_api::{InferenceService, InferenceServiceClass};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::scene::*;

/// The storage class that every cluster of hack/cluster has.
const FIRST: &str = "standard";
const SECOND: &str = "e2e-second";

#[tokio::test]
async fn a_storage_class_reaches_new_volumes_only_and_is_told_once_a_040_a_041_a_042_a_043()
-> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("storage").await?;
    let storage: Api<StorageClass> = Api::all(cluster.client.clone());
    let first = storage.get(FIRST).await?;
    let second = json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": { "name": SECOND },
        "provisioner": first.provisioner,
        "volumeBindingMode": first.volume_binding_mode,
    });
    let apply = PatchParams::apply("e2e").force();
    storage
        .patch(SECOND, &apply, &Patch::Apply(&second))
        .await?;
    let spec = json!({
        "modelPolicy": { "allowedEndpointTypes": ["Chat"] },
        "acceleratorPolicy": { "allowedPlacementTypes": ["WholeDevice"] },
        "modelStorageClassName": FIRST,
    });
    put_class_of(&cluster.client, "e2e-storage", spec).await?;
    let order = Order::file(&cluster, &namespace, "order", "e2e-storage", SMOLLM).await?;
    order.ready().await?;
    let (made, region) = volume(&order).await?;
    ensure!(region == FIRST, "made on {region}");
    let copy = order.first_copy().await?;

    // The class changes: the standing volume stays, and so does the copy.
    let classes: Api<InferenceServiceClass> = Api::all(cluster.client.clone());
    let change = Patch::Merge(json!({ "spec": { "modelStorageClassName": SECOND } }));
    classes
        .patch("e2e-storage", &PatchParams::default(), &change)
        .await?;
    let kept = |order: &InferenceService| {
        let storage = order
            .status
            .as_ref()
            .and_then(|status| status.storage.as_ref());
        storage.is_some_and(|storage| {
            storage.kept_in_spite_of.as_deref() == Some(SECOND)
                && storage.storage_class_name.as_deref() == Some(FIRST)
        })
    };
    order
        .until("tell that its volume is kept", wait::SHORT, kept)
        .await?;
    order.ready().await?;
    ensure!(
        order.first_copy().await?.container_id == copy.container_id,
        "another storage class restarted the copy"
    );

    // Other changes go through meanwhile: an edit moves the copy, on the volume that stands.
    let pods: Api<Pod> = order.api();
    let pod = format!("{}-0", order.name);
    let uid = pods.get(&pod).await?.uid();
    let edit =
        Patch::Merge(json!({ "spec": { "model": { "huggingFace": { "revision": "main" } } } }));
    let orders = order.api::<InferenceService>();
    orders
        .patch(&order.name, &PatchParams::default(), &edit)
        .await?;
    // There are spare devices, so a second copy comes first, and goes last with its own volume.
    let what = "be raised anew after an edit";
    wait::until(&pods, &pod, what, wait::MODEL, |pod| {
        pod.uid() != uid && running(pod)
    })
    .await?;
    wait::gone(&pods, "order-1", wait::MODEL).await?;
    let served = order.ready().await?;
    ensure!(kept(&served), "{:?}", served.status);
    ensure!(volume(&order).await? == (made.clone(), FIRST.to_owned()));

    // A new order gets the new storage class at once.
    let newer = Order::file(&cluster, &namespace, "newer", "e2e-storage", SMOLLM).await?;
    let sets: Api<StatefulSet> = newer.api();
    let on_second = |set: &StatefulSet| {
        let templates = set.spec.volume_claim_templates.as_ref();
        templates.into_iter().flatten().all(|claim| {
            let spec = claim.spec.as_ref();
            spec.and_then(|spec| spec.storage_class_name.as_deref()) == Some(SECOND)
        })
    };
    wait::until(
        &sets,
        "newer",
        "ask for the new storage class",
        wait::LONG,
        on_second,
    )
    .await?;
    newer.delete().await?;

    // It was told once, however often the order was reconciled.
    let events: Api<Event> = Api::namespaced(cluster.client.clone(), &namespace);
    let of_reason = ListParams::default().fields("reason=SettledRegionKept");
    let events = events.list(&of_reason).await?.items;
    ensure!(
        events.len() == 1 && events[0].series.is_none(),
        "{} events, the first of the series {:?}",
        events.len(),
        events.first().map(|event| &event.series)
    );

    // To move it, the workload and the claim behind it are removed.
    let seen = requests(&cluster).await?.len();
    let sets: Api<StatefulSet> = order.api();
    sets.delete(&order.name, &DeleteParams::default()).await?;
    let volumes: Api<PersistentVolumeClaim> = order.api();
    match volumes.delete(&made.0, &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.is_not_found() => {}
        other => drop(other?),
    }
    let on_second = |claim: &PersistentVolumeClaim| {
        let spec = claim.spec.as_ref();
        spec.and_then(|spec| spec.storage_class_name.as_deref()) == Some(SECOND)
    };
    wait::until(
        &volumes,
        &made.0,
        "be made on the new storage class",
        wait::LONG,
        on_second,
    )
    .await?;
    let moved = order
        .until("serve from the new volume", wait::MODEL, |order| {
            let ready = e2e::cluster::order::condition(order, "Ready");
            !kept(order) && ready.is_some_and(|ready| ready.status == "True")
        })
        .await?;
    let storage = moved.status.and_then(|status| status.storage);
    let storage = storage.context("the order tells no storage")?;
    ensure!(
        storage.storage_class_name.as_deref() == Some(SECOND) && storage.kept_in_spite_of.is_none(),
        "{storage:?}"
    );
    let journal = requests(&cluster).await?;
    let again = journal
        .iter()
        .skip(seen)
        .any(|request| request.path.contains("/resolve/"));
    ensure!(again, "the model was not downloaded again");
    let answer = order.chat(QUESTION).await?;
    ensure!(answer.contains("Paris"), "the order answered: {answer}");
    cluster.delete_namespace(&namespace).await?;
    storage_gone(&cluster).await
}

/// Name and UID of the volume claim of an order's first copy, and its storage class.
async fn volume(order: &Order) -> anyhow::Result<((String, Option<String>), String)> {
    let volumes: Api<PersistentVolumeClaim> = order.api();
    let volume = volumes.get(&format!("storage-{}-0", order.name)).await?;
    let spec = volume.spec.as_ref().context("a claim without spec")?;
    let region = spec.storage_class_name.clone().unwrap_or_default();
    Ok(((volume.name_any(), volume.uid()), region))
}

async fn storage_gone(cluster: &Cluster) -> Outcome {
    let storage: Api<StorageClass> = Api::all(cluster.client.clone());
    storage.delete(SECOND, &DeleteParams::default()).await?;
    Ok(())
}
