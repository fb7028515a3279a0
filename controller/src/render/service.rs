//! The Service: the order's name, port 80.

use super::{Input, RUNTIME_PORT, labels, metadata};
use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;

/// The order's Service.
pub fn service(input: &Input<'_>) -> Service {
    let order = input.order.name_any();
    Service {
        metadata: metadata(input.order, order.clone()),
        spec: Some(ServiceSpec {
            type_: Some("ClusterIP".to_owned()),
            selector: Some(labels(&order)),
            ports: Some(vec![ServicePort {
                name: Some("service-port".to_owned()),
                port: 80,
                target_port: Some(IntOrString::String("http".to_owned())),
                protocol: Some("TCP".to_owned()),
                ..ServicePort::default()
            }]),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

/// The runtime's port as the API has it.
pub(super) fn runtime_port() -> IntOrString {
    IntOrString::Int(RUNTIME_PORT)
}
