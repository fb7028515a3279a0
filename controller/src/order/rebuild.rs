//! When a workload is raised anew, and what is still there of the earlier one. Pure.
//!
//! A placement and a volume cannot be changed under a copy, so the workload
//! goes first: the StatefulSet, by garbage collection its pods, and by the policy of
//! its claims their volumes. Its successor has the same names. It is made only when
//! nothing of the earlier one is left, or a copy would get the old, too small volume.

use super::dereference::is_owned;
use crate::render::{STORAGE, StandingVolume};
use inference_api::{InferenceService, OrderCondition as C, OrderReason as R};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::{Resource, ResourceExt};
use planner::Plan;
use std::sync::Arc;

/// Whether the order's status says that its workload is raised anew. It says so
/// before anything is removed, so a restart in between goes on with it.
pub fn is_announced(order: &InferenceService) -> bool {
    let conditions = order.status.as_ref().map(|s| s.conditions.as_slice());
    C::RuntimeCurrent
        .find(conditions.unwrap_or_default())
        .is_some_and(|c| c.reason == R::WorkloadRebuilding.as_str())
}

/// Why the workload has to go, in words; none where copies can be moved.
pub fn reason(
    standing: Option<&Plan>,
    plan: &Plan,
    moved: bool,
    volume: Option<&StandingVolume>,
    needed: u64,
) -> Option<String> {
    if moved && let Some(standing) = standing {
        let (was, is) = (words(standing), words(plan));
        return Some(if was == is {
            format!("copies get other devices for {is} than they have")
        } else {
            format!("copies get {is} instead of {was}")
        });
    }
    let have = volume.and_then(StandingVolume::bytes)?;
    (have < needed).then(|| {
        format!("the model needs a volume of {needed} bytes and the standing one has {have}")
    })
}

fn words(plan: &Plan) -> String {
    let what = match (&plan.profile, plan.sharing_mode) {
        (Some(profile), planner::SharingMode::Dedicated) => format!("partition {profile}"),
        (_, planner::SharingMode::Shared) => format!("a share of {} bytes", plan.memory_bytes),
        (None, _) => "whole device".to_owned(),
    };
    format!(
        "{} × {what} of {}",
        plan.devices_per_replica, plan.device_class_name
    )
}

/// What is left of an earlier workload: none of it may be there when the next one is
/// made. `needed` is the size of a volume in bytes.
///
/// A pod or a claim that no StatefulSet owns is taken over by the next one, as
/// Kubernetes does, unless the claim is too small.
pub fn leftovers(
    order: &InferenceService,
    statefulset: Option<&StatefulSet>,
    pods: &[Arc<Pod>],
    volumes: &[Arc<PersistentVolumeClaim>],
    needed: u64,
) -> Vec<String> {
    let standing = statefulset.filter(|s| is_owned(order, *s));
    if let Some(standing) = standing {
        let ending = standing.metadata.deletion_timestamp.is_some();
        return ending
            .then(|| format!("StatefulSet {}", standing.name_any()))
            .into_iter()
            .collect();
    }
    let of_a_set = |owners: &[k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference]| {
        owners.iter().any(|o| o.kind == "StatefulSet")
    };
    let pods = pods
        .iter()
        .filter(|p| p.metadata.deletion_timestamp.is_some() || of_a_set(p.owner_references()))
        .map(|p| format!("Pod {}", p.name_any()));
    let prefix = format!("{STORAGE}-{}-", order.name_any());
    let volumes = volumes
        .iter()
        .filter(|v| v.name_any().starts_with(&prefix))
        .filter_map(|v| {
            let name = format!("PersistentVolumeClaim {}", v.name_any());
            if v.meta().deletion_timestamp.is_some() || of_a_set(v.owner_references()) {
                return Some(name);
            }
            let size = v.spec.as_ref()?.resources.as_ref()?.requests.as_ref()?;
            let size: dra_cel::Quantity = size.get("storage")?.0.parse().ok()?;
            let have = size.to_bytes()?;
            (have < needed).then(|| {
                format!("{name} ({have} bytes, {needed} are needed; delete it, nothing else does)")
            })
        });
    pods.chain(volumes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::tests as fixture;
    use serde_json::{Value, json};

    fn pod(metadata: Value) -> Vec<Arc<Pod>> {
        vec![Arc::new(
            serde_json::from_value(json!({"metadata": metadata})).unwrap(),
        )]
    }

    fn claim(metadata: Value, size: &str) -> Vec<Arc<PersistentVolumeClaim>> {
        vec![Arc::new(
            serde_json::from_value(json!({"metadata": metadata,
                "spec": {"resources": {"requests": {"storage": size}}}}))
            .unwrap(),
        )]
    }

    fn by_a_set(name: &str) -> Value {
        json!({"name": name, "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "support-llm", "uid": "gone"}]})
    }

    fn ending(name: &str) -> Value {
        json!({"name": name, "deletionTimestamp": "2026-01-01T00:00:00Z"})
    }

    fn left(pods: &[Arc<Pod>], volumes: &[Arc<PersistentVolumeClaim>]) -> Vec<String> {
        leftovers(&fixture::order(""), None, pods, volumes, 1 << 30)
    }

    #[test]
    fn the_next_workload_waits_for_what_the_earlier_one_had_a_115() {
        assert!(left(&[], &[]).is_empty());
        for metadata in [by_a_set("support-llm-0"), ending("support-llm-0")] {
            assert_eq!(left(&pod(metadata), &[]), ["Pod support-llm-0"]);
        }
        for metadata in [
            by_a_set("storage-support-llm-0"),
            ending("storage-support-llm-0"),
        ] {
            assert_eq!(
                left(&[], &claim(metadata, "9Gi")),
                ["PersistentVolumeClaim storage-support-llm-0"]
            );
        }
    }

    #[test]
    fn what_nobody_owns_is_taken_over_unless_it_is_too_small_a_115() {
        let own = json!({"name": "storage-support-llm-0"});
        assert!(left(&pod(json!({"name": "support-llm-0"})), &[]).is_empty());
        assert!(left(&[], &claim(own.clone(), "1Gi")).is_empty());
        let small = left(&[], &claim(own, "1Mi"));
        assert!(small[0].contains("1048576 bytes"), "{small:?}");
        let other =
            json!({"name": "notes-support-llm-0", "deletionTimestamp": "2026-01-01T00:00:00Z"});
        assert!(left(&[], &claim(other, "1Mi")).is_empty());
    }

    #[test]
    fn a_set_that_stands_waits_for_nothing_and_one_that_goes_for_itself() {
        let set = |metadata: Value| -> StatefulSet {
            serde_json::from_value(json!({"metadata": metadata})).unwrap()
        };
        let mut metadata = json!({"name": "support-llm", "ownerReferences": [
            {"apiVersion": "a", "kind": "InferenceService", "name": "support-llm", "uid": "8f0c"}]});
        let order = fixture::order("");
        let copies = pod(by_a_set("support-llm-0"));
        assert!(leftovers(&order, Some(&set(metadata.clone())), &copies, &[], 1).is_empty());
        metadata["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        assert_eq!(
            leftovers(&order, Some(&set(metadata)), &copies, &[], 1),
            ["StatefulSet support-llm"]
        );
    }

    #[test]
    fn another_placement_and_a_larger_volume_are_told_in_words_a_115() {
        let (small, large) = (fixture::plan(1), {
            let mut plan = fixture::plan(1);
            plan.device_class_name = "gpu.ai.deckhouse.io".into();
            plan.profile = None;
            plan
        });
        let volume = StandingVolume {
            storage_class: None,
            size: crate::render::bytes(1 << 30),
        };
        let reason = |moved, needed| reason(Some(&small), &large, moved, Some(&volume), needed);
        assert_eq!(
            reason(true, 1).unwrap(),
            "copies get 1 × whole device of gpu.ai.deckhouse.io instead of 1 × partition 1g.10gb of mig.ai.deckhouse.io"
        );
        assert_eq!(reason(false, 1 << 30), None);
        assert!(reason(false, 2 << 30).unwrap().contains("2147483648 bytes"));
    }
}
