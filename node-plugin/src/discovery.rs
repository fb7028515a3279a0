//! Finding the GPUs, and finding them again.
//!
//! In: an NVML to load. Out: the loaded GPUs for claims and the wanted state for the
//! publisher, over channels. Never: an exit: a node without a driver may get one, and
//! until then its pool is empty and pods that end can still be cleaned up.
//!
//! What was found is kept on the disk: an NVML that fails or hangs after a restart does
//! not empty the pool, which stays as it was, under taints.

use std::collections::BTreeSet;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use gpu::{Gpus, Inventory, Library, PciAddress, Roots};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::claims::hardware::{Hardware, NvmlGpus};
use crate::claims::{Claims, Loaded, LookError};
use crate::events::NodeEvents;
use crate::health::{Health, Memory};
use crate::metrics::{Call, Calls, Metrics};
use crate::readiness::{Part, Readiness};
use crate::slices::{MigPolicy, StaticInstance, Wanted, not_offered};

/// The first and the longest wait before NVML is loaded again.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// How long a look at the GPUs may take until it counts as hung.
const LOOK: Duration = Duration::from_secs(10);
/// How long the slices wait for the health of what they show: a fault from before is then
/// in the first slices, and nobody is given a broken GPU meanwhile.
const CHECK: Duration = Duration::from_secs(1);

/// What discovery works with.
pub struct Discovery {
    /// Which NVML.
    pub library: Library,
    /// The roots of `/proc` and `/sys`.
    pub roots: Roots,
    /// Whether claims may change how the GPUs are partitioned.
    pub mig: MigPolicy,
    /// This node's claims.
    pub claims: Claims,
    /// Where the loaded GPUs go.
    pub loaded: watch::Sender<Option<Loaded>>,
    /// Where the wanted state goes.
    pub wanted: watch::Sender<Option<Arc<Wanted>>>,
    /// For people.
    pub events: NodeEvents,
    /// Counted here: unreadable GPUs.
    pub metrics: Metrics,
    /// Known here: the calls of NVML.
    pub calls: Calls,
    /// Whether there are GPUs to serve.
    pub readiness: Readiness,
    /// How long between two looks.
    pub interval: Duration,
    /// What is wrong with the GPUs.
    pub health: Health,
    /// What was found before.
    pub memory: Memory,
}

impl Discovery {
    /// Looks until it is stopped.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut last = self.recall().await;
        self.readiness
            .not_ready(Part::Gpus, "the GPUs have not been read yet");
        let mut backoff = RETRY.0;
        let mut mended = false;
        let mut said = String::new();
        loop {
            let opened = tokio::select! {
                () = stop.cancelled() => return,
                opened = self.open_in_time(last.as_ref()) => opened,
            };
            match opened {
                Ok(loaded) => {
                    backoff = RETRY.0;
                    said.clear();
                    self.loaded.send_replace(Some(loaded.clone()));
                    if !mended {
                        mended = true;
                        for report in self.claims.reconcile(Some(loaded.clone())).await {
                            self.events
                                .warn(report.reason, "Reconcile", &report.text)
                                .await;
                        }
                    }
                    tokio::select! {
                        () = stop.cancelled() => return,
                        () = self.follow(loaded, &mut last) => {}
                    }
                }
                Err(reason) => self.without_gpus(&reason, last.as_ref(), &mut said).await,
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(backoff) => backoff = (backoff * 2).min(RETRY.1),
            }
        }
    }

    /// Loads NVML and asks it for its version.
    async fn open(&self) -> Result<Loaded, OpenFailure> {
        let (library, roots, mig) = (self.library.clone(), self.roots.clone(), self.mig);
        let calls = self.calls.clone();
        tokio::task::spawn_blocking(move || {
            let has_cards = has_nvidia_cards(&roots.sys);
            let opened = calls.make(Call::Open, || Gpus::open(&library));
            let gpus = opened.map_err(|error| OpenFailure {
                no_gpus: matches!(error, gpu::Error::NoDriver { .. }) && !has_cards,
                reason: error.to_string(),
            })?;
            let hardware = NvmlGpus::new(gpus, roots).with_calls(calls).under(mig);
            let inventory = hardware.inventory().map_err(|error| OpenFailure {
                no_gpus: false,
                reason: error.to_string(),
            })?;
            Ok(Loaded {
                hardware: Arc::new(hardware),
                driver_version: inventory.driver_version,
            })
        })
        .await
        .unwrap_or_else(|error| {
            Err(OpenFailure {
                no_gpus: false,
                reason: error.to_string(),
            })
        })
    }

    /// The same, and says so when it hangs. NVML is never loaded twice at once.
    async fn open_in_time(&self, last: Option<&Wanted>) -> Result<Loaded, OpenFailure> {
        let mut opening = pin!(self.open());
        match tokio::time::timeout(LOOK, &mut opening).await {
            Ok(opened) => opened,
            Err(_) => {
                let failure = OpenFailure {
                    no_gpus: false,
                    reason: hung(),
                };
                self.without_gpus(&failure, last, &mut String::new()).await;
                opening.await
            }
        }
    }

    /// What was there before the start, as far as it still can be.
    async fn recall(&mut self) -> Option<Wanted> {
        let remembered = match self.memory.recall() {
            Ok(remembered) => remembered?,
            Err(error) => {
                tracing::error!(%error, "The devices from before the start cannot be read.");
                return None;
            }
        };
        let held = self.claims.gpus().await;
        let bus = self.roots.sys.join("bus/pci/devices");
        let wanted =
            remembered.still_there(|pci| held.contains(&pci) || bus.join(pci.to_string()).exists());
        (!wanted.inventory.gpus.is_empty()).then_some(wanted)
    }

    /// Publishes what is there and looks again, until NVML stops answering.
    async fn follow(&mut self, loaded: Loaded, last: &mut Option<Wanted>) {
        let mut ticks = tokio::time::interval(self.interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut known: Option<BTreeSet<StaticInstance>> = None;
        let mut reported = Vec::new();
        let mut withheld = Vec::new();
        if let Some(last) = last {
            self.health.watch(loaded.hardware.clone(), addresses(last));
            if last.inventory.driver_version != loaded.driver_version {
                self.health.driver_replaced();
            }
        }
        loop {
            ticks.tick().await;
            let mut look = self.look(&loaded, last.as_ref()).await;
            if let (Ok((_, statics)), Some(before)) = (&look, &known)
                && statics != before
            {
                // What is taken for an administrator's instance withdraws devices;
                // that takes two looks.
                look = self.look(&loaded, last.as_ref()).await;
            }
            match look {
                Ok((inventory, statics)) => {
                    if known.as_ref() != Some(&statics) {
                        for instance in &statics {
                            tracing::info!(gpu = %instance.pci, start = instance.placement.start,
                                size = instance.placement.size,
                                "A MIG instance that no claim created is published as it is.");
                        }
                    }
                    known = Some(statics.clone());
                    self.report(&inventory, &mut reported).await;
                    let sharing = self.claims.sharing(&inventory);
                    let held = self.claims.held().await.unwrap_or_else(|error| {
                        tracing::error!(%error, "What claims hold cannot be read.");
                        last.as_ref()
                            .map(|last| last.held.clone())
                            .unwrap_or_default()
                    });
                    let wanted = Wanted::new(inventory, statics)
                        .under(self.mig)
                        .shared(sharing)
                        .holding(held);
                    self.report_withheld(&wanted, &mut withheld).await;
                    let wanted = wanted.keeping(last.as_ref());
                    self.health
                        .watch(loaded.hardware.clone(), addresses(&wanted));
                    self.health.check(CHECK).await;
                    self.publish(&wanted);
                    self.remember(&wanted).await;
                    *last = Some(wanted);
                }
                Err(error) => {
                    let reason = error.to_string();
                    tracing::error!("{reason}.");
                    self.readiness.not_ready(Part::Gpus, &reason);
                    let word = match error {
                        LookError::Checkpoints(_) => "CheckpointUnreadable",
                        LookError::Gpus(_) | LookError::Died => "GPUsUnreadable",
                    };
                    self.events.warn(word, "Discover", &reason).await;
                    return;
                }
            }
        }
    }

    /// Says what is there and is not offered, once for each change.
    async fn report_withheld(&self, wanted: &Wanted, reported: &mut Vec<String>) {
        let now = not_offered(wanted);
        for reason in now.iter().filter(|reason| !reported.contains(reason)) {
            tracing::warn!("{reason}.");
            self.events.warn("MIGNotOffered", "Discover", reason).await;
        }
        *reported = now;
    }

    /// One look at the GPUs. When it hangs, what was there before is published where
    /// nothing is yet, and the look is waited for: there is never a second one at once.
    async fn look(
        &self,
        loaded: &Loaded,
        last: Option<&Wanted>,
    ) -> Result<(Inventory, BTreeSet<StaticInstance>), LookError> {
        let mut look = pin!(self.claims.inventory(loaded.hardware.clone()));
        match tokio::time::timeout(LOOK, &mut look).await {
            Ok(found) => found,
            Err(_) => {
                tracing::error!("A look at the GPUs hangs; what was found before stays published.");
                if self.wanted.borrow().is_none() {
                    self.readiness.not_ready(Part::Gpus, &hung());
                    self.fall_back(last);
                }
                look.await
            }
        }
    }

    /// Keeps what was found over a restart.
    async fn remember(&mut self, wanted: &Wanted) {
        let Some(write) = self.memory.changed(wanted) else {
            return;
        };
        let written = tokio::task::spawn_blocking(move || write().map_err(|e| e.to_string()));
        if let Err(error) = written.await.unwrap_or_else(|error| Err(error.to_string())) {
            tracing::error!(error, "The devices cannot be kept over a restart.");
        }
    }

    /// Says which GPUs cannot be read, once for each change.
    async fn report(&self, inventory: &Inventory, reported: &mut Vec<String>) {
        let reasons: Vec<String> = inventory
            .unreadable
            .iter()
            .map(|g| format!("GPU {}: {}", g.index, g.reason))
            .collect();
        self.metrics.unreadable(reasons.len());
        // The others are served. A plugin that is not ready would stop the DaemonSet's
        // update on every node, for the sake of one broken card.
        self.readiness.ready(Part::Gpus);
        if reasons != *reported {
            for reason in &reasons {
                tracing::error!(reason, "A GPU cannot be read; no new claim gets it.");
                self.events.warn("GPUUnreadable", "Discover", reason).await;
            }
            if reported.is_empty() || reasons.is_empty() {
                tracing::info!(
                    gpus = inventory.gpus.len(),
                    driver = inventory.driver_version,
                    "The GPUs were read."
                );
            }
            *reported = reasons;
        }
    }

    /// What was there before, under taints, or an empty pool; and why, said once for each
    /// reason.
    async fn without_gpus(&self, failure: &OpenFailure, last: Option<&Wanted>, said: &mut String) {
        if let Some(last) = last {
            self.health.unavailable(addresses(last), &failure.reason);
        }
        self.fall_back(last);
        let repeated = *said == failure.reason;
        said.clone_from(&failure.reason);
        if failure.no_gpus {
            self.readiness.ready(Part::Gpus);
            if !repeated {
                tracing::info!(
                    reason = failure.reason,
                    "This node has no NVIDIA GPU; its pool is empty."
                );
            }
            return;
        }
        self.readiness.not_ready(Part::Gpus, &failure.reason);
        if !repeated {
            tracing::error!(
                reason = failure.reason,
                "NVML cannot be used; it is tried again."
            );
            self.events
                .warn("NVMLUnavailable", "Discover", &failure.reason)
                .await;
        }
    }

    /// What was there before, all of it unreadable, or an empty pool.
    fn fall_back(&self, last: Option<&Wanted>) {
        if let Some(last) = last {
            let mut wanted = last.clone();
            wanted.unreadable = addresses(last).into_iter().collect();
            self.publish(&wanted);
        } else if self.wanted.borrow().is_none() {
            let inventory = Inventory {
                driver_version: String::new(),
                cuda_version: (0, 0),
                gpus: Vec::new(),
                unreadable: Vec::new(),
            };
            self.publish(&Wanted::new(inventory, BTreeSet::new()));
        }
    }

    fn publish(&self, wanted: &Wanted) {
        self.wanted.send_if_modified(|current| {
            let mut wanted = wanted.clone();
            // Asked for here and not before: the monitor changes them in the same place.
            wanted.faults = self.health.faults().to_vec();
            let changed = current.as_deref() != Some(&wanted);
            if changed {
                *current = Some(Arc::new(wanted));
            }
            changed
        });
    }
}

fn addresses(wanted: &Wanted) -> Vec<PciAddress> {
    wanted.inventory.gpus.iter().map(|gpu| gpu.pci).collect()
}

fn hung() -> String {
    format!("NVML has not answered for {} s", LOOK.as_secs())
}

struct OpenFailure {
    /// There is no driver, and no card that would need one.
    no_gpus: bool,
    reason: String,
}

/// Whether the PCI bus has an NVIDIA display or 3D controller.
fn has_nvidia_cards(sys: &Path) -> bool {
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let Ok(devices) = std::fs::read_dir(sys.join("bus/pci/devices")) else {
        return false;
    };
    devices.flatten().any(|device| {
        let path = device.path();
        read(&path.join("vendor")).trim() == "0x10de"
            && read(&path.join("class")).trim().starts_with("0x03")
    })
}
