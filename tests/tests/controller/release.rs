//! What a new release of the platform does to orders that serve: the same orders under a controller
//! with other recipes.

use anyhow::{Context, Result, ensure};
use controller::recipe::RecipeBook;
use inference_api::names::RELEASE_LABEL;
use inference_api::{InferenceService, Phase};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::json;

use crate::setup::Platform;
use crate::workload::{Workload, answers, found};

const SHIPPED: &str = include_str!("../../../controller/recipes/llama-cpp.yaml");
const NEXT: &str = "llama-cpp-next";

/// A release of llama.cpp with other lines in its recipe.
fn next(changes: &[(&str, &str)]) -> Result<RecipeBook> {
    let mut text = SHIPPED.to_owned();
    let release = shipped()?;
    let changes = [(release.as_str(), NEXT)]
        .into_iter()
        .chain(changes.iter().copied());
    for (was, is) in changes {
        ensure!(text.contains(was), "the recipe has no {was}");
        text = text.replace(was, is);
    }
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("llama-cpp.yaml"), text)?;
    Ok(RecipeBook::from_folder(folder.path())?)
}

fn shipped() -> Result<String> {
    let line = SHIPPED.lines().find_map(|l| l.strip_prefix("release: "));
    Ok(line.context("no release")?.to_owned())
}

fn release(labels: Option<&std::collections::BTreeMap<String, String>>) -> Option<&str> {
    labels?.get(RELEASE_LABEL).map(String::as_str)
}

#[tokio::test]
async fn copies_stay_on_their_release_and_one_that_is_raised_anew_is_on_the_next_a_110_a_111_a_112_a_113_a_114()
-> Result<()> {
    let before = shipped()?;
    let mut platform = Platform::new().await?;
    platform.start(|_| {}).await?;
    let corner = platform.corner("releases").await?;
    corner.devices(2, "80Gi").await?;
    let workload = Workload::served(&corner, 2).await?;
    let uids = [workload.pod(0).await?.uid(), workload.pod(1).await?.uid()];
    let recipes = next(&[
        ("limit: 4096", "limit: 1024"),
        ("sequences: 4", "sequences: 3"),
    ])?;
    platform.start(|o| o.recipes = recipes.clone()).await?;
    let held = workload
        .says("RuntimeCurrent", "ReplicasHeldOnPreviousRuntime", "0 of 2")
        .await?;
    let message = &found(&held, "RuntimeCurrent")
        .context("no condition")?
        .message;
    for words in [
        format!("release {NEXT}"),
        format!("2 on {before}"),
        format!("{NEXT} accepts contexts of 1024 tokens and 3 requests at once"),
        format!("{before} accepts contexts of 2048 tokens and 4 requests at once"),
    ] {
        assert!(message.contains(&words), "{words} in {message}");
    }
    let status = held.status.clone().context("no status")?;
    assert_eq!(status.phase, Some(Phase::Ready), "they go on serving");
    let model = status.model.context("no model")?;
    assert_eq!(model.context_tokens, Some(2048), "what the copies accept");
    let template = workload.set().await?.spec.template.metadata;
    let labels = template.as_ref().and_then(|m| m.labels.as_ref());
    assert_eq!(
        release(labels),
        Some(NEXT),
        "the description is the new one at once"
    );
    assert_eq!(
        [workload.pod(0).await?.uid(), workload.pod(1).await?.uid()],
        uids
    );

    // Whoever deletes a copy moves that one.
    workload.ends(0).await?;
    let raised = workload.raise(0, answers()).await?;
    assert_eq!(release(Some(raised.labels())), Some(NEXT));
    let mixed = workload
        .says("RuntimeCurrent", "ReplicasHeldOnPreviousRuntime", "1 of 2")
        .await?;
    let told = mixed.status.and_then(|s| s.release).context("no release")?;
    assert_eq!(told.shipped, NEXT);
    assert_eq!(told.previous.as_deref(), Some(before.as_str()));
    assert_eq!(told.replicas_on_shipped, 1);
    assert_eq!(workload.pod(1).await?.uid(), uids[1]);

    // An edit moves all, the class's way.
    workload.edit("main").await?;
    for ordinal in [1, 0] {
        workload.goes(ordinal).await?;
        workload.raise(ordinal, answers()).await?;
    }
    let moved = workload
        .says("RuntimeCurrent", "RuntimeCurrent", "2 copies")
        .await?;
    let status = moved.status.context("no status")?;
    assert_eq!(status.release.map(|r| r.replicas_on_shipped), Some(2));
    Ok(())
}

#[tokio::test]
async fn a_release_that_needs_more_than_the_copies_have_moves_none_and_is_held_a_110_a_112_a_115()
-> Result<()> {
    let mut platform = Platform::new().await?;
    platform.start(|_| {}).await?;
    let corner = platform.corner("hungry").await?;
    corner.devices(2, "80Gi").await?;
    let workload = Workload::served(&corner, 1).await?;
    let before = workload.set().await?;
    let recipes = next(&[("fixed: 256Mi", "fixed: 100Gi")])?;
    platform.start(|o| o.recipes = recipes.clone()).await?;
    workload
        .says(
            "RuntimeCurrent",
            "ReplicasHeldOnPreviousRuntime",
            "none can move alone",
        )
        .await?;
    workload
        .class(json!({"scalingPolicy": {"minReplicas": 2, "maxReplicas": 2}}))
        .await?;
    let two = |s: &StatefulSet| s.spec.replicas == Some(2);
    let set = corner.until("chat", "have two copies", two).await?;
    assert_eq!(
        set.spec.template, before.spec.template,
        "a new one would not fit"
    );
    workload.raise(1, answers()).await?;
    workload
        .says("RuntimeCurrent", "ReplicasHeldOnPreviousRuntime", "0 of 2")
        .await?;
    // An edit that finds no room leaves what serves as it is.
    workload.edit("main").await?;
    let refused = workload
        .says("RuntimeCurrent", "MoveStopped", "0 of 2")
        .await?;
    assert_eq!(
        found(&refused, "Planned").map(|c| c.reason.as_str()),
        Some("ResourceClaimExhausted")
    );
    assert_eq!(
        found(&refused, "Ready").map(|c| c.status.as_str()),
        Some("True")
    );
    assert!(workload.stays(0).await? && workload.stays(1).await?);
    // With room it is raised anew.
    corner.devices(2, "200Gi").await?;
    workload
        .says("RuntimeCurrent", "WorkloadRebuilding", "")
        .await?;
    Ok(())
}

#[tokio::test]
async fn the_first_version_of_the_record_is_read_and_changes_nothing_a_110() -> Result<()> {
    use controller::order::settled::SETTLED;
    use kube::api::{Patch, PatchParams};
    let mut platform = Platform::new().await?;
    platform.start(|_| {}).await?;
    let corner = platform.corner("versions").await?;
    corner.slice("80Gi").await?;
    let workload = Workload::served(&corner, 1).await?;
    platform.stop().await?;
    let set = workload.set().await?;
    let record = set.annotations().get(SETTLED).context("no record")?;
    let mut record: serde_json::Value = serde_json::from_str(record)?;
    let fields = record.as_object_mut().context("no object")?;
    fields.retain(|name, _| ["inputs", "generation", "plan", "facts"].contains(&name.as_str()));
    let first = json!({"metadata": {"annotations": {SETTLED: record.to_string()}}});
    corner
        .api::<StatefulSet>()
        .patch("chat", &PatchParams::default(), &Patch::Merge(&first))
        .await?;
    let uid = workload.pod(0).await?.uid();
    platform.start(|_| {}).await?;
    let second = |s: &StatefulSet| {
        let record = s.annotations().get(SETTLED);
        record.is_some_and(|r| r.contains("\"version\":2"))
    };
    let read = corner.until("chat", "be recorded anew", second).await?;
    assert_eq!(read.spec.template, set.spec.template);
    assert_eq!(corner.api::<Pod>().get("chat-0").await?.uid(), uid);
    let order = corner.api::<InferenceService>().get("chat").await?;
    assert_eq!(order.status.and_then(|s| s.phase), Some(Phase::Ready));
    Ok(())
}
