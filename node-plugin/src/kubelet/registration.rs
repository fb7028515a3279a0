//! The registration service.
//!
//! In: the kubelet's two calls. Out: who we are, and whether the kubelet took us, in
//! readiness and the log. Never: an exit: a kubelet that refuses may be replaced by
//! one that does not.

use std::path::PathBuf;

use kubelet_api::registration::v1::registration_server::Registration;
use kubelet_api::registration::v1::{
    DRA_PLUGIN, InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use tonic::{Request, Response, Status};

use crate::DRIVER;
use crate::readiness::{Part, Readiness};

pub(super) struct RegistrationService {
    endpoint: PathBuf,
    readiness: Readiness,
}

impl RegistrationService {
    pub(super) fn new(endpoint: PathBuf, readiness: Readiness) -> Self {
        readiness.not_ready(
            Part::Kubelet,
            "the kubelet has not registered this plugin yet",
        );
        Self {
            endpoint,
            readiness,
        }
    }
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: DRA_PLUGIN.to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.endpoint.to_string_lossy().into_owned(),
            // The kubelet takes the first node service that it knows, so those come
            // first, and the newest health service that it knows itself.
            supported_versions: vec![
                kubelet_api::dra::v1::SERVICE.to_owned(),
                kubelet_api::dra::v1beta1::SERVICE.to_owned(),
                kubelet_api::health::v1::SERVICE.to_owned(),
                kubelet_api::health::v1alpha1::SERVICE.to_owned(),
            ],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        if status.plugin_registered {
            tracing::info!("The kubelet registered this plugin.");
            self.readiness.ready(Part::Kubelet);
        } else {
            let reason = format!(
                "the kubelet refused to register this plugin: {}; it has to be version 1.34 or \
                 later with the feature gate DynamicResourceAllocation on",
                status.error
            );
            tracing::error!(error = status.error, "{reason}.");
            self.readiness.not_ready(Part::Kubelet, &reason);
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
