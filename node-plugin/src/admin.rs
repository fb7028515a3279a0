//! `/livez`, `/readyz` and `/metrics`.
//!
//! In: liveness, readiness, metrics. Out: HTTP.
//! Never: an answer that waits for the API server or for a GPU.

use std::net::SocketAddr;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::liveness::Liveness;
use crate::monitoring::Monitoring;
use crate::readiness::Readiness;

/// The routes.
pub fn router(liveness: Liveness, readiness: Readiness, monitoring: Monitoring) -> Router {
    let livez = move || {
        let liveness = liveness.clone();
        async move { answer(liveness.check().await.map(|()| "ok\n".to_owned())) }
    };
    let readyz = move || {
        let state = answer(readiness.check());
        async move { state }
    };
    let text = move || {
        let monitoring = monitoring.clone();
        async move {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([("content-type", kind)], monitoring.text().await)
        }
    };
    Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(text))
}

fn answer(state: Result<String, String>) -> (StatusCode, String) {
    match state {
        Ok(text) => (StatusCode::OK, text),
        Err(reasons) => (StatusCode::SERVICE_UNAVAILABLE, reasons),
    }
}

/// Serves until it is stopped.
///
/// # Errors
/// When the address cannot be bound or the server fails.
pub async fn serve(
    address: SocketAddr,
    router: Router,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let listener = TcpListener::bind(address).await?;
    axum::serve(listener, router)
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
}
