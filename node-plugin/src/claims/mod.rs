//! From a claim to devices in a container, and back.
//!
//! In: a claim's identity from the kubelet and its object from the API server. Out:
//! prepared devices. Never: lose a claim that was prepared, or give the same hardware
//! to two. Only this module touches the disk and the hardware.
//!
//! Order of locks: the claim's, then its GPUs' in ascending order; the turn of a shared
//! device's daemon after the claim's, with no GPU's held. There is none for the node, so
//! a slow partition or daemon delays nobody else. The blocking part runs in a task
//! of its own: a kubelet that gives up after 45 s and asks again finds the first
//! attempt holding the locks, never half done and abandoned.

pub mod allocation;
pub mod cdi;
pub mod checkpoint;
mod collect;
pub mod config;
pub mod core;
pub mod driver;
mod error;
pub mod facts;
pub mod files;
pub mod hardware;
mod held;
mod index;
mod injected;
mod locks;
pub mod metadata;
mod rebuild;
mod reconcile;
pub mod record;
mod salvage;
pub(crate) mod sealed;
mod shares;
pub mod sharing;
mod statics;
pub mod status;
mod targets;
mod usage;
mod waiting;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use gpu::{Inventory, PciAddress};
use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use self::allocation::Allocated;
use self::checkpoint::{CheckpointError, ClaimRef, PreparedDevice, Record, Target};
use self::core::{Core, CoreError, Prepared, StepHook};
use self::hardware::Hardware;
use self::locks::{Held, Locks};
use self::sharing::daemons::Daemons;
use self::status::Statuses;
use crate::metrics::{DeviceKind, Metrics, Operation, Phase, Stopwatch};
use crate::slices::StaticInstance;

pub use self::collect::{Collector, Sweep};
pub use self::error::{ClaimError, LookError, OpenError};
pub use self::reconcile::Report;

/// When a call is answered at the latest; the work goes on, and the next call finds it done.
/// The kubelet waits for 45 s.
const ANSWER: Duration = Duration::from_secs(40);
/// Where claims are read from.
pub trait ClaimSource: Send + Sync + 'static {
    /// Reads a claim as the API server has it now; `None` where there is none.
    ///
    /// The error says what failed; it is shown to people as it is.
    fn get<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ResourceClaim>, String>>;

    /// The same at the least cost for the API server, perhaps a little out of date: what is
    /// not there by this has to be looked for with [`Self::get`].
    fn glance<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ResourceClaim>, String>> {
        self.get(namespace, name)
    }
}

/// The GPUs, once NVML is loaded.
#[derive(Clone)]
pub struct Loaded {
    /// The calls.
    pub hardware: Arc<dyn Hardware>,
    /// The driver's version, which names its libraries.
    pub driver_version: String,
}

/// Where this node's claims keep their state.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The node, which is the name of its pool.
    pub node: String,
    /// The plugin's own folder: checkpoints and locks.
    pub folder: PathBuf,
    /// The CDI folder.
    pub cdi: PathBuf,
    /// The roots of the driver's files.
    pub roots: driver::Roots,
    /// How devices are shared.
    pub sharing: sharing::Settings,
}

/// This node's claims. Cloning is cheap and shares everything.
#[derive(Clone)]
pub struct Claims {
    core: Arc<Core>,
    locks: Arc<Locks>,
    daemons: Daemons,
    source: Arc<dyn ClaimSource>,
    loaded: watch::Receiver<Option<Loaded>>,
    node: String,
    metrics: Metrics,
    statuses: Arc<Statuses>,
    /// Work that goes on, whether somebody waits for it or not.
    running: TaskTracker,
    /// How many claims have ended in this process: told to those that wait for one.
    ended: watch::Sender<u64>,
}

impl Claims {
    /// Opens the state of this node's claims. `after` is called after each durable
    /// step; tests stop there.
    ///
    /// # Errors
    /// When a folder cannot be made.
    pub fn open(
        settings: Settings,
        source: Arc<dyn ClaimSource>,
        loaded: watch::Receiver<Option<Loaded>>,
        after: StepHook,
    ) -> Result<Self, OpenError> {
        let boot = settings.roots.proc.join("sys/kernel/random/boot_id");
        // A fake proc root has the driver's files only.
        let boot = if boot.exists() {
            boot
        } else {
            "/proc/sys/kernel/random/boot_id".into()
        };
        let boot_id = std::fs::read_to_string(&boot)
            .map_err(|source| OpenError::BootId { path: boot, source })?
            .trim()
            .to_owned();
        let folder = |path: &PathBuf| {
            let path = path.clone();
            move |source| OpenError::Folder { path, source }
        };
        let locks = settings.folder.join("locks");
        let locks = Arc::new(Locks::open(locks.clone()).map_err(folder(&locks))?);
        let core = Arc::new(Core {
            checkpoints: checkpoint::Checkpoints::open(settings.folder.join("claims"))?,
            cdi: cdi::CdiFiles::open(settings.cdi.clone()).map_err(folder(&settings.cdi))?,
            metadata: metadata::MetadataFiles::new(settings.folder.join("dra-device-metadata")),
            driver: driver::Driver::new(settings.roots),
            sharing: settings.sharing.clone(),
            statics: statics::Statics::new(settings.folder.join("statics.json"), boot_id.clone()),
            boot_id,
            after,
        });
        let daemons = Daemons::new(
            settings.sharing,
            core.clone(),
            locks.clone(),
            loaded.clone(),
        );
        Ok(Self {
            core,
            locks,
            daemons,
            source,
            loaded,
            node: settings.node,
            metrics: Metrics::default(),
            statuses: Arc::default(),
            running: TaskTracker::new(),
            ended: watch::Sender::new(0),
        })
    }

    /// The same, counted in these metrics.
    #[must_use]
    pub fn with_metrics(self, metrics: Metrics) -> Self {
        Self { metrics, ..self }
    }

    /// What is to be written into the status of prepared claims; see [`Statuses::run`].
    #[must_use]
    pub fn statuses(&self) -> Arc<Statuses> {
        self.statuses.clone()
    }

    /// Prepares a claim; asked again, it gives the same answer.
    ///
    /// A device that a claim still holds which has ended (its pod was deleted by force) is
    /// waited for: its containers may still run, and the kubelet unprepares it after them.
    ///
    /// # Errors
    /// For this claim only.
    pub async fn prepare(&self, claim: ClaimRef) -> Result<Vec<PreparedDevice>, ClaimError> {
        let (this, watch) = (self.clone(), Stopwatch::start(Operation::Prepare));
        self.detached(claim, move |claim| async move {
            let result = this.prepare_now(&claim, &watch).await;
            this.metrics.operation(&watch, &result);
            match &result {
                Ok(devices) => {
                    let names: Vec<&str> = devices.iter().map(|d| d.device.as_str()).collect();
                    tracing::info!(devices = names.join(","), "Prepared.");
                }
                Err(error) => tracing::error!(%error, "A claim could not be prepared."),
            }
            result
        })
        .await
    }

    async fn prepare_now(
        &self,
        claim: &ClaimRef,
        watch: &Stopwatch,
    ) -> Result<Vec<PreparedDevice>, ClaimError> {
        let wanted = watch.wait(Phase::ReadClaim, self.read(claim)).await?;
        if wanted.devices.is_empty() {
            return Ok(Vec::new());
        }
        for device in &wanted.devices {
            watch.saw(DeviceKind::of_name(&device.device));
        }
        self.attempt_patiently(claim, &wanted, watch).await
    }

    /// A claim as it is now, and what it asks of this driver.
    async fn read(&self, claim: &ClaimRef) -> Result<Wanted, ClaimError> {
        let object = self
            .source
            .get(&claim.namespace, &claim.name)
            .await
            .map_err(|reason| ClaimError::Read {
                claim: claim.clone(),
                reason,
            })?
            .ok_or_else(|| ClaimError::Gone {
                claim: claim.clone(),
            })?;
        let devices = allocation::read(&object, claim, &self.node).map_err(|source| {
            ClaimError::Allocation {
                claim: claim.clone(),
                source,
            }
        })?;
        Ok(Wanted {
            devices,
            pod_claim_name: allocation::pod_claim_name(&object),
            status: status::devices_of(&object),
        })
    }

    /// One attempt to prepare a claim.
    async fn attempt(
        &self,
        claim: &ClaimRef,
        wanted: &Wanted,
        watch: &Stopwatch,
    ) -> Result<Vec<PreparedDevice>, ClaimError> {
        let loaded = self.loaded.borrow().clone();
        let loaded = loaded.ok_or_else(|| ClaimError::Core {
            claim: claim.clone(),
            source: Box::new(CoreError::Hardware {
                device: wanted
                    .devices
                    .iter()
                    .map(|d| d.device.as_str())
                    .collect::<Vec<_>>()
                    .join(", "),
                source: hardware::unavailable(),
            }),
        })?;
        let (hardware, observed) = (loaded.hardware.clone(), wanted.status.clone());
        let devices = loop {
            let locked = self.lock(claim, wanted.gpus());
            let mut held = watch.wait(Phase::Lock, locked).await?;
            let (core, watched) = (self.core.clone(), watch.clone());
            let (named, wanted, with) = (claim.clone(), wanted.clone(), loaded.clone());
            let prepared = blocking(claim, &mut held, move || {
                watched.run(|| {
                    core.prepare(
                        &*with.hardware,
                        &with.driver_version,
                        &named,
                        wanted.pod_claim_name,
                        &wanted.devices,
                    )
                })
            });
            match prepared.await? {
                Prepared::Completed(devices) => break devices,
                Prepared::Waiting(waiting) => {
                    break self.share(claim, held, *waiting, loaded, watch).await?;
                }
                Prepared::GiveBackFirst => self.give_back(claim.clone(), held, None).await?,
            }
        };
        let described = hardware.described();
        self.statuses.put(status::Report::new(
            claim,
            &devices,
            &described,
            Some(observed),
        ));
        Ok(devices)
    }

    /// Unprepares a claim; an unknown one is a success, and the object is not needed.
    ///
    /// # Errors
    /// When the claim's hardware is in use or the disk refuses.
    pub async fn unprepare(&self, claim: ClaimRef) -> Result<(), ClaimError> {
        let (this, watch) = (self.clone(), Stopwatch::start(Operation::Unprepare));
        self.detached(claim, move |claim| async move {
            let locked = this.lock(&claim, BTreeSet::new());
            let result = match watch.wait(Phase::Lock, locked).await {
                Ok(held) => this.give_back(claim, held, Some(watch.clone())).await,
                Err(error) => Err(error),
            };
            this.metrics.operation(&watch, &result);
            match &result {
                Ok(()) => tracing::info!("Unprepared."),
                Err(error) => tracing::error!(%error, "A claim could not be unprepared."),
            }
            result
        })
        .await
    }

    /// Ends when no claim is being worked on.
    pub async fn idle(&self) {
        self.running.close();
        self.running.wait().await;
    }

    /// The steps of unprepare, behind the claim's locks.
    async fn give_back(
        &self,
        claim: ClaimRef,
        mut held: Vec<Held>,
        watch: Option<Stopwatch>,
    ) -> Result<(), ClaimError> {
        self.statuses.forget(&claim.uid);
        let mut wanted = Vec::new();
        let damaged = self.core.checkpoints.read(&claim.uid);
        if matches!(damaged, Err(CheckpointError::Corrupt { .. })) {
            // Nothing left of it may name its devices, but its allocation does.
            drop(held);
            let read = self.read(&claim).await;
            let read = read.unwrap_or_default();
            held = self.lock(&claim, read.gpus()).await?;
            wanted = read.devices;
        }
        let core = self.core.clone();
        let loaded = self.loaded.borrow().clone();
        let named = claim.clone();
        let released = blocking(&claim, &mut held, move || {
            let hardware = loaded.as_ref().map(|l| &*l.hardware);
            let Some(watch) = watch else {
                return core.unprepare(hardware, &named, &wanted);
            };
            let record = core.checkpoints.read(&named.uid).ok().flatten();
            for device in record.iter().flat_map(|record| &record.devices) {
                watch.saw(DeviceKind::of(&device.target));
            }
            watch.run(|| core.unprepare(hardware, &named, &wanted))
        });
        let result = match released.await {
            Ok(daemons) if daemons.is_empty() => Ok(()),
            Ok(daemons) => self.leave(&claim, held, daemons).await,
            Err(error) => Err(error),
        };
        self.ended.send_modify(|ended| *ended += 1);
        result
    }

    /// MIG instances that exist and that no claim of ours made, beside everything else
    /// there is. The records are read before and after the inventory, so that an instance
    /// which appears or goes meanwhile is not taken for an administrator's.
    ///
    /// # Errors
    /// When the checkpoints or the inventory cannot be read.
    pub async fn inventory(
        &self,
        hardware: Arc<dyn Hardware>,
    ) -> Result<(Inventory, BTreeSet<StaticInstance>), LookError> {
        let core = self.core.clone();
        tokio::task::spawn_blocking(move || {
            let mut records = core.checkpoints.all_anew()?.records;
            let inventory = hardware
                .inventory()
                .map_err(|error| LookError::Gpus(error.to_string()))?;
            let after = core.checkpoints.all()?;
            records.extend(after.records);
            let ours = records.iter().flat_map(|r| r.own_instances()).collect();
            let doubtful: Vec<_> = after
                .unreadable
                .iter()
                .map(|unreadable| core.doubtful(&unreadable.uid, &unreadable.error))
                .collect();
            let statics = core.administrators(&inventory, &ours, &doubtful);
            core.statics.observe(&statics);
            Ok((inventory, statics))
        })
        .await
        .unwrap_or(Err(LookError::Died))
    }

    /// The GPUs that claims hold something of, by their records.
    pub async fn gpus(&self) -> BTreeSet<PciAddress> {
        let core = self.core.clone();
        let read = move || match core.checkpoints.all() {
            Ok(all) => {
                let devices = all.records.iter().flat_map(|record| &record.devices);
                devices.map(|device| device.target.pci()).collect()
            }
            Err(error) => {
                tracing::warn!(%error, "The claims' GPUs cannot be told.");
                BTreeSet::new()
            }
        };
        tokio::task::spawn_blocking(read).await.unwrap_or_default()
    }

    /// This boot.
    #[must_use]
    pub fn boot_id(&self) -> &str {
        &self.core.boot_id
    }

    /// Locks a claim, then the GPUs that it asks for and those it already has.
    async fn lock(
        &self,
        claim: &ClaimRef,
        mut gpus: BTreeSet<PciAddress>,
    ) -> Result<Vec<Held>, ClaimError> {
        let failed = |source| ClaimError::Lock {
            claim: claim.clone(),
            source,
        };
        let mut held = vec![self.locks.claim(&claim.uid).await.map_err(failed)?];
        match self.core.checkpoints.read(&claim.uid) {
            Ok(record) => gpus.extend(
                record
                    .iter()
                    .flat_map(|r| r.devices.iter().map(|d| d.target.pci())),
            ),
            Err(CheckpointError::Corrupt { .. }) => {
                gpus.extend(self.core.salvaged_gpus(&claim.uid));
            }
            Err(source) => {
                return Err(ClaimError::Core {
                    claim: claim.clone(),
                    source: Box::new(source.into()),
                });
            }
        }
        for gpu in gpus {
            held.push(self.locks.gpu(gpu).await.map_err(failed)?);
        }
        Ok(held)
    }

    /// Runs work that goes on when its caller gives up.
    async fn detached<T, F, R>(&self, claim: ClaimRef, work: F) -> Result<T, ClaimError>
    where
        T: Send + 'static,
        F: FnOnce(ClaimRef) -> R,
        R: Future<Output = Result<T, ClaimError>> + Send + 'static,
    {
        let died = ClaimError::Died {
            claim: claim.clone(),
        };
        let slow = ClaimError::Slow {
            claim: claim.clone(),
            after: ANSWER,
        };
        // Every line of the work carries it, on whichever thread it is written.
        let span = claim.span();
        let running = self.running.spawn(work(claim).instrument(span));
        match tokio::time::timeout(ANSWER, running).await {
            Ok(result) => result.unwrap_or(Err(died)),
            Err(_) => Err(slow),
        }
    }
}

/// Runs steps of a claim on a blocking thread, which holds its locks meanwhile.
async fn blocking<T: Send + 'static>(
    claim: &ClaimRef,
    held: &mut Vec<Held>,
    work: impl FnOnce() -> Result<T, CoreError> + Send + 'static,
) -> Result<T, ClaimError> {
    let (span, with) = (tracing::Span::current(), std::mem::take(held));
    let result = tokio::task::spawn_blocking(move || (span.in_scope(work), with));
    match result.await {
        Ok((result, with)) => {
            *held = with;
            result.map_err(|source| failed(claim, source))
        }
        Err(_) => Err(ClaimError::Died {
            claim: claim.clone(),
        }),
    }
}

fn failed(claim: &ClaimRef, source: CoreError) -> ClaimError {
    ClaimError::Core {
        claim: claim.clone(),
        source: Box::new(source),
    }
}

/// What a claim asks of this driver.
#[derive(Debug, Clone, Default)]
struct Wanted {
    devices: Vec<Allocated>,
    pod_claim_name: Option<String>,
    /// What its status says of its devices by now.
    status: Vec<AllocatedDeviceStatus>,
}

impl Wanted {
    fn gpus(&self) -> BTreeSet<PciAddress> {
        let devices = self.devices.iter();
        devices.filter_map(|d| targets::pci_of(&d.device)).collect()
    }
}

impl Record {
    /// The MIG instances that this claim made, or may have made before a crash.
    pub(crate) fn own_instances(&self) -> impl Iterator<Item = StaticInstance> {
        self.devices
            .iter()
            .filter_map(|device| match device.target {
                Target::Partition {
                    pci,
                    profile_id,
                    placement,
                    adopted: false,
                    ..
                } => Some(StaticInstance {
                    pci,
                    profile_id,
                    placement,
                }),
                Target::Partition { .. } | Target::Whole { .. } | Target::Share { .. } => None,
            })
    }
}
