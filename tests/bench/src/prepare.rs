//! Latency of NodePrepareResources and NodeUnprepareResources, as the kubelet sees it.
//!
//! Both drivers run at the same time on one control plane and take turns: in each round either gets the
//! same number of calls, and who begins alternates. A claim is a call, as for pods with one claim; each
//! driver has one connection, warm from discarded rounds.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use e2e::kubelet::{Claim, Plugin};
use futures::future::try_join_all;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;

use crate::allocation;
use crate::driver::{Driver, Kind, OURS, PEER, Programs, Stage, milliseconds};
use crate::report::{Comparison, Figure, Row};
use crate::topology;

/// Rounds that count, unless told otherwise.
const ROUNDS: u32 = 12;
/// Rounds before them, which do not.
const WARM_UP: u32 = 2;
/// Calls one after the other that a driver gets in a round.
const IN_A_ROW: usize = 25;
/// Calls at once that a driver gets in a round.
const AT_ONCE: usize = 50;
/// Claims that stay prepared while calls are measured, from part to part.
const STANDING: [usize; 3] = [0, 200, 500];
/// The most of them.
const MOST_STANDING: usize = STANDING[STANDING.len() - 1];
/// Claims that come and go.
const WORKING: usize = 200;
/// Devices that the peer simulates; it prepares any number of claims for one device.
const PEER_DEVICES: u32 = 8;
/// GPUs of ours: a standing claim and a claim at once have a device each.
const GPUS: u32 = 560;

/// A driver with its claims and the samples taken of it.
struct Side {
    driver: Driver,
    claims: Vec<Claim>,
    standing: Vec<Claim>,
}

/// The samples of one side in one situation, in ms.
#[derive(Debug, Default, Clone)]
struct Samples {
    prepare: Vec<f64>,
    unprepare: Vec<f64>,
    /// All calls of a round together, where they were made at once.
    batch: Vec<f64>,
    /// Processor time of the driver for each pair of calls.
    processor: Vec<f64>,
}

pub(crate) async fn measure(
    programs: &Programs,
    work: &Path,
    rounds: Option<u32>,
) -> Result<Comparison> {
    let rounds = rounds.unwrap_or(ROUNDS);
    let stage = Stage::new(programs, work)?;
    let namespace = stage.namespace().await?;
    let first = if programs.control {
        peer(&stage, &namespace).await?
    } else {
        ours(&stage, &namespace).await?
    };
    let sides = [first, peer(&stage, &namespace).await?];
    let mut rows = Vec::new();
    rows.extend(floor(&stage, &sides, rounds).await?);
    // Before any claim stays: neither side has one here.
    let partitions = if programs.control {
        Vec::new()
    } else {
        partitions(&stage, &namespace, &sides[1], rounds).await?
    };
    let mut stay = 0;
    for standing in STANDING {
        tracing::info!(standing, "Preparing claims that stay.");
        for side in &sides {
            for claim in &side.standing[stay..standing] {
                prepare(&side.driver, claim).await?;
            }
        }
        stay = standing;
        // What a driver does after its answer, such as telling the claims' status, is over.
        for side in &sides {
            side.driver.settled().await?;
        }
        tracing::info!(
            standing,
            rounds,
            "Measuring calls one after the other, and at once."
        );
        let mut in_a_row = [Samples::default(), Samples::default()];
        let mut at_once = [Samples::default(), Samples::default()];
        for round in 0..WARM_UP + rounds {
            for index in order(round) {
                let side = &sides[index];
                // The claims of a round differ from the last one's, or a driver could remember.
                let first = (round as usize * IN_A_ROW) % (side.claims.len() - IN_A_ROW + 1);
                let sequence = &side.claims[first..first + IN_A_ROW];
                let sequential = one_after_the_other(&side.driver, sequence).await?;
                let concurrent = all_at_once(&side.driver, &side.claims[..AT_ONCE]).await?;
                if round >= WARM_UP {
                    in_a_row[index].add(sequential);
                    at_once[index].add(concurrent);
                }
            }
        }
        let what = format!("one after the other, {standing} standing claims");
        rows.extend(rows_of(&what, in_a_row, false));
        let what = format!("{AT_ONCE} at once, {standing} standing claims");
        rows.extend(rows_of(&what, at_once, true));
    }
    rows.extend(partitions);
    Ok(Comparison {
        title: "Prepare and unprepare a claim",
        sides: programs.sides(),
        rows,
        notes: vec![
            format!(
                "One claim is one call over the kubelet's socket and names one device. Rounds of \
                 {IN_A_ROW} calls in a row and {AT_ONCE} at once, {rounds} of each; the drivers take \
                 turns, {WARM_UP} rounds before that are discarded."
            ),
            format!(
                "Whole devices: no side works on hardware. {OURS} has {GPUS} fake GPUs, since it \
                 gives a device to one claim only; {PEER} gives its {PEER_DEVICES} devices to any \
                 number."
            ),
            "Partitions: a MIG instance is created and destroyed in the fake NVML, which a real GPU \
             takes far longer for; the peer has nothing like it and prepares a device as before."
                .to_owned(),
            "The ratio is the first column divided by the second: below 1, the first takes less."
                .to_owned(),
        ],
    })
}

/// Which side begins a round.
fn order(round: u32) -> [usize; 2] {
    if round.is_multiple_of(2) {
        [0, 1]
    } else {
        [1, 0]
    }
}

async fn ours(stage: &Stage<'_>, namespace: &str) -> Result<Side> {
    tracing::info!(gpus = GPUS, "Starting the node plugin.");
    let topology = stage.path("many.yaml");
    topology::write_many(GPUS, &topology)?;
    let gpus = stage.fake_gpus("many-gpus", &topology).await?;
    let driver = stage.start(&Kind::NodePlugin(gpus)).await?;
    let devices = driver.whole_devices()?.to_vec();
    ensure!(
        devices.len() == GPUS as usize,
        "{} devices are published",
        devices.len()
    );
    let (standing, working) = devices.split_at(MOST_STANDING);
    side(stage, namespace, driver, working, standing).await
}

async fn peer(stage: &Stage<'_>, namespace: &str) -> Result<Side> {
    tracing::info!(
        devices = PEER_DEVICES,
        "Starting dra-example-kubeletplugin."
    );
    let driver = stage.start(&Kind::Example(PEER_DEVICES)).await?;
    let devices = driver.whole_devices()?.to_vec();
    side(stage, namespace, driver, &devices, &devices).await
}

async fn side(
    stage: &Stage<'_>,
    namespace: &str,
    driver: Driver,
    working: &[String],
    standing: &[String],
) -> Result<Side> {
    let client = &stage.client;
    let claims = allocation::create(client, namespace, &driver, working, WORKING).await?;
    let standing = allocation::create(client, namespace, &driver, standing, MOST_STANDING).await?;
    Ok(Side {
        driver,
        claims,
        standing,
    })
}

/// What neither driver can go below: an empty call to each, and the claim's GET that either makes.
async fn floor(stage: &Stage<'_>, sides: &[Side; 2], rounds: u32) -> Result<Vec<Row>> {
    let api: Api<ResourceClaim> =
        Api::namespaced(stage.client.clone(), &sides[0].claims[0].namespace);
    let mut empty = [Vec::new(), Vec::new()];
    let mut get = [Vec::new(), Vec::new()];
    for round in 0..WARM_UP + rounds {
        for index in order(round) {
            for claim in &sides[index].claims[..IN_A_ROW] {
                let begin = Instant::now();
                sides[index].driver.plugin.prepare(&[]).await?;
                let empty_call = milliseconds(begin);
                let begin = Instant::now();
                api.get(&claim.name).await?;
                if round >= WARM_UP {
                    empty[index].push(empty_call);
                    get[index].push(milliseconds(begin));
                }
            }
        }
    }
    let row = |measure, samples| Row {
        what: "floor".to_owned(),
        measure,
        unit: "ms",
        shown: &[Figure::P50],
        samples,
    };
    Ok(vec![
        row("a call without a claim", empty),
        row("GET of a claim by the bench", get),
    ])
}

/// MIG partitions of ours beside whole devices of the peer.
async fn partitions(
    stage: &Stage<'_>,
    namespace: &str,
    peer: &Side,
    rounds: u32,
) -> Result<Vec<Row>> {
    tracing::info!("Measuring partitions.");
    let gpus = stage.fake_gpus("h100", &topology::h100()).await?;
    let driver = stage.start(&Kind::NodePlugin(gpus)).await?;
    // One of each GPU and the like, so that claims prepared at once would not meet.
    let smallest: Vec<String> = driver
        .devices_of("mig")?
        .iter()
        .filter(|name| name.contains("-mig-1g10gb-") && !name.contains("-me-"))
        .cloned()
        .collect();
    ensure!(
        !smallest.is_empty(),
        "there is no partition 1g.10gb among {:?}",
        driver.devices
    );
    let claims =
        allocation::create(&stage.client, namespace, &driver, &smallest, smallest.len()).await?;
    let mut samples = [Samples::default(), Samples::default()];
    for round in 0..WARM_UP + rounds {
        for index in order(round) {
            let side = if index == 0 {
                (&driver, &claims)
            } else {
                (&peer.driver, &peer.claims)
            };
            let first = (round as usize * IN_A_ROW) % (side.1.len() - IN_A_ROW + 1);
            let taken = one_after_the_other(side.0, &side.1[first..first + IN_A_ROW]).await?;
            if round >= WARM_UP {
                samples[index].add(taken);
            }
        }
    }
    Ok(rows_of(
        "MIG partition against whole device, one after the other, 0 standing claims",
        samples,
        false,
    ))
}

async fn one_after_the_other(driver: &Driver, claims: &[Claim]) -> Result<Samples> {
    let mut samples = Samples::default();
    let before = driver.processor_time()?;
    for claim in claims {
        samples.prepare.push(prepare(driver, claim).await?);
        samples.unprepare.push(unprepare(driver, claim).await?);
    }
    samples.add_processor_time(driver.processor_time()? - before, claims.len());
    Ok(samples)
}

async fn all_at_once(driver: &Driver, claims: &[Claim]) -> Result<Samples> {
    let mut samples = Samples::default();
    let before = driver.processor_time()?;
    let begin = Instant::now();
    samples.prepare = try_join_all(claims.iter().map(|claim| prepare(driver, claim))).await?;
    samples.batch.push(milliseconds(begin));
    samples.unprepare = try_join_all(claims.iter().map(|claim| unprepare(driver, claim))).await?;
    samples.add_processor_time(driver.processor_time()? - before, claims.len());
    Ok(samples)
}

/// Prepares a claim and says how long it took, in ms.
pub(crate) async fn prepare(driver: &Driver, claim: &Claim) -> Result<f64> {
    let plugin: &Plugin = &driver.plugin;
    let begin = Instant::now();
    let devices = plugin
        .prepare_claim(claim)
        .await
        .with_context(|| driver.tell())?;
    let taken = milliseconds(begin);
    ensure!(
        devices.len() == 1 && !devices[0].cdi_device_ids.is_empty(),
        "{} prepared {devices:?} and not one device with CDI",
        driver.name
    );
    Ok(taken)
}

/// Undoes a claim and says how long it took, in ms.
pub(crate) async fn unprepare(driver: &Driver, claim: &Claim) -> Result<f64> {
    let begin = Instant::now();
    driver
        .plugin
        .unprepare_claim(claim)
        .await
        .with_context(|| driver.tell())?;
    Ok(milliseconds(begin))
}

impl Samples {
    fn add(&mut self, other: Self) {
        self.prepare.extend(other.prepare);
        self.unprepare.extend(other.unprepare);
        self.batch.extend(other.batch);
        self.processor.extend(other.processor);
    }

    #[allow(clippy::cast_precision_loss)] // far fewer than 2^52
    fn add_processor_time(&mut self, time: f64, pairs: usize) {
        self.processor.push(time / pairs as f64);
    }
}

fn rows_of(what: &str, samples: [Samples; 2], at_once: bool) -> Vec<Row> {
    let row = |measure, shown, pick: fn(&Samples) -> Vec<f64>| Row {
        what: what.to_owned(),
        measure,
        unit: "ms",
        shown,
        samples: samples.each_ref().map(pick),
    };
    let mut rows = vec![
        row("prepare", &[Figure::P50, Figure::P99], |samples| {
            samples.prepare.clone()
        }),
        row("unprepare", &[Figure::P50, Figure::P99], |samples| {
            samples.unprepare.clone()
        }),
    ];
    if at_once {
        rows.push(row("all prepared", &[Figure::P50], |samples| {
            samples.batch.clone()
        }));
    }
    rows.push(row("CPU per pair", &[Figure::Mean], |samples| {
        samples.processor.clone()
    }));
    rows
}
