//! What the components' accounts may do: what their code does, and nothing else.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result};
use controller::component::Component;
use e2e::charts::repository;
use e2e::control_plane::recorder::{Recorder, Right, granted, right};
use inference_api::{InferenceService, InferenceServiceClass};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use crate::orders::{pod, ready};
use crate::processes::{Alone, manifests};
use crate::setup::Corner;

const SOON: Duration = Duration::from_secs(30);
const GROUP: &str = "ai.deckhouse.io";
const TWO: &[&str] = &["--set", "separateDeployments=true"];

/// Rights that no request shows: the chart's admission policy asks for them behind another one, and
/// without them that one is refused.
fn behind(right: &Right) -> bool {
    right.1 == "inferenceserviceclasses/planner" && right.2 == "update"
}

/// Rights of the model catalog, which this version has no client of yet.
fn of_the_catalog(right: &Right) -> bool {
    right.0 == GROUP && ["models", "clustermodels"].contains(&right.1.as_str())
}

/// The rights of an account's roles against what it asked.
fn compare(account: &str, recorder: &Recorder) -> Result<()> {
    let granted = granted(&manifests("rbac.yaml", TWO)?, |role| role == account)?;
    let used = recorder.used()?;
    assert_eq!(
        recorder.refused(),
        Vec::<String>::new(),
        "{account} was refused"
    );
    let unused: Vec<&Right> = granted
        .difference(&used)
        .filter(|right| !behind(right) && !of_the_catalog(right))
        .collect();
    assert!(
        unused.is_empty(),
        "granted to {account} and never used: {unused:?}"
    );
    let missing: Vec<&Right> = used.difference(&granted).collect();
    assert!(
        missing.is_empty(),
        "used by {account} and not granted: {missing:?}"
    );
    Ok(())
}

/// A claim template that the platform made for the order at some other time.
fn made_before(order: &InferenceService, name: &str, spec: Value) -> String {
    let instance = order.name_any();
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {
            "name": name,
            "labels": {
                "app.kubernetes.io/name": "inference-runtime",
                "app.kubernetes.io/instance": instance,
                "app.kubernetes.io/managed-by": "ai-inference",
            },
            "ownerReferences": [{
                "apiVersion": format!("{GROUP}/v1alpha1"), "kind": "InferenceService",
                "name": instance, "uid": order.uid(), "controller": true,
            }],
        },
        "spec": spec,
    })
    .to_string()
}

/// Deletes a class, or makes it, and waits until the order says so.
async fn without_and_with_its_class(corner: &Corner, order: &str) -> Result<()> {
    let classes: Api<InferenceServiceClass> = Api::all(corner.client.clone());
    let class = classes.get(&corner.name).await?;
    classes
        .delete(&corner.name, &DeleteParams::default())
        .await?;
    corner
        .reason(order, "ClassResolved", "ClassNotFound")
        .await?;
    let again = json!({
        "apiVersion": format!("{GROUP}/v1alpha1"), "kind": "InferenceServiceClass",
        "metadata": {"name": corner.name}, "spec": class.spec,
    });
    corner.plane.apply_yaml("", &again.to_string()).await?;
    corner
        .reason(order, "ClassResolved", "ClassResolved")
        .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_component_uses_every_right_that_the_chart_grants_it_and_is_refused_none_a_026()
-> Result<()> {
    let alone = Alone::new(TWO).await?;
    let (controller, asked_by_controller) = alone.recorded(Component::Controller.name()).await?;
    let (planner, asked_by_planner) = alone.recorded(Component::Planner.name()).await?;
    let corner = alone.corner("rights").await?;
    corner.slice("80Gi").await?;

    // What an earlier time left: a claim template that nothing stands on.
    for order in ["chat", "grown"] {
        corner.order(order, "acme/tiny").await?;
    }
    let chat = corner.api::<InferenceService>().get("chat").await?;
    let request = json!({"spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": corner.name}}]}}});
    let old = made_before(&chat, "chat-0000000000", request);
    corner.plane.apply_yaml(&corner.namespace, &old).await?;

    let first = alone.start(planner.clone(), &[Component::Planner], "planner-0")?;
    let running = alone.start(controller, &[Component::Controller], "controller-0")?;
    corner
        .reason("chat", "Planned", "LaunchPlanCalculated")
        .await?;
    let templates = corner.api::<ResourceClaimTemplate>();
    let old = templates
        .get_opt("chat-0000000000")
        .await?
        .and_then(|t| t.uid())
        .unwrap_or_default();
    tokio::time::timeout(
        SOON,
        await_condition(templates, "chat-0000000000", conditions::is_deleted(&old)),
    )
    .await
    .context("the old claim template stays")??;

    // A copy that an edit moves.
    corner
        .until::<StatefulSet>("chat", "exist", |_| true)
        .await?;
    let copy = pod(&corner, "chat", ready(), true).await?;
    corner.reason("chat", "Ready", "Ready").await?;
    corner.edit_moves("chat", &copy).await?;

    // A placement that an edit moves: the workload is raised anew.
    elsewhere(&corner, "grown").await?;

    // A second copy and back.
    for (copies, stands) in [(2, true), (1, false)] {
        let classes: Api<InferenceServiceClass> = Api::all(corner.client.clone());
        let edit = json!({"spec": {"scalingPolicy": {"minReplicas": copies, "maxReplicas": 2}}});
        classes
            .patch(&corner.name, &PatchParams::default(), &Patch::Merge(&edit))
            .await?;
        let budgets = corner.api::<PodDisruptionBudget>();
        let as_wanted = |b: Option<&PodDisruptionBudget>| b.is_some() == stands;
        tokio::time::timeout(SOON, await_condition(budgets, "chat", as_wanted))
            .await
            .with_context(|| format!("{copies} copies, and the budget is not as wanted"))??;
    }

    // The same event twice is one event that is counted up.
    for _ in 0..2 {
        without_and_with_its_class(&corner, "chat").await?;
    }
    twice_ready(&corner).await?;

    // The first start made the built-in class, the second finds it.
    first.stop().await?;
    assert_eq!(
        alone.holder(Component::Planner).await?,
        None,
        "the lease is given up"
    );
    let second = alone.start(planner, &[Component::Planner], "planner-1")?;
    tokio::time::timeout(Duration::from_secs(10), async {
        while alone.holder(Component::Planner).await?.as_deref() != Some("planner-1") {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        anyhow::Ok(())
    })
    .await
    .context("a lease that was given up was not taken at once")??;
    let found = |asked: &Recorder| {
        asked
            .asked()
            .iter()
            .any(|a| a.uri.ends_with("/inferenceserviceclasses/default-llm"))
    };
    tokio::time::timeout(SOON, async {
        while !found(&asked_by_planner) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
    .await
    .context("the second planner did not look at the built-in class")?;
    // Each is at work on its own: a class filed now is judged by the second planner.
    second_judges(&corner).await?;
    second.stop().await?;
    running.stop().await?;

    compare(Component::Controller.name(), &asked_by_controller)?;
    compare(Component::Planner.name(), &asked_by_planner)
}

/// Lets the class allow another DeviceClass alone, and edits an order.
async fn elsewhere(corner: &Corner, order: &str) -> Result<()> {
    let set = corner
        .until::<StatefulSet>(order, "exist", |_| true)
        .await?;
    let other = format!(
        "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {{ name: elsewhere }}\nspec: {{ selectors: [{{ cel: {{ expression: \"device.driver == '{}.example.com'\" }} }}] }}\n",
        corner.name
    );
    corner.plane.apply_yaml("", &other).await?;
    let classes: Api<InferenceServiceClass> = Api::all(corner.client.clone());
    let edit = json!({"spec": {"acceleratorPolicy": {"deviceClassNames": ["elsewhere"]}}});
    classes
        .patch(&corner.name, &PatchParams::default(), &Patch::Merge(&edit))
        .await?;
    let edit = json!({"spec": {"model": {"huggingFace": {"revision": "main"}}}});
    corner
        .api::<InferenceService>()
        .patch(order, &PatchParams::default(), &Patch::Merge(&edit))
        .await?;
    let uid = set.uid().unwrap_or_default();
    let gone = await_condition(
        corner.api::<StatefulSet>(),
        order,
        conditions::is_deleted(&uid),
    );
    tokio::time::timeout(SOON, gone)
        .await
        .context("the workload that stands elsewhere stays")??;
    Ok(())
}

/// Lets a class be refused, accepted and refused again in the same words.
async fn twice_ready(corner: &Corner) -> Result<()> {
    let classes: Api<InferenceServiceClass> = Api::all(corner.client.clone());
    for (storage, reason) in [
        (Some("none"), "StorageClassNotFound"),
        (None, "Ready"),
        (Some("none"), "StorageClassNotFound"),
        (None, "Ready"),
    ] {
        let edit = json!({"spec": {"modelStorageClassName": storage}});
        classes
            .patch(&corner.name, &PatchParams::default(), &Patch::Merge(&edit))
            .await?;
        judged(corner, &corner.name, reason).await?;
    }
    Ok(())
}

async fn judged(corner: &Corner, class: &str, reason: &str) -> Result<()> {
    let classes: Api<InferenceServiceClass> = Api::all(corner.client.clone());
    let told = |class: Option<&InferenceServiceClass>| {
        let status = class.and_then(|c| c.status.as_ref());
        status.is_some_and(|s| s.conditions.iter().any(|c| c.reason == reason))
    };
    tokio::time::timeout(SOON, await_condition(classes, class, told))
        .await
        .with_context(|| format!("{class} is not {reason}"))??;
    Ok(())
}

/// A class whose selector no device can be held against: its order finds out, and the planner looks.
async fn second_judges(corner: &Corner) -> Result<()> {
    let device_class = &corner.name;
    let filed = format!(
        "
apiVersion: ai.deckhouse.io/v1alpha1
kind: InferenceServiceClass
metadata: {{ name: rights-late }}
spec:
  modelPolicy: {{ allowedEndpointTypes: [Chat] }}
  acceleratorPolicy:
    allowedPlacementTypes: [WholeDevice]
    deviceClassNames: [{device_class}]
    selectors: [{{ cel: {{ expression: \"device.attributes['rights.example.com'].absent == 'x'\" }} }}]
---
apiVersion: ai.deckhouse.io/v1alpha1
kind: InferenceService
metadata: {{ name: late }}
spec:
  inferenceServiceClassName: rights-late
  model: {{ src: HuggingFace, huggingFace: {{ repository: acme/tiny }} }}
"
    );
    corner.plane.apply_yaml(&corner.namespace, &filed).await?;
    corner
        .reason("late", "Planned", "PlacementUndecidable")
        .await?;
    judged(corner, "rights-late", "SelectorUndecidable").await
}

/// Why each right is needed; a right without a reason fails the test.
const REASONS: &[(&str, &str)] = &[
    ("inferenceservices", "orders are watched"),
    (
        "inferenceservices/status",
        "an order is told what became of it",
    ),
    (
        "inferenceserviceclasses",
        "classes are watched; the planner makes `default-llm` where it is absent",
    ),
    (
        "inferenceserviceclasses/status",
        "a class is told whether it can be used",
    ),
    (
        "inferenceserviceclasses/planner",
        "marks who writes the planner's state",
    ),
    (
        "models",
        "the model catalog, with `catalog.mode: Enabled`; this version does not read it yet",
    ),
    ("clustermodels", "the same"),
    (
        "statefulsets",
        "an order's copies; deleted to be raised anew on another placement or volume",
    ),
    ("services", "an order's address inside the cluster"),
    (
        "resourceclaimtemplates",
        "what each copy claims; deleted when no copy stands on it",
    ),
    (
        "poddisruptionbudgets",
        "a drain takes one of several copies at a time; deleted when there is one copy again",
    ),
    (
        "pods",
        "copies are watched, and deleted to be moved to the current description",
    ),
    (
        "persistentvolumeclaims",
        "a workload is raised anew when the volumes of the old one are gone",
    ),
    ("secrets", "an order's token is made; it is never read"),
    (
        "resourceslices",
        "what plans are made from; a class's selectors are tried on them",
    ),
    (
        "deviceclasses",
        "what plans are made from, and what classes name",
    ),
    ("resourceclaims", "what of the devices is taken"),
    ("nodes", "where devices may be used"),
    ("storageclasses", "what classes name"),
    (
        "apiservices",
        "`v1.resource.k8s.io` alone: whether the cluster serves it",
    ),
    ("events", "what a person should know"),
    (
        "leases",
        "in the platform's namespace: who leads the component",
    ),
];

#[test]
fn the_documentation_lists_the_rights_of_the_components_as_the_chart_grants_them() -> Result<()> {
    let rbac = manifests("rbac.yaml", TWO)?;
    let mut tables = String::new();
    for component in Component::ALL {
        let rights = granted(&rbac, |role| role == component.name())?;
        tables.push_str(&format!(
            "\n`{}`:\n\n| API group | Resource | Verbs | Why |\n|---|---|---|---|\n",
            component.name()
        ));
        let resources: BTreeSet<(&String, &String)> =
            rights.iter().map(|(g, r, _)| (g, r)).collect();
        for (group, resource) in resources {
            let verbs: Vec<&str> = rights
                .iter()
                .filter(|(g, r, _)| (g, r) == (group, resource))
                .map(|(_, _, verb)| verb.as_str())
                .collect();
            let why = REASONS.iter().find(|(of, _)| of == resource);
            let (_, why) = why.with_context(|| format!("nothing says why {resource}"))?;
            let group = if group.is_empty() { "core" } else { group };
            let verbs = verbs.join(", ");
            tables.push_str(&format!("| `{group}` | `{resource}` | {verbs} | {why} |\n"));
        }
    }
    let path = repository().join("docs/rights.md");
    let text = std::fs::read_to_string(&path)?;
    let (start, end) = ("<!-- components:start -->\n", "\n<!-- components:end -->");
    let (before, rest) = text.split_once(start).context("no start of the tables")?;
    let (kept, after) = rest.split_once(end).context("no end of the tables")?;
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, format!("{before}{start}{tables}{end}{after}"))?;
        return Ok(());
    }
    assert!(
        kept == tables,
        "docs/rights.md is stale; UPDATE_GOLDEN=1 makes it:\n{tables}"
    );
    Ok(())
}

/// A right that was made up is not among those granted: the comparison has teeth.
#[test]
fn the_rights_that_are_compared_are_those_of_one_component() -> Result<()> {
    let of = |account: &str| granted(&manifests("rbac.yaml", TWO)?, |role| role == account);
    let (controller, planner) = (
        of(Component::Controller.name())?,
        of(Component::Planner.name())?,
    );
    let writes_classes = right(GROUP, "inferenceserviceclasses/status", "patch");
    assert!(planner.contains(&writes_classes) && !controller.contains(&writes_classes));
    let makes_workloads = right("apps", "statefulsets", "create");
    assert!(controller.contains(&makes_workloads) && !planner.contains(&makes_workloads));
    Ok(())
}
