//! Which nodes an order may use, and which nodes a device can be reached from.
//!
//! In: nodes, the demand's tolerations and node selector. Out: verdicts. The
//! rules are those of the kube-scheduler's node affinity, taint and
//! unschedulable filters.

use crate::demand::{Demand, Toleration};
use crate::snapshot::{
    DeviceTaint, Node, NodeOperator, NodeRequirement, NodeSelector, NodeTaint, Scope, TaintEffect,
};

/// The taint that a cordoned node has; a pod may tolerate it.
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";

/// Why an order may not use a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NodeProblem {
    NotReady,
    Cordoned,
    Tainted(String),
    Labels,
}

/// Whether replicas of the demand may run on the node.
pub(crate) fn usable(node: &Node, demand: &Demand) -> Result<(), NodeProblem> {
    if !node.ready {
        return Err(NodeProblem::NotReady);
    }
    let tolerated = |key: &str, value: &str, effect: TaintEffect| {
        demand
            .node_tolerations
            .iter()
            .any(|t| tolerates(t, key, value, effect))
    };
    if node.unschedulable && !tolerated(UNSCHEDULABLE, "", TaintEffect::NoSchedule) {
        return Err(NodeProblem::Cordoned);
    }
    let blocking = |taint: &&NodeTaint| {
        keeps_away(taint.effect) && !tolerated(&taint.key, &taint.value, taint.effect)
    };
    if let Some(taint) = node.taints.iter().find(blocking) {
        return Err(NodeProblem::Tainted(taint.key.clone()));
    }
    let labelled = |(key, value): (&String, &String)| node.labels.get(key) == Some(value);
    if demand.node_selector.iter().all(labelled) {
        Ok(())
    } else {
        Err(NodeProblem::Labels)
    }
}

/// The first taint of a device that keeps the demand's claims away.
pub(crate) fn intolerable<'d>(
    taints: &'d [DeviceTaint],
    tolerations: &[Toleration],
) -> Option<&'d DeviceTaint> {
    taints.iter().find(|taint| {
        let tolerated = |t: &Toleration| tolerates(t, &taint.key, &taint.value, taint.effect);
        keeps_away(taint.effect) && !tolerations.iter().any(tolerated)
    })
}

fn keeps_away(effect: TaintEffect) -> bool {
    matches!(effect, TaintEffect::NoSchedule | TaintEffect::NoExecute)
}

fn tolerates(toleration: &Toleration, key: &str, value: &str, effect: TaintEffect) -> bool {
    if toleration.effect.is_some_and(|only| only != effect) {
        return false;
    }
    match toleration.key.as_deref() {
        None | Some("") => toleration.exists,
        Some(wanted) => wanted == key && (toleration.exists || toleration.value == value),
    }
}

/// Whether the node is in the scope of a slice, or of a device whose slice
/// leaves it to the devices.
pub(crate) fn in_scope(node: &Node, slice: &Scope, device: Option<&Scope>) -> bool {
    match slice {
        Scope::NodeName(name) => *name == node.name,
        Scope::All => true,
        Scope::Selector(selector) => selected(node, selector),
        Scope::PerDevice => match device {
            None | Some(Scope::PerDevice) => false,
            Some(own) => in_scope(node, own, None),
        },
    }
}

fn selected(node: &Node, selector: &NodeSelector) -> bool {
    selector.terms.iter().any(|term| {
        let empty = term.match_expressions.is_empty() && term.match_fields.is_empty();
        let labels = |r: &NodeRequirement| holds(r, node.labels.get(&r.key).map(String::as_str));
        let fields = |r: &NodeRequirement| {
            holds(r, (r.key == "metadata.name").then_some(node.name.as_str()))
        };
        // A term without requirements matches nothing.
        !empty && term.match_expressions.iter().all(labels) && term.match_fields.iter().all(fields)
    })
}

fn holds(requirement: &NodeRequirement, value: Option<&str>) -> bool {
    let listed = |value: &str| requirement.values.iter().any(|v| v == value);
    let compared = |above: bool| {
        let operand = requirement
            .values
            .first()
            .and_then(|v| v.parse::<i64>().ok());
        let value = value.and_then(|v| v.parse::<i64>().ok());
        matches!((value, operand), (Some(v), Some(o)) if if above { v > o } else { v < o })
    };
    match requirement.operator {
        NodeOperator::In => value.is_some_and(listed),
        NodeOperator::NotIn => !value.is_some_and(listed),
        NodeOperator::Exists => value.is_some(),
        NodeOperator::DoesNotExist => value.is_none(),
        NodeOperator::Gt => compared(true),
        NodeOperator::Lt => compared(false),
    }
}
