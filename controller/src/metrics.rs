//! The controller's figures, all with the prefix `ai_inference_`.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Cause {
    cause: &'static str,
}

/// Counters and gauges.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Reconciles of orders begun.
    pub reconciles: Counter,
    /// Writes to the API server; an idle cluster adds none.
    pub writes: Counter,
    /// 1 while this process leads.
    pub leader: Gauge,
    failures: Family<Cause, Counter>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("ai_inference");
        let (reconciles, writes) = (Counter::default(), Counter::default());
        let (leader, failures) = (Gauge::default(), Family::default());
        registry.register(
            "order_reconciles",
            "Reconciles of orders begun",
            reconciles.clone(),
        );
        registry.register("api_writes", "Writes to the API server", writes.clone());
        registry.register("leader", "1 while this process leads", leader.clone());
        registry.register(
            "reconcile_failures",
            "Reconciles that failed, by cause",
            failures.clone(),
        );
        Metrics {
            registry,
            reconciles,
            writes,
            leader,
            failures,
        }
    }
}

impl Metrics {
    /// Counts a failed reconcile.
    pub fn failed(&self, cause: &'static str) {
        self.failures.get_or_create(&Cause { cause }).inc();
    }

    /// All figures as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
