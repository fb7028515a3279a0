//! The PodDisruptionBudget: whoever drains nodes takes one copy of an order at a time.

use super::{Input, labels, metadata};
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;

/// The budget of an order of several copies. A single copy has none: it would hold up every drain.
pub fn budget(input: &Input<'_>) -> PodDisruptionBudget {
    let order = input.order.name_any();
    PodDisruptionBudget {
        metadata: metadata(input.order, order.clone()),
        spec: Some(PodDisruptionBudgetSpec {
            max_unavailable: Some(IntOrString::Int(1)),
            selector: Some(LabelSelector {
                match_labels: Some(labels(&order)),
                ..LabelSelector::default()
            }),
            // A copy that does not answer holds up nobody's drain.
            unhealthy_pod_eviction_policy: Some("AlwaysAllow".to_owned()),
            ..PodDisruptionBudgetSpec::default()
        }),
        status: None,
    }
}
