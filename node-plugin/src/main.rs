//! The thin shell around the library: options, logging, signals.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use node_plugin::claims::sharing::launch;
use node_plugin::logs;
use node_plugin::options::Options;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some(launch::COMMAND) {
        return launch::main(arguments.next().as_deref());
    }
    match plugin() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("Error: {error:?}");
            ExitCode::FAILURE
        }
    }
}

fn plugin() -> anyhow::Result<()> {
    let options = Options::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing::subscriber::set_global_default(logs::subscriber(filter, std::io::stdout))?;
    rustls::crypto::ring::default_provider()
        .install_default()
        .map_err(|_| anyhow::anyhow!("a TLS provider was installed already"))?;
    // Few threads: each has its own memory arena, and one waits for NVML or the disk.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(16)
        .enable_all()
        .build()?;
    let result = runtime.block_on(serve(options));
    // A call into a driver that hangs must not keep the process: every step is durable.
    runtime.shutdown_timeout(Duration::from_secs(5));
    result
}

async fn serve(options: Options) -> anyhow::Result<()> {
    let config = kube::Config::infer()
        .await
        .context("no cluster to talk to")?;
    let client = kube::Client::try_from(config)?;
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stopping = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("Stopping.");
        stopping.cancel();
    });
    node_plugin::run(options, client, stop).await
}
