//! A Hugging Face-compatible hub on a folder of repositories. See the module `e2e::hub`.

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;
use e2e::hub::{Hub, repository::read_repositories, router};

/// Serves ROOT/OWNER/NAME/** as a model hub, with admin routes for tests.
#[derive(Debug, Parser)]
struct Options {
    /// Folder of repositories: OWNER/NAME/FILES.
    #[arg(long, env = "HUB_ROOT")]
    root: PathBuf,
    /// Address to listen on.
    #[arg(long, env = "HUB_ADDRESS", default_value = "0.0.0.0:8080")]
    address: SocketAddr,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_ansi(std::io::stdout().is_terminal())
        .init();
    let options = Options::parse();
    let root = options.root.clone();
    let repositories = tokio::task::spawn_blocking(move || read_repositories(&root)).await??;
    for (id, repository) in &repositories {
        let (commit, files) = (&repository.commit, repository.files.len());
        tracing::info!(id, commit, files, "Serving a repository.");
    }
    let listener = tokio::net::TcpListener::bind(options.address)
        .await
        .with_context(|| format!("listen on {}", options.address))?;
    tracing::info!(address = %listener.local_addr()?, "Listening.");
    axum::serve(listener, router(Hub::new(repositories)))
        .with_graceful_shutdown(termination())
        .await?;
    Ok(())
}

/// Resolves on SIGTERM or SIGINT: as process 1 of a container neither ends the process by itself.
async fn termination() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) = (
        signal(SignalKind::terminate()),
        signal(SignalKind::interrupt()),
    ) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
