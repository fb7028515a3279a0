//! One instance of the plugin, from start to stop.
//!
//! In: options and a token that stops it. Out: the running parts, wired together.
//! Never: logic of its own.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::GetParams;
use kube::{Api, Client};
use rustix::fs::FlockOperation;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::claims::sharing::What;
use crate::claims::{ClaimSource, Claims, Collector, Loaded, driver, sharing};
use crate::discovery::Discovery;
use crate::events::NodeEvents;
use crate::health::{Memory, Monitor};
use crate::kubelet::Servers;
use crate::liveness::Liveness;
use crate::metrics::{Calls, DaemonEvent, Metrics};
use crate::monitoring::Monitoring;
use crate::options::Options;
use crate::readiness::{Part, Readiness};
use crate::slices::Wanted;
use crate::slices::publisher::Publisher;
use crate::{DRIVER, admin, claims, health, kubelet};

/// The longest time between two looks for a claim that may be gone. Two looks in a row have
/// to miss it, and it is to be collected within a minute.
const SWEEP: Duration = Duration::from_secs(25);

/// How long a read of a claim may take: the kubelet waits 45 s for the whole call.
const READ: Duration = Duration::from_secs(10);
/// How long the last writes of the slices may take: one that has begun, and the taints of an end
/// without a successor. An API server that is busy takes a second for each.
const PUBLISHED: Duration = Duration::from_secs(10);

/// How many reports of daemons may wait to be told.
const REPORTS: usize = 64;

/// Runs until `stop`, then deregisters and ends.
///
/// # Errors
/// When this instance cannot start, or one of its servers ends.
pub async fn run(options: Options, client: Client, stop: CancellationToken) -> anyhow::Result<()> {
    let metrics = Metrics::default();
    let readiness = Readiness::default();
    readiness.not_ready(Part::Slices, "the slices have not been published yet");
    let events = NodeEvents::new(client.clone(), &options.node_name);
    let (loaded, loaded_receiver) = watch::channel::<Option<Loaded>>(None);
    let (wanted, wanted_receiver) = watch::channel::<Option<Arc<Wanted>>>(None);

    let (reports, reported) = mpsc::channel(REPORTS);
    let folder = options.kubelet_plugins_dir.join(DRIVER);
    let settings = claims::Settings {
        node: options.node_name.clone(),
        folder: folder.clone(),
        cdi: options.cdi_dir.clone(),
        roots: driver::Roots {
            host_driver: options
                .host_driver_root
                .unwrap_or_else(|| options.driver_root.clone()),
            driver: options.driver_root.clone(),
            dev: options.dev_root,
            proc: options.proc_root.clone(),
        },
        sharing: sharing::Settings {
            policy: options.sharing,
            folder: options.mps_dir,
            launcher: options
                .mps_launcher
                .unwrap_or_else(|| "/proc/self/exe".into()),
            cgroups: options.cgroup_root,
            reports: Some(reports),
        },
    };
    let source = Arc::new(ApiClaims {
        client: client.clone(),
    });
    let claims = Claims::open(settings, source, loaded_receiver, Arc::new(|_| ()))
        .context("the state of this node's claims cannot be opened")?
        .with_metrics(metrics.clone());
    let calls = Calls::new(metrics.clone());
    let interval = Duration::from_secs(options.resync_seconds);
    let settings = health::Settings {
        folder: folder.clone(),
        boot_id: claims.boot_id().to_owned(),
        policy: health::core::Policy {
            fatal: options.health_fatal_effect,
            ignored: options.health_ignored_xids.into_iter().collect(),
            hold: options.health_hold_seconds.into(),
            ..health::core::Policy::default()
        },
        interval: Duration::from_secs(options.health_interval_seconds),
        deadline: Duration::from_secs(options.health_deadline_seconds),
        repairs: interval,
    };
    let repairs = health::Repairs::new(client.clone(), &options.node_name);
    let (health, monitor, beside) = Monitor::new(
        settings,
        wanted.clone(),
        events.clone(),
        Some(repairs),
        metrics.clone(),
        readiness.clone(),
    );
    let settings = kubelet::Settings {
        plugins: options.kubelet_plugins_dir,
        registry: options.kubelet_registry_dir,
        pod_uid: options.pod_uid,
        pool: options.node_name.clone(),
    };
    let mut servers = Servers::start(
        &settings,
        claims.clone(),
        readiness.clone(),
        wanted_receiver.clone(),
    )
    .await?;
    let liveness = Liveness {
        calls: calls.clone(),
        sockets: servers.sockets().clone(),
        hung: Duration::from_secs(options.nvml_hung_seconds),
        answered: health.answered(),
    };
    let monitoring = Monitoring {
        metrics: metrics.clone(),
        claims: claims.clone(),
        wanted: wanted_receiver.clone(),
    };
    let admin = tokio::spawn(admin::serve(
        options.admin_address,
        admin::router(liveness, readiness.clone(), monitoring),
        stop.clone(),
    ));

    let library = match options.nvml_library {
        Some(path) => gpu::Library::Path(path),
        None => gpu::Library::InDriverRoot(options.driver_root),
    };
    let monitor = tokio::spawn(monitor.run(stop.clone()));
    let discovery = Discovery {
        library,
        roots: gpu::Roots {
            proc: options.proc_root,
            sys: options.sys_root,
        },
        mig: options.mig_mode,
        claims: claims.clone(),
        loaded,
        wanted,
        events: events.clone(),
        metrics: metrics.clone(),
        calls,
        readiness: readiness.clone(),
        interval,
        health,
        memory: Memory::new(&folder, claims.boot_id()),
    };
    let daemons = tokio::spawn(daemons(
        claims.clone(),
        discovery.loaded.subscribe(),
        interval,
        stop.clone(),
    ));
    let reports = tokio::spawn(tell(reported, events.clone(), metrics.clone()));
    let discovery = tokio::spawn(discovery.run(stop.clone()));
    tokio::spawn(
        claims
            .statuses()
            .run(client.clone(), options.node_name.clone(), stop.clone()),
    );
    let collector = tokio::spawn(collect_garbage(
        claims,
        interval.min(SWEEP),
        events.clone(),
        stop.clone(),
    ));
    let mut publisher = tokio::spawn({
        let (stop, lock) = (stop.clone(), folder.join("publisher.lock"));
        let (node, sockets) = (options.node_name, servers.sockets().clone());
        async move {
            let held = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                held = publisher_lock(lock, &readiness) => held?,
            };
            let publisher =
                Publisher::new(client, node, wanted_receiver, events, metrics, readiness);
            publisher.run(stop, sockets.alone()).await;
            drop(held);
            anyhow::Ok(())
        }
    });

    let ended = tokio::select! {
        () = stop.cancelled() => Ok(()),
        () = servers.ended() => Err(anyhow::anyhow!("a socket server ended")),
        result = admin => result?.context("the admin server ended"),
        result = discovery => result.context("discovery ended"),
        result = monitor => result.context("the watch of the GPUs' health ended"),
        result = collector => result.context("the claim collector ended"),
        result = daemons => result.context("the supervision of MPS daemons ended"),
        result = reports => result.context("the reports of MPS daemons ended"),
        result = &mut publisher => result?.context("the publisher ended"),
    };
    let stopped = stop.is_cancelled();
    stop.cancel();
    servers.stop().await;
    // A pool of which half is written is of no use to anybody.
    if !publisher.is_finished() {
        tokio::time::timeout(PUBLISHED, publisher).await.ok();
    }
    beside.finish().await;
    if stopped { Ok(()) } else { ended }
}

/// Makes this instance the node's one publisher: two releases side by side would undo
/// each other's writes. The lock ends with the process that holds it.
///
/// An instance that has to wait is ready meanwhile, because the slices are published;
/// a rolling update ends the old instance only when the new one is ready.
async fn publisher_lock(path: PathBuf, readiness: &Readiness) -> anyhow::Result<File> {
    let cannot = || format!("cannot lock {}", path.display());
    let file = File::options()
        .create(true)
        .append(true)
        .open(&path)
        .with_context(cannot)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => return Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => {}
        Err(error) => return Err(error).with_context(cannot),
    }
    tracing::info!("Another instance publishes this node's slices; this one waits for its end.");
    readiness.ready(Part::Slices);
    let (sender, receiver) = oneshot::channel();
    // A thread of its own: this can take as long as the other instance lives, and the
    // process may end meanwhile.
    std::thread::Builder::new()
        .name("publisher-lock".to_owned())
        .spawn(move || {
            let locked = rustix::fs::flock(&file, FlockOperation::LockExclusive).map(|()| file);
            drop(sender.send(locked)); // Nobody waits any more while stopping.
        })?;
    let file = receiver.await?.with_context(cannot)?;
    tracing::info!("This instance publishes the slices from now on.");
    Ok(file)
}

/// Adopts the MPS daemons of an earlier instance as soon as the GPUs are there, and from
/// then on looks after all of them: a daemon's end is noticed at once, what could not be
/// done then is done here.
async fn daemons(
    claims: Claims,
    mut loaded: watch::Receiver<Option<Loaded>>,
    interval: Duration,
    stop: CancellationToken,
) {
    tokio::select! {
        () = stop.cancelled() => return,
        loaded = loaded.wait_for(Option::is_some) => drop(loaded),
    }
    loop {
        claims.converge_daemons().await;
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(interval) => {}
        }
    }
}

/// Tells people what happened to MPS daemons.
async fn tell(mut reports: mpsc::Receiver<sharing::Report>, events: NodeEvents, metrics: Metrics) {
    while let Some(report) = reports.recv().await {
        metrics.daemon(DaemonEvent::of(&report.what));
        let device = report.device;
        match &report.what {
            What::Started | What::Stopped => {}
            What::Died => {
                let note = format!(
                    "The MPS daemon of device {device} ended although claims use the device; \
                     it is started again. CUDA processes that were connected to it have to be \
                     restarted."
                );
                events.warn("MPSDaemonDied", "Supervise", &note).await;
            }
            What::Failed(reason) => events.warn("MPSDaemonFailed", "Supervise", reason).await,
        }
    }
}

async fn collect_garbage(
    claims: Claims,
    cycle: Duration,
    events: NodeEvents,
    stop: CancellationToken,
) {
    let mut collector = Collector::new(claims);
    let half = cycle / 2;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(half) => {}
        }
        let sweep = tokio::select! {
            () = stop.cancelled() => return,
            sweep = collector.sweep(half, half) => sweep,
        };
        for report in sweep.reports {
            events.warn(report.reason, "Collect", &report.text).await;
        }
    }
}

/// Claims as the API server has them, read one by one and kept nowhere.
struct ApiClaims {
    client: Client,
}

impl ClaimSource for ApiClaims {
    fn get<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ResourceClaim>, String>> {
        self.read(namespace, name, GetParams::default()).boxed()
    }

    fn glance<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ResourceClaim>, String>> {
        // Any version will do: it is answered without a question to etcd.
        self.read(namespace, name, GetParams::any()).boxed()
    }
}

impl ApiClaims {
    async fn read(
        &self,
        namespace: &str,
        name: &str,
        params: GetParams,
    ) -> Result<Option<ResourceClaim>, String> {
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        match tokio::time::timeout(READ, api.get_with(name, &params)).await {
            Ok(Ok(claim)) => Ok(Some(claim)),
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(None),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("no answer within {} s", READ.as_secs())),
        }
    }
}
