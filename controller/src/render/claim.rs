//! The claim template: the plan as a device request.

use super::{CLAIM, Input, labels, metadata, short_hash};
use k8s_openapi::api::resource::v1::{
    CELDeviceSelector, CapacityRequirements, DeviceClaim, DeviceRequest, DeviceSelector,
    ExactDeviceRequest, ResourceClaimSpec, ResourceClaimTemplate, ResourceClaimTemplateSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;

/// The order's claim template. A template cannot be changed, so its name holds
/// the hash of its content.
pub fn claim_template(input: &Input<'_>) -> ResourceClaimTemplate {
    let plan = input.plan;
    let selector = |expression: &String| DeviceSelector {
        cel: Some(CELDeviceSelector {
            expression: expression.clone(),
        }),
    };
    let selectors: Vec<DeviceSelector> = plan.selectors.iter().map(selector).collect();
    let requests: std::collections::BTreeMap<String, Quantity> = plan
        .capacity_requests
        .iter()
        .map(|(name, q)| (name.clone(), Quantity(q.to_string())))
        .collect();
    let spec = ResourceClaimSpec {
        devices: Some(DeviceClaim {
            requests: Some(vec![DeviceRequest {
                name: CLAIM.to_owned(),
                exactly: Some(ExactDeviceRequest {
                    device_class_name: plan.device_class_name.clone(),
                    allocation_mode: Some("ExactCount".to_owned()),
                    count: Some(i64::from(plan.devices_per_replica)),
                    selectors: (!selectors.is_empty()).then_some(selectors),
                    capacity: (!requests.is_empty()).then_some(CapacityRequirements {
                        requests: Some(requests),
                    }),
                    ..ExactDeviceRequest::default()
                }),
                ..DeviceRequest::default()
            }]),
            ..DeviceClaim::default()
        }),
    };
    let order = input.order.name_any();
    let name = format!("{order}-{}", short_hash(&spec));
    ResourceClaimTemplate {
        metadata: metadata(input.order, name),
        spec: Some(ResourceClaimTemplateSpec {
            // Claims are known as the order's by these labels.
            metadata: Some(ObjectMeta {
                labels: Some(labels(&order)),
                ..ObjectMeta::default()
            }),
            spec: Some(spec),
        }),
    }
}
