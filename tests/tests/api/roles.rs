//! What the chart's roles let people do, asked of the API server for each kind of user.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use e2e::charts::render;
use e2e::control_plane::ControlPlane;
use e2e::control_plane::recorder::granted;
use inference_api::{InferenceService, InferenceServiceClass};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use k8s_openapi::api::rbac::v1::ClusterRole;
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::{Api, Client, ResourceExt};
use serde_json::json;

/// One template of the controller's chart.
fn template(namespace: &str, name: &str, more: &[&str]) -> Result<String> {
    let path = format!("templates/{name}");
    render(
        "controller/chart",
        namespace,
        &[&["--show-only", &path], more].concat(),
    )
}

const ROLES: &str = "user-roles.yaml";
const READ: &[&str] = &["get", "list", "watch"];
const WRITE: &[&str] = &["create", "update", "patch", "delete", "deletecollection"];

/// The access levels in their order, each with the names of the roles that it adds.
const LEVELS: &[(&str, &str)] = &[
    ("User", "d8:user-authz:ai-inference:user"),
    (
        "PrivilegedUser",
        "d8:user-authz:ai-inference:privileged-user",
    ),
    ("Editor", "d8:user-authz:ai-inference:editor"),
    ("Admin", "d8:user-authz:ai-inference:admin"),
    ("ClusterEditor", "d8:user-authz:ai-inference:cluster-editor"),
    ("ClusterAdmin", "d8:user-authz:ai-inference:cluster-admin"),
];

/// Grants `role` to `user`: in `namespace`, or in all.
async fn bind(plane: &ControlPlane, user: &str, role: &str, namespace: Option<&str>) -> Result<()> {
    let (kind, scope) = match namespace {
        Some(_) => ("RoleBinding", ""),
        None => ("ClusterRoleBinding", "everywhere:"),
    };
    let name = format!("{scope}{user}:{role}");
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    });
    plane
        .apply_yaml(namespace.unwrap_or_default(), &binding.to_string())
        .await?;
    Ok(())
}

/// Makes a user of each access level, as the platform's user-authz binds them: the roles of the level
/// and of those below it, in one namespace up to Admin and in all from ClusterEditor on.
async fn people(plane: &ControlPlane, namespace: &str) -> Result<()> {
    for (at, (level, _)) in LEVELS.iter().enumerate() {
        let within = (at < 4).then_some(namespace);
        for (_, role) in &LEVELS[..=at] {
            bind(plane, &format!("{namespace}-{level}"), role, within).await?;
        }
    }
    Ok(())
}

/// Asks whether `user` may do something: resource (with subresource) of a group, in a namespace.
async fn may(
    client: &Client,
    user: &str,
    verb: &str,
    (group, resource): (&str, &str),
    namespace: Option<&str>,
) -> Result<bool> {
    let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(user.to_owned()),
            groups: Some(vec!["system:authenticated".to_owned()]),
            resource_attributes: Some(ResourceAttributes {
                verb: Some(verb.to_owned()),
                group: Some(group.to_owned()),
                resource: Some(resource.to_owned()),
                subresource: Some(subresource.to_owned()),
                namespace: namespace.map(str::to_owned),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    };
    let answer = Api::<SubjectAccessReview>::all(client.clone())
        .create(&PostParams::default(), &review)
        .await?;
    Ok(answer.status.context("a review without an answer")?.allowed)
}

const ORDERS: (&str, &str) = ("ai.deckhouse.io", "inferenceservices");
const CLASSES: (&str, &str) = ("ai.deckhouse.io", "inferenceserviceclasses");

/// What is given to nobody, beside the catalog's kinds, which are another module's.
const NOBODYS: &[((&str, &str), &[&str])] = &[
    (
        ("ai.deckhouse.io", "inferenceserviceclasses/planner"),
        &["get", "update", "create"],
    ),
    (
        ("ai.deckhouse.io", "inferenceserviceclasses/status"),
        &["get", "update", "patch"],
    ),
    (
        ("ai.deckhouse.io", "inferenceservices/status"),
        &["get", "update", "patch"],
    ),
    (("", "secrets"), &["get", "list", "create", "update"]),
    (("", "pods/exec"), &["create"]),
    (
        ("rbac.authorization.k8s.io", "clusterroles"),
        &["bind", "escalate"],
    ),
    (
        ("rbac.authorization.k8s.io", "roles"),
        &["bind", "escalate"],
    ),
    (("", "users"), &["impersonate"]),
    (("", "serviceaccounts"), &["impersonate"]),
    (("ai.deckhouse.io", "models"), READ),
    (("ai.deckhouse.io", "clustermodels"), READ),
];

type Question<'a> = ((&'a str, &'a str), &'a str, Option<&'a str>, bool);

#[tokio::test]
async fn each_access_level_may_do_what_it_is_for_and_nothing_else_a_001_a_090_a_092_a_094()
-> Result<()> {
    let plane = ControlPlane::shared()?;
    plane
        .apply_yaml("", &template("levels", ROLES, &[])?)
        .await?;
    let own = plane.namespace("levels").await?;
    let other = plane.namespace("levels-other").await?;
    people(plane, &own).await?;
    let client = plane.client()?;

    let mut wrong = Vec::new();
    for (at, (level, _)) in LEVELS.iter().enumerate() {
        let user = format!("{own}-{level}");
        let (writes, everywhere) = (at >= 2, at >= 4);
        // What, which verb, in which namespace, and whether it is allowed.
        let mut expected = Vec::<Question<'_>>::new();
        for verb in READ {
            expected.push((ORDERS, verb, Some(&own), true));
            expected.push((ORDERS, verb, Some(&other), everywhere));
            expected.push((CLASSES, verb, None, everywhere));
        }
        for verb in WRITE {
            expected.push((ORDERS, verb, Some(&own), writes));
            expected.push((ORDERS, verb, Some(&other), everywhere));
            expected.push((CLASSES, verb, None, everywhere));
        }
        for (what, verbs) in NOBODYS {
            expected.extend(
                verbs
                    .iter()
                    .map(|verb| (*what, *verb, Some(own.as_str()), false)),
            );
        }
        for (what, verb, namespace, allowed) in expected {
            if may(&client, &user, verb, what, namespace).await? != allowed {
                let not = if allowed { "not " } else { "" };
                wrong.push(format!("{level} may {not}{verb} {what:?} in {namespace:?}"));
            }
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
    Ok(())
}

#[test]
fn no_role_for_people_holds_what_is_given_to_nobody_a_091() -> Result<()> {
    let roles = template("n", ROLES, &[])?;
    let all = granted(&roles, |_| true)?;
    ensure!(!all.is_empty(), "the chart has no roles for people");
    for (group, resource, verb) in &all {
        let right = format!("{verb} {group}/{resource}");
        assert!(!resource.contains('/'), "{right} is of a subresource");
        assert_ne!(resource, "secrets", "{right}");
        assert!(
            !["bind", "escalate", "impersonate"].contains(&verb.as_str()),
            "{right}"
        );
        let known = matches!(
            (group.as_str(), resource.as_str()),
            ORDERS | CLASSES | ("deckhouse.io", "moduleconfigs")
        );
        assert!(known, "{right} is of another's kind");
    }
    // The increments of these levels are empty.
    for level in ["privileged-user", "admin", "cluster-admin"] {
        let name = format!("d8:user-authz:ai-inference:{level}");
        assert!(
            roles.contains(&format!("name: {name}\n")),
            "{name} is missing"
        );
        assert!(granted(&roles, |role| role == name)?.is_empty(), "{name}");
    }
    Ok(())
}

#[test]
fn the_roles_of_the_second_model_hold_the_same_as_the_access_levels_a_094() -> Result<()> {
    let roles = template("d8-ai-inference", ROLES, &[])?;
    let of = |names: &[&str]| granted(&roles, |role| names.contains(&role));
    assert_eq!(
        of(&["d8:use:capability:module:ai-inference:view"])?,
        of(&["d8:user-authz:ai-inference:user"])?
    );
    assert_eq!(
        of(&["d8:use:capability:module:ai-inference:edit"])?,
        of(&["d8:user-authz:ai-inference:editor"])?
    );
    let mut manage = of(&[
        "d8:manage:permission:module:ai-inference:view",
        "d8:manage:permission:module:ai-inference:edit",
    ])?;
    manage.retain(|(group, ..)| group != "deckhouse.io");
    assert_eq!(
        manage,
        of(&[
            "d8:user-authz:ai-inference:user",
            "d8:user-authz:ai-inference:editor",
            "d8:user-authz:ai-inference:cluster-editor",
        ])?
    );
    let documents: Vec<ClusterRole> = serde_saphyr::from_multiple(&roles)?;
    for role in documents
        .iter()
        .filter(|r| r.name_any().starts_with("d8:manage:"))
    {
        for rule in role.rules.iter().flatten() {
            let settings = rule
                .resources
                .iter()
                .flatten()
                .any(|r| r == "moduleconfigs");
            let names = rule.resource_names.clone().unwrap_or_default();
            let creates = rule.verbs == ["create"];
            assert!(
                !settings || creates || names == ["ai-inference"],
                "{} is about other modules' settings: {rule:?}",
                role.name_any()
            );
        }
        let labels = role.labels();
        assert_eq!(labels["rbac.deckhouse.io/kind"], "manage");
        assert_eq!(labels["rbac.deckhouse.io/namespace"], "d8-ai-inference");
    }
    for role in documents
        .iter()
        .filter(|r| r.name_any().starts_with("d8:use:"))
    {
        assert_eq!(role.labels()["rbac.deckhouse.io/kind"], "use");
    }
    for (level, name) in LEVELS {
        let role = documents.iter().find(|r| r.name_any() == *name);
        let role = role.with_context(|| format!("{name} is missing"))?;
        let told = &role.annotations()["user-authz.deckhouse.io/access-level"];
        assert_eq!(told, level);
    }
    Ok(())
}

#[tokio::test]
async fn view_edit_and_admin_of_kubernetes_hold_the_rights_to_orders_by_aggregation_a_090()
-> Result<()> {
    // Of its own: aggregation changes roles that every test would share.
    let plane = ControlPlane::start()?;
    let aggregation = plane.controllers(&["clusterrole-aggregation-controller"])?;
    plane.apply_yaml("", &template("n", ROLES, &[])?).await?;
    let client = plane.client()?;
    let roles: Api<ClusterRole> = Api::all(client.clone());
    let holds = |verb: &'static str| {
        move |role: Option<&ClusterRole>| {
            let mut rules = role.into_iter().flat_map(|r| r.rules.iter().flatten());
            rules.any(|rule| {
                rule.resources.iter().flatten().any(|r| r == ORDERS.1)
                    && rule.verbs.iter().any(|v| v == verb)
            })
        }
    };
    for (role, verb) in [
        ("view", "list"),
        ("edit", "list"),
        ("edit", "create"),
        ("admin", "create"),
    ] {
        let waited = await_condition(roles.clone(), role, holds(verb));
        tokio::time::timeout(Duration::from_secs(30), waited)
            .await
            .with_context(|| format!("{role} never held {verb}; {}", aggregation.log_tail()))??;
    }
    let own = plane.namespace("builtin").await?;
    for role in ["view", "edit", "admin"] {
        bind(&plane, role, role, Some(&own)).await?;
    }
    let other = plane.namespace("builtin-other").await?;
    for (user, writes) in [("view", false), ("edit", true), ("admin", true)] {
        for verb in READ {
            assert!(
                may(&client, user, verb, ORDERS, Some(&own)).await?,
                "{user} {verb}"
            );
            assert!(
                !may(&client, user, verb, ORDERS, Some(&other)).await?,
                "{user} {verb}"
            );
            // The namespace's people do not read a class.
            assert!(
                !may(&client, user, verb, CLASSES, None).await?,
                "{user} {verb}"
            );
        }
        for verb in WRITE {
            assert_eq!(
                may(&client, user, verb, ORDERS, Some(&own)).await?,
                writes,
                "{user} {verb}"
            );
            assert!(
                !may(&client, user, verb, CLASSES, None).await?,
                "{user} {verb}"
            );
        }
        let ours = NOBODYS
            .iter()
            .filter(|((group, _), _)| *group == "ai.deckhouse.io");
        for (what, verbs) in ours {
            for verb in *verbs {
                assert!(
                    !may(&client, user, verb, *what, Some(&own)).await?,
                    "{user} {verb} {what:?}"
                );
            }
        }
    }
    // And none of it where the administrator wants to grant orders one by one.
    let without = template("n", ROLES, &["--set", "aggregateUserRoles=false"])?;
    assert!(
        !without.contains("rbac.authorization.k8s.io/aggregate-to-"),
        "{without}"
    );
    Ok(())
}

#[tokio::test]
async fn a_namespaces_user_orders_reads_the_contract_and_sees_no_class_a_059_a_093() -> Result<()> {
    let plane = ControlPlane::shared()?;
    plane
        .apply_yaml("", &template("levels", ROLES, &[])?)
        .await?;
    let namespace = plane.namespace("orderer").await?;
    people(plane, &namespace).await?;
    let class = format!("class-of-{namespace}");
    plane
        .apply_yaml("", &format!("apiVersion: ai.deckhouse.io/v1alpha1\nkind: InferenceServiceClass\nmetadata: {{ name: {class} }}\nspec: {{ modelPolicy: {{ allowedEndpointTypes: [Chat] }} }}\n"))
        .await?;
    let order = format!(
        "apiVersion: ai.deckhouse.io/v1alpha1\nkind: InferenceService\nmetadata: {{ name: chat, namespace: {namespace} }}\nspec:\n  inferenceServiceClassName: {class}\n  model: {{ src: HuggingFace, huggingFace: {{ repository: acme/tiny }} }}\n"
    );

    let user = plane.client_as(&format!("{namespace}-User"), &["system:authenticated"])?;
    let editor = plane.client_as(&format!("{namespace}-Editor"), &["system:authenticated"])?;
    let refused = |answer: Result<String, kube::Error>, what: &str| match answer {
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(()),
        answer => bail!("{what} is not refused: {answer:?}"),
    };
    let of = |client: &Client| Api::<InferenceService>::namespaced(client.clone(), &namespace);
    let wanted: InferenceService = serde_saphyr::from_str(&order)?;
    let name = |o: InferenceService| o.name_any();
    refused(
        of(&user)
            .create(&PostParams::default(), &wanted)
            .await
            .map(name),
        "an order by a reader",
    )?;
    of(&editor).create(&PostParams::default(), &wanted).await?;

    // What the controller decided, as it writes it.
    let status = json!({"status": {"model": {"endpointType": "Chat"}}});
    let all: Api<InferenceService> = Api::namespaced(plane.client()?, &namespace);
    all.patch_status("chat", &PatchParams::default(), &Patch::Merge(&status))
        .await?;
    let forged = of(&editor)
        .patch_status("chat", &PatchParams::default(), &Patch::Merge(&status))
        .await;
    refused(forged.map(name), "the status by an editor")?;
    for client in [&user, &editor] {
        let read = of(client).get("chat").await?.status.context("no status")?;
        let contract = read.model.and_then(|m| m.endpoint_type);
        assert_eq!(contract.map(|c| c.as_str()), Some("Chat"));
        let classes: Api<InferenceServiceClass> = Api::all(client.clone());
        refused(classes.get(&class).await.map(|c| c.name_any()), "the class")?;
    }
    // The controller's order has a token; its Secret is not theirs either.
    let secrets: Api<k8s_openapi::api::core::v1::Secret> =
        Api::namespaced(editor.clone(), &namespace);
    refused(
        secrets.get("chat-token").await.map(|s| s.name_any()),
        "the token's Secret",
    )?;
    of(&editor).delete("chat", &Default::default()).await?;
    Ok(())
}

#[tokio::test]
async fn without_the_catalog_its_rights_are_gone_and_no_others_a_021_a_022_a_025() -> Result<()> {
    let plane = ControlPlane::shared()?;
    let namespace = plane.namespace("catalog").await?;
    let rbac = |mode: &str| {
        let option = format!("catalog.mode={mode}");
        template(&namespace, "rbac.yaml", &["--set", &option])
    };
    let (enabled, none) = (
        granted(&rbac("Enabled")?, |_| true)?,
        granted(&rbac("None")?, |_| true)?,
    );
    assert_eq!(
        enabled,
        granted(&template(&namespace, "rbac.yaml", &[])?, |_| true)?
    );
    let only: Vec<_> = enabled.difference(&none).collect();
    assert!(
        only.iter()
            .all(|(_, resource, _)| ["models", "clustermodels"].contains(&resource.as_str())),
        "{only:?}"
    );
    assert!(none.is_subset(&enabled), "None adds a right");

    let client = plane.client()?;
    let account = format!("system:serviceaccount:{namespace}:ai-inference-controller");
    for (mode, reads) in [("Enabled", true), ("None", false)] {
        plane.apply_yaml(&namespace, &rbac(mode)?).await?;
        for model in ["models", "clustermodels"] {
            for verb in READ {
                let kind = (ORDERS.0, model);
                let may = may(&client, &account, verb, kind, None).await?;
                assert_eq!(may, reads, "{mode}: {verb} {model}");
            }
        }
        assert!(
            may(&client, &account, "list", ORDERS, None).await?,
            "{mode}"
        );
    }
    let error = rbac("Sometimes").unwrap_err().to_string();
    assert!(error.contains("catalog"), "{error}");
    Ok(())
}
