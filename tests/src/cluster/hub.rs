//! The model hub inside the cluster, reached through the API server's proxy.

use anyhow::Context;
use serde_json::{Value, json};

use super::Cluster;

/// The repository with a real model that the hub's image holds.
pub const SMOLLM: &str = "local/SmolLM2-135M-Instruct-GGUF";
const PROXY: &str = "/api/v1/namespaces/hub/services/hub:http/proxy";

/// Adds a repository to the hub. `files` maps paths to `{"text": …}`, `{"size": …}` or
/// `{"safetensorsHeader": …}`.
///
/// # Errors
/// When the hub is not there or refuses.
pub async fn put_repository(cluster: &Cluster, id: &str, files: Value) -> anyhow::Result<()> {
    let body = json!({ "files": files }).to_string();
    send(cluster, "PUT", &format!("/admin/repositories/{id}"), body).await?;
    Ok(())
}

/// Arms a fault; see `e2e::hub::faults::Fault`.
///
/// # Errors
/// When the hub is not there or refuses.
pub async fn arm_fault(cluster: &Cluster, fault: Value) -> anyhow::Result<()> {
    send(cluster, "POST", "/admin/faults", fault.to_string()).await?;
    Ok(())
}

/// Disarms every fault.
///
/// # Errors
/// When the hub is not there.
pub async fn disarm_faults(cluster: &Cluster) -> anyhow::Result<()> {
    send(cluster, "DELETE", "/admin/faults", String::new()).await?;
    Ok(())
}

/// The requests that the hub answered so far, oldest first.
///
/// # Errors
/// When the hub is not there.
pub async fn requests(cluster: &Cluster) -> anyhow::Result<Vec<crate::hub::faults::JournalEntry>> {
    let journal = send(cluster, "GET", "/admin/requests", String::new()).await?;
    Ok(serde_json::from_str(&journal)?)
}

async fn send(cluster: &Cluster, method: &str, path: &str, body: String) -> anyhow::Result<String> {
    let request = axum::http::Request::builder()
        .method(method)
        .uri(format!("{PROXY}{path}"))
        .header("content-type", "application/json")
        .body(body.into_bytes())?;
    cluster
        .client
        .request_text(request)
        .await
        .with_context(|| format!("{method} {path} of the hub (installed by hack/install)"))
}
