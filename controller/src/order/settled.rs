//! What an order settled on, kept on its StatefulSet: the plan and the facts it
//! was made from.
//!
//! A serving order keeps its placement while the cluster changes around it, asks
//! the hub for nothing, and survives the controller: all of that because the
//! decision is written where the workload is.

use crate::model::ModelFacts;
use k8s_openapi::api::apps::v1::StatefulSet;
use kube::ResourceExt;
use planner::Plan;
use serde::{Deserialize, Serialize};

/// Annotation of the StatefulSet.
pub const SETTLED: &str = "ai.deckhouse.io/settled-plan";

/// The decision that a workload stands on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Settled {
    /// Hash of the demand ([`super::validate::inputs`]).
    pub inputs: String,
    /// Generation of the order that it was decided for.
    pub generation: i64,
    /// The placement, without what is only for explanation.
    pub plan: Plan,
    /// The model.
    pub facts: ModelFacts,
}

impl Settled {
    /// The decision that a StatefulSet stands on; none where the annotation is
    /// missing or of a version that this one does not read.
    pub fn of(standing: &StatefulSet) -> Option<Self> {
        serde_json::from_str(standing.annotations().get(SETTLED)?).ok()
    }

    /// A decision, stripped of what is only for explanation.
    pub fn new(inputs: String, generation: i64, plan: &Plan, facts: &ModelFacts) -> Self {
        let mut plan = plan.clone();
        plan.explanation.rejections.clear();
        Settled {
            inputs,
            generation,
            plan,
            facts: facts.clone(),
        }
    }

    /// The annotation's value.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Whether two plans give a copy the same devices in the same way.
pub fn same_placement(a: &Plan, b: &Plan) -> bool {
    (
        &a.device_class_name,
        a.devices_per_replica,
        &a.selectors,
        &a.capacity_requests,
    ) == (
        &b.device_class_name,
        b.devices_per_replica,
        &b.selectors,
        &b.capacity_requests,
    )
}
