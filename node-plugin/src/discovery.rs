//! Finding the GPUs, and finding them again.
//!
//! In: an NVML to load. Out: the loaded GPUs for claims and the wanted state for the
//! publisher, over channels. Never: an exit: a node without a driver may get one, and
//! until then its pool is empty and pods that end can still be cleaned up.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use gpu::{Gpus, Inventory, Library, Roots};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::claims::hardware::{Hardware, NvmlGpus};
use crate::claims::{Claims, Loaded, LookError};
use crate::events::NodeEvents;
use crate::metrics::{Call, Calls, Metrics};
use crate::readiness::{Part, Readiness};
use crate::slices::{MigPolicy, StaticInstance, Wanted, not_offered};

/// The first and the longest wait before NVML is loaded again.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

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
}

impl Discovery {
    /// Looks until it is stopped.
    pub async fn run(self, stop: CancellationToken) {
        self.readiness
            .not_ready(Part::Gpus, "the GPUs have not been read yet");
        let mut backoff = RETRY.0;
        let mut mended = false;
        let mut said = String::new();
        loop {
            match self.open().await {
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
                        () = self.follow(loaded) => {}
                    }
                }
                Err(reason) => self.without_gpus(&reason, &mut said).await,
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

    /// Publishes what is there and looks again, until NVML stops answering.
    async fn follow(&self, loaded: Loaded) {
        let mut ticks = tokio::time::interval(self.interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut known: Option<BTreeSet<StaticInstance>> = None;
        let mut reported = Vec::new();
        let mut withheld = Vec::new();
        loop {
            ticks.tick().await;
            let mut look = self.claims.inventory(loaded.hardware.clone()).await;
            if let (Ok((_, statics)), Some(before)) = (&look, &known)
                && statics != before
            {
                // What is taken for an administrator's instance withdraws devices;
                // that takes two looks.
                look = self.claims.inventory(loaded.hardware.clone()).await;
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
                    let before = self.wanted.borrow().clone();
                    let wanted = Wanted::new(inventory, statics).under(self.mig);
                    self.report_withheld(&wanted, &mut withheld).await;
                    self.publish(wanted.keeping(before.as_deref()));
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

    /// An empty pool, and why, said once for each reason.
    async fn without_gpus(&self, failure: &OpenFailure, said: &mut String) {
        if self.wanted.borrow().is_none() {
            let inventory = Inventory {
                driver_version: String::new(),
                cuda_version: (0, 0),
                gpus: Vec::new(),
                unreadable: Vec::new(),
            };
            self.publish(Wanted::new(inventory, BTreeSet::new()));
        }
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

    fn publish(&self, wanted: Wanted) {
        self.wanted.send_if_modified(|current| {
            let changed = current.as_deref() != Some(&wanted);
            if changed {
                *current = Some(Arc::new(wanted));
            }
            changed
        });
    }
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
