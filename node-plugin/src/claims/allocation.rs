//! What a claim's allocation asks of this driver.
//!
//! In: a ResourceClaim and the identity that the kubelet gave. Out: this driver's
//! devices in it, each with its base request. Never: another driver's results or
//! configuration.

use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceRequestAllocationResult, ResourceClaim,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::checkpoint::ClaimRef;
use super::config;
use super::sharing::amount;
use crate::DRIVER;

/// One device that the scheduler gave to the claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allocated {
    /// The request, without a subrequest.
    pub request: String,
    /// Which of the request's alternatives it is, where it has some.
    pub subrequest: Option<String>,
    /// Its pool.
    pub pool: String,
    /// Its name.
    pub device: String,
    /// The share of the device, where several claims hold it.
    pub share_id: Option<String>,
    /// Granted for administration.
    pub admin_access: bool,
    /// Device memory that the scheduler granted of a shared device, in bytes.
    pub memory_bytes: Option<u64>,
    /// Compute that the scheduler granted of a shared device, in percent.
    pub cores_percent: Option<u32>,
}

/// A claim that cannot be prepared as it stands.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocationError {
    /// Another claim has taken the name.
    #[error(
        "the claim was replaced: its UID is now {found}; the pod that refers to it has to be recreated"
    )]
    Replaced {
        /// The UID of the claim that is there.
        found: String,
    },
    /// The scheduler has not allocated it, or the allocation was taken back.
    #[error(
        "the claim is not allocated; it has to be allocated by the scheduler before a pod can use it"
    )]
    NotAllocated,
    /// A device of a pool that is not this node's.
    #[error("request {request}: device {device} is in pool {pool}, this node serves pool {node}")]
    WrongPool {
        /// The request.
        request: String,
        /// The device.
        device: String,
        /// The pool it is in.
        pool: String,
        /// This node's pool.
        node: String,
    },
    /// An amount of a shared device that is not one.
    #[error(
        "request {request}: the consumed capacity {capacity} of device {device} is {amount:?}, which is not a quantity that fits; delete the pod, so that its claim is allocated anew"
    )]
    Amount {
        /// The request.
        request: String,
        /// The device.
        device: String,
        /// Which capacity.
        capacity: String,
        /// What the allocation says.
        amount: String,
    },
    /// A configuration for this driver that it does not understand.
    #[error("{requests}: the opaque configuration of driver {DRIVER} ({source_of_config}) is not valid: {reason}; correct it in the claim, its template or its device class", source_of_config = .origin)]
    Config {
        /// The requests it is for.
        requests: String,
        /// `FromClass` or `FromClaim`.
        origin: String,
        /// Which field is wrong.
        reason: String,
    },
}

/// Reads this driver's part of an allocation.
///
/// # Errors
/// When the claim is another one, is not allocated, or asks for what cannot be done.
pub fn read(
    object: &ResourceClaim,
    claim: &ClaimRef,
    node: &str,
) -> Result<Vec<Allocated>, AllocationError> {
    let allocation = of_claim(object, claim)?;
    let Some(devices) = allocation.devices.as_ref() else {
        return Ok(Vec::new());
    };

    for entry in devices.config.iter().flatten() {
        let Some(opaque) = entry
            .opaque
            .as_ref()
            .filter(|opaque| opaque.driver == DRIVER)
        else {
            continue;
        };
        config::decode(&opaque.parameters.0).map_err(|reason| AllocationError::Config {
            requests: match entry.requests.as_deref() {
                None | Some([]) => "all requests".to_owned(),
                Some([one]) => format!("request {one}"),
                Some(several) => format!("requests {}", several.join(", ")),
            },
            origin: entry.source.clone(),
            reason,
        })?;
    }

    devices
        .results
        .iter()
        .flatten()
        .filter(|result| result.driver == DRIVER)
        .map(|result| {
            let (request, subrequest) = match result.request.split_once('/') {
                Some((request, subrequest)) => (request.to_owned(), Some(subrequest.to_owned())),
                None => (result.request.clone(), None),
            };
            if result.pool != node {
                return Err(AllocationError::WrongPool {
                    request,
                    device: result.device.clone(),
                    pool: result.pool.clone(),
                    node: node.to_owned(),
                });
            }
            let consumed = |capacity: &str| consumed(result, &request, capacity);
            Ok(Allocated {
                memory_bytes: consumed("memory")?,
                cores_percent: consumed("cores")?
                    .map(|cores| u32::try_from(cores).unwrap_or(u32::MAX)),
                request,
                subrequest,
                pool: result.pool.clone(),
                device: result.device.clone(),
                share_id: result.share_id.clone(),
                admin_access: result.admin_access.unwrap_or(false),
            })
        })
        .collect()
}

/// What was granted of one capacity of a shared device, rounded as the scheduler did it.
/// A server that does not keep amounts tells none.
fn consumed(
    result: &DeviceRequestAllocationResult,
    request: &str,
    capacity: &str,
) -> Result<Option<u64>, AllocationError> {
    let consumed = result.consumed_capacity.as_ref();
    // A name without a domain is in the driver's own.
    let amount = consumed.and_then(|consumed| {
        let qualified = format!("{DRIVER}/{capacity}");
        consumed.get(capacity).or_else(|| consumed.get(&qualified))
    });
    let Some(Quantity(amount)) = amount else {
        return Ok(None);
    };
    match amount::parse(amount) {
        Some(number) => Ok(Some(number)),
        None => Err(AllocationError::Amount {
            request: request.to_owned(),
            device: result.device.clone(),
            capacity: capacity.to_owned(),
            amount: amount.clone(),
        }),
    }
}

/// What the pod calls the claim, where it was made from a template: the name in its
/// `spec.resourceClaims`, which the resource claim controller notes on the claim.
#[must_use]
pub fn pod_claim_name(object: &ResourceClaim) -> Option<String> {
    let annotations = object.metadata.annotations.as_ref()?;
    let name = annotations.get("resource.kubernetes.io/pod-claim-name")?;
    (!name.is_empty()).then(|| name.clone())
}

/// Why a claim cannot be in use on this node; `None` while it may be.
#[must_use]
pub fn why_unused(object: &ResourceClaim, claim: &ClaimRef, node: &str) -> Option<String> {
    let allocation = match of_claim(object, claim) {
        Ok(allocation) => allocation,
        Err(error) => return Some(error.to_string()),
    };
    let mut results = allocation
        .devices
        .iter()
        .flat_map(|devices| devices.results.iter().flatten());
    let here = results.any(|result| result.driver == DRIVER && result.pool == node);
    (!here).then(|| "it is allocated elsewhere now".to_owned())
}

/// The allocation of a claim, if the object is still the one that was meant.
fn of_claim<'a>(
    object: &'a ResourceClaim,
    claim: &ClaimRef,
) -> Result<&'a AllocationResult, AllocationError> {
    let found = object.metadata.uid.as_deref().unwrap_or_default();
    if found != claim.uid {
        return Err(AllocationError::Replaced {
            found: found.to_owned(),
        });
    }
    let status = object.status.as_ref();
    status
        .and_then(|status| status.allocation.as_ref())
        .ok_or(AllocationError::NotAllocated)
}

#[cfg(test)]
impl Allocated {
    /// A whole GPU.
    pub(crate) fn for_test() -> Self {
        Self {
            request: "gpu".into(),
            subrequest: None,
            pool: "node".into(),
            device: "gpu-0000-65-00-0".into(),
            share_id: None,
            admin_access: false,
            memory_bytes: None,
            cores_percent: None,
        }
    }
}
