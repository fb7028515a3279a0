//! Whether the cluster serves resource.k8s.io/v1, without which nothing can be placed.
//!
//! In: the API server's discovery, and the object by which it tells of a served API. Out: an
//! answer, and the moment at which it changes. Never: a guess from the server's version.

use anyhow::Context as _;
use futures::StreamExt;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tracing::warn;

/// The API, as it is asked for.
const API: &str = "resource.k8s.io/v1";
/// The object that stands while the API is served.
const REGISTERED: &str = "v1.resource.k8s.io";

/// Asks whether the API is served.
///
/// # Errors
/// Where the API server does not answer.
pub async fn is_served(client: &Client) -> anyhow::Result<bool> {
    match client.list_api_group_resources(API).await {
        Ok(list) => Ok(list.resources.iter().any(|r| r.kind == "ResourceSlice")),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
        Err(error) => Err(error).context("asking which APIs the cluster serves"),
    }
}

/// Waits until the API is served although it was not, or the other way round.
///
/// # Errors
/// None that ends the watch; it is taken up again.
pub async fn changed(client: &Client, was_served: bool) -> anyhow::Result<()> {
    let one = watcher::Config::default().fields(&format!("metadata.name={REGISTERED}"));
    let registered: Api<APIService> = Api::all(client.clone());
    let mut events = std::pin::pin!(watcher(registered, one).default_backoff());
    while let Some(event) = events.next().await {
        match event {
            // The object is only the sign; what is served, discovery tells.
            Ok(_) => match is_served(client).await {
                Ok(served) if served != was_served => return Ok(()),
                Ok(_) => {}
                Err(error) => warn!("{error:#}; waiting for the next sign."),
            },
            Err(error) => {
                warn!(%error, "The watch of {REGISTERED} broke and will be taken up again.")
            }
        }
    }
    anyhow::bail!("the watch of {REGISTERED} ended")
}
