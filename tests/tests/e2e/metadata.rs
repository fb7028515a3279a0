//! What a container and its claim tell of a device, through kubelet and container runtime.

use anyhow::{Context, ensure};
use e2e::cluster::devices::{DRIVER, instances};
use e2e::cluster::{Cluster, container_file, wait};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};

use crate::scene::*;

/// Where the container of a pod that calls its claim `model` finds the file of request `gpu`.
const FILE: &str = "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/model/gpu/gpu.ai.deckhouse.io-metadata.json";

#[tokio::test]
async fn a_container_and_its_claim_tell_the_instance_that_the_hardware_has() -> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("metadata").await?;
    let templates: Api<ResourceClaimTemplate> = Api::namespaced(cluster.client.clone(), &namespace);
    let template = serde_json::from_value(json!({
        "metadata": { "name": "part" },
        "spec": { "spec": { "devices": { "requests": [{
            "name": "gpu",
            "firstAvailable": [{
                "name": "small",
                "deviceClassName": "mig.ai.deckhouse.io",
            }],
        }] } } },
    }))?;
    templates.create(&PostParams::default(), &template).await?;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &namespace);
    let claims = json!({ "name": "model", "resourceClaimTemplateName": "part" });
    let pod = idle_pod("reader", &claims, None)?;
    pods.create(&PostParams::default(), &pod).await?;
    let pod = wait::until(&pods, "reader", "run", wait::LONG, running).await?;
    let status = pod.status.context("a pod without status")?;
    let node = pod.spec.and_then(|spec| spec.node_name);
    let node = node.context("a pod that runs nowhere")?;
    let container = status.container_statuses.into_iter().flatten().next();
    let container = container.and_then(|c| c.container_id).context("no id")?;
    let claim = status.resource_claim_statuses.into_iter().flatten().next();
    let claim = claim
        .and_then(|c| c.resource_claim_name)
        .context("no claim")?;

    let text = container_file(&cluster, &node, &container, FILE).await?;
    let objects = serde_json::Deserializer::from_str(&text).into_iter::<Value>();
    let objects: Vec<Value> = objects.collect::<Result<_, _>>()?;
    let versions: Vec<&Value> = objects.iter().map(|object| &object["apiVersion"]).collect();
    ensure!(
        versions
            == [
                "metadata.resource.k8s.io/v1beta1",
                "metadata.resource.k8s.io/v1alpha1"
            ],
        "the file holds {versions:?}"
    );
    let request = &objects[0]["requests"][0];
    ensure!(request["name"] == "gpu/small", "{request}");
    let device = &request["devices"][0];
    let uuid = device["attributes"]["uuid"]["string"].as_str();
    let uuid = uuid.context("the container learns no UUID")?;
    let name = device["name"].as_str().context("a device without name")?;
    let gpu = name.split("-mig-").next().unwrap_or(name);
    let hardware = cluster
        .on_node(&node, &["cat", "/opt/fake-gpu/state.json"])
        .await?;
    ensure!(
        uuid.starts_with("MIG-") && hardware.contains(uuid),
        "{uuid}"
    );

    let claims: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), &namespace);
    let told = |claim: &ResourceClaim| {
        let status = claim.status.as_ref();
        let devices = status.and_then(|status| status.devices.as_ref());
        devices.into_iter().flatten().any(|told| {
            let data = told.data.as_ref().map(|data| &data.0["uuid"]);
            told.driver == DRIVER && told.device == name && data == Some(&json!(uuid))
        })
    };
    wait::until(&claims, &claim, "tell the same UUID", wait::SHORT, told).await?;

    let before = instances(&cluster, &node, gpu).await?;
    cluster.delete_namespace(&namespace).await?;
    let start = start_of(name)?;
    let mut after = before;
    after.remove(&start);
    expect_instances(&cluster, &node, gpu, &after).await
}
