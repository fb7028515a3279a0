//! The figures of the components, all with the prefix `ai_inference_` and the label `component`.

use crate::component::Component;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Of {
    component: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Cause {
    component: &'static str,
    cause: &'static str,
}

/// The figures of a process.
#[derive(Debug)]
pub struct Figures {
    registry: Registry,
    reconciles: Family<Of, Counter>,
    writes: Family<Of, Counter>,
    leader: Family<Of, Gauge>,
    failures: Family<Cause, Counter>,
}

impl Default for Figures {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("ai_inference");
        let (reconciles, writes) = (Family::default(), Family::default());
        let (leader, failures) = (Family::default(), Family::default());
        registry.register(
            "reconciles",
            "Reconciles begun: of orders by the controller, of classes by the planner",
            reconciles.clone(),
        );
        registry.register("api_writes", "Writes to the API server", writes.clone());
        registry.register(
            "leader",
            "1 while this process leads the component",
            leader.clone(),
        );
        registry.register(
            "reconcile_failures",
            "Reconciles that failed, by cause",
            failures.clone(),
        );
        Figures {
            registry,
            reconciles,
            writes,
            leader,
            failures,
        }
    }
}

impl Figures {
    /// The figures of one component, from now on among those of the process.
    pub fn of(&self, component: Component) -> Metrics {
        let of = Of {
            component: component.word(),
        };
        Metrics {
            component,
            reconciles: self.reconciles.get_or_create_owned(&of),
            writes: self.writes.get_or_create_owned(&of),
            leader: self.leader.get_or_create_owned(&of),
            failures: self.failures.clone(),
        }
    }

    /// All figures as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

/// Counters and gauges of one component.
#[derive(Clone, Debug)]
pub struct Metrics {
    component: Component,
    /// Reconciles begun.
    pub reconciles: Counter,
    /// Writes to the API server; an idle cluster adds none.
    pub writes: Counter,
    /// 1 while this process leads the component.
    pub leader: Gauge,
    failures: Family<Cause, Counter>,
}

impl Metrics {
    /// Counts a failed reconcile.
    pub fn failed(&self, cause: &'static str) {
        let component = self.component.word();
        self.failures
            .get_or_create(&Cause { component, cause })
            .inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_component_has_its_own_figures_a_026() {
        let figures = Figures::default();
        let (controller, planner) = (
            figures.of(Component::Controller),
            figures.of(Component::Planner),
        );
        controller.leader.set(1);
        planner.writes.inc();
        planner.failed("api");
        let text = figures.text();
        for line in [
            r#"ai_inference_leader{component="controller"} 1"#,
            r#"ai_inference_leader{component="planner"} 0"#,
            r#"ai_inference_api_writes_total{component="controller"} 0"#,
            r#"ai_inference_api_writes_total{component="planner"} 1"#,
            r#"ai_inference_reconcile_failures_total{component="planner",cause="api"} 1"#,
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }
}
