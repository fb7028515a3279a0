//! The node service, in both versions that kubelets speak.
//!
//! In: claims by name. Out: one entry for each, devices or an error. Never: an error of
//! the whole call for the sake of one claim.

use std::collections::HashMap;

use kubelet_api::dra::{v1, v1beta1};
use tonic::{Request, Response, Status};

use crate::claims::Claims;
use crate::claims::checkpoint::{ClaimRef, PreparedDevice};

#[derive(Clone)]
pub(super) struct NodeService {
    claims: Claims,
}

impl NodeService {
    pub(super) fn new(claims: Claims) -> Self {
        Self { claims }
    }

    async fn prepare(&self, claim: ClaimRef) -> (String, Result<Vec<PreparedDevice>, String>) {
        let uid = claim.uid.clone();
        let result = self.claims.prepare(claim).await;
        (uid, result.map_err(|error| error.to_string()))
    }

    async fn unprepare(&self, claim: ClaimRef) -> (String, String) {
        let uid = claim.uid.clone();
        let result = self.claims.unprepare(claim).await;
        let error = result.err().map(|error| error.to_string());
        (uid, error.unwrap_or_default())
    }
}

#[tonic::async_trait]
impl v1::dra_plugin_server::DraPlugin for NodeService {
    async fn node_prepare_resources(
        &self,
        request: Request<v1::NodePrepareResourcesRequest>,
    ) -> Result<Response<v1::NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        let calls = claims.into_iter().map(|c| self.prepare(claim_ref(c)));
        let claims = futures::future::join_all(calls)
            .await
            .into_iter()
            .map(|(uid, result)| {
                let response = match result {
                    Ok(devices) => v1::NodePrepareResourceResponse {
                        devices: devices.into_iter().map(device).collect(),
                        error: String::new(),
                    },
                    Err(error) => v1::NodePrepareResourceResponse {
                        devices: Vec::new(),
                        error,
                    },
                };
                (uid, response)
            });
        Ok(Response::new(v1::NodePrepareResourcesResponse {
            claims: claims.collect(),
        }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<v1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<v1::NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        let calls = claims.into_iter().map(|c| self.unprepare(claim_ref(c)));
        let claims = futures::future::join_all(calls).await.into_iter();
        Ok(Response::new(v1::NodeUnprepareResourcesResponse {
            claims: claims
                .map(|(uid, error)| (uid, v1::NodeUnprepareResourceResponse { error }))
                .collect(),
        }))
    }
}

/// The older version is the same contract without share ids.
#[tonic::async_trait]
impl v1beta1::dra_plugin_server::DraPlugin for NodeService {
    async fn node_prepare_resources(
        &self,
        request: Request<v1beta1::NodePrepareResourcesRequest>,
    ) -> Result<Response<v1beta1::NodePrepareResourcesResponse>, Status> {
        let request = v1::NodePrepareResourcesRequest {
            claims: newer(request.into_inner().claims),
        };
        let response =
            v1::dra_plugin_server::DraPlugin::node_prepare_resources(self, Request::new(request))
                .await?;
        let older = |d: v1::Device| v1beta1::Device {
            request_names: d.request_names,
            pool_name: d.pool_name,
            device_name: d.device_name,
            cdi_device_ids: d.cdi_device_ids,
        };
        let claims: HashMap<_, _> = response
            .into_inner()
            .claims
            .into_iter()
            .map(|(uid, r)| {
                let devices = r.devices.into_iter().map(older).collect();
                (
                    uid,
                    v1beta1::NodePrepareResourceResponse {
                        devices,
                        error: r.error,
                    },
                )
            })
            .collect();
        Ok(Response::new(v1beta1::NodePrepareResourcesResponse {
            claims,
        }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<v1beta1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<v1beta1::NodeUnprepareResourcesResponse>, Status> {
        let request = v1::NodeUnprepareResourcesRequest {
            claims: newer(request.into_inner().claims),
        };
        let response =
            v1::dra_plugin_server::DraPlugin::node_unprepare_resources(self, Request::new(request))
                .await?;
        let claims: HashMap<_, _> = response
            .into_inner()
            .claims
            .into_iter()
            .map(|(uid, r)| {
                (
                    uid,
                    v1beta1::NodeUnprepareResourceResponse { error: r.error },
                )
            })
            .collect();
        Ok(Response::new(v1beta1::NodeUnprepareResourcesResponse {
            claims,
        }))
    }
}

fn newer(claims: Vec<v1beta1::Claim>) -> Vec<v1::Claim> {
    let newer = |c: v1beta1::Claim| v1::Claim {
        namespace: c.namespace,
        uid: c.uid,
        name: c.name,
    };
    claims.into_iter().map(newer).collect()
}

fn claim_ref(claim: v1::Claim) -> ClaimRef {
    ClaimRef {
        namespace: claim.namespace,
        name: claim.name,
        uid: claim.uid,
    }
}

fn device(device: PreparedDevice) -> v1::Device {
    v1::Device {
        request_names: vec![device.request],
        pool_name: device.pool,
        device_name: device.device,
        cdi_device_ids: device.cdi_device_ids,
        share_id: device.share_id,
    }
}
