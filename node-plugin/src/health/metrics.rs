//! The metrics of health.
//!
//! In: faults and what was published. Out: three metrics. Never: a label that grows with
//! anything but NVIDIA's list of XIDs.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use super::{Fault, Kind, Severity};

type Labels = [(&'static str, String); 2];

/// The metrics of health. Cloning shares them.
#[derive(Debug, Clone)]
pub struct HealthMetrics {
    faults: Family<Labels, Gauge>,
    xids: Family<[(&'static str, String); 1], Counter>,
    publication: Histogram,
    /// When the first change was seen that is not published yet.
    pending: Arc<Mutex<Option<Instant>>>,
}

impl Default for HealthMetrics {
    fn default() -> Self {
        Self {
            faults: Family::default(),
            xids: Family::default(),
            // 1 ms to 16 s.
            publication: Histogram::new(exponential_buckets(0.001, 2.0, 15)),
            pending: Arc::default(),
        }
    }
}

impl HealthMetrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "health_faults",
            "Faults of GPUs that there are now",
            self.faults.clone(),
        );
        registry.register(
            "xids",
            "XIDs that the driver has reported",
            self.xids.clone(),
        );
        registry.register_with_unit(
            "health_publication_duration",
            "Time from a change of health until the slices tell it",
            Unit::Seconds,
            self.publication.clone(),
        );
    }

    /// The driver reported an XID.
    pub fn xid(&self, number: u64) {
        self.xids
            .get_or_create(&[("xid", number.to_string())])
            .inc();
    }

    /// These are the faults now.
    pub fn faults(&self, faults: &[Fault]) {
        for kind in Kind::ALL {
            for severity in Severity::ALL {
                let count = faults
                    .iter()
                    .filter(|f| f.kind == kind && f.severity == severity)
                    .count();
                let labels = [
                    ("fault", kind.name().to_owned()),
                    ("severity", severity.name().to_owned()),
                ];
                let count = i64::try_from(count).unwrap_or(i64::MAX);
                self.faults.get_or_create(&labels).set(count);
            }
        }
    }

    /// A change was seen that the slices have to tell.
    pub fn changed(&self, seen: Instant) {
        self.pending
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(seen);
    }

    /// The slices tell everything.
    pub fn published(&self) {
        let pending = self
            .pending
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(seen) = pending {
            self.publication.observe(seen.elapsed().as_secs_f64());
        }
    }
}
