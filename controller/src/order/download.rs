//! Reads the progress of running downloads from their pods.

use super::Context;
use super::copies::Copy;
use crate::fetch::Report;
use crate::render::PROGRESS_PORT;
use inference_api::CopyDownloadStatus;
use std::time::Duration;

/// No report is longer.
const MAX_REPORT: usize = 16 << 10;

/// A client for pods' progress. A pod's owner decides what answers there, so it is
/// led nowhere else, and no more than a report is read.
///
/// # Errors
/// None is known; the builder has one.
pub fn client() -> Result<reqwest::Client, reqwest::Error> {
    reqwest::Client::builder()
        // Pods are reached without TLS, so no certificates are needed.
        .tls_certs_only([])
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .timeout(Duration::from_secs(2))
        .build()
}

async fn report(client: &reqwest::Client, url: String) -> Option<Report> {
    let mut response = client.get(url).send().await.ok()?;
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.ok()? {
        if body.len() + chunk.len() > MAX_REPORT {
            return None;
        }
        body.extend_from_slice(&chunk);
    }
    serde_json::from_slice(&body).ok()
}

/// The progress of every copy that is downloading now. A copy that does not
/// answer is listed without counts: the next round asks again.
pub async fn read(copies: &[Copy], cx: &Context) -> Vec<CopyDownloadStatus> {
    let mut found = Vec::new();
    for copy in copies {
        let Some(address) = &copy.downloading_at else {
            continue;
        };
        let host = if address.contains(':') {
            format!("[{address}]")
        } else {
            address.clone()
        };
        let url = format!("http://{host}:{PROGRESS_PORT}/progress");
        let report = report(&cx.progress, url).await;
        let bytes = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let report = report.unwrap_or(Report {
            total_bytes: 0,
            downloaded_bytes: 0,
            message: "starting".into(),
        });
        found.push(CopyDownloadStatus {
            name: copy.name.clone(),
            total_bytes: bytes(report.total_bytes),
            downloaded_bytes: bytes(report.downloaded_bytes),
            message: Some(report.message.chars().take(200).collect()),
        });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::{Body, Bytes};
    use axum::response::Redirect;
    use axum::{Json, Router, routing::get};

    #[tokio::test]
    async fn a_pod_can_neither_lead_the_controller_elsewhere_nor_fill_its_memory() {
        crate::test_hub::install_crypto();
        let report_now = || async {
            Json(serde_json::json!({"totalBytes": 2, "downloadedBytes": 1, "message": "m"}))
        };
        let endless = || async {
            let part = || Ok::<_, std::io::Error>(Bytes::from_static(&[b' '; 4096]));
            Body::from_stream(futures::stream::repeat_with(part))
        };
        let app = Router::new()
            .route("/progress", get(report_now))
            .route("/away", get(|| async { Redirect::temporary("/progress") }))
            .route("/endless", get(endless));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        let client = client().unwrap();
        let read = async |path: &str| report(&client, format!("{address}{path}")).await;
        assert_eq!(read("/progress").await.unwrap().downloaded_bytes, 1);
        assert!(read("/away").await.is_none());
        assert!(read("/endless").await.is_none());
    }
}
