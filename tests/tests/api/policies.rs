//! The chart's admission policy: who writes the planner's state, and who does not.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use e2e::charts::render;
use e2e::control_plane::ControlPlane;
use inference_api::{InferenceService, InferenceServiceClass};
use k8s_openapi::api::apps::v1::StatefulSet;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

const PLAN: &str = "ai.deckhouse.io/settled-plan";

/// Gives `user` every right on workloads and on both kinds' status, and the marker or not.
async fn grant(plane: &ControlPlane, user: &str, marker: bool) -> Result<Client> {
    let mut rules = vec![
        json!({"apiGroups": ["apps"], "resources": ["statefulsets"], "verbs": ["get", "create", "update", "patch", "delete"]}),
        json!({"apiGroups": ["ai.deckhouse.io"], "verbs": ["get", "update", "patch"],
               "resources": ["inferenceservices/status", "inferenceserviceclasses/status"]}),
    ];
    if marker {
        rules.push(json!({"apiGroups": ["ai.deckhouse.io"], "resources": ["inferenceserviceclasses/planner"], "verbs": ["update"]}));
    }
    let rbac = "rbac.authorization.k8s.io";
    let (version, meta) = (format!("{rbac}/v1"), json!({"name": user}));
    for object in [
        json!({"apiVersion": version, "kind": "ClusterRole", "metadata": meta, "rules": rules}),
        json!({"apiVersion": version, "kind": "ClusterRoleBinding", "metadata": meta,
               "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": user},
               "subjects": [{"apiGroup": rbac, "kind": "User", "name": user}]}),
    ] {
        plane.apply_yaml("", &object.to_string()).await?;
    }
    plane.client_as(user, &["system:authenticated"])
}

fn workload(name: &str, plan: Option<&str>) -> Result<StatefulSet> {
    let annotations = plan.map(|plan| json!({ PLAN: plan }));
    Ok(serde_json::from_value(json!({
        "metadata": {"name": name, "annotations": annotations},
        "spec": {
            "serviceName": name,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {"containers": [{"name": "c", "image": "i"}]},
            },
        },
    }))?)
}

/// The answer has to be the policy's refusal, which names what was written and the missing right.
fn refused<T: std::fmt::Debug>(answer: Result<T, kube::Error>, what: &str) -> Result<()> {
    match answer {
        Err(kube::Error::Api(status)) => {
            let words = &status.message;
            ensure!(status.code == 403, "{} {words}", status.code);
            ensure!(
                words.contains(what) && words.contains("update inferenceserviceclasses/planner"),
                "{words}"
            );
            Ok(())
        }
        answer => bail!("{what} is not refused: {answer:?}"),
    }
}

fn merge(value: Value) -> Patch<Value> {
    Patch::Merge(value)
}

#[tokio::test]
async fn only_who_holds_the_marker_writes_the_planners_state_a_095() -> Result<()> {
    let plane = ControlPlane::shared()?;
    let namespace = plane.namespace("marker").await?;
    plane
        .apply_yaml(
            "",
            &render(
                "controller/chart",
                "marker",
                &["--show-only", "templates/admission.yaml"],
            )?,
        )
        .await?;
    let without = grant(plane, "marker-without", false).await?;
    let with = grant(plane, "marker-with", true).await?;
    let sets = |client: &Client| Api::<StatefulSet>::namespaced(client.clone(), &namespace);
    let params = PatchParams::default();

    // A new policy takes a moment to be in force.
    let forged = workload("forged", Some("{}"))?;
    let deadline = Instant::now() + Duration::from_secs(30);
    let answer = loop {
        match sets(&without).create(&PostParams::default(), &forged).await {
            Ok(_) => {
                ensure!(Instant::now() < deadline, "the policy was never in force");
                sets(&without)
                    .delete("forged", &DeleteParams::default())
                    .await?;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            answer => break answer,
        }
    };
    refused(
        answer,
        "annotation ai.deckhouse.io/settled-plan of StatefulSet forged",
    )?;

    // A workload that is nobody's, and what concerns no plan, is nobody's business.
    sets(&without)
        .create(&PostParams::default(), &workload("plain", None)?)
        .await?;
    sets(&with)
        .create(&PostParams::default(), &workload("planned", Some("{}"))?)
        .await?;
    let scaled = merge(json!({"spec": {"replicas": 3}}));
    sets(&without).patch("planned", &params, &scaled).await?;
    for (plan, from) in [
        (json!("{\"other\":1}"), "planned"),
        (Value::Null, "planned"),
        (json!("{}"), "plain"),
    ] {
        let edit = merge(json!({"metadata": {"annotations": { PLAN: plan }}}));
        let answer = sets(&without).patch(from, &params, &edit).await;
        refused(answer, &format!("of StatefulSet {from}"))?;
    }
    let edit = merge(json!({"metadata": {"annotations": { PLAN: "{\"other\":1}" }}}));
    sets(&with).patch("planned", &params, &edit).await?;

    plane
        .apply_yaml(
            &namespace,
            &format!(
                "
apiVersion: ai.deckhouse.io/v1alpha1
kind: InferenceServiceClass
metadata: {{ name: {namespace} }}
spec: {{ modelPolicy: {{ allowedEndpointTypes: [Chat] }} }}
---
apiVersion: ai.deckhouse.io/v1alpha1
kind: InferenceService
metadata: {{ name: chat }}
spec:
  inferenceServiceClassName: {namespace}
  model: {{ src: HuggingFace, huggingFace: {{ repository: acme/tiny }} }}
"
            ),
        )
        .await?;
    let orders = |client: &Client| Api::<InferenceService>::namespaced(client.clone(), &namespace);
    let classes = |client: &Client| Api::<InferenceServiceClass>::all(client.clone());
    let phase = merge(json!({"status": {"phase": "Pending"}}));
    orders(&without)
        .patch_status("chat", &params, &phase)
        .await?;
    let plan = merge(json!({"status": {"plan": {"deviceClassName": "mine"}}}));
    let answer = orders(&without).patch_status("chat", &params, &plan).await;
    refused(answer, "status.plan of InferenceService chat")?;
    orders(&with).patch_status("chat", &params, &plan).await?;
    // The plan stays as it is in a write of something else.
    let phase = merge(json!({"status": {"phase": "Ready"}}));
    orders(&without)
        .patch_status("chat", &params, &phase)
        .await?;

    let count = merge(json!({"status": {"orders": 7}}));
    let answer = classes(&without)
        .patch_status(&namespace, &params, &count)
        .await;
    refused(
        answer,
        &format!("status of InferenceServiceClass {namespace}"),
    )?;
    classes(&with)
        .patch_status(&namespace, &params, &count)
        .await?;
    // The administrator may everything.
    let count = merge(json!({"status": {"orders": 0}}));
    classes(&plane.client()?)
        .patch_status(&namespace, &params, &count)
        .await?;
    Ok(())
}
