//! What a running download tells: bytes so far and what it does.
//!
//! In: the download's own counts. Out: `GET /progress` as JSON on a port of the
//! pod, which the controller reads while the init container runs. Never: a token,
//! or anything about the volume's other contents.

use crate::model::ModelFile;
use axum::{Json, Router, extract::State, routing::get};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The answer of `GET /progress`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Bytes of all files.
    pub total_bytes: u64,
    /// Bytes that are on the volume.
    pub downloaded_bytes: u64,
    /// What it does now, in words.
    pub message: String,
}

/// Counts shared by the download and the server.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    total: AtomicU64,
    downloaded: AtomicU64,
    message: Mutex<String>,
}

impl Progress {
    /// Counts for these files, all still to come.
    pub fn of(files: &[ModelFile]) -> Self {
        let progress = Progress::default();
        let total = files.iter().fold(0u64, |s, f| s.saturating_add(f.size));
        progress.0.total.store(total, Ordering::Relaxed);
        progress
    }

    /// The counts now.
    pub fn report(&self) -> Report {
        let total_bytes = self.0.total.load(Ordering::Relaxed);
        Report {
            total_bytes,
            downloaded_bytes: self.0.downloaded.load(Ordering::Relaxed).min(total_bytes),
            message: self
                .0
                .message
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone(),
        }
    }

    pub(crate) fn say(&self, message: impl Into<String>) {
        *self
            .0
            .message
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = message.into();
    }

    pub(crate) fn add(&self, bytes: u64) {
        self.0.downloaded.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Takes back what has to be downloaded again.
    pub(crate) fn lose(&self, bytes: u64) {
        self.0.downloaded.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn skip(&self, files: &[ModelFile]) {
        for f in files {
            self.add(f.size);
        }
        self.done();
    }

    pub(crate) fn done(&self) {
        self.say("complete");
    }
}

/// Serves `GET /progress` until the process ends.
///
/// # Errors
/// Where the address cannot be bound.
pub async fn serve(address: std::net::SocketAddr, progress: Progress) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::bind(address).await?;
    let app = Router::new()
        .route(
            "/progress",
            get(|State(p): State<Progress>| async move { Json(p.report()) }),
        )
        .with_state(progress);
    axum::serve(listener, app).await
}
