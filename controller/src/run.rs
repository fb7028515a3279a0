//! `controller run`: election, watches, the two reconcilers, orderly end.

use crate::admin::{self, Health};
use crate::lease::Election;
use crate::model::{Hub, HubEndpoint};
use crate::order::{self, Settings};
use crate::recipe::RecipeBook;
use crate::{class, watches};
use anyhow::Context as _;
use futures::StreamExt;
use inference_api::{InferenceService, InferenceServiceClass};
use kube::core::DeserializeGuard;
use kube::runtime::controller::{self, Controller};
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::watcher;
use kube::{Api, Client};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};

/// How long tasks may take to end.
const GRACE: Duration = Duration::from_secs(5);

/// What `controller run` is told.
#[derive(Clone, Debug)]
pub struct Options {
    /// The hub, as the controller reaches it.
    pub hub: HubEndpoint,
    /// What the installation decides.
    pub settings: Settings,
    /// Runtimes.
    pub recipes: RecipeBook,
    /// Where health and figures are served; none serves none.
    pub admin: Option<SocketAddr>,
    /// Namespace and identity of the election; none runs without one.
    pub election: Option<(String, String)>,
    /// Whether `default-llm` is made if absent.
    pub default_class: bool,
}

/// Runs until stopped, or until something that must not end has ended.
///
/// # Errors
/// Where the process cannot do its part any more; the caller ends it.
pub async fn run(client: Client, options: Options, stop: CancellationToken) -> anyhow::Result<()> {
    let health = Health::default();
    let tasks = TaskTracker::new();
    // Everything of this run ends with it, whatever ended first.
    let stop = stop.child_token();
    let guard = stop.clone().drop_guard();
    let admin = options
        .admin
        .map(|address| tokio::spawn(admin::serve(address, health.clone(), stop.clone())));
    health.ready.store(true, Ordering::Release);
    let mut election = options.election.as_ref().map(|(namespace, me)| {
        Election::new(client.clone(), namespace, "ai-inference-controller", me)
    });
    if let Some(election) = &mut election
        && !election.acquire(&stop).await
    {
        return Ok(());
    }
    health.metrics.leader.set(1);
    let led = lead(client, &options, &health, &tasks, stop.clone());
    let result = match (&mut election, admin) {
        (None, None) => led.await,
        (None, Some(admin)) => tokio::select! {
            result = led => result,
            ended = admin => Err(admin_ended(ended)),
        },
        (Some(election), None) => tokio::select! {
            result = led => result,
            () = election.hold(&stop) => lost(&stop),
        },
        (Some(election), Some(admin)) => tokio::select! {
            result = led => result,
            () = election.hold(&stop) => lost(&stop),
            ended = admin => if stop.is_cancelled() { Ok(()) } else { Err(admin_ended(ended)) },
        },
    };
    drop(guard);
    tasks.close();
    if tokio::time::timeout(GRACE, tasks.wait()).await.is_err() {
        warn!("Some tasks did not end in time.");
    }
    result
}

fn lost(stop: &CancellationToken) -> anyhow::Result<()> {
    if stop.is_cancelled() {
        return Ok(());
    }
    anyhow::bail!("the lease was lost to another process")
}

fn admin_ended(ended: Result<std::io::Result<()>, tokio::task::JoinError>) -> anyhow::Error {
    match ended {
        Ok(Err(error)) => anyhow::Error::from(error).context("the admin server can't listen"),
        _ => anyhow::anyhow!("the admin server ended"),
    }
}

async fn lead(
    client: Client,
    options: &Options,
    health: &Health,
    tasks: &TaskTracker,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let device_api = serves_device_api(&client).await?;
    if !device_api {
        warn!("The cluster does not serve resource.k8s.io/v1; orders can't be placed on it.");
    }
    let reporter = Reporter {
        controller: crate::FIELD_MANAGER.to_owned(),
        instance: options.election.as_ref().map(|(_, me)| me.clone()),
    };
    let recorder = Recorder::new(client.clone(), reporter);
    if options.default_class {
        class::ensure_default_class(client.clone(), &recorder)
            .await
            .context("making the built-in class default-llm")?;
    }
    let (watched, wakeups) = watches::start(&client, device_api, tasks, &stop);
    tokio::select! {
        () = watched.ready() => {}
        () = stop.cancelled() => return Ok(()),
    }
    info!(device_api, "The stores are complete; reconciling.");
    let order_cx = Arc::new(order::Context {
        client: client.clone(),
        stores: watched.stores.clone(),
        device_api,
        hub: Hub::new(options.hub.clone()).context("making the hub's client")?,
        progress: order::download::client().context("making the client of downloads' progress")?,
        recipes: options.recipes.clone(),
        settings: options.settings.clone(),
        recorder: recorder.clone(),
        metrics: health.metrics.clone(),
        changes: watched.changes.clone(),
        memory: Default::default(),
    });
    let class_cx = Arc::new(class::Context {
        client: client.clone(),
        device_classes: watched.stores.device_classes.clone(),
        storage_classes: watched.storage_classes.clone(),
        orders: watched.orders.clone(),
        device_api,
        recorder,
        metrics: health.metrics.clone(),
    });
    let config = || {
        controller::Config::default()
            .debounce(Duration::from_millis(100))
            .concurrency(8)
    };
    let orders: Api<DeserializeGuard<InferenceService>> = Api::all(client.clone());
    let orders = Controller::new(orders, watcher::Config::default())
        .with_config(config())
        .reconcile_on(wakeups.orders)
        .graceful_shutdown_on(stop.clone().cancelled_owned())
        .run(order::reconcile, order::error_policy, order_cx)
        .for_each(|result| async move {
            if let Err(error) = result {
                debug!(%error, "An order's reconcile ended with an error.");
            }
        });
    let classes: Api<DeserializeGuard<InferenceServiceClass>> = Api::all(client);
    let classes = Controller::new(classes, watcher::Config::default())
        .with_config(config())
        .reconcile_on(wakeups.classes)
        .graceful_shutdown_on(stop.clone().cancelled_owned())
        .run(class::reconcile, class::error_policy, class_cx)
        .for_each(|result| async move {
            if let Err(error) = result {
                debug!(%error, "A class's reconcile ended with an error.");
            }
        });
    tokio::join!(orders, classes);
    if stop.is_cancelled() {
        Ok(())
    } else {
        anyhow::bail!("the reconcilers ended by themselves")
    }
}

async fn serves_device_api(client: &Client) -> anyhow::Result<bool> {
    match client.list_api_group_resources("resource.k8s.io/v1").await {
        Ok(list) => Ok(list.resources.iter().any(|r| r.kind == "ResourceSlice")),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
        Err(error) => Err(error).context("asking which APIs the cluster serves"),
    }
}
