//! Reads the progress of running downloads from their pods.

use super::Context;
use super::copies::Copy;
use crate::fetch::Report;
use crate::render::PROGRESS_PORT;
use inference_api::CopyDownloadStatus;
use std::time::Duration;

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
        let answer = cx
            .progress
            .get(url)
            .timeout(Duration::from_secs(2))
            .send()
            .await;
        let report = match answer {
            Ok(response) => response.json::<Report>().await.ok(),
            Err(_) => None,
        };
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
