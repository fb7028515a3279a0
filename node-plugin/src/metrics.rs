//! The plugin's metrics.
//!
//! In: what happened. Out: the OpenMetrics text. Never: a label whose values grow with
//! the number of claims.

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// What the kubelet asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Operation {
    /// Prepare of one claim.
    Prepare,
    /// Unprepare of one claim.
    Unprepare,
}

/// How something ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Outcome {
    /// As asked.
    Success,
    /// With an error.
    Error,
}

impl Outcome {
    /// The outcome of a result.
    pub fn of<T, E>(result: &Result<T, E>) -> Self {
        if result.is_ok() {
            Self::Success
        } else {
            Self::Error
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabels {
    operation: Operation,
    outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: Outcome,
}

/// All metrics. Cloning shares them.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    operations: Family<OperationLabels, Histogram>,
    devices: Gauge,
    slice_writes: Family<OutcomeLabel, Counter>,
    gpus_unreadable: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("ai_inference_node_plugin");
        // 1 ms to 65 s: a whole device takes milliseconds, the kubelet waits 45 s.
        let operations = Family::<OperationLabels, Histogram>::new_with_constructor(|| {
            Histogram::new(exponential_buckets(0.001, 2.0, 17))
        });
        let devices = Gauge::default();
        let slice_writes = Family::<OutcomeLabel, Counter>::default();
        let gpus_unreadable = Gauge::default();
        registry.register(
            "claim_operation_duration_seconds",
            "How long the prepare or unprepare of one claim took",
            operations.clone(),
        );
        registry.register(
            "published_devices",
            "Devices in the node's pool",
            devices.clone(),
        );
        registry.register(
            "slice_writes",
            "Writes of ResourceSlices to the API server",
            slice_writes.clone(),
        );
        registry.register(
            "unreadable_gpus",
            "GPUs that NVML lists but cannot describe",
            gpus_unreadable.clone(),
        );
        Self {
            registry: Arc::new(registry),
            operations,
            devices,
            slice_writes,
            gpus_unreadable,
        }
    }
}

impl Metrics {
    /// One claim was handled.
    pub fn operation(&self, operation: Operation, outcome: Outcome, took: Duration) {
        let labels = OperationLabels { operation, outcome };
        self.operations
            .get_or_create(&labels)
            .observe(took.as_secs_f64());
    }

    /// The pool has this many devices.
    pub fn published(&self, devices: usize) {
        self.devices.set(i64::try_from(devices).unwrap_or(i64::MAX));
    }

    /// A slice was written, or could not be.
    pub fn slice_write(&self, outcome: Outcome) {
        self.slice_writes
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
    }

    /// This many GPUs cannot be read.
    pub fn unreadable(&self, gpus: usize) {
        self.gpus_unreadable
            .set(i64::try_from(gpus).unwrap_or(i64::MAX));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_counted_by_operation_and_outcome_under_the_projects_prefix() {
        let metrics = Metrics::default();
        metrics.operation(
            Operation::Prepare,
            Outcome::Success,
            Duration::from_millis(3),
        );
        metrics.published(26);
        let text = metrics.text();
        let count = "ai_inference_node_plugin_claim_operation_duration_seconds_count\
                     {operation=\"Prepare\",outcome=\"Success\"} 1";
        assert!(text.contains(count), "{text}");
        assert!(
            text.contains("ai_inference_node_plugin_published_devices 26"),
            "{text}"
        );
    }
}
