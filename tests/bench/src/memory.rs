//! Resident memory of the drivers, idle and after work, and how soon they are there.
//!
//! The drivers are started anew in each round, one after the other, and who begins alternates.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use crate::allocation;
use crate::driver::{Driver, OURS, Programs, Stage};
use crate::prepare::{prepare, unprepare};
use crate::report::{Comparison, Figure, Row};

/// Rounds, unless told otherwise.
const ROUNDS: u32 = 5;
/// Devices of either driver, which are the GPUs of the topology.
const DEVICES: u32 = 8;
/// Pairs of prepare and unprepare.
const PAIRS: usize = 2000;
/// How long a driver is left alone before it counts as idle: what it does after its start is not
/// announced, and this is what is measured.
const IDLE: Duration = Duration::from_secs(2);

/// What is measured, in the order of the table, with the unit.
const MEASURES: [(&str, &str, &str); 8] = [
    ("idle", "resident memory", "MiB"),
    ("idle", "of it anonymous", "MiB"),
    ("after 2000 claims", "resident memory", "MiB"),
    ("after 2000 claims", "of it anonymous", "MiB"),
    ("after 2000 claims", "peak", "MiB"),
    ("after 2000 claims", "CPU per pair", "ms"),
    ("start", "to registered", "ms"),
    ("start", "to all slices published", "ms"),
];

pub(crate) async fn measure(
    programs: &Programs,
    work: &Path,
    rounds: Option<u32>,
) -> Result<Comparison> {
    let rounds = rounds.unwrap_or(ROUNDS);
    let stage = Stage::new(programs, work)?;
    let namespace = stage.namespace().await?;
    let kinds = stage.kinds(DEVICES).await?;
    let mut rows: Vec<Row> = MEASURES
        .iter()
        .map(|(what, measure, unit)| Row {
            what: (*what).to_owned(),
            measure,
            unit,
            shown: &[Figure::P50],
            samples: [Vec::new(), Vec::new()],
        })
        .collect();
    for round in 0..rounds {
        tracing::info!(round, rounds, "Measuring memory.");
        let order = if round.is_multiple_of(2) {
            [0, 1]
        } else {
            [1, 0]
        };
        for side in order {
            let driver = stage.start(&kinds[side]).await?;
            let figures = measure_one(&stage, &namespace, &driver).await?;
            stage.stop(driver).await?;
            for (row, figure) in rows.iter_mut().zip(figures) {
                row.samples[side].push(figure);
            }
        }
    }
    Ok(Comparison {
        title: "Memory and start",
        sides: programs.sides(),
        rows,
        notes: vec![
            format!(
                "A fresh process for each sample: idle is {} s after it has registered and \
                 published its {DEVICES} devices ({OURS}: with their partitions), then come {PAIRS} \
                 claims, each prepared and unprepared.",
                IDLE.as_secs()
            ),
            format!(
                "Resident memory is VmRSS, anonymous RssAnon, peak VmHWM of /proc/PID/status. That of \
                 {OURS} includes the fake NVML; a real driver's library is larger."
            ),
        ],
    })
}

/// The figures of [`MEASURES`] for one driver.
async fn measure_one(stage: &Stage<'_>, namespace: &str, driver: &Driver) -> Result<[f64; 8]> {
    let devices = driver.whole_devices()?;
    let claims =
        allocation::create(&stage.client, namespace, driver, devices, devices.len()).await?;
    tokio::time::sleep(IDLE).await;
    let idle = [driver.memory("VmRSS")?, driver.memory("RssAnon")?];
    let before = driver.processor_time()?;
    for claim in claims.iter().cycle().take(PAIRS) {
        prepare(driver, claim).await?;
        unprepare(driver, claim).await?;
    }
    #[allow(clippy::cast_precision_loss)] // far fewer than 2^52
    let processor = (driver.processor_time()? - before) / PAIRS as f64;
    let [idle_resident, idle_anonymous] = idle;
    Ok([
        idle_resident,
        idle_anonymous,
        driver.memory("VmRSS")?,
        driver.memory("RssAnon")?,
        driver.memory("VmHWM")?,
        processor,
        driver.registered,
        driver.published,
    ])
}
