//! Processor time of the drivers while nothing happens.
//!
//! Both run at the same time on one control plane, with claims prepared as on a busy node, and are then
//! left alone.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use crate::allocation;
use crate::driver::{Driver, Kind, OURS, Programs, Stage};
use crate::prepare::prepare;
use crate::report::{Comparison, Figure, Row};

/// Rounds, unless told otherwise.
const ROUNDS: u32 = 1;
/// Devices of either driver, which are the GPUs of the topology.
const DEVICES: u32 = 8;
/// How long a round is.
const LENGTH: Duration = Duration::from_secs(600);

pub(crate) async fn measure(
    programs: &Programs,
    work: &Path,
    rounds: Option<u32>,
) -> Result<Comparison> {
    let rounds = rounds.unwrap_or(ROUNDS);
    let stage = Stage::new(programs, work)?;
    let namespace = stage.namespace().await?;
    let [first, second] = stage.kinds(DEVICES).await?;
    let drivers = [
        busy(&stage, &namespace, &first).await?,
        busy(&stage, &namespace, &second).await?,
    ];
    let mut samples = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        tracing::info!(round, rounds, seconds = LENGTH.as_secs(), "Doing nothing.");
        let before = [drivers[0].processor_time()?, drivers[1].processor_time()?];
        tokio::time::sleep(LENGTH).await;
        for (side, before) in before.into_iter().enumerate() {
            samples[side].push(drivers[side].processor_time()? - before);
        }
    }
    Ok(Comparison {
        title: "Ten idle minutes",
        sides: programs.sides(),
        rows: vec![Row {
            what: format!("{DEVICES} devices, each held by a claim"),
            measure: "CPU in ten minutes",
            unit: "ms",
            shown: &[Figure::P50],
            samples,
        }],
        notes: vec![format!(
            "Both ran at the same time, each with {DEVICES} claims prepared. {OURS} asks NVML for the \
             health of its GPUs meanwhile; the peer has no health."
        )],
    })
}

/// A driver all of whose devices are prepared.
async fn busy(stage: &Stage<'_>, namespace: &str, kind: &Kind) -> Result<Driver> {
    let driver = stage.start(kind).await?;
    let devices = driver.whole_devices()?;
    let claims =
        allocation::create(&stage.client, namespace, &driver, devices, devices.len()).await?;
    for claim in &claims {
        prepare(&driver, claim).await?;
    }
    Ok(driver)
}
