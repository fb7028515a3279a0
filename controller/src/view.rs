//! Kubernetes objects become the planner's plain types.
//!
//! In: ResourceSlices, DeviceClasses, ResourceClaims, Nodes as the API serves
//! them. Out: a [`Snapshot`]. What cannot be read as the API defines it (a
//! quantity or version that does not parse) is left out and counted, so that one
//! driver's fault costs one device and not the whole plan.

use inference_api::names::{MANAGED_BY, RUNTIME_NAME};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::resource::v1 as dra;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use kube::ResourceExt;
use planner::{
    AllocatedClaim, AllocatedDevice, AttributeValue, Capacity, CapacityRange, CounterConsumption,
    CounterSet, Device, DeviceClass, DeviceTaint, Node, NodeOperator, NodeRequirement,
    NodeSelector, NodeSelectorTerm, NodeTaint, OrderRef, Pool, Quantity, RequestPolicy, Scope,
    Slice, Snapshot, TaintEffect,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Labels of everything made for an order: name, instance, manager.
pub const LABEL_NAME: &str = "app.kubernetes.io/name";
/// The order's name.
pub const LABEL_INSTANCE: &str = "app.kubernetes.io/instance";
/// Who made it.
pub const LABEL_MANAGED_BY: &str = "app.kubernetes.io/managed-by";

/// The order that an object of its namespace was made for, by its labels.
pub fn order_of(labels: &BTreeMap<String, String>) -> Option<&str> {
    let is = |key: &str, value: &str| labels.get(key).is_some_and(|v| v == value);
    if is(LABEL_MANAGED_BY, MANAGED_BY) && is(LABEL_NAME, RUNTIME_NAME) {
        labels.get(LABEL_INSTANCE).map(String::as_str)
    } else {
        None
    }
}

/// A snapshot of the cluster, in an order that does not depend on the store's.
pub fn snapshot(
    slices: &[Arc<dra::ResourceSlice>],
    classes: &[Arc<dra::DeviceClass>],
    claims: &[Arc<dra::ResourceClaim>],
    nodes: &[Arc<core::Node>],
) -> Snapshot {
    let mut snapshot = Snapshot {
        slices: slices.iter().map(|s| slice(s)).collect(),
        device_classes: classes.iter().map(|c| device_class(c)).collect(),
        claims: claims.iter().filter_map(|c| claim(c)).collect(),
        nodes: nodes.iter().map(|n| node(n)).collect(),
    };
    snapshot.slices.sort_by(|a, b| a.name.cmp(&b.name));
    snapshot.device_classes.sort_by(|a, b| a.name.cmp(&b.name));
    snapshot
        .claims
        .sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
    snapshot.nodes.sort_by(|a, b| a.name.cmp(&b.name));
    snapshot
}

fn quantity(q: &ApiQuantity) -> Option<Quantity> {
    q.0.parse().ok()
}

fn scope(
    node_name: Option<&String>,
    selector: Option<&core::NodeSelector>,
    all: Option<bool>,
) -> Option<Scope> {
    match (node_name, selector, all) {
        (Some(name), _, _) => Some(Scope::NodeName(name.clone())),
        (_, Some(selector), _) => Some(Scope::Selector(node_selector(selector))),
        (_, _, Some(true)) => Some(Scope::All),
        _ => None,
    }
}

fn slice(s: &dra::ResourceSlice) -> Slice {
    let spec = &s.spec;
    let scope = scope(
        spec.node_name.as_ref(),
        spec.node_selector.as_ref(),
        spec.all_nodes,
    )
    .unwrap_or(Scope::PerDevice);
    Slice {
        name: s.name_any(),
        driver: spec.driver.clone(),
        pool: Pool {
            name: spec.pool.name.clone(),
            generation: spec.pool.generation,
            slice_count: spec.pool.resource_slice_count,
        },
        scope,
        counter_sets: spec
            .shared_counters
            .iter()
            .flatten()
            .map(counter_set)
            .collect(),
        devices: spec.devices.iter().flatten().filter_map(device).collect(),
    }
}

fn counter_set(set: &dra::CounterSet) -> CounterSet {
    CounterSet {
        name: set.name.clone(),
        counters: counters(&set.counters),
    }
}

fn counters(from: &BTreeMap<String, dra::Counter>) -> BTreeMap<String, Quantity> {
    from.iter()
        .filter_map(|(name, c)| Some((name.clone(), quantity(&c.value)?)))
        .collect()
}

fn device(d: &dra::Device) -> Option<Device> {
    let mut capacity = BTreeMap::new();
    for (name, c) in d.capacity.iter().flatten() {
        let value = quantity(&c.value)?;
        let request_policy = c.request_policy.as_ref().map(request_policy);
        capacity.insert(
            name.clone(),
            Capacity {
                value,
                request_policy,
            },
        );
    }
    Some(Device {
        name: d.name.clone(),
        attributes: d
            .attributes
            .iter()
            .flatten()
            .filter_map(|(name, a)| Some((name.clone(), attribute(a)?)))
            .collect(),
        capacity,
        consumes: d
            .consumes_counters
            .iter()
            .flatten()
            .map(|c| CounterConsumption {
                counter_set: c.counter_set.clone(),
                counters: counters(&c.counters),
            })
            .collect(),
        taints: d.taints.iter().flatten().map(device_taint).collect(),
        allow_multiple_allocations: d.allow_multiple_allocations.unwrap_or(false),
        scope: scope(d.node_name.as_ref(), d.node_selector.as_ref(), d.all_nodes),
    })
}

fn request_policy(p: &dra::CapacityRequestPolicy) -> RequestPolicy {
    RequestPolicy {
        default: p.default.as_ref().and_then(quantity),
        valid_values: p
            .valid_values
            .iter()
            .flatten()
            .filter_map(quantity)
            .collect(),
        valid_range: p.valid_range.as_ref().and_then(|r| {
            Some(CapacityRange {
                min: quantity(&r.min)?,
                max: r.max.as_ref().and_then(quantity),
                step: r.step.as_ref().and_then(quantity),
            })
        }),
    }
}

fn attribute(a: &dra::DeviceAttribute) -> Option<AttributeValue> {
    if let Some(v) = a.int {
        Some(AttributeValue::Int(v))
    } else if let Some(v) = a.bool {
        Some(AttributeValue::Bool(v))
    } else if let Some(v) = &a.string {
        Some(AttributeValue::String(v.clone()))
    } else if let Some(v) = &a.version {
        Some(AttributeValue::Version(v.parse().ok()?))
    } else if let Some(v) = &a.ints {
        Some(AttributeValue::Ints(v.clone()))
    } else if let Some(v) = &a.bools {
        Some(AttributeValue::Bools(v.clone()))
    } else if let Some(v) = &a.strings {
        Some(AttributeValue::Strings(v.clone()))
    } else {
        let versions = a.versions.as_ref()?;
        Some(AttributeValue::Versions(
            versions
                .iter()
                .map(|v| v.parse().ok())
                .collect::<Option<_>>()?,
        ))
    }
}

fn effect(text: &str) -> TaintEffect {
    match text {
        "NoExecute" => TaintEffect::NoExecute,
        "PreferNoSchedule" => TaintEffect::PreferNoSchedule,
        "None" => TaintEffect::None,
        // An effect of a newer API is taken at its most usual.
        _ => TaintEffect::NoSchedule,
    }
}

fn device_taint(t: &dra::DeviceTaint) -> DeviceTaint {
    DeviceTaint {
        key: t.key.clone(),
        value: t.value.clone().unwrap_or_default(),
        effect: effect(&t.effect),
    }
}

fn node_selector(s: &core::NodeSelector) -> NodeSelector {
    let requirement = |r: &core::NodeSelectorRequirement| NodeRequirement {
        key: r.key.clone(),
        operator: match r.operator.as_str() {
            "In" => NodeOperator::In,
            "NotIn" => NodeOperator::NotIn,
            "DoesNotExist" => NodeOperator::DoesNotExist,
            "Gt" => NodeOperator::Gt,
            "Lt" => NodeOperator::Lt,
            _ => NodeOperator::Exists,
        },
        values: r.values.clone().unwrap_or_default(),
    };
    NodeSelector {
        terms: s
            .node_selector_terms
            .iter()
            .map(|t| NodeSelectorTerm {
                match_expressions: t
                    .match_expressions
                    .iter()
                    .flatten()
                    .map(requirement)
                    .collect(),
                match_fields: t.match_fields.iter().flatten().map(requirement).collect(),
            })
            .collect(),
    }
}

fn device_class(c: &dra::DeviceClass) -> DeviceClass {
    let cel = |s: &dra::DeviceSelector| s.cel.as_ref().map(|c| c.expression.clone());
    DeviceClass {
        name: c.name_any(),
        selectors: c
            .spec
            .iter()
            .flat_map(|s| s.selectors.iter().flatten())
            .filter_map(cel)
            .collect(),
    }
}

pub(crate) fn claim(c: &dra::ResourceClaim) -> Option<AllocatedClaim> {
    let allocation = c.status.as_ref()?.allocation.as_ref()?;
    let results = allocation.devices.as_ref()?.results.iter().flatten();
    let namespace = c.namespace()?;
    Some(AllocatedClaim {
        order: order_of(c.labels()).map(|name| OrderRef {
            namespace: namespace.clone(),
            name: name.to_owned(),
        }),
        namespace,
        name: c.name_any(),
        uid: c.uid().unwrap_or_default(),
        devices: results
            .map(|r| AllocatedDevice {
                driver: r.driver.clone(),
                pool: r.pool.clone(),
                device: r.device.clone(),
                share_id: r.share_id.clone(),
                consumed_capacity: r
                    .consumed_capacity
                    .iter()
                    .flatten()
                    .filter_map(|(name, q)| Some((name.clone(), quantity(q)?)))
                    .collect(),
                admin_access: r.admin_access.unwrap_or(false),
            })
            .collect(),
    })
}

pub(crate) fn node(n: &core::Node) -> Node {
    let spec = n.spec.clone().unwrap_or_default();
    let conditions = n.status.iter().flat_map(|s| s.conditions.iter().flatten());
    Node {
        name: n.name_any(),
        labels: n.labels().clone(),
        taints: spec
            .taints
            .iter()
            .flatten()
            .map(|t| NodeTaint {
                key: t.key.clone(),
                value: t.value.clone().unwrap_or_default(),
                effect: effect(&t.effect),
            })
            .collect(),
        unschedulable: spec.unschedulable.unwrap_or(false),
        ready: conditions
            .clone()
            .any(|c| c.type_ == "Ready" && c.status == "True"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_as_the_node_plugin_publishes_it_is_read_whole() {
        let object: dra::ResourceSlice = serde_saphyr::from_str(
            r#"
metadata: {name: s}
spec:
  driver: gpu.ai.deckhouse.io
  nodeName: worker
  pool: {name: worker, generation: 3, resourceSliceCount: 2}
  sharedCounters:
  - name: gpu-0000-65-00-0
    counters: {memory-slice-0: {value: "1"}, compute-slices: {value: "7"}}
  devices:
  - name: gpu-0000-65-00-0-mig-1g10gb-0
    attributes:
      type: {string: mig}
      cudaComputeCapability: {version: 9.0.0}
      placementStart: {int: 0}
    capacity: {memory: {value: "10468982784"}}
    consumesCounters:
    - counterSet: gpu-0000-65-00-0
      counters: {memory-slice-0: {value: "1"}}
    taints: [{key: gpu.ai.deckhouse.io/unhealthy, effect: NoExecute}]
"#,
        )
        .unwrap();
        let slice = slice(&object);
        assert_eq!(slice.scope, Scope::NodeName("worker".into()));
        assert_eq!((slice.pool.generation, slice.pool.slice_count), (3, 2));
        assert_eq!(
            slice.counter_sets[0].counters["compute-slices"],
            Quantity::from_units(7)
        );
        let device = &slice.devices[0];
        assert_eq!(device.attributes["type"].as_str(), Some("mig"));
        assert_eq!(device.attributes.len(), 3);
        assert_eq!(
            device.capacity["memory"].value.to_bytes(),
            Some(10_468_982_784)
        );
        assert_eq!(device.consumes[0].counter_set, "gpu-0000-65-00-0");
        assert_eq!(device.taints[0].effect, TaintEffect::NoExecute);
    }

    #[test]
    fn only_allocated_claims_count_and_an_orders_own_are_known_by_their_labels() {
        let read = |labels: &str, status: &str| -> dra::ResourceClaim {
            serde_saphyr::from_str(&format!(
                "metadata: {{name: c, namespace: ns, uid: u, labels: {labels}}}\nspec: {{}}\nstatus: {status}"
            ))
            .unwrap()
        };
        let ours = "{app.kubernetes.io/name: inference-runtime, app.kubernetes.io/instance: o, app.kubernetes.io/managed-by: ai-inference}";
        let allocation =
            "{allocation: {devices: {results: [{request: gpu, driver: d, pool: p, device: x}]}}}";
        assert_eq!(claim(&read(ours, "{}")), None);
        let held = claim(&read(ours, allocation)).unwrap();
        assert_eq!(
            held.order,
            Some(OrderRef {
                namespace: "ns".into(),
                name: "o".into()
            })
        );
        assert_eq!(held.devices[0].device, "x");
        assert_eq!(claim(&read("{}", allocation)).unwrap().order, None);
    }
}
