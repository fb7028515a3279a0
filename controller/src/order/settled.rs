//! What an order settled on, kept on its StatefulSet: the plan, the facts and the
//! terms it was made from, and how far it got.
//!
//! A serving order keeps its placement while the cluster changes around it, asks
//! the hub for nothing, and survives the controller: all of that because the
//! decision is written where the workload is.

use super::moves::Roll;
use crate::model::ModelFacts;
use inference_api::{EndpointType, InferenceServiceStatus};
use k8s_openapi::api::apps::v1::StatefulSet;
use kube::ResourceExt;
use planner::Plan;
use serde::{Deserialize, Serialize};

/// Annotation of the StatefulSet.
pub const SETTLED: &str = "ai.deckhouse.io/settled-plan";
/// Version of what is written. The first had no number and no parts; what it had is
/// still written under the same names, so that an earlier release reads this one.
pub const VERSION: u32 = 2;

/// What a decision was made from: a hash of each contribution. The order's own is its
/// generation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Parts {
    /// Of the class: which accelerators and portions of them, the contract, the token.
    /// Bounds on the number of copies and namespaces are not among it.
    pub class: String,
    /// Of the release: the memory that its recipe asks for.
    pub release: String,
    /// Of the source: the model's facts.
    pub source: String,
}

/// How far a decision got.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// No copy has answered yet.
    New,
    /// The same, after an earlier workload was removed (A-115).
    Rebuilding,
    /// A copy has answered: from now on only an edit changes what is served (A-117).
    #[default]
    Serving,
}

/// The decision that a workload stands on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Settled {
    /// Version of this record.
    #[serde(default = "first")]
    pub version: u32,
    /// Hash of the demand as a whole ([`super::validate::inputs`]): all that the first
    /// version had to compare.
    pub inputs: String,
    /// What each contributed; none in the first version.
    #[serde(default)]
    pub parts: Option<Parts>,
    /// Generation of the order that it was decided for.
    pub generation: i64,
    /// The contract that is served.
    #[serde(default)]
    pub contract: Option<EndpointType>,
    /// Whether requests need the order's token.
    #[serde(default)]
    pub token: Option<bool>,
    /// How far it got.
    #[serde(default)]
    pub stage: Stage,
    /// The move that is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roll: Option<Roll>,
    /// The placement, without what is only for explanation.
    pub plan: Plan,
    /// The model.
    pub facts: ModelFacts,
}

fn first() -> u32 {
    1
}

impl Settled {
    /// The decision that a StatefulSet stands on; none where the annotation is
    /// missing or cannot be read. The first version did not hold the contract and the
    /// token: the order's status does.
    pub fn of(standing: &StatefulSet, status: Option<&InferenceServiceStatus>) -> Option<Self> {
        let mut settled: Settled =
            serde_json::from_str(standing.annotations().get(SETTLED)?).ok()?;
        if settled.contract.is_none() {
            settled.contract = status.and_then(|s| s.model.as_ref()?.endpoint_type);
        }
        if settled.token.is_none() {
            let endpoint = status.and_then(|s| s.endpoint.as_ref());
            settled.token = endpoint.map(|e| e.token_secret_name.is_some());
        }
        Some(settled)
    }

    /// The annotation's value.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// A plan without what is only for explanation.
pub fn stripped(plan: &Plan) -> Plan {
    let mut plan = plan.clone();
    plan.explanation.rejections.clear();
    plan
}

/// Whether a copy that stands by the one plan has what the other one gives: the same
/// kind of devices, so many of them, the same portion. The planner's own selector is
/// not compared: it repeats the kind, and names the need, which another model or
/// release may change without another device.
pub fn same_placement(a: &Plan, b: &Plan) -> bool {
    let kind = |plan: &Plan| {
        (
            plan.device_class_name.clone(),
            plan.driver.clone(),
            plan.sharing_mode,
            plan.placement_type,
            plan.profile.clone(),
            plan.devices_per_replica,
            plan.memory_bytes,
            plan.capacity_requests.clone(),
        )
    };
    let of_class = |plan: &Plan| plan.selectors.iter().skip(1).cloned().collect::<Vec<_>>();
    // Records of early versions have none.
    let (whole_a, whole_b) = (a.device_memory_bytes, b.device_memory_bytes);
    let same_device = whole_a == whole_b || whole_a == 0 || whole_b == 0;
    kind(a) == kind(b) && same_device && of_class(a) == of_class(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Format;
    use crate::render::tests as fixture;
    use serde_json::json;

    fn standing(annotation: &str) -> StatefulSet {
        let mut set = StatefulSet::default();
        set.metadata.annotations = Some([(SETTLED.to_owned(), annotation.to_owned())].into());
        set
    }

    fn first_version() -> String {
        json!({"inputs": "0123456789", "generation": 3,
            "plan": fixture::plan(1), "facts": fixture::facts(Format::Gguf)})
        .to_string()
    }

    #[test]
    fn the_first_version_is_read_as_serving_what_the_status_says() {
        let status: InferenceServiceStatus = serde_json::from_value(json!({
            "model": {"endpointType": "Embeddings"}, "endpoint": {"address": "http://a"}}))
        .unwrap();
        let settled = Settled::of(&standing(&first_version()), Some(&status)).unwrap();
        assert_eq!((settled.version, settled.generation), (1, 3));
        assert_eq!(settled.parts, None);
        assert_eq!(settled.contract, Some(EndpointType::Embeddings));
        assert_eq!(settled.token, Some(false));
        assert_eq!(settled.stage, Stage::Serving, "nothing is changed under it");
        let unknown = Settled::of(&standing(&first_version()), None).unwrap();
        assert_eq!((unknown.contract, unknown.token), (None, None));
    }

    #[test]
    fn what_is_written_is_read_and_holds_what_the_first_version_needs() {
        let mut settled = Settled::of(&standing(&first_version()), None).unwrap();
        settled.version = VERSION;
        settled.parts = Some(Parts {
            class: "c".into(),
            release: "r".into(),
            source: "s".into(),
        });
        settled.stage = Stage::Rebuilding;
        settled.roll = Some(Roll {
            generation: 3,
            surge_since: Some(5),
        });
        let json = settled.to_json();
        assert_eq!(Settled::of(&standing(&json), None), Some(settled));
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        for field in ["inputs", "generation", "plan", "facts"] {
            assert!(value.get(field).is_some(), "{field}");
        }
        assert_eq!(Settled::of(&standing("{}"), None), None);
    }

    #[test]
    fn a_placement_is_the_same_whatever_is_needed_of_it_and_another_by_what_is_given_a_115() {
        let standing = fixture::plan(1);
        let differs = |change: fn(&mut Plan)| {
            let mut plan = standing.clone();
            change(&mut plan);
            !same_placement(&standing, &plan)
        };
        assert!(!differs(|p| p.memory_needed_bytes += 1));
        assert!(!differs(|p| p.selectors[0].push_str(" && true")));
        assert!(!differs(|p| p.replicas_that_fit = 9));
        assert!(differs(|p| p.device_class_name = "gpu".into()));
        assert!(differs(|p| p.profile = Some("2g.20gb".into())));
        assert!(differs(|p| p.memory_bytes += 1));
        assert!(differs(|p| p.devices_per_replica = 2));
        assert!(differs(|p| p.selectors.push("device.driver == 'x'".into())));
        assert!(differs(|p| {
            let share = planner::Quantity::from_bytes(1);
            p.capacity_requests.insert("memory".into(), share);
        }));
    }
}
