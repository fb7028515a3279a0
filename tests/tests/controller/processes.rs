//! A second control plane, for tests that start and end processes of the platform themselves: one
//! test at a time, since each process takes every order and class there is.

use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow};
use controller::component::Component;
use controller::run::{Options, run};
use e2e::charts::render;
use e2e::control_plane::ControlPlane;
use e2e::control_plane::recorder::Recorder;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::DeleteParams;
use kube::client::ClientBuilder;
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::{Mutex, MutexGuard};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::setup::{Corner, PLATFORM, options, serve_hub};

/// The control plane, which one test has for itself.
pub(crate) struct Alone {
    pub(crate) plane: &'static ControlPlane,
    hub: String,
    _turn: MutexGuard<'static, ()>,
}

impl Alone {
    /// The control plane with the chart's rights and policies; `more` are Helm's arguments. No process
    /// of the platform runs, and no lease stands.
    pub(crate) async fn new(more: &[&str]) -> Result<Self> {
        static TURN: Mutex<()> = Mutex::const_new(());
        static PLANE: OnceLock<Result<ControlPlane, String>> = OnceLock::new();
        let turn = TURN.lock().await;
        let plane = PLANE
            .get_or_init(|| ControlPlane::start().map_err(|error| format!("{error:#}")))
            .as_ref()
            .map_err(|message| anyhow!("{message}"))?;
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": PLATFORM}});
        plane.apply_yaml("", &namespace.to_string()).await?;
        for file in ["rbac.yaml", "admission.yaml"] {
            let manifests = manifests(file, more)?;
            plane.apply_yaml(PLATFORM, &manifests).await.context(file)?;
        }
        let alone = Self {
            plane,
            hub: serve_hub().await?,
            _turn: turn,
        };
        for component in Component::ALL {
            let name = component.name();
            if alone.leases()?.get_opt(name).await?.is_some() {
                alone
                    .leases()?
                    .delete(name, &DeleteParams::default())
                    .await?;
            }
        }
        Ok(alone)
    }

    /// The leases of the platform.
    pub(crate) fn leases(&self) -> Result<Api<Lease>> {
        Ok(Api::namespaced(self.plane.client()?, PLATFORM))
    }

    /// Who holds the lease of a component.
    pub(crate) async fn holder(&self, component: Component) -> Result<Option<String>> {
        let lease = self.leases()?.get_opt(component.name()).await?;
        Ok(lease
            .and_then(|lease| lease.spec?.holder_identity)
            .filter(|holder| !holder.is_empty()))
    }

    /// A client of an account, and what it asks.
    pub(crate) async fn recorded(&self, account: &str) -> Result<(Client, Recorder)> {
        recorded(self.plane, account).await
    }

    /// Starts a process that runs `components`.
    pub(crate) fn start(
        &self,
        client: Client,
        components: &[Component],
        me: &str,
    ) -> Result<Process> {
        let options = Options {
            components: components.iter().copied().collect(),
            election: Some((PLATFORM.into(), me.into())),
            ..options(self.hub.clone())?
        };
        let stop = CancellationToken::new();
        let task = tokio::spawn(run(client, options, stop.clone()));
        Ok(Process { stop, task })
    }

    /// A corner of it; see [`Corner::new`].
    pub(crate) async fn corner(&self, name: &str) -> Result<Corner> {
        Corner::on(self.plane, name, None).await
    }
}

/// A client of an account of the platform, and what it asks.
pub(crate) async fn recorded(plane: &ControlPlane, account: &str) -> Result<(Client, Recorder)> {
    let config = plane.config_for_service_account(PLATFORM, account).await?;
    let recorder = Recorder::default();
    let client = ClientBuilder::try_from(config)?
        .with_layer(&recorder)
        .build();
    Ok((client, recorder))
}

/// One template of the chart.
pub(crate) fn manifests(file: &str, more: &[&str]) -> Result<String> {
    let path = format!("templates/{file}");
    let only = ["--show-only", path.as_str()];
    render("controller/chart", PLATFORM, &[&only, more].concat())
}

/// The namespaces of a control plane.
pub(crate) fn namespaces(client: Client) -> Api<Namespace> {
    Api::all(client)
}

/// A process of the platform, within this one.
pub(crate) struct Process {
    stop: CancellationToken,
    task: JoinHandle<Result<()>>,
}

impl Process {
    /// Asks it to end, and waits.
    pub(crate) async fn stop(self) -> Result<()> {
        self.stop.cancel();
        self.task.await?
    }

    /// Ends it in the middle of whatever it does, as a lost machine would: nothing is given up.
    pub(crate) async fn kill(self) {
        self.task.abort();
        // It says that it was aborted.
        let _ = self.task.await;
    }

    /// Waits until it ends by itself, and gives its words.
    pub(crate) async fn ends(self) -> Result<String> {
        match self.task.await? {
            Ok(()) => Err(anyhow!("it ended without a word")),
            Err(error) => Ok(format!("{error:#}")),
        }
    }
}
