//! Snapshot and demand in, plan and explanation out.
//!
//! In: a [`Snapshot`] of the cluster and the [`Demand`] of one order. Out: an
//! [`Outcome`]: a [`Plan`] that narrows the order's claims, or an
//! [`Explanation`] of why there is none. Never talks to a cluster, never reads a
//! clock, never allocates anything: the kube-scheduler does.

mod demand;
mod explanation;
mod plan;
mod snapshot;

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

/// Plans one order.
///
/// Deterministic: the same snapshot and demand give the same outcome.
pub fn plan(snapshot: &Snapshot, demand: &Demand) -> Outcome {
    let _ = (snapshot, demand);
    Outcome::NoDeviceClass(Explanation::default())
}
