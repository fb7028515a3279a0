//! Writes what was decided: server-side apply, only where something differs.

use super::build::Decision;
use super::copies::{self, Copy};
use super::dereference::{Seen, is_owned};
use super::rebuild;
use super::{Context, Error, Refusal};
use crate::FIELD_MANAGER;
use crate::delete::delete_one;
use crate::render;
use inference_api::names::TOKEN_KEY;
use inference_api::{InferenceService, OrderCondition as C, OrderReason as R};
use k8s_openapi::ByteString;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::NamespaceResourceScope;
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fmt::Debug;
use tracing::info;

/// What stands after the writes.
pub struct Applied {
    /// The copies, as they were before.
    pub copies: Vec<Copy>,
    /// The StatefulSet, if it stands.
    pub statefulset: Option<StatefulSet>,
    /// What the API server refused.
    pub refused: Option<Refusal>,
}

/// Writes the decision.
///
/// # Errors
/// [`Error::Api`] where trying again may help; what the API server refuses for
/// good becomes a condition.
pub async fn apply(
    order: &InferenceService,
    seen: &Seen,
    decision: &Decision,
    cx: &Context,
) -> Result<Applied, Error> {
    let standing = seen
        .statefulset
        .as_deref()
        .filter(|s| is_owned(order, *s))
        .cloned();
    let mut applied = Applied {
        copies: decision.copies.clone(),
        statefulset: standing,
        refused: None,
    };
    let Some(objects) = &decision.objects else {
        return Ok(applied);
    };
    let namespace = order.namespace().unwrap_or_default();
    if decision.rebuild.is_some() {
        // Said first, so that whoever goes on after a restart knows what was begun.
        if rebuild::is_announced(order) {
            remove_workload(order, seen, cx).await?;
            applied.statefulset = None;
            applied.copies.clear();
        }
        return Ok(applied);
    }
    let wrote = async {
        ensure_token(order, decision, cx).await?;
        let template = seen
            .templates
            .iter()
            .find(|t| t.name_any() == objects.template.name_any());
        ensure(cx, order, &objects.template, template.map(|t| &**t)).await?;
        ensure(cx, order, &objects.service, seen.service.as_deref()).await?;
        ensure_budget(order, seen, objects.budget.as_ref(), cx).await?;
        if !decision.leftovers.is_empty() {
            return Ok(None);
        }
        ensure(cx, order, &objects.statefulset, seen.statefulset.as_deref())
            .await
            .map(Some)
    };
    match wrote.await {
        Ok(statefulset) => applied.statefulset = statefulset,
        Err(Failure::Refused(refusal)) => {
            applied.refused = Some(*refusal);
            return Ok(applied);
        }
        Err(Failure::Error(error)) => return Err(error),
    }
    let pods: Api<Pod> = Api::namespaced(cx.client.clone(), &namespace);
    for copy in &decision.copies {
        if !decision.step.moved.contains(&copy.name) {
            continue;
        }
        delete(&pods, &copy.name, Some(copy.uid.clone())).await?;
        cx.remember_ending(order, &copy.uid);
        info!(
            namespace,
            order = order.name_any(),
            pod = copy.name,
            "Moving a copy to the current description."
        );
    }
    remove_old_templates(order, seen, decision, cx).await?;
    Ok(applied)
}

enum Failure {
    Refused(Box<Refusal>),
    Error(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Error(error)
    }
}

/// Writes one object if it differs from what stands; gives what stands then.
async fn ensure<K>(
    cx: &Context,
    order: &InferenceService,
    wanted: &K,
    live: Option<&K>,
) -> Result<K, Failure>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Serialize
        + Debug,
{
    let namespace = order.namespace().unwrap_or_default();
    let name = wanted.name_any();
    let object = format!("{} {namespace}/{name}", K::kind(&()));
    if let Some(live) = live {
        if !is_owned(order, live) {
            return Err(Failure::Refused(Box::new(Refusal::new(
                C::WorkloadReady,
                R::NameTaken,
                format!("{object} exists and was not made for this order; remove it, or give the order another name"),
            ).transient())));
        }
        if differs(wanted, live).is_none() {
            return Ok(live.clone());
        }
    }
    let api: Api<K> = Api::namespaced(cx.client.clone(), &namespace);
    let params = PatchParams::apply(FIELD_MANAGER).force();
    match api.patch(&name, &params, &Patch::Apply(wanted)).await {
        Ok(written) => {
            info!(object, "Applied.");
            cx.metrics.writes.inc();
            Ok(written)
        }
        Err(kube::Error::Api(status)) if matches!(status.code, 400 | 403 | 422) => {
            // Nothing tells when a quota or a policy changes.
            Err(Failure::Refused(Box::new(
                Refusal::new(
                    C::WorkloadReady,
                    R::WorkloadRefused,
                    format!("{object}: {}", status.message),
                )
                .transient(),
            )))
        }
        Err(error) => Err(Error::api("apply", object)(error).into()),
    }
}

/// Writes or removes the disruption budget. One of the order's name that somebody else made stands
/// for ours.
async fn ensure_budget(
    order: &InferenceService,
    seen: &Seen,
    wanted: Option<&PodDisruptionBudget>,
    cx: &Context,
) -> Result<(), Failure> {
    let live = seen.budget.as_deref();
    if live.is_some_and(|live| !is_owned(order, live)) {
        return Ok(());
    }
    match (wanted, live) {
        (Some(wanted), live) => {
            ensure(cx, order, wanted, live).await?;
        }
        (None, Some(live)) => {
            let namespace = order.namespace().unwrap_or_default();
            let api: Api<PodDisruptionBudget> = Api::namespaced(cx.client.clone(), &namespace);
            delete(&api, &live.name_any(), live.uid()).await?;
        }
        (None, None) => {}
    }
    Ok(())
}

/// Where what stands differs from what is wanted: a path; none where all that is
/// wanted is there. Fields that others or the server filled in do not count.
pub fn differs<K: Serialize>(wanted: &K, live: &K) -> Option<String> {
    let (Ok(wanted), Ok(live)) = (serde_json::to_value(wanted), serde_json::to_value(live)) else {
        return Some("unreadable".to_owned());
    };
    difference(&wanted, &live)
}

fn difference(wanted: &Value, live: &Value) -> Option<String> {
    match (wanted, live) {
        (Value::Object(wanted), Value::Object(live)) => wanted.iter().find_map(|(key, value)| {
            let inner = match live.get(key) {
                Some(live) => difference(value, live),
                // The server drops what is empty.
                None if is_empty(value) => None,
                None => Some(String::new()),
            };
            inner.map(|path| format!("{key}.{path}"))
        }),
        (Value::Array(wanted), Value::Array(live)) => {
            if wanted.len() != live.len() {
                return Some("length".to_owned());
            }
            wanted
                .iter()
                .zip(live)
                .enumerate()
                .find_map(|(i, (w, l))| difference(w, l).map(|path| format!("{i}.{path}")))
        }
        (wanted, live) => (wanted != live).then(String::new),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

/// The endpoint's token: made once, never read. A Secret of that name that is
/// there already is used as it is; one that was removed is made anew.
async fn ensure_token(
    order: &InferenceService,
    decision: &Decision,
    cx: &Context,
) -> Result<(), Failure> {
    let uid = order.uid().unwrap_or_default();
    let missing = decision.copies.iter().any(|c| c.secret_missing);
    if !decision.token || (cx.remembered().tokens.contains(&uid) && !missing) {
        return Ok(());
    }
    let namespace = order.namespace().unwrap_or_default();
    let name = InferenceService::token_secret_name(&order.name_any());
    let object = format!("Secret {namespace}/{name}");
    let Some(token) = random_token() else {
        return Err(Error::Malformed("the system gives no random bytes".into()).into());
    };
    let secret = Secret {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: Some(namespace.clone()),
            labels: Some(render::labels(&order.name_any())),
            owner_references: render::owner(order).map(|o| vec![o]),
            ..ObjectMeta::default()
        },
        data: Some([(TOKEN_KEY.to_owned(), ByteString(token.into_bytes()))].into()),
        type_: Some("Opaque".to_owned()),
        ..Secret::default()
    };
    let api: Api<Secret> = Api::namespaced(cx.client.clone(), &namespace);
    match api
        .create(
            &PostParams {
                field_manager: Some(FIELD_MANAGER.to_owned()),
                ..PostParams::default()
            },
            &secret,
        )
        .await
    {
        Ok(_) => {
            info!(object, "Made the endpoint's token.");
            cx.metrics.writes.inc();
        }
        Err(kube::Error::Api(status)) if status.code == 409 => {}
        Err(kube::Error::Api(status)) if matches!(status.code, 403 | 422) => {
            return Err(Failure::Refused(Box::new(
                Refusal::new(
                    C::WorkloadReady,
                    R::WorkloadRefused,
                    format!("{object}: {}", status.message),
                )
                .transient(),
            )));
        }
        Err(error) => return Err(Error::api("create", object)(error).into()),
    }
    cx.remembered().tokens.insert(uid);
    Ok(())
}

/// 256 random bits as hex.
fn random_token() -> Option<String> {
    let mut bytes = [0u8; 32];
    rustls::crypto::ring::default_provider()
        .secure_random
        .fill(&mut bytes)
        .ok()?;
    Some(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

async fn delete<K>(api: &Api<K>, name: &str, uid: Option<String>) -> Result<(), Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let deleted = delete_one(api, name, uid).await;
    deleted.map_err(|error| Error::api("delete", format!("{} {name}", K::kind(&())))(error))
}

/// Removes the StatefulSet; its claims' retention policy takes the volumes along.
async fn remove_workload(order: &InferenceService, seen: &Seen, cx: &Context) -> Result<(), Error> {
    let Some(standing) = &seen.statefulset else {
        return Ok(());
    };
    if standing.metadata.deletion_timestamp.is_some() {
        return Ok(());
    }
    let api: Api<StatefulSet> =
        Api::namespaced(cx.client.clone(), &order.namespace().unwrap_or_default());
    delete(&api, &standing.name_any(), standing.uid()).await
}

/// Claim templates of earlier plans that no copy stands on.
async fn remove_old_templates(
    order: &InferenceService,
    seen: &Seen,
    decision: &Decision,
    cx: &Context,
) -> Result<(), Error> {
    let Some(objects) = &decision.objects else {
        return Ok(());
    };
    let pod = objects.statefulset.spec.template.spec.as_ref();
    let claims = pod.and_then(|p| p.resource_claims.as_ref());
    let current: Vec<&str> = claims
        .into_iter()
        .flatten()
        .filter_map(|c| c.resource_claim_template_name.as_deref())
        .collect();
    let used = |name: &str| {
        seen.pods
            .iter()
            .map(|p| copies::read(p))
            .any(|c| c.claim_template.as_deref() == Some(name))
    };
    let api: Api<ResourceClaimTemplate> =
        Api::namespaced(cx.client.clone(), &order.namespace().unwrap_or_default());
    for template in &seen.templates {
        let name = template.name_any();
        if !current.contains(&name.as_str()) && is_owned(order, &**template) && !used(&name) {
            delete(&api, &name, template.uid()).await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_the_server_filled_in_is_no_difference_and_what_somebody_changed_is() {
        let wanted = json!({"spec": {"replicas": 1, "containers": [{"name": "a", "env": [], "value": ""}], "empty": {}}});
        let live = json!({"spec": {"replicas": 1, "containers": [{"name": "a", "imagePullPolicy": "Always"}]}, "status": {}});
        assert_eq!(difference(&wanted, &live), None);
        let edited = json!({"spec": {"replicas": 2, "containers": [{"name": "a"}]}});
        assert_eq!(
            difference(&wanted, &edited).as_deref(),
            Some("spec.replicas.")
        );
        let added = json!({"spec": {"replicas": 1, "containers": [{"name": "a"}, {"name": "b"}]}});
        assert_eq!(
            difference(&wanted, &added).as_deref(),
            Some("spec.containers.length")
        );
    }

    #[test]
    fn tokens_are_long_and_never_the_same_a_087() {
        let (a, b) = (random_token().unwrap(), random_token().unwrap());
        assert!(a.len() == 64 && a != b);
    }
}
