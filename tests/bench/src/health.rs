//! From a GPU's fault to its taint in the API server.
//!
//! A critical error is given to the fake GPU and a watch waits for the device's taint. Beside it stands
//! what nothing can go below: the bench itself replaces the slice that holds the same device, and the same
//! watch waits for that.

use std::path::Path;
use std::pin::pin;
use std::time::Instant;

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use kube::api::{ListParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};

use crate::driver::{Driver, Kind, Programs, Stage, milliseconds};
use crate::report::{Comparison, Figure, Row};
use crate::topology;

/// Rounds, unless told otherwise: a fresh driver each.
const ROUNDS: u32 = 5;
/// A critical error that keeps new work off a GPU (NVLink).
const XID: u32 = 74;
/// Replaced by the bench, for the watch to tell it from what the driver writes.
const MARK: &str = "bench";

pub(crate) async fn measure(
    programs: &Programs,
    work: &Path,
    rounds: Option<u32>,
) -> Result<Comparison> {
    let rounds = rounds.unwrap_or(ROUNDS);
    let stage = Stage::new(programs, work)?;
    let gpus = stage.fake_gpus("gpus", &topology::h100()).await?;
    let mut samples = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        tracing::info!(round, rounds, "Measuring the time to publish a fault.");
        let driver = stage.start(&Kind::NodePlugin(gpus.clone())).await?;
        for (index, device) in driver.whole_devices()?.iter().enumerate() {
            // Before the fault: whoever has a slice of its own is not written by the driver here.
            samples[1].push(update(&stage, &driver, device, index).await?);
            samples[0].push(fault(&stage, &driver, &gpus, device).await?);
        }
        stage.stop(driver).await?;
    }
    Ok(Comparison {
        title: "A fault becomes a taint",
        sides: ["node-plugin", "plain update"],
        rows: vec![Row {
            what: format!("XID {XID} of one of 8 GPUs"),
            measure: "until a watch tells",
            unit: "ms",
            shown: &[Figure::P50, Figure::P99],
            samples,
        }],
        notes: vec![
            "From the start of the process that puts the error into the fake NVML until a watch shows \
             the device's taint; beside it a copy of the same slice that the bench replaces by one PUT."
                .to_owned(),
        ],
    })
}

/// The time from an error of the GPU of `device` to the taint, in ms.
async fn fault(stage: &Stage<'_>, driver: &Driver, gpus: &Path, device: &str) -> Result<f64> {
    let tainted = |found: &Device| {
        found.name == device
            && found
                .taints
                .iter()
                .flatten()
                .any(|taint| taint.value.as_deref() == Some(&XID.to_string()))
    };
    let seen = seen(stage, &driver.pool, |slice| {
        slice.spec.devices.iter().flatten().any(tainted)
    });
    let begin = Instant::now();
    let (told, done) = tokio::join!(seen, stage.xid(driver, gpus, device, XID));
    done?;
    told.with_context(|| driver.tell())?;
    Ok(milliseconds(begin))
}

/// The time of a PUT of a slice like that of `device` until the watch tells, in ms.
async fn update(stage: &Stage<'_>, driver: &Driver, device: &str, index: usize) -> Result<f64> {
    let slices: Api<ResourceSlice> = Api::all(stage.client.clone());
    let own = ListParams::default().fields(&format!("spec.nodeName={}", driver.pool));
    let holds = |slice: &ResourceSlice| {
        let mut devices = slice.spec.devices.iter().flatten();
        devices.any(|found| found.name == device)
    };
    let found = slices.list(&own).await?.into_iter().find(holds);
    let mut slice = found.with_context(|| format!("no slice holds {device}"))?;
    let name = format!("{MARK}-{}-{index}", driver.pool);
    slice.metadata = kube::api::ObjectMeta {
        name: Some(name.clone()),
        ..Default::default()
    };
    // Another driver's, so that ours lets it be and no pool counts it.
    slice.spec.driver = format!("{MARK}.example.com");
    let mut slice = slices.create(&PostParams::default(), &slice).await?;
    slice.spec.pool.generation += 1;
    let generation = slice.spec.pool.generation;
    let seen = seen(stage, &driver.pool, |slice| {
        slice.name_any() == name && slice.spec.pool.generation == generation
    });
    let plain = PostParams::default();
    let begin = Instant::now();
    let (told, done) = tokio::join!(seen, slices.replace(&name, &plain, &slice));
    done?;
    told?;
    let taken = milliseconds(begin);
    slices.delete(&name, &Default::default()).await?;
    Ok(taken)
}

/// Waits until a watch of the node's slices shows one that `wanted` takes.
async fn seen(
    stage: &Stage<'_>,
    pool: &str,
    wanted: impl Fn(&ResourceSlice) -> bool,
) -> Result<()> {
    let slices: Api<ResourceSlice> = Api::all(stage.client.clone());
    let own = watcher::Config::default().fields(&format!("spec.nodeName={pool}"));
    let mut changes = pin!(
        watcher(slices, own)
            .applied_objects()
            .try_filter(|slice| { futures::future::ready(wanted(slice)) })
    );
    changes.next().await.context("the watch ended")??;
    Ok(())
}
