//! Of the processes of a component one acts, and the others wait until they may.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use controller::component::Component;
use e2e::control_plane::recorder::{Asked, Recorder};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Service;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::processes::Alone;
use crate::setup::Corner;

/// A lease holds for 15 s; then somebody who looks every 2 s takes it.
const TAKEN_OVER_WITHIN: Duration = Duration::from_secs(40);

fn about_leases(asked: &Asked) -> bool {
    asked.uri.contains("/leases")
}

/// Requests that are about anything but the lease.
fn work(recorder: &Recorder) -> Vec<Asked> {
    let mut asked = recorder.asked();
    asked.retain(|asked| !about_leases(asked));
    asked
}

/// Waits for a process to hold the lease of a component.
async fn held_by(alone: &Alone, component: Component, who: &str) -> Result<()> {
    let begun = Instant::now();
    while alone.holder(component).await?.as_deref() != Some(who) {
        ensure!(
            begun.elapsed() < TAKEN_OVER_WITHIN,
            "{who} never held the lease {}",
            component.name()
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_process_acts_and_when_it_is_killed_the_other_takes_over_a_026() -> Result<()> {
    let alone = Alone::new(&[]).await?;
    let account = Component::Controller.name();
    let (first, asked_by_first) = alone.recorded(account).await?;
    let (second, asked_by_second) = alone.recorded(account).await?;
    let corner = alone.corner("killed").await?;
    corner.slice("80Gi").await?;
    let first = alone.start(first, &Component::ALL, "first")?;
    for component in Component::ALL {
        held_by(&alone, component, "first").await?;
    }
    let second = alone.start(second, &Component::ALL, "second")?;
    corner.order("before", "acme/tiny").await?;
    corner
        .until::<StatefulSet>("before", "exist", |_| true)
        .await?;
    // The other has looked at both leases, and at nothing else.
    let looked = |recorder: &Recorder| recorder.asked().iter().filter(|a| about_leases(a)).count();
    let begun = Instant::now();
    while looked(&asked_by_second) < 2 {
        ensure!(
            begun.elapsed() < TAKEN_OVER_WITHIN,
            "the second does not stand by"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let acted = work(&asked_by_second);
    assert!(acted.is_empty(), "acts without the lease: {acted:?}");

    first.kill().await;
    let killed = Instant::now();
    corner.order("after", "acme/tiny").await?;
    for component in Component::ALL {
        held_by(&alone, component, "second").await?;
    }
    corner
        .until::<StatefulSet>("after", "exist", |_| true)
        .await?;
    let begun = work(&asked_by_second).iter().map(|a| a.at).min();
    let begun = begun.context("the second did nothing")?;
    let ended = work(&asked_by_first).iter().map(|a| a.at).max();
    assert!(ended.context("the first did nothing")? < killed);
    // Nobody knows that the first is gone but by its lease.
    let waited = begun - killed;
    assert!(
        waited > Duration::from_secs(10),
        "taken over after {waited:?}"
    );
    second.stop().await?;
    for component in Component::ALL {
        assert_eq!(alone.holder(component).await?, None);
    }
    Ok(())
}

/// Makes the controller write: it undoes what somebody changes of a Service.
async fn disturb(corner: &Corner, port: u16) -> Result<()> {
    let services: Api<Service> = corner.api();
    let drift =
        json!({"spec": {"ports": [{"name": "service-port", "port": 80, "targetPort": port}]}});
    services
        .patch("chat", &PatchParams::default(), &Patch::Merge(&drift))
        .await?;
    Ok(())
}

fn mended(service: &Service) -> bool {
    let ports = service.spec.as_ref().and_then(|s| s.ports.clone());
    let target = serde_json::json!("http");
    ports
        .unwrap_or_default()
        .iter()
        .any(|p| serde_json::to_value(&p.target_port).is_ok_and(|t| t == target))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_cannot_renew_its_lease_stops_writing_before_another_begins_a_026()
-> Result<()> {
    let alone = Alone::new(&[]).await?;
    let account = Component::Controller.name();
    let (first, asked_by_first) = alone.recorded(account).await?;
    let (second, asked_by_second) = alone.recorded(account).await?;
    let corner = alone.corner("hanging").await?;
    corner.slice("80Gi").await?;
    corner.order("chat", "acme/tiny").await?;
    let first = alone.start(first, &[Component::Controller], "first")?;
    corner.until::<Service>("chat", "exist", |_| true).await?;
    let second = alone.start(second, &[Component::Controller], "second")?;

    asked_by_first.let_leases_hang();
    let hung = Instant::now();
    // It still has its term, and everything but the lease answers.
    disturb(&corner, 1).await?;
    corner.until::<Service>("chat", "be mended", mended).await?;
    let words = tokio::time::timeout(TAKEN_OVER_WITHIN, first.ends())
        .await
        .context("the first goes on without a lease")??;
    assert!(
        words.contains("ai-inference-controller was lost"),
        "{words}"
    );
    let (stepped_down, writes) = (Instant::now(), work(&asked_by_first).len());
    assert!(
        stepped_down - hung < Duration::from_secs(15),
        "{:?}",
        stepped_down - hung
    );
    disturb(&corner, 2).await?;
    corner
        .until::<Service>("chat", "be mended by the other", mended)
        .await?;
    assert_eq!(
        work(&asked_by_first).len(),
        writes,
        "writes after it lost the lease"
    );
    let begun = work(&asked_by_second).iter().map(|a| a.at).min();
    assert!(begun.context("the second did nothing")? > stepped_down);
    held_by(&alone, Component::Controller, "second").await?;
    second.stop().await
}
