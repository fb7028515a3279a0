//! Figures of the node plugin beside a peer's, taken in one run. Started by `hack/bench`.
//!
//! In: the built programs. Out: a table for people, and the same with every sample as JSON. Whatever is
//! compared takes turns within the run, so that the machine's load falls on both alike; a figure of one
//! side alone is never published.

mod allocation;
mod driver;
mod health;
mod idle;
mod machine;
mod memory;
mod pod_start;
mod prepare;
mod report;
mod topology;

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};

use driver::Programs;
use report::Report;

/// Compares the node plugin with dra-example-driver, and pods with a claim with pods without one.
#[derive(Debug, Parser)]
struct Options {
    /// What to measure.
    name: Name,
    /// File for the figures, with every sample.
    #[arg(long)]
    json: Option<PathBuf>,
    /// File for the table, as Markdown.
    #[arg(long)]
    markdown: Option<PathBuf>,
    /// Rounds that count; each measures both sides. Each measurement has its own default.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Folder for the drivers' state. Their writes are synced, so its disk is part of what is measured.
    #[arg(long)]
    work_dir: Option<PathBuf>,
    #[command(flatten)]
    programs: Programs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Name {
    /// Latency of prepare and unprepare against dra-example-driver.
    Prepare,
    /// Resident memory, and time from start to published devices, against dra-example-driver.
    Memory,
    /// From a GPU's fault to its taint in the API, against a plain update of the same slice.
    Health,
    /// Processor time of ten minutes in which nothing happens, against dra-example-driver.
    Idle,
    /// Pods with a claim against pods without one, on the cluster of `hack/cluster`.
    PodStart,
    /// All of them.
    All,
}

impl Name {
    fn includes(self, other: Self) -> bool {
        self == other || self == Self::All
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("bench=info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    let options = Options::parse();
    let work = tempfile::Builder::new()
        .prefix("bench-")
        .tempdir_in(options.work_dir.unwrap_or_else(std::env::temp_dir))
        .context("make a folder for the drivers' state")?;
    // First, so that a missing cluster costs nobody the minutes of the other measurements.
    let cluster = if options.name.includes(Name::PodStart) {
        Some(pod_start::connect().await?)
    } else {
        None
    };
    let mut report = Report::new(machine::describe(work.path())?);
    if options.name.includes(Name::Prepare) {
        report.add(prepare::measure(&options.programs, work.path(), options.rounds).await?);
    }
    if options.name.includes(Name::Memory) {
        report.add(memory::measure(&options.programs, work.path(), options.rounds).await?);
    }
    if options.name.includes(Name::Health) {
        report.add(health::measure(&options.programs, work.path(), options.rounds).await?);
    }
    if options.name.includes(Name::Idle) {
        report.add(idle::measure(&options.programs, work.path(), options.rounds).await?);
    }
    if let Some(cluster) = &cluster {
        report.add(pod_start::measure(cluster, options.rounds).await?);
    }
    report.finish(machine::load()?);
    let table = report.markdown();
    if let Some(path) = &options.json {
        let json = serde_json::to_vec_pretty(&report)?;
        std::fs::write(path, json).with_context(|| path.display().to_string())?;
    }
    if let Some(path) = &options.markdown {
        std::fs::write(path, &table).with_context(|| path.display().to_string())?;
    }
    #[allow(clippy::print_stdout)] // the result
    {
        println!("{table}");
    }
    Ok(())
}
