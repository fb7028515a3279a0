//! The two components of the platform: what each does, and under which name.
//!
//! In: nothing. Out: names. The `controller` turns each order into a workload. The `planner`
//! has what concerns more than one order: it judges classes, keeps the built-in class and counts
//! a class's orders. Each has a lease, an account, a field manager and a metrics label of its own;
//! one process may run one of them or both.
//!
//! The placement of one order is decided by the crate `planner`, which is pure, within the
//! controller's reconcile: plan and workload are written together, so that neither ever stands
//! without the other. That is why both components hold the right `update` on
//! `inferenceserviceclasses/planner`, without which the planner's state is not written.

use clap::ValueEnum;

/// Target of the planner's log lines; the controller's have the names of its modules.
pub(crate) const PLANNER_LOG: &str = "planner";

/// A component.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum)]
pub enum Component {
    /// Reconciles orders into workloads.
    Controller,
    /// Judges classes.
    Planner,
}

impl Component {
    /// Both.
    pub const ALL: [Component; 2] = [Component::Controller, Component::Planner];

    /// The word of `--components`, of the log and of the metrics' label `component`.
    pub const fn word(self) -> &'static str {
        match self {
            Component::Controller => "controller",
            Component::Planner => "planner",
        }
    }

    /// Name of its lease, its account and its field manager.
    pub const fn name(self) -> &'static str {
        match self {
            Component::Controller => crate::FIELD_MANAGER,
            Component::Planner => "ai-inference-planner",
        }
    }
}
