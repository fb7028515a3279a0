//! What is left of an order that is deleted: nothing.

use std::path::Path;

use anyhow::{Context, ensure};
use e2e::charts::repository;
use e2e::cluster::hub::SMOLLM;
use e2e::cluster::order::{Order, put_class};
use e2e::cluster::{Cluster, PLATFORM_NAMESPACE, wait};
use inference_api::{InferenceService, InferenceServiceClass};
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret, Service};
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde_json::json;

use crate::scene::*;

#[tokio::test]
async fn an_order_goes_whole_without_its_class_and_without_a_controller_a_087_a_122_a_123()
-> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("deletion").await?;
    let policy = json!({ "allowedPlacementTypes": ["WholeDevice"] });
    put_class(&cluster.client, "e2e-going", policy).await?;
    let order = Order::file(&cluster, &namespace, "order", "e2e-going", SMOLLM).await?;
    order.ready().await?;

    // Its class goes first: the order says so, and serves.
    let classes: Api<InferenceServiceClass> = Api::all(cluster.client.clone());
    classes
        .delete("e2e-going", &DeleteParams::default())
        .await?;
    order.refused("ClassResolved", "ClassNotFound").await?;
    let answer = order.chat(QUESTION).await?;
    ensure!(answer.contains("Paris"), "the order answered: {answer}");

    // Then every process of the platform that could help; whatever comes of it, they come back.
    scale_controller(&cluster, 0).await?;
    let gone = leaves_nothing(&cluster, &order).await;
    scale_controller(&cluster, 1).await?;
    gone?;
    cluster.delete_namespace(&namespace).await
}

#[tokio::test]
async fn the_platform_is_removed_only_when_that_is_confirmed_and_orders_stay_deletable_a_120_a_122()
-> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("uninstall").await?;
    let policy = json!({ "allowedPlacementTypes": ["WholeDevice"] });
    put_class(&cluster.client, "e2e-remaining", policy).await?;
    let order = Order::file(&cluster, &namespace, "order", "e2e-remaining", SMOLLM).await?;
    order.ready().await?;
    let installed = [
        "get",
        "values",
        "controller",
        "--output",
        "yaml",
        "--namespace",
        PLATFORM_NAMESPACE,
    ];
    let installed = cluster.helm(&installed).await?;
    let values = tempfile::NamedTempFile::new()?;
    std::fs::write(values.path(), installed)?;

    let outcome = uninstalled(&cluster, &order, values.path()).await;
    // Whatever came of it, the next test finds the platform as it was installed.
    let ended = roll_back(&cluster).await;
    let restored = install(&cluster, values.path(), false).await;
    outcome.and(restored.or(ended))?;
    cluster.delete_namespace(&namespace).await
}

async fn uninstalled(cluster: &Cluster, order: &Order, values: &Path) -> Outcome {
    let uninstall = [
        "uninstall",
        "controller",
        "--namespace",
        PLATFORM_NAMESPACE,
        "--wait",
    ];
    let refused = cluster.helm(&uninstall).await.err();
    let refused = refused.context("the platform was removed without a question")?;
    let refused = format!("{refused:#}");
    ensure!(
        refused.contains(&order.namespace) && refused.contains("e2e-remaining"),
        "the order and its class are not listed: {refused}"
    );
    let answer = order.chat(QUESTION).await?;
    ensure!(answer.contains("Paris"), "the order answered: {answer}");

    roll_back(cluster).await?;
    install(cluster, values, true).await?;
    cluster.helm(&uninstall).await?;
    wait::gone(&order.api::<StatefulSet>(), &order.name, wait::LONG).await?;
    wait::gone(&order.api::<Service>(), &order.name, wait::LONG).await?;
    wait::gone(
        &order.api::<Pod>(),
        &format!("{}-0", order.name),
        wait::LONG,
    )
    .await?;
    let held = cluster.allocated_devices(&order.namespace).await?;
    ensure!(
        held.is_empty(),
        "without a platform the order holds {held:?}"
    );
    let classes: Api<InferenceServiceClass> = Api::all(cluster.client.clone());
    classes
        .get("e2e-remaining")
        .await
        .context("an administrator's class was removed")?;
    // The order stayed, and nothing holds it.
    let orders = order.api::<InferenceService>();
    orders.delete(&order.name, &DeleteParams::default()).await?;
    wait::gone(&orders, &order.name, wait::SHORT).await
}

/// Ends a removal that was refused: Helm takes it for one that is under way.
async fn roll_back(cluster: &Cluster) -> Outcome {
    let history = [
        "history",
        "controller",
        "--namespace",
        PLATFORM_NAMESPACE,
        "--output",
        "json",
    ];
    let history: serde_json::Value = serde_json::from_str(&cluster.helm(&history).await?)?;
    let last = history
        .as_array()
        .and_then(|all| all.last())
        .context("no revision")?;
    let (revision, status) = (last["revision"].to_string(), &last["status"]);
    if status == "uninstalling" {
        let rollback = [
            "rollback",
            "controller",
            &revision,
            "--namespace",
            PLATFORM_NAMESPACE,
        ];
        cluster.helm(&rollback).await?;
    }
    Ok(())
}

/// Installs the controller's chart, or upgrades to it.
async fn install(cluster: &Cluster, values: &Path, confirm: bool) -> Outcome {
    let chart = repository().join("controller/chart");
    let (chart, values) = (chart.to_string_lossy(), values.to_string_lossy());
    let confirm = format!("uninstall.confirm={confirm}");
    let arguments = [
        "upgrade",
        "--install",
        "controller",
        &chart,
        "--namespace",
        PLATFORM_NAMESPACE,
        "--values",
        &values,
        "--set",
        &confirm,
        "--wait",
        "--timeout",
        "120s",
    ];
    cluster.helm(&arguments).await.map(drop)
}

/// Deletes the order and waits until everything that was made for it is gone.
async fn leaves_nothing(cluster: &Cluster, order: &Order) -> Outcome {
    let orders = order.api::<InferenceService>();
    orders.delete(&order.name, &DeleteParams::default()).await?;
    wait::gone(&orders, &order.name, wait::SHORT).await?;
    wait::gone(&order.api::<StatefulSet>(), &order.name, wait::LONG).await?;
    wait::gone(&order.api::<Service>(), &order.name, wait::LONG).await?;
    wait::gone(
        &order.api::<Pod>(),
        &format!("{}-0", order.name),
        wait::LONG,
    )
    .await?;
    let token = format!("{}-token", order.name);
    wait::gone(&order.api::<Secret>(), &token, wait::LONG).await?;
    let everything = ListParams::default();
    for volume in order
        .api::<PersistentVolumeClaim>()
        .list(&everything)
        .await?
    {
        let name = volume
            .metadata
            .name
            .context("a volume claim without name")?;
        wait::gone(&order.api::<PersistentVolumeClaim>(), &name, wait::LONG).await?;
    }
    for template in order
        .api::<ResourceClaimTemplate>()
        .list(&everything)
        .await?
    {
        let name = template.metadata.name.context("a template without name")?;
        wait::gone(&order.api::<ResourceClaimTemplate>(), &name, wait::LONG).await?;
    }
    let held = cluster.allocated_devices(&order.namespace).await?;
    ensure!(held.is_empty(), "a deleted order holds {held:?}");
    Ok(())
}

/// Sets how many processes the controller has, and waits until there are so many.
async fn scale_controller(cluster: &Cluster, replicas: i32) -> Outcome {
    let deployments: Api<Deployment> = Api::namespaced(cluster.client.clone(), PLATFORM_NAMESPACE);
    let scale = Patch::Merge(json!({ "spec": { "replicas": replicas } }));
    deployments
        .patch("controller", &PatchParams::default(), &scale)
        .await?;
    let what = format!("have {replicas} processes");
    wait::until(
        &deployments,
        "controller",
        &what,
        wait::LONG,
        |deployment| {
            let status = deployment.status.as_ref();
            let count = |of: fn(&k8s_openapi::api::apps::v1::DeploymentStatus) -> Option<i32>| {
                status.and_then(of).unwrap_or_default()
            };
            count(|status| status.replicas) == replicas
                && count(|status| status.ready_replicas) == replicas
        },
    )
    .await?;
    Ok(())
}
