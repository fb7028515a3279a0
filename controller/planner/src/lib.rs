//! Snapshot and demand in, plan and explanation out.
//!
//! In: a [`Snapshot`] of the cluster and the [`Demand`] of one order. Out: an
//! [`Outcome`]: a [`Plan`] that narrows the order's claims, or an
//! [`Explanation`] of why there is none. Never talks to a cluster, never reads a
//! clock, never allocates anything: the kube-scheduler does.

mod broken;
mod candidates;
mod demand;
mod explanation;
mod inventory;
mod kinds;
mod narrow;
mod nodes;
mod occupancy;
mod plan;
mod search;
mod shares;
mod snapshot;
mod wording;

#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod property_tests;
#[cfg(test)]
mod ruled_out_tests;
#[cfg(test)]
mod scheduler_tests;
#[cfg(test)]
mod share_tests;
#[cfg(test)]
mod tests;

pub use broken::broken_selectors;
pub use demand::{
    Demand, MemoryNeed, PlacementType, ReplicaBounds, ShareBounds, SharingMode, Toleration,
};
pub use dra_cel::{AttributeValue, Quantity, Version};
pub use explanation::{
    BrokenSelector, Explanation, Rejection, RejectionReason, SHORT_FORM_LIMIT, SelectorHolder,
};
pub use plan::{DeviceRef, Outcome, Placement, Plan};
pub use snapshot::{
    AllocatedClaim, AllocatedDevice, Capacity, CapacityRange, CounterConsumption, CounterSet,
    Device, DeviceClass, DeviceTaint, Node, NodeOperator, NodeRequirement, NodeSelector,
    NodeSelectorTerm, NodeTaint, OrderRef, Pool, RequestPolicy, Scope, Slice, Snapshot,
    TaintEffect,
};

/// Plans orders and keeps compiled selectors from one plan to the next.
#[derive(Debug, Default)]
pub struct Planner {
    selectors: kinds::SelectorCache,
}

impl Planner {
    /// Most compiled selectors that are kept.
    const CACHE_LIMIT: usize = 1024;

    /// Plans one order.
    ///
    /// Deterministic: the same snapshot and demand give the same outcome,
    /// whatever was planned before.
    pub fn plan(&mut self, snapshot: &Snapshot, demand: &Demand) -> Outcome {
        if self.selectors.len() > Self::CACHE_LIMIT {
            self.selectors.clear();
        }
        search::plan(snapshot, demand, &mut self.selectors)
    }
}

/// Plans one order with nothing kept; see [`Planner`] for many.
pub fn plan(snapshot: &Snapshot, demand: &Demand) -> Outcome {
    Planner::default().plan(snapshot, demand)
}
