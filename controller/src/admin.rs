//! `/livez`, `/readyz` and `/metrics` of a process.

use crate::metrics::Figures;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::{Router, routing::get};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio_util::sync::CancellationToken;

/// What the server tells.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// Whether the process does its part: it leads, or stands by for the leader.
    pub ready: Arc<AtomicBool>,
    /// Figures.
    pub figures: Arc<Figures>,
}

/// The routes.
pub fn router(health: Health) -> Router {
    Router::new()
        .route("/livez", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .route(
            "/metrics",
            get(|State(h): State<Health>| async move { h.figures.text() }),
        )
        .with_state(health)
}

async fn ready(State(health): State<Health>) -> impl IntoResponse {
    if health.ready.load(Ordering::Acquire) {
        (StatusCode::OK, "ok")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "starting")
    }
}

/// Serves until cancelled.
///
/// # Errors
/// Where the address cannot be bound.
pub async fn serve(
    address: SocketAddr,
    health: Health,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::bind(address).await?;
    axum::serve(listener, router(health))
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
}
