//! The StatefulSet: an always-current template whose running copies stay.

use super::{Input, STORAGE, bytes, labels, metadata, pod};
use crate::recipe::memory;
use k8s_openapi::api::apps::v1::{
    StatefulSet, StatefulSetPersistentVolumeClaimRetentionPolicy, StatefulSetSpec,
    StatefulSetUpdateStrategy,
};
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimSpec, VolumeResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::ResourceExt;

/// Volumes that stand already: claim templates cannot be changed.
#[derive(Clone, Debug, PartialEq)]
pub struct StandingVolume {
    /// StorageClass that the claims were made with.
    pub storage_class: Option<String>,
    /// Their size, in bytes.
    pub size: Quantity,
}

impl StandingVolume {
    /// The volumes of a standing StatefulSet.
    pub fn of(standing: &StatefulSet) -> Option<Self> {
        let templates = standing.spec.volume_claim_templates.as_ref()?;
        let claim = templates.iter().find(|c| c.name_any() == STORAGE)?;
        let spec = claim.spec.as_ref()?;
        let size = spec
            .resources
            .as_ref()?
            .requests
            .as_ref()?
            .get("storage")?
            .clone();
        Some(StandingVolume {
            storage_class: spec.storage_class_name.clone(),
            size,
        })
    }

    /// Bytes, where the size is a number of them.
    pub fn bytes(&self) -> Option<u64> {
        self.size.0.parse::<dra_cel::Quantity>().ok()?.to_bytes()
    }
}

/// The order's StatefulSet, on the claim template of the given name.
pub fn statefulset(
    input: &Input<'_>,
    claim_template: &str,
    standing: Option<&StandingVolume>,
) -> StatefulSet {
    let order = input.order.name_any();
    let fresh = StandingVolume {
        storage_class: input.storage_class.map(str::to_owned),
        size: bytes(memory::volume(input.recipe, input.facts)),
    };
    let volume = standing.unwrap_or(&fresh);
    StatefulSet {
        metadata: metadata(input.order, order.clone()),
        spec: StatefulSetSpec {
            replicas: Some(input.replicas),
            service_name: Some(order.clone()),
            selector: LabelSelector {
                match_labels: Some(labels(&order)),
                ..LabelSelector::default()
            },
            template: pod::template(input, claim_template),
            // Running copies stay when the template changes.
            update_strategy: Some(StatefulSetUpdateStrategy {
                type_: Some("OnDelete".to_owned()),
                rolling_update: None,
            }),
            // A copy that finds no device must not hold up the others.
            pod_management_policy: Some("Parallel".to_owned()),
            // A volume holds nothing that cannot be downloaded again. Kept, it would be
            // paid for after each copy that a move raised beside the others.
            persistent_volume_claim_retention_policy: Some(
                StatefulSetPersistentVolumeClaimRetentionPolicy {
                    when_deleted: Some("Delete".to_owned()),
                    when_scaled: Some("Delete".to_owned()),
                },
            ),
            revision_history_limit: Some(2),
            volume_claim_templates: Some(vec![storage_claim(&order, volume)]),
            ..StatefulSetSpec::default()
        },
        status: None,
    }
}

fn storage_claim(order: &str, volume: &StandingVolume) -> PersistentVolumeClaim {
    PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(STORAGE.to_owned()),
            labels: Some(labels(order)),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeClaimSpec {
            access_modes: Some(vec!["ReadWriteOnce".to_owned()]),
            storage_class_name: volume.storage_class.clone(),
            resources: Some(VolumeResourceRequirements {
                requests: Some([("storage".to_owned(), volume.size.clone())].into()),
                limits: None,
            }),
            ..PersistentVolumeClaimSpec::default()
        }),
        status: None,
    }
}
