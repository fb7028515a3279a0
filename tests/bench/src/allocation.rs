//! Claims as a scheduler leaves them: allocated to one device of a driver.
//!
//! In: a driver and the names of devices. Out: claims that its kubelet may prepare. No scheduler runs;
//! the allocation is written as it would write it.

use anyhow::{Context, Result};
use e2e::kubelet::Claim;
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;

use crate::driver::Driver;

/// Claims that are created at a time.
const AT_ONCE: usize = 8;

/// Creates `count` claims in `namespace`, the first allocated to the first of `devices` and so on,
/// beginning again when there are no more.
pub(crate) async fn create(
    client: &Client,
    namespace: &str,
    driver: &Driver,
    devices: &[String],
    count: usize,
) -> Result<Vec<Claim>> {
    stream::iter(devices.iter().cycle().take(count))
        .map(|device| create_one(client, namespace, driver, device))
        .buffered(AT_ONCE)
        .try_collect()
        .await
}

async fn create_one(
    client: &Client,
    namespace: &str,
    driver: &Driver,
    device: &str,
) -> Result<Claim> {
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
    let claim: ResourceClaim = serde_json::from_value(json!({
        "metadata": {"generateName": "bench-"},
        "spec": {"devices": {"requests": [
            {"name": "gpu", "exactly": {"deviceClassName": driver.name, "count": 1}}
        ]}},
    }))?;
    let created = claims
        .create(&PostParams::default(), &claim)
        .await
        .context("create a claim")?;
    let name = created.name_any();
    let status = json!({"status": {"allocation": {"devices": {"results": [
        {"request": "gpu", "driver": driver.name, "pool": driver.pool, "device": device}
    ]}}}});
    claims
        .patch_status(&name, &PatchParams::default(), &Patch::Merge(status))
        .await
        .with_context(|| format!("allocate {device} to claim {name}"))?;
    Ok(Claim {
        namespace: namespace.to_owned(),
        uid: created
            .uid()
            .context("the API server gave a claim no UID")?,
        name,
    })
}
