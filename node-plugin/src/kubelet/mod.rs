//! The kubelet's side of the plugin: sockets, registration, the node and the health service.
//!
//! In: the kubelet's gRPC calls. Out: calls of [`crate::claims`], and their answers in
//! the kubelet's terms. Never: a decision about a claim; this is transport.

mod health;
mod node_service;
mod probe;
mod registration;
mod sockets;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kubelet_api::dra::{v1, v1beta1};
use kubelet_api::health::v1::dra_resource_health_server as health_v1;
use kubelet_api::health::v1alpha1::dra_resource_health_server as health_v1alpha1;
use kubelet_api::registration::v1 as plugin_registration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use crate::claims::Claims;
use crate::readiness::Readiness;
use crate::slices::Wanted;

pub use health::HealthService;
pub use probe::probe;
pub use sockets::{SocketError, Sockets};

/// How long a connection may take to end: the kubelet keeps its own open for ever, and
/// a graceful shutdown waits for it (hyper #4170).
const DRAIN: Duration = Duration::from_secs(5);

/// How long claims that are being worked on may take before the plugin deregisters: with
/// [`DRAIN`] and the end of the process within the pod's 30 s of grace.
const FINISH: Duration = Duration::from_secs(15);

/// Where the kubelet finds the plugin.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The kubelet's folder of plugins, `/var/lib/kubelet/plugins`.
    pub plugins: PathBuf,
    /// The kubelet's folder of registration sockets, `/var/lib/kubelet/plugins_registry`.
    pub registry: PathBuf,
    /// The UID of this pod: two instances live side by side during an update.
    pub pod_uid: String,
    /// The name of the pool whose devices' health is told.
    pub pool: String,
}

/// The servers of one instance.
pub struct Servers {
    claims: Claims,
    sockets: Sockets,
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

impl Servers {
    /// Serves both sockets. The registration socket comes last, because the kubelet
    /// calls as soon as it sees it. Sockets of dead instances are removed first.
    ///
    /// # Errors
    /// When a socket cannot be bound.
    pub async fn start(
        settings: &Settings,
        claims: Claims,
        readiness: Readiness,
        wanted: watch::Receiver<Option<Arc<Wanted>>>,
    ) -> Result<Self, SocketError> {
        let sockets = Sockets::prepare(settings).await?;
        let stop = CancellationToken::new();

        let node = node_service::NodeService::new(claims.clone());
        let health = HealthService::new(settings.pool.clone(), wanted, stop.clone());
        let listener = sockets::bind(&sockets.endpoint)?;
        let router = Server::builder()
            .add_service(v1::dra_plugin_server::DraPluginServer::new(node.clone()))
            .add_service(v1beta1::dra_plugin_server::DraPluginServer::new(node))
            .add_service(health_v1::DraResourceHealthServer::new(health.clone()))
            .add_service(health_v1alpha1::DraResourceHealthServer::new(health));
        let cancelled = stop.clone();
        let node_task = tokio::spawn(async move {
            let incoming = UnixListenerStream::new(listener);
            let served = router
                .serve_with_incoming_shutdown(incoming, cancelled.cancelled_owned())
                .await;
            if let Err(error) = served {
                tracing::error!(%error, "The node service ended.");
            }
        });

        let registration =
            registration::RegistrationService::new(sockets.endpoint.clone(), readiness);
        let listener = sockets::bind(&sockets.registration)?;
        let service =
            plugin_registration::registration_server::RegistrationServer::new(registration);
        let router = Server::builder().add_service(service);
        let cancelled = stop.clone();
        let registration_task = tokio::spawn(async move {
            let incoming = UnixListenerStream::new(listener);
            let served = router
                .serve_with_incoming_shutdown(incoming, cancelled.cancelled_owned())
                .await;
            if let Err(error) = served {
                tracing::error!(%error, "The registration service ended.");
            }
        });

        tracing::info!(endpoint = %sockets.endpoint.display(),
            registration = %sockets.registration.display(), "Waiting for the kubelet.");
        Ok(Self {
            claims,
            sockets,
            stop,
            tasks: vec![node_task, registration_task],
        })
    }

    /// The sockets that are served.
    #[must_use]
    pub fn sockets(&self) -> &Sockets {
        &self.sockets
    }

    /// Ends when a server does: they serve until they are stopped, so that is a fault.
    pub async fn ended(&mut self) {
        let tasks = self.tasks.iter_mut();
        futures::future::select_all(tasks).await.0.ok();
    }

    /// Lets work in progress finish, deregisters and ends, in this order: the kubelet
    /// drops the connection of a plugin whose registration socket is gone, and a call
    /// that is under way on it fails the start of its pod. Where another instance is
    /// registered, new calls go there already; where there is none, they come here until
    /// the end.
    pub async fn stop(mut self) {
        if tokio::time::timeout(FINISH, self.claims.idle())
            .await
            .is_err()
        {
            tracing::warn!(
                "Work on a claim takes longer than this instance may live; the kubelet asks the \
                 next one again."
            );
        }
        self.sockets.remove_registration();
        self.stop.cancel();
        let ends = self.tasks.drain(..).map(|mut task| async move {
            if !task.is_finished() && tokio::time::timeout(DRAIN, &mut task).await.is_err() {
                task.abort();
            }
        });
        futures::future::join_all(ends).await;
        self.sockets.remove_endpoint();
    }
}
