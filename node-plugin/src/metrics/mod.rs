//! The plugin's metrics.
//!
//! In: what happened. Out: the OpenMetrics text. Never: a label whose values grow with
//! the number of claims.

mod calls;
mod labels;
mod stopwatch;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gpu::PciAddress;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

pub use calls::Calls;
pub use labels::{Call, Cause, DaemonEvent, DeviceKind, Operation, Outcome, Phase};
use labels::{
    CallLabels, DaemonLabel, ErrorLabels, GpuLabel, KindLabel, OperationLabels, OutcomeLabel,
    PhaseLabels,
};
pub use stopwatch::{Stopwatch, phase};

use crate::claims::ClaimError;
use crate::health::HealthMetrics;
use crate::slices::Holding;

/// What the disk holds of this node's claims.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// Checkpoints.
    pub records: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Checkpoints that cannot be used.
    pub broken: usize,
    /// Prepared devices by kind.
    pub devices: BTreeMap<DeviceKind, usize>,
    /// What claims hold of each GPU.
    pub held: BTreeMap<PciAddress, Vec<Holding>>,
}

/// All metrics. Cloning shares them.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    operations: Family<OperationLabels, Histogram>,
    phases: Family<PhaseLabels, Histogram>,
    errors: Family<ErrorLabels, Counter>,
    prepared: Family<KindLabel, Gauge>,
    checkpoints: Gauge,
    checkpoint_bytes: Gauge,
    checkpoints_broken: Gauge,
    devices: Gauge,
    slice_writes: Family<OutcomeLabel, Counter>,
    publishing: Family<OutcomeLabel, Histogram>,
    gpus_unreadable: Gauge,
    placeable: Family<GpuLabel, Gauge>,
    calls: Family<CallLabels, Histogram>,
    health: HealthMetrics,
    daemons: Family<DaemonLabel, Counter>,
}

/// 1 ms to 65 s: a whole device takes milliseconds, the kubelet waits 45 s.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 17))
}

/// 0.1 ms to 6.5 s: parts of an operation are read where they are short, too.
fn short_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.0001, 2.0, 17))
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("ai_inference_node_plugin");
        let metrics = Self {
            registry: Arc::default(),
            operations: Family::new_with_constructor(seconds),
            phases: Family::new_with_constructor(short_seconds),
            errors: Family::default(),
            prepared: Family::default(),
            checkpoints: Gauge::default(),
            checkpoint_bytes: Gauge::default(),
            checkpoints_broken: Gauge::default(),
            devices: Gauge::default(),
            slice_writes: Family::default(),
            publishing: Family::new_with_constructor(seconds),
            gpus_unreadable: Gauge::default(),
            placeable: Family::default(),
            calls: Family::new_with_constructor(short_seconds),
            health: HealthMetrics::default(),
            daemons: Family::default(),
        };
        metrics.register(&mut registry);
        metrics.begin_at_zero();
        Self {
            registry: Arc::new(registry),
            ..metrics
        }
    }
}

impl Metrics {
    fn register(&self, registry: &mut Registry) {
        self.health.register(registry);
        registry.register(
            "build",
            "The running release",
            Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]),
        );
        registry.register_with_unit(
            "claim_operation_duration",
            "How long the prepare or unprepare of one claim took",
            Unit::Seconds,
            self.operations.clone(),
        );
        registry.register_with_unit(
            "claim_phase_duration",
            "How long the parts of the prepare or unprepare of one claim took",
            Unit::Seconds,
            self.phases.clone(),
        );
        registry.register(
            "claim_errors",
            "Prepares and unprepares that failed, by cause",
            self.errors.clone(),
        );
        registry.register(
            "prepared_devices",
            "Devices that claims hold on this node",
            self.prepared.clone(),
        );
        registry.register(
            "checkpoints",
            "Claims that are recorded on the disk",
            self.checkpoints.clone(),
        );
        registry.register_with_unit(
            "checkpoints_size",
            "The size of all checkpoints on the disk",
            Unit::Bytes,
            self.checkpoint_bytes.clone(),
        );
        registry.register(
            "checkpoints_broken",
            "Checkpoints that cannot be used: corrupt, or written by a later release",
            self.checkpoints_broken.clone(),
        );
        registry.register(
            "published_devices",
            "Devices in the node's pool",
            self.devices.clone(),
        );
        registry.register(
            "slice_writes",
            "Writes of ResourceSlices to the API server",
            self.slice_writes.clone(),
        );
        registry.register_with_unit(
            "publish_duration",
            "How long it took to make the node's ResourceSlices what they should be",
            Unit::Seconds,
            self.publishing.clone(),
        );
        registry.register(
            "unreadable_gpus",
            "GPUs that NVML lists but cannot describe",
            self.gpus_unreadable.clone(),
        );
        registry.register_with_unit(
            "largest_placeable_device",
            "Memory of the largest device that this GPU has room for: the whole GPU, a \
             partition, or 0 when nothing fits",
            Unit::Bytes,
            self.placeable.clone(),
        );
        registry.register(
            "mps_daemon_events",
            "What happened to the MPS daemons of shared devices",
            self.daemons.clone(),
        );
        registry.register_with_unit(
            "nvml_call_duration",
            "How long calls of NVML took",
            Unit::Seconds,
            self.calls.clone(),
        );
    }

    /// Counters start at zero, so that the first increment is seen as one.
    fn begin_at_zero(&self) {
        for operation in Operation::ALL.iter().copied() {
            for cause in Cause::ALL.iter().copied() {
                let labels = ErrorLabels { operation, cause };
                drop(self.errors.get_or_create(&labels));
            }
        }
        for kind in DeviceKind::OF_DEVICES {
            drop(self.prepared.get_or_create(&KindLabel { kind }));
        }
        for outcome in Outcome::ALL.iter().copied() {
            drop(self.slice_writes.get_or_create(&OutcomeLabel { outcome }));
        }
        for event in DaemonEvent::ALL.iter().copied() {
            drop(self.daemons.get_or_create(&DaemonLabel { event }));
        }
    }

    /// Something happened to the MPS daemon of a shared device.
    pub fn daemon(&self, event: DaemonEvent) {
        self.daemons.get_or_create(&DaemonLabel { event }).inc();
    }

    /// One claim was handled.
    pub fn operation<T>(&self, watch: &Stopwatch, result: &Result<T, ClaimError>) {
        let (operation, kind) = (watch.operation, watch.kind());
        let labels = OperationLabels {
            operation,
            kind,
            outcome: Outcome::of(result),
        };
        self.operations
            .get_or_create(&labels)
            .observe(watch.total().as_secs_f64());
        for (phase, took) in watch.phases() {
            let labels = PhaseLabels {
                operation,
                kind,
                phase,
            };
            self.phases
                .get_or_create(&labels)
                .observe(took.as_secs_f64());
        }
        if let Err(error) = result {
            let cause = Cause::of(error);
            self.errors
                .get_or_create(&ErrorLabels { operation, cause })
                .inc();
        }
    }

    /// This is on the disk.
    pub fn usage(&self, usage: &Usage) {
        self.checkpoints.set(whole(usage.records));
        self.checkpoint_bytes
            .set(i64::try_from(usage.bytes).unwrap_or(i64::MAX));
        self.checkpoints_broken.set(whole(usage.broken));
        for kind in DeviceKind::OF_DEVICES {
            let count = usage.devices.get(&kind).copied().unwrap_or_default();
            self.prepared
                .get_or_create(&KindLabel { kind })
                .set(whole(count));
        }
    }

    /// The pool has this many devices.
    pub fn published(&self, devices: usize) {
        self.devices.set(whole(devices));
    }

    /// A slice was written, or could not be.
    pub fn slice_write(&self, outcome: Outcome) {
        self.slice_writes
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
    }

    /// The slices were made what they should be, or could not be.
    pub fn publish(&self, outcome: Outcome, took: Duration) {
        self.publishing
            .get_or_create(&OutcomeLabel { outcome })
            .observe(took.as_secs_f64());
    }

    /// This many GPUs cannot be read.
    pub fn unreadable(&self, gpus: usize) {
        self.gpus_unreadable.set(whole(gpus));
    }

    /// The memory of the largest partition that each GPU has room for, by PCI address.
    /// A GPU that is not among them is forgotten.
    pub fn placeable(&self, bytes: &BTreeMap<String, u64>) {
        self.placeable.clear();
        for (gpu, bytes) in bytes {
            let label = GpuLabel { gpu: gpu.clone() };
            self.placeable
                .get_or_create(&label)
                .set(i64::try_from(*bytes).unwrap_or(i64::MAX));
        }
    }

    /// NVML answered, or did not.
    pub fn call(&self, call: Call, outcome: Outcome, took: Duration) {
        self.calls
            .get_or_create(&CallLabels { call, outcome })
            .observe(took.as_secs_f64());
    }

    /// The metrics of health.
    pub fn health(&self) -> &HealthMetrics {
        &self.health
    }

    /// The metrics as OpenMetrics text.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }
}

fn whole(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
