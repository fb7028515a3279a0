//! `/livez`, `/readyz` and `/metrics`.
//!
//! In: readiness and metrics. Out: HTTP. Never: an answer that depends on the API
//! server or the GPUs at that moment.

use std::net::SocketAddr;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;
use crate::readiness::Readiness;

/// The routes.
pub fn router(readiness: Readiness, metrics: Metrics) -> Router {
    let readyz = move || {
        let state = readiness.check();
        async move {
            match state {
                Ok(()) => (StatusCode::OK, "ok\n".to_owned()),
                Err(reasons) => (StatusCode::SERVICE_UNAVAILABLE, reasons),
            }
        }
    };
    let text = move || {
        let text = metrics.text();
        async move {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([("content-type", kind)], text)
        }
    };
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(text))
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
