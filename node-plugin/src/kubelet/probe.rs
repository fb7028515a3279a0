//! Asking the plugin's own servers whether they serve.
//!
//! In: the paths of the sockets. Out: whether each answers as it would the kubelet.
//! Never: a claim, and never a call that could change anything.

use std::path::Path;
use std::time::Duration;

use kubelet_api::dra::v1::NodePrepareResourcesRequest;
use kubelet_api::dra::v1::dra_plugin_client::DraPluginClient;
use kubelet_api::registration::v1::InfoRequest;
use kubelet_api::registration::v1::registration_client::RegistrationClient;
use tonic::transport::{Channel, Endpoint};

use super::Sockets;

/// The kubelet gives `GetInfo` one second.
const ANSWER: Duration = Duration::from_secs(1);

/// Calls both servers through their sockets: one whose file was removed, whose task ended
/// or whose threads are all blocked does not answer.
///
/// # Errors
/// What does not answer, for people.
pub async fn probe(sockets: &Sockets) -> Result<(), String> {
    let registration = async {
        let mut client = RegistrationClient::new(connect(&sockets.registration).await?);
        client.get_info(InfoRequest {}).await.map(drop)
    };
    let node = async {
        let mut client = DraPluginClient::new(connect(&sockets.endpoint).await?);
        let nothing = NodePrepareResourcesRequest { claims: Vec::new() };
        client.node_prepare_resources(nothing).await.map(drop)
    };
    answered("registration service", &sockets.registration, registration).await?;
    answered("node service", &sockets.endpoint, node).await
}

async fn answered(
    what: &str,
    socket: &Path,
    call: impl Future<Output = Result<(), tonic::Status>>,
) -> Result<(), String> {
    let failed = |why: &str| {
        let socket = socket.display();
        Err(format!("the {what} at {socket} does not answer: {why}"))
    };
    match tokio::time::timeout(ANSWER, call).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(status)) => failed(status.message()),
        Err(_) => failed("no answer within a second"),
    }
}

async fn connect(socket: &Path) -> Result<Channel, tonic::Status> {
    let failed = |error: tonic::transport::Error| tonic::Status::unavailable(error.to_string());
    let endpoint = Endpoint::try_from(format!("unix:{}", socket.display())).map_err(failed)?;
    endpoint.connect().await.map_err(failed)
}
