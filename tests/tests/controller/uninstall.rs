//! The platform is uninstalled: what it asks, what it removes, what it leaves.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use controller::component::Component;
use controller::uninstall::{self, Options};
use e2e::charts::{documents, repository};
use e2e::control_plane::recorder::granted;
use e2e::control_plane::{ControlPlane, asset};
use inference_api::{InferenceService, InferenceServiceClass, Phase};
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{Pod, Secret, Service};
use k8s_openapi::api::rbac::v1::ClusterRole;
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::processes::{Alone, manifests, recorded};
use crate::setup::PLATFORM;

const SOON: Duration = Duration::from_secs(30);
const ACCOUNT: &str = "ai-inference-uninstall";

fn told(confirmed: bool) -> Options {
    Options {
        confirmed,
        namespace: PLATFORM.into(),
        deployments: vec!["controller".into()],
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uninstalling_lists_and_refuses_and_once_confirmed_leaves_only_what_is_the_peoples_a_120_a_122()
-> Result<()> {
    let alone = Alone::new(&[]).await?;
    let admin = alone.plane.client()?;
    let all_orders: Api<InferenceService> = Api::all(admin.clone());
    // Whatever other tests left is not of this one.
    for order in all_orders.list(&ListParams::default()).await? {
        let of: Api<InferenceService> =
            Api::namespaced(admin.clone(), &order.namespace().unwrap_or_default());
        of.delete(&order.name_any(), &DeleteParams::default())
            .await?;
    }
    // The hook's account, its rights and nothing else.
    let hook = manifests("uninstall.yaml", &[])?;
    alone.plane.apply_yaml(PLATFORM, &hook).await?;
    let deployment = manifests("deployment.yaml", &[])?;
    alone.plane.apply_yaml(PLATFORM, &deployment).await?;
    let (client, _) = alone.recorded(Component::Controller.name()).await?;
    let running = alone.start(client, &Component::ALL, "controller-0")?;

    let corner = alone.corner("leaving").await?;
    corner.slice("80Gi").await?;
    corner.order("chat", "acme/tiny").await?;
    corner
        .until::<StatefulSet>("chat", "exist", |_| true)
        .await?;
    corner
        .reason("chat", "WorkloadReady", "WorkloadCreating")
        .await?;
    // Somebody else's, with our label.
    let other = "apiVersion: v1\nkind: Service\nmetadata: { name: other, labels: { app.kubernetes.io/managed-by: ai-inference } }\nspec: { ports: [{ port: 1 }] }\n";
    alone.plane.apply_yaml(&corner.namespace, other).await?;
    let classes: Api<InferenceServiceClass> = Api::all(admin.clone());
    let made = |c: Option<&InferenceServiceClass>| c.is_some();
    tokio::time::timeout(SOON, await_condition(classes.clone(), "default-llm", made))
        .await
        .context("no built-in class")??;

    let (client, asked) = recorded(alone.plane, ACCOUNT).await?;
    let words = uninstall::run(client.clone(), &told(false)).await;
    let words = words.err().context("it does not ask")?.to_string();
    for part in [
        "orders: 1",
        &format!("namespace {}: chat", corner.namespace),
        "leaving",
        "delete inferenceservices --all",
        "uninstall.confirm=true",
    ] {
        assert!(words.contains(part), "{part} is not in {words}");
    }
    assert!(
        !words.contains("default-llm"),
        "the platform's own class is not the people's: {words}"
    );
    assert!(
        asked.asked().iter().all(|a| !a.writes()),
        "it changed something before it was confirmed"
    );
    corner.api::<StatefulSet>().get("chat").await?;

    // As the Deployment's and the kubelet's controllers: the pod ends when no replica is wanted.
    let deployments: Api<Deployment> = Api::namespaced(admin.clone(), PLATFORM);
    let pods: Api<Pod> = Api::namespaced(admin.clone(), PLATFORM);
    let mut template = serde_json::to_value(deployments.get("controller").await?.spec.template)?;
    template["metadata"]["name"] = json!("controller-0");
    let process: Pod = serde_json::from_value(template)?;
    pods.create(&PostParams::default(), &process).await?;
    let removal = tokio::spawn({
        let client = client.clone();
        async move { uninstall::run(client, &told(true)).await }
    });
    let none = |d: Option<&Deployment>| d.is_some_and(|d| d.spec.replicas == Some(0));
    tokio::time::timeout(SOON, await_condition(deployments, "controller", none))
        .await
        .context("the controllers go on")??;
    corner
        .api::<StatefulSet>()
        .get("chat")
        .await
        .context("it does not wait for the controller")?;
    running.stop().await?;
    pods.delete("controller-0", &DeleteParams::default())
        .await?;
    tokio::time::timeout(SOON, removal)
        .await
        .context("it does not end")???;

    assert!(corner.api::<StatefulSet>().get_opt("chat").await?.is_none());
    assert!(corner.api::<Service>().get_opt("chat").await?.is_none());
    let templates = corner.api::<ResourceClaimTemplate>();
    assert_eq!(templates.list(&ListParams::default()).await?.items.len(), 0);
    corner
        .api::<Service>()
        .get("other")
        .await
        .context("it removed somebody else's")?;
    assert!(classes.get_opt("default-llm").await?.is_none());
    classes
        .get("leaving")
        .await
        .context("an administrator's class is not the platform's to remove")?;
    for component in Component::ALL {
        assert!(alone.leases()?.get_opt(component.name()).await?.is_none());
    }
    // The order stays, says what became of it, and can be deleted; with it goes its token.
    let order = corner
        .reason("chat", "Ready", "PlatformUninstalled")
        .await?;
    assert!(order.finalizers().is_empty());
    let status = order.status.context("no status")?;
    assert_eq!(
        (status.phase, status.endpoint),
        (Some(Phase::Pending), None)
    );
    corner.api::<Secret>().get("chat-token").await?;
    let collector = alone.plane.controllers(&["garbage-collector-controller"])?;
    corner
        .api::<InferenceService>()
        .delete("chat", &DeleteParams::default())
        .await?;
    let gone = await_condition(
        corner.api::<Secret>(),
        "chat-token",
        |s: Option<&Secret>| s.is_none(),
    );
    tokio::time::timeout(SOON, gone)
        .await
        .with_context(|| format!("the token stays; {}", collector.log_tail()))??;

    // Cleaned up first, it does not ask.
    for class in classes.list(&ListParams::default()).await? {
        classes
            .delete(&class.name_any(), &DeleteParams::default())
            .await?;
    }
    uninstall::run(client, &told(false)).await?;

    let granted = granted(&hook, |role| role == ACCOUNT)?;
    let used = asked.used()?;
    assert_eq!(asked.refused(), Vec::<String>::new());
    assert_eq!(granted, used, "granted and used differ");
    Ok(())
}

#[test]
fn helm_asks_before_it_removes_anything_and_the_confirmation_is_a_value_a_120() -> Result<()> {
    let arguments = |more: &[&str]| -> Result<Option<Vec<String>>> {
        let all = documents(&manifests("uninstall.yaml", more)?)?;
        for object in &all {
            let annotations = &object["metadata"]["annotations"];
            assert_eq!(annotations["helm.sh/hook"], "pre-delete", "{object:#}");
            // No account with such rights outlives the uninstallation or its refusal.
            let policy = annotations["helm.sh/hook-delete-policy"]
                .as_str()
                .unwrap_or_default();
            assert!(policy.contains("hook-succeeded"), "{object:#}");
        }
        let job = all.iter().find(|object| object["kind"] == "Job");
        let pod = job.map(|job| &job["spec"]["template"]["spec"]);
        let arguments = pod.map(|pod| pod["containers"][0]["args"].clone());
        Ok(arguments.map(serde_json::from_value).transpose()?)
    };
    let asks = arguments(&[])?.context("no Job")?;
    assert_eq!(asks, ["uninstall", "--deployment=controller"]);
    let confirmed = arguments(&["--set", "uninstall.confirm=true,separateDeployments=true"])?;
    assert_eq!(
        confirmed.context("no Job")?,
        [
            "uninstall",
            "--deployment=controller",
            "--deployment=planner",
            "--confirm"
        ]
    );
    // Helm calls a template that makes nothing an error.
    assert!(manifests("uninstall.yaml", &["--set", "uninstall.hook=false"]).is_err());
    Ok(())
}

/// What a Job's container is told, as the kubelet would start it.
fn confirms(pod: &Pod) -> bool {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut arguments = containers.flat_map(|c| c.args.iter().flatten());
    arguments.any(|argument| argument == "--confirm")
}

/// Runs `helm` on a control plane; whether it succeeded, and its words.
async fn helm(plane: &ControlPlane, arguments: &[&str]) -> Result<(bool, String)> {
    let output = tokio::process::Command::new(asset("helm")?)
        .args(arguments)
        .args(["--namespace", PLATFORM])
        .env("KUBECONFIG", plane.kubeconfig())
        .output()
        .await?;
    let words = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok((output.status.success(), words))
}

/// `helm uninstall`, with its Job's pod run here in the kubelet's place.
async fn helm_uninstall(plane: &ControlPlane) -> Result<(bool, String)> {
    let pods: Api<Pod> = Api::namespaced(plane.client()?, PLATFORM);
    let old: Vec<Option<String>> = pods
        .list(&ListParams::default())
        .await?
        .iter()
        .map(ResourceExt::uid)
        .collect();
    let run = async {
        let pod = loop {
            let all = pods.list(&ListParams::default()).await?;
            let new = all.into_iter().find(|pod| !old.contains(&pod.uid()));
            if let Some(pod) = new {
                break pod;
            }
            // Its name is not known before it is there.
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        let (client, _) = recorded(plane, ACCOUNT).await?;
        let done = uninstall::run(client, &told(confirms(&pod))).await;
        let (phase, code) = match &done {
            Ok(()) => ("Succeeded", 0),
            Err(_) => ("Failed", 1),
        };
        let ended = json!({"status": {"phase": phase, "containerStatuses": [{
            "name": "uninstall", "ready": false, "restartCount": 0, "image": "i", "imageID": "i",
            "state": {"terminated": {"exitCode": code}}}]}});
        pods.patch_status(
            &pod.name_any(),
            &PatchParams::default(),
            &Patch::Merge(&ended),
        )
        .await?;
        anyhow::Ok(done)
    };
    let arguments = ["uninstall", "controller", "--timeout", "60s"];
    let (done, helm) = tokio::join!(run, helm(plane, &arguments));
    let (succeeded, words) = helm?;
    let done = done?.map_or_else(|error| error.to_string(), |()| String::new());
    Ok((succeeded, format!("{words}{done}")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn helm_stops_while_orders_remain_and_goes_on_after_the_clean_way_a_120_a_121() -> Result<()>
{
    // Of its own: what Helm installs must not be there.
    let plane = ControlPlane::start()?;
    let jobs = plane.controllers(&["job-controller"])?;
    let chart = repository().join("controller/chart");
    let chart = chart.to_string_lossy();
    let own = ["--set", "crds.install=false"];
    let install = [
        &["install", "controller", &chart, "--create-namespace"][..],
        &own,
    ]
    .concat();
    let (installed, words) = helm(&plane, &install).await?;
    ensure!(installed, "{words}");
    let namespace = plane.namespace("people").await?;
    plane
        .apply_yaml(
            &namespace,
            "
apiVersion: ai.deckhouse.io/v1alpha1
kind: InferenceServiceClass
metadata: { name: gold }
spec: { modelPolicy: { allowedEndpointTypes: [Chat] } }
---
apiVersion: ai.deckhouse.io/v1alpha1
kind: InferenceService
metadata: { name: chat }
spec:
  inferenceServiceClassName: gold
  model: { src: HuggingFace, huggingFace: { repository: acme/tiny } }
",
        )
        .await?;

    let (gone, words) = helm_uninstall(&plane).await?;
    assert!(!gone, "{words}");
    assert!(
        words.contains(&format!("namespace {namespace}: chat")),
        "{words}; {}",
        jobs.log_tail()
    );
    let client = plane.client()?;
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), PLATFORM);
    let controller = deployments.get("controller").await?;
    assert_eq!(controller.spec.replicas, Some(1), "nothing has changed");
    let roles: Api<ClusterRole> = Api::all(client.clone());
    roles.get("ai-inference-controller").await?;
    assert!(
        roles.get_opt(ACCOUNT).await?.is_none(),
        "the hook's rights outlive it"
    );

    // The documented order: orders, classes, platform.
    let orders: Api<InferenceService> = Api::namespaced(client.clone(), &namespace);
    orders.delete("chat", &DeleteParams::default()).await?;
    let (gone, words) = helm_uninstall(&plane).await?;
    assert!(!gone && words.contains("gold"), "{words}");
    let classes: Api<InferenceServiceClass> = Api::all(client.clone());
    classes.delete("gold", &DeleteParams::default()).await?;
    let (gone, words) = helm_uninstall(&plane).await?;
    assert!(gone, "{words}");
    assert!(deployments.get_opt("controller").await?.is_none());
    let left = roles.list(&ListParams::default()).await?;
    let left: Vec<String> = left
        .iter()
        .map(ResourceExt::name_any)
        .filter(|name| name.contains("ai-inference"))
        .collect();
    assert_eq!(left, Vec::<String>::new());
    Ok(())
}
