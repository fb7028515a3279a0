//! `controller run`: for each component an election, its watches, its reconciler, an orderly end.
//!
//! In: a client and what the process was told. Out: nothing but what the reconcilers write. Never: a
//! write of a component whose lease is another's.

use crate::admin::{self, Health};
use crate::component::{Component, PLANNER_LOG};
use crate::lease::{Election, Held};
use crate::metrics::Metrics;
use crate::model::{Hub, HubEndpoint};
use crate::order::{self, Settings};
use crate::recipe::RecipeBook;
use crate::{class, device_api, watches};
use anyhow::Context as _;
use futures::StreamExt;
use futures::future::join_all;
use inference_api::{InferenceService, InferenceServiceClass};
use kube::core::DeserializeGuard;
use kube::runtime::controller::{self, Controller};
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::watcher;
use kube::{Api, Client};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{Instrument, debug, info, info_span, warn};

/// How long tasks may take to end.
const GRACE: Duration = Duration::from_secs(5);

/// What `controller run` is told.
#[derive(Clone, Debug)]
pub struct Options {
    /// What this process is a part of.
    pub components: BTreeSet<Component>,
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
    let admin = async {
        match options.admin {
            Some(address) => admin::serve(address, health.clone(), stop.clone()).await,
            None => {
                stop.cancelled().await;
                Ok(())
            }
        }
    };
    health.ready.store(true, Ordering::Release);
    let components = join_all(options.components.iter().map(|component| {
        let part = take_part(*component, &client, &options, &health, &tasks, &stop);
        let span = info_span!(target: "controller", "run", component = component.word());
        // Without one of its components a process is not what it was started to be.
        ends_the_run(part.instrument(span), &stop)
    }));
    let admin = ends_the_run(
        async { admin.await.context("the admin server can't listen") },
        &stop,
    );
    let (components, admin) = tokio::join!(components, admin);
    drop(guard);
    tasks.close();
    if tokio::time::timeout(GRACE, tasks.wait()).await.is_err() {
        warn!("Some tasks did not end in time.");
    }
    components.into_iter().collect::<anyhow::Result<()>>()?;
    admin
}

/// Whatever ends takes the others along.
async fn ends_the_run(
    part: impl Future<Output = anyhow::Result<()>>,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let result = part.await;
    stop.cancel();
    result
}

/// Stands for election as a component, leads it, and gives the lease up when nothing more is
/// written under it.
async fn take_part(
    component: Component,
    client: &Client,
    options: &Options,
    health: &Health,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let part = Part {
        component,
        client,
        options,
        metrics: Arc::new(health.figures.of(component)),
        tasks,
    };
    let Some((namespace, me)) = &options.election else {
        part.metrics.leader.set(1);
        return part.lead(stop).await;
    };
    let mut election = Election::new(client.clone(), namespace, component.name(), me);
    if !election.acquire(stop).await {
        return Ok(());
    }
    part.metrics.leader.set(1);
    let led = part.lead(stop);
    let mut led = std::pin::pin!(led);
    let result = tokio::select! {
        result = &mut led => Some(result),
        held = election.hold(stop) => match held {
            Held::Lost => None,
            Held::Stopped => Some(tokio::time::timeout(GRACE, led).await.unwrap_or(Ok(()))),
        },
    };
    part.metrics.leader.set(0);
    match result {
        Some(result) => {
            election.release().await;
            result
        }
        // What was under way is dropped, and writes nothing more.
        None => Err(anyhow::anyhow!("the lease {} was lost", component.name())),
    }
}

/// A component of this process.
struct Part<'a> {
    component: Component,
    client: &'a Client,
    options: &'a Options,
    metrics: Arc<Metrics>,
    tasks: &'a TaskTracker,
}

impl Part<'_> {
    /// Leads until stopped; begins anew when the cluster gains or loses the API of devices.
    async fn lead(&self, stop: &CancellationToken) -> anyhow::Result<()> {
        let component = self.component;
        let reporter = Reporter {
            controller: component.name().to_owned(),
            instance: self.options.election.as_ref().map(|(_, me)| me.clone()),
        };
        let recorder = Recorder::new(self.client.clone(), reporter);
        if component == Component::Planner && self.options.default_class {
            class::ensure_default_class(self.client.clone(), &recorder)
                .await
                .context("making the built-in class default-llm")?;
        }
        while !stop.is_cancelled() {
            let device_api = device_api::is_served(self.client).await?;
            if !device_api {
                warn!(
                    "The cluster does not serve resource.k8s.io/v1; orders can't be placed on it."
                );
            }
            let term = stop.child_token();
            let led = async {
                match component {
                    Component::Controller => self.orders(device_api, &recorder, &term).await,
                    Component::Planner => self.classes(device_api, &recorder, &term).await,
                }
            };
            let mut led = std::pin::pin!(led);
            tokio::select! {
                result = &mut led => {
                    result?;
                    anyhow::ensure!(stop.is_cancelled(), "the reconcilers ended by themselves");
                }
                changed = device_api::changed(self.client, device_api) => {
                    changed?;
                    info!("The cluster serves resource.k8s.io/v1 now, or does not any more; beginning anew.");
                    term.cancel();
                    led.await?;
                }
            }
        }
        Ok(())
    }

    /// The controller's part: orders.
    async fn orders(
        &self,
        device_api: bool,
        recorder: &Recorder,
        stop: &CancellationToken,
    ) -> anyhow::Result<()> {
        let options = self.options;
        let (watched, wakeups) = watches::of_orders(self.client, device_api, self.tasks, stop);
        tokio::select! {
            () = watched.ready() => {}
            () = stop.cancelled() => return Ok(()),
        }
        info!(device_api, "The stores are complete; reconciling orders.");
        let cx = Arc::new(order::Context {
            client: self.client.clone(),
            stores: watched.stores,
            device_api,
            hub: Hub::new(options.hub.clone()).context("making the hub's client")?,
            progress: order::download::client()
                .context("making the client of downloads' progress")?,
            recipes: options.recipes.clone(),
            settings: options.settings.clone(),
            recorder: recorder.clone(),
            metrics: self.metrics.clone(),
            changes: watched.changes,
            memory: Default::default(),
        });
        let orders: Api<DeserializeGuard<InferenceService>> = Api::all(self.client.clone());
        Controller::new(orders, watcher::Config::default())
            .with_config(config())
            .reconcile_on(wakeups)
            .graceful_shutdown_on(stop.clone().cancelled_owned())
            .run(order::reconcile, order::error_policy, cx)
            .for_each(|result| async move {
                if let Err(error) = result {
                    debug!(%error, "An order's reconcile ended with an error.");
                }
            })
            .await;
        Ok(())
    }

    /// The planner's part: classes.
    async fn classes(
        &self,
        device_api: bool,
        recorder: &Recorder,
        stop: &CancellationToken,
    ) -> anyhow::Result<()> {
        let (watched, wakeups) = watches::of_classes(self.client, device_api, self.tasks, stop);
        tokio::select! {
            () = watched.ready() => {}
            () = stop.cancelled() => return Ok(()),
        }
        info!(target: PLANNER_LOG, device_api, "The stores are complete; reconciling classes.");
        let cx = Arc::new(class::Context {
            client: self.client.clone(),
            device_classes: watched.device_classes,
            storage_classes: watched.storage_classes,
            orders: watched.orders,
            device_api,
            recorder: recorder.clone(),
            metrics: self.metrics.clone(),
        });
        let classes: Api<DeserializeGuard<InferenceServiceClass>> = Api::all(self.client.clone());
        Controller::new(classes, watcher::Config::default())
            .with_config(config())
            .reconcile_on(wakeups)
            .graceful_shutdown_on(stop.clone().cancelled_owned())
            .run(class::reconcile, class::error_policy, cx)
            .for_each(|result| async move {
                if let Err(error) = result {
                    debug!(target: PLANNER_LOG, %error, "A class's reconcile ended with an error.");
                }
            })
            .await;
        Ok(())
    }
}

fn config() -> controller::Config {
    controller::Config::default()
        .debounce(Duration::from_millis(100))
        .concurrency(8)
}
