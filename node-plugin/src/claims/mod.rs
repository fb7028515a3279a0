//! From a claim to devices in a container, and back.
//!
//! In: a claim's identity from the kubelet and its object from the API server. Out:
//! prepared devices. Never: lose a claim that was prepared, or give the same hardware
//! to two. Only this module touches the disk and the hardware.
//!
//! Order of locks: the claim's, then its GPUs' in ascending order; there is none for
//! the node, so a slow partition delays nobody else. The blocking part runs in a task
//! of its own: a kubelet that gives up after 45 s and asks again finds the first
//! attempt holding the locks, never half done and abandoned.

pub mod allocation;
pub mod cdi;
pub mod checkpoint;
pub mod config;
pub mod core;
pub mod driver;
pub mod facts;
pub mod hardware;
mod injected;
mod known;
mod locks;
pub mod metadata;
mod reconcile;
pub mod record;
mod targets;
mod usage;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use futures::future::BoxFuture;
use gpu::{Inventory, PciAddress};
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use self::allocation::AllocationError;
use self::checkpoint::{CheckpointError, ClaimRef, PreparedDevice, Record, Target};
use self::core::{Core, CoreError, StepHook};
use self::hardware::Hardware;
use self::locks::{Held, Locks};
use crate::metrics::{DeviceKind, Metrics, Operation, Phase, Stopwatch};
use crate::slices::StaticInstance;

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
}

/// A claim that could not be prepared or unprepared.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// The API server did not answer.
    #[error("claim {claim}: cannot read it from the API server: {reason}")]
    Read {
        /// The claim.
        claim: ClaimRef,
        /// What failed.
        reason: String,
    },
    /// There is no such claim.
    #[error("claim {claim}: it does not exist; the pod that refers to it has to be recreated")]
    Gone {
        /// The claim.
        claim: ClaimRef,
    },
    /// The claim cannot be prepared as it stands.
    #[error("claim {claim}: {source}")]
    Allocation {
        /// The claim.
        claim: ClaimRef,
        /// Why.
        source: AllocationError,
    },
    /// A step failed.
    #[error("claim {claim}: {source}")]
    Core {
        /// The claim.
        claim: ClaimRef,
        /// Why.
        source: Box<CoreError>,
    },
    /// A lock file cannot be used.
    #[error("claim {claim}: cannot lock: {source}; check the plugin's folder")]
    Lock {
        /// The claim.
        claim: ClaimRef,
        /// Why.
        source: std::io::Error,
    },
    /// The work died.
    #[error("claim {claim}: the attempt ended unexpectedly; it is retried")]
    Died {
        /// The claim.
        claim: ClaimRef,
    },
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
}

/// The state of this node's claims cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The boot id cannot be read.
    #[error("cannot read the boot id from {path}: {source}")]
    BootId {
        /// Where it was looked for.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A folder cannot be made.
    #[error("cannot create {path}: {source}; it has to be a writable folder of the host")]
    Folder {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The checkpoints cannot be opened.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// This node's claims. Cloning is cheap and shares everything.
#[derive(Clone)]
pub struct Claims {
    core: Arc<Core>,
    locks: Arc<Locks>,
    source: Arc<dyn ClaimSource>,
    loaded: watch::Receiver<Option<Loaded>>,
    node: String,
    metrics: Metrics,
    /// Work that goes on, whether somebody waits for it or not.
    running: TaskTracker,
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
        Ok(Self {
            locks: Arc::new(Locks::open(locks.clone()).map_err(folder(&locks))?),
            core: Arc::new(Core {
                checkpoints: checkpoint::Checkpoints::open(settings.folder.join("claims"))?,
                cdi: cdi::CdiFiles::open(settings.cdi.clone()).map_err(folder(&settings.cdi))?,
                metadata: metadata::MetadataFiles::new(settings.folder.join("dra-device-metadata")),
                driver: driver::Driver::new(settings.roots),
                boot_id,
                after,
            }),
            source,
            loaded,
            node: settings.node,
            metrics: Metrics::default(),
            running: TaskTracker::new(),
        })
    }

    /// The same, counted in these metrics.
    #[must_use]
    pub fn with_metrics(self, metrics: Metrics) -> Self {
        Self { metrics, ..self }
    }

    /// Prepares a claim; asked again, it gives the same answer.
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
        let object = watch
            .wait(
                Phase::ReadClaim,
                self.source.get(&claim.namespace, &claim.name),
            )
            .await
            .map_err(|reason| ClaimError::Read {
                claim: claim.clone(),
                reason,
            })?
            .ok_or_else(|| ClaimError::Gone {
                claim: claim.clone(),
            })?;
        let wanted = allocation::read(&object, claim, &self.node).map_err(|source| {
            ClaimError::Allocation {
                claim: claim.clone(),
                source,
            }
        })?;
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let pod_claim_name = allocation::pod_claim_name(&object);
        for device in &wanted {
            watch.saw(DeviceKind::of_name(&device.device));
        }
        let loaded = self
            .loaded
            .borrow()
            .clone()
            .ok_or_else(|| ClaimError::Core {
                claim: claim.clone(),
                source: Box::new(CoreError::Hardware {
                    device: wanted
                        .iter()
                        .map(|d| d.device.as_str())
                        .collect::<Vec<_>>()
                        .join(", "),
                    source: core::unavailable(),
                }),
            })?;
        let gpus = wanted
            .iter()
            .filter_map(|d| targets::pci_of(&d.device))
            .collect();
        let held = watch.wait(Phase::Lock, self.lock(claim, gpus)).await?;
        let (core, named, watch) = (self.core.clone(), claim.clone(), watch.clone());
        blocking(claim.clone(), held, move || {
            watch.run(|| {
                core.prepare(
                    &*loaded.hardware,
                    &loaded.driver_version,
                    &named,
                    pod_claim_name,
                    &wanted,
                )
            })
        })
        .await
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

    /// The steps of unprepare, behind the claim's locks.
    async fn give_back(
        &self,
        claim: ClaimRef,
        held: Vec<Held>,
        watch: Option<Stopwatch>,
    ) -> Result<(), ClaimError> {
        let core = self.core.clone();
        let loaded = self.loaded.borrow().clone();
        let uid = claim.uid.clone();
        blocking(claim, held, move || {
            let hardware = loaded.as_ref().map(|l| &*l.hardware);
            let Some(watch) = watch else {
                return core.unprepare(hardware, &uid);
            };
            let record = core.checkpoints.read(&uid).ok().flatten();
            for device in record.iter().flat_map(|record| &record.devices) {
                watch.saw(DeviceKind::of(&device.target));
            }
            watch.run(|| core.unprepare(hardware, &uid))
        })
        .await
    }

    /// Ends when no claim is being worked on.
    pub async fn idle(&self) {
        self.running.close();
        self.running.wait().await;
    }

    /// MIG instances that exist and that no claim of ours made. `read` reads the
    /// inventory; the records are read before and after it, so that an instance which
    /// appears or goes meanwhile is not taken for an administrator's.
    ///
    /// # Errors
    /// When the checkpoints or the inventory cannot be read.
    pub async fn inventory(
        &self,
        hardware: Arc<dyn Hardware>,
    ) -> Result<(Inventory, BTreeSet<StaticInstance>), String> {
        let core = self.core.clone();
        tokio::task::spawn_blocking(move || {
            let mut ours = own_instances(&core)?;
            let inventory = hardware.inventory().map_err(|error| error.to_string())?;
            ours.extend(own_instances(&core)?);
            let statics = inventory
                .gpus
                .iter()
                .flat_map(|gpu| gpu.instances.iter().map(|instance| (gpu.pci, instance)))
                .map(|(pci, instance)| StaticInstance {
                    pci,
                    profile_id: instance.profile_id,
                    placement: instance.placement,
                })
                .filter(|instance| !ours.contains(instance))
                .collect();
            Ok((inventory, statics))
        })
        .await
        .map_err(|error| error.to_string())?
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
        let record = self
            .core
            .checkpoints
            .read(&claim.uid)
            .map_err(|source| ClaimError::Core {
                claim: claim.clone(),
                source: Box::new(source.into()),
            })?;
        gpus.extend(
            record
                .iter()
                .flat_map(|r| r.devices.iter().map(|d| d.target.pci())),
        );
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
        // Every line of the work carries it, on whichever thread it is written.
        let span = claim.span();
        self.running
            .spawn(work(claim).instrument(span))
            .await
            .unwrap_or(Err(died))
    }
}

/// Runs the steps of a claim on a blocking thread, with its locks.
async fn blocking<T: Send + 'static>(
    claim: ClaimRef,
    held: Vec<Held>,
    work: impl FnOnce() -> Result<T, CoreError> + Send + 'static,
) -> Result<T, ClaimError> {
    let span = tracing::Span::current();
    let result = tokio::task::spawn_blocking(move || {
        let result = span.in_scope(work);
        drop(held);
        result
    });
    match result.await {
        Ok(result) => result.map_err(|source| ClaimError::Core {
            claim,
            source: Box::new(source),
        }),
        Err(_) => Err(ClaimError::Died { claim }),
    }
}

fn own_instances(core: &Core) -> Result<BTreeSet<StaticInstance>, String> {
    let (records, _) = core.checkpoints.all().map_err(|error| error.to_string())?;
    Ok(records
        .iter()
        .flat_map(|record| record.own_instances())
        .collect())
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
                Target::Partition { .. } | Target::Whole { .. } => None,
            })
    }
}
