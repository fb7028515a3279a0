//! The cluster as the planner sees it: slices, device classes, allocated claims
//! and nodes, as plain values.
//!
//! In: whatever a shell read from the API server. Out: types that mirror
//! `resource.k8s.io/v1` closely enough to be compared with the scheduler's own
//! allocator, and that serialise to JSON. No client and no clock.

use std::collections::BTreeMap;
use std::fmt;

use dra_cel::{AttributeValue, Quantity};
use serde::{Deserialize, Serialize};

/// Everything that a plan depends on besides the demand.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Snapshot {
    /// Every ResourceSlice of every driver.
    #[serde(default)]
    pub slices: Vec<Slice>,
    /// Every DeviceClass.
    #[serde(default)]
    pub device_classes: Vec<DeviceClass>,
    /// Every ResourceClaim that has an allocation.
    #[serde(default)]
    pub claims: Vec<AllocatedClaim>,
    /// Every node.
    #[serde(default)]
    pub nodes: Vec<Node>,
}

/// One ResourceSlice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Slice {
    /// `metadata.name`; the scheduler walks a pool's slices in this order.
    #[serde(default)]
    pub name: String,
    /// DRA driver that published it.
    pub driver: String,
    /// Pool that it is a part of.
    pub pool: Pool,
    /// Nodes that can reach its devices.
    pub scope: Scope,
    /// Counter sets that devices of the pool draw on.
    #[serde(default)]
    pub counter_sets: Vec<CounterSet>,
    /// Devices, in the driver's order of preference.
    #[serde(default)]
    pub devices: Vec<Device>,
}

/// A slice's place in its pool.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Pool {
    /// Name, unique per driver.
    pub name: String,
    /// Only slices of a pool's highest generation count.
    #[serde(default)]
    pub generation: i64,
    /// How many slices the pool has at this generation; with fewer than these
    /// present it is incomplete and nothing is allocated from it.
    pub slice_count: i64,
}

/// Which nodes can reach a slice or a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Scope {
    /// The named node.
    NodeName(String),
    /// Nodes that match.
    Selector(NodeSelector),
    /// Every node.
    All,
    /// Each device names its own nodes.
    PerDevice,
}

/// A node selector: terms are alternatives.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeSelector {
    /// A node matches when it matches one of these; none of them match nothing.
    pub terms: Vec<NodeSelectorTerm>,
}

/// One alternative of a node selector: all of its requirements must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeSelectorTerm {
    /// Requirements on labels.
    #[serde(default)]
    pub match_expressions: Vec<NodeRequirement>,
    /// Requirements on fields; only `metadata.name` exists.
    #[serde(default)]
    pub match_fields: Vec<NodeRequirement>,
}

/// One requirement on a node's label or field.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeRequirement {
    /// Label key or field path.
    pub key: String,
    /// How the values are compared.
    pub operator: NodeOperator,
    /// Operands; for `Gt` and `Lt` exactly one integer.
    #[serde(default)]
    pub values: Vec<String>,
}

/// Operators of node requirements, named as Kubernetes names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeOperator {
    /// The value is one of those listed.
    In,
    /// The value is none of those listed, or absent.
    NotIn,
    /// The key exists.
    Exists,
    /// The key does not exist.
    DoesNotExist,
    /// The value is an integer above the operand.
    Gt,
    /// The value is an integer below the operand.
    Lt,
}

/// A named set of counters, shared by the devices of a pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CounterSet {
    /// Name, unique in the pool.
    pub name: String,
    /// What there is in total, by counter.
    pub counters: BTreeMap<String, Quantity>,
}

/// One device of a slice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// Name, unique in the pool.
    pub name: String,
    /// Attributes by name; a name without domain belongs to the driver's.
    #[serde(default)]
    pub attributes: BTreeMap<String, AttributeValue>,
    /// Capacities by name; a name without domain belongs to the driver's.
    #[serde(default)]
    pub capacity: BTreeMap<String, Capacity>,
    /// Counters that the device takes from the pool while it is allocated.
    #[serde(default)]
    pub consumes: Vec<CounterConsumption>,
    /// Taints of the device itself and of DeviceTaintRules on it.
    #[serde(default)]
    pub taints: Vec<DeviceTaint>,
    /// Whether several claims may hold shares of it at once.
    #[serde(default)]
    pub allow_multiple_allocations: bool,
    /// Nodes that can reach it, when the slice's scope is [`Scope::PerDevice`].
    #[serde(default)]
    pub scope: Option<Scope>,
}

/// One capacity of a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Capacity {
    /// The amount; in bytes for memory.
    pub value: Quantity,
    /// How requests for a share of it are defaulted, bounded and rounded.
    #[serde(default)]
    pub request_policy: Option<RequestPolicy>,
}

/// How a share's request for a capacity is judged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RequestPolicy {
    /// What a share gets that requests nothing.
    #[serde(default)]
    pub default: Option<Quantity>,
    /// The only amounts allowed, ascending; empty when a range rules.
    #[serde(default)]
    pub valid_values: Vec<Quantity>,
    /// The range of amounts allowed.
    #[serde(default)]
    pub valid_range: Option<CapacityRange>,
}

/// The amounts that a share may request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CapacityRange {
    /// The least; requests below it are rounded up to it.
    pub min: Quantity,
    /// The most; none means the whole capacity.
    #[serde(default)]
    pub max: Option<Quantity>,
    /// Requests are rounded up to `min` plus a multiple of this.
    #[serde(default)]
    pub step: Option<Quantity>,
}

/// What a device takes from one counter set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CounterConsumption {
    /// Name of the counter set in the same pool.
    pub counter_set: String,
    /// Amounts by counter.
    pub counters: BTreeMap<String, Quantity>,
}

/// A taint on a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceTaint {
    /// Key.
    pub key: String,
    /// Value; may be empty.
    #[serde(default)]
    pub value: String,
    /// What it does to those who do not tolerate it.
    pub effect: TaintEffect,
}

/// What a taint does, on a node or a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TaintEffect {
    /// Nothing (devices only).
    None,
    /// Others are preferred (nodes only).
    PreferNoSchedule,
    /// Nothing new is placed.
    NoSchedule,
    /// Nothing new is placed and what is there is removed.
    NoExecute,
}

/// A DeviceClass.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceClass {
    /// Name.
    pub name: String,
    /// CEL expressions; a device belongs to the class when all are true.
    #[serde(default)]
    pub selectors: Vec<String>,
}

/// A ResourceClaim that holds devices.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AllocatedClaim {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    #[serde(default)]
    pub uid: String,
    /// The order whose replica it serves; `None` for anybody else's claim.
    #[serde(default)]
    pub order: Option<OrderRef>,
    /// What it holds.
    pub devices: Vec<AllocatedDevice>,
}

/// Names an order.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OrderRef {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl fmt::Display for OrderRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// One device, or one share of it, that a claim holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AllocatedDevice {
    /// Driver of the pool.
    pub driver: String,
    /// Pool.
    pub pool: String,
    /// Device in the pool.
    pub device: String,
    /// Set when the claim holds a share and not the whole device.
    #[serde(default)]
    pub share_id: Option<String>,
    /// What the share takes of each capacity.
    #[serde(default)]
    pub consumed_capacity: BTreeMap<String, Quantity>,
    /// Administrators' access takes nothing away from others.
    #[serde(default)]
    pub admin_access: bool,
}

/// A node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Node {
    /// Name.
    pub name: String,
    /// Labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Taints.
    #[serde(default)]
    pub taints: Vec<NodeTaint>,
    /// Cordoned.
    #[serde(default)]
    pub unschedulable: bool,
    /// Whether its `Ready` condition is true.
    pub ready: bool,
}

/// A taint on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeTaint {
    /// Key.
    pub key: String,
    /// Value; may be empty.
    #[serde(default)]
    pub value: String,
    /// What it does to pods that do not tolerate it.
    pub effect: TaintEffect,
}
