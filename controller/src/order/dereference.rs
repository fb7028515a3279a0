//! Everything that an order refers to, and everything that stands for it.
//!
//! Reads stores first; the API server only for what a store does not have, and
//! the hub only for facts that neither the workload nor memory holds.

use super::copies::{self, Copy};
use super::settled::Settled;
use super::{Context, Error, Refusal, validate};
use crate::model::{ModelFacts, ModelRequest};
use crate::view::order_of;
use inference_api::names::HUGGING_FACE_TOKEN_KEYS;
use inference_api::{
    InferenceService, InferenceServiceClass, OrderCondition, OrderReason, TokenSecretReference,
};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Resource, ResourceExt};
use planner::Snapshot;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::sync::Arc;

/// What was found.
pub struct Seen {
    /// The class, if it exists and can be read.
    pub class: Option<InferenceServiceClass>,
    /// The order's StatefulSet, whoever made it.
    pub statefulset: Option<Arc<StatefulSet>>,
    /// The order's Service, whoever made it.
    pub service: Option<Arc<Service>>,
    /// Its pods, by name.
    pub pods: Vec<Arc<Pod>>,
    /// The disruption budget of the order's name, whoever made it; sought only where one is wanted.
    pub budget: Option<Arc<PodDisruptionBudget>>,
    /// Claims of its copies' volumes.
    pub volumes: Vec<Arc<PersistentVolumeClaim>>,
    /// Its claim templates.
    pub templates: Vec<Arc<ResourceClaimTemplate>>,
    /// What its workload stands on.
    pub settled: Option<Settled>,
    /// The model; none where it was not asked for, since the class refuses.
    pub facts: Option<Result<ModelFacts, Refusal>>,
    /// The cluster.
    pub snapshot: Arc<Snapshot>,
}

/// Reads what the order refers to.
///
/// # Errors
/// [`Error::Api`] where the API server does not answer.
pub async fn dereference(order: &InferenceService, cx: &Context) -> Result<Seen, Error> {
    let namespace = order.namespace().unwrap_or_default();
    let name = order.name_any();
    let class_ref = ObjectRef::new(&order.spec.inference_service_class_name);
    let class = cx
        .stores
        .classes
        .get(&class_ref)
        .and_then(|c| c.0.as_ref().ok().cloned());
    let statefulset = find(cx, &cx.stores.statefulsets, &namespace, &name).await?;
    let service = find(cx, &cx.stores.services, &namespace, &name).await?;
    let several = class
        .as_ref()
        .is_some_and(|c| c.spec.scaling().min_replicas > 1);
    let budget = if several {
        find(cx, &cx.stores.budgets, &namespace, &name).await?
    } else {
        let own = ObjectRef::new(&name).within(&namespace);
        cx.stores.budgets.get(&own)
    };
    let pods = pods(order, cx);
    let mut volumes: Vec<Arc<PersistentVolumeClaim>> =
        of_order(&cx.stores.volumes, &namespace, &name);
    volumes.sort_by_key(|v| v.name_any());
    let templates = of_order(&cx.stores.templates, &namespace, &name);
    let settled = statefulset
        .as_deref()
        .filter(|s| is_owned(order, *s))
        .and_then(|s| Settled::of(s, order.status.as_ref()));
    let facts = match validate::class(order, class.as_ref()) {
        Err(_) => None,
        Ok(_) => Some(match validate::model_request(order, cx.settings.catalog) {
            Err(refusal) => Err(refusal),
            Ok(request) => facts(order, request, settled.as_ref(), cx).await?,
        }),
    };
    Ok(Seen {
        class,
        statefulset,
        service,
        pods,
        volumes,
        budget,
        templates,
        settled,
        facts,
        snapshot: cx.snapshot(),
    })
}

/// The order's pods, by name.
fn pods(order: &InferenceService, cx: &Context) -> Vec<Arc<Pod>> {
    let namespace = order.namespace().unwrap_or_default();
    let mut pods = of_order(&cx.stores.pods, &namespace, &order.name_any());
    pods.sort_by_key(|p: &Arc<Pod>| p.name_any());
    pods
}

/// The copies that are left of an order that is being deleted; its StatefulSet may be gone.
pub fn copies(order: &InferenceService, cx: &Context) -> Vec<Copy> {
    pods(order, cx).iter().map(|p| copies::read(p)).collect()
}

/// Whether an object was made for this very order, and not for one of the same name.
pub fn is_owned<K: Resource>(order: &InferenceService, object: &K) -> bool {
    let uid = order.meta().uid.as_deref().unwrap_or_default();
    object
        .meta()
        .owner_references
        .iter()
        .flatten()
        .any(|o| o.uid == uid)
}

/// The object of that name: from the store, which knows our own only, or else
/// from the API server, so that somebody else's is seen before it is overwritten.
async fn find<K>(
    cx: &Context,
    store: &Store<K>,
    namespace: &str,
    name: &str,
) -> Result<Option<Arc<K>>, Error>
where
    K: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Debug
        + 'static,
{
    if let Some(found) = store.get(&ObjectRef::new(name).within(namespace)) {
        return Ok(Some(found));
    }
    let api: Api<K> = Api::namespaced(cx.client.clone(), namespace);
    let object = format!("{} {namespace}/{name}", K::kind(&()));
    Ok(api
        .get_opt(name)
        .await
        .map_err(Error::api("get", object))?
        .map(Arc::new))
}

fn of_order<K: Resource<DynamicType = ()> + Clone + 'static>(
    store: &Store<K>,
    namespace: &str,
    name: &str,
) -> Vec<Arc<K>> {
    store.state_filter(|o| {
        o.namespace().as_deref() == Some(namespace) && order_of(o.labels()) == Some(name)
    })
}

async fn facts(
    order: &InferenceService,
    request: ModelRequest,
    settled: Option<&Settled>,
    cx: &Context,
) -> Result<Result<ModelFacts, Refusal>, Error> {
    if let Some(settled) = settled.filter(|s| s.facts.request == request) {
        return Ok(Ok(settled.facts.clone()));
    }
    let reference = order
        .spec
        .model
        .hugging_face
        .as_ref()
        .and_then(|s| s.token_secret_ref.as_ref());
    let namespace = order.namespace().unwrap_or_default();
    let identity = reference.map(|r| (namespace.clone(), r.name.clone()));
    // A revision that was resolved for this very spec stays (equal on all copies).
    let status = order.status.as_ref();
    let pinned = status
        .filter(|s| {
            s.observed_generation.is_some() && s.observed_generation == order.metadata.generation
        })
        .and_then(|s| s.model.as_ref()?.revision.clone());
    let key = |commit: &str| (request.clone(), commit.to_owned(), identity.clone());
    if let Some(facts) = pinned.as_deref().and_then(|p| cx.recall_facts(&key(p))) {
        return Ok(Ok(facts));
    }
    let (token, unreadable) = match reference {
        None => (None, false),
        Some(reference) => match token(&namespace, reference, cx).await? {
            Token::Found(token) => (Some(token), false),
            Token::Forbidden => (None, true),
            Token::Missing(message) => {
                let refusal = Refusal::new(
                    OrderCondition::ModelResolved,
                    OrderReason::SecretNotFound,
                    message,
                );
                // Nothing tells when the Secret appears: Secrets are not watched.
                return Ok(Err(refusal.transient()));
            }
        },
    };
    let resolved = cx
        .hub
        .resolve(&request, pinned.as_deref(), token.as_deref())
        .await;
    Ok(match resolved {
        Ok(facts) => {
            cx.remember_facts(key(&facts.commit), &facts);
            Ok(facts)
        }
        Err(error) => {
            let mut refusal = validate::model_refusal(&error);
            if refusal.reason == OrderReason::AccessDenied {
                if unreadable && let Some(reference) = reference {
                    refusal.message = format!(
                        "{}; the controller has no right to read Secrets, so grant it this one: kubectl -n {namespace} create role {name}-read --verb=get --resource=secrets --resource-name={name}; kubectl -n {namespace} create rolebinding {name}-read --role={name}-read --serviceaccount={account}",
                        refusal.message,
                        name = reference.name,
                        account = cx.settings.service_account,
                    );
                }
                // The terms may be accepted or the right be granted at any time.
                refusal = refusal.transient();
            }
            Err(refusal)
        }
    })
}

enum Token {
    Found(String),
    Forbidden,
    Missing(String),
}

/// The hub's token, where the namespace lets the controller read that one Secret.
async fn token(
    namespace: &str,
    reference: &TokenSecretReference,
    cx: &Context,
) -> Result<Token, Error> {
    let api: Api<Secret> = Api::namespaced(cx.client.clone(), namespace);
    let secret = match api.get_opt(&reference.name).await {
        Ok(Some(secret)) => secret,
        Ok(None) => {
            return Ok(Token::Missing(format!(
                "there is no Secret {} in {namespace}; create it",
                reference.name
            )));
        }
        Err(kube::Error::Api(status)) if status.code == 403 => return Ok(Token::Forbidden),
        Err(error) => {
            return Err(Error::api(
                "get",
                format!("Secret {namespace}/{}", reference.name),
            )(error));
        }
    };
    let keys: Vec<&str> = match &reference.key {
        Some(key) => vec![key],
        None => HUGGING_FACE_TOKEN_KEYS.to_vec(),
    };
    let data = secret.data.unwrap_or_default();
    let found = keys
        .iter()
        .find_map(|k| String::from_utf8(data.get(*k)?.0.clone()).ok());
    Ok(match found {
        Some(token) => Token::Found(token.trim().to_owned()),
        None => Token::Missing(format!(
            "the Secret {} in {namespace} has no key {}; add it",
            reference.name,
            keys.join(" or ")
        )),
    })
}
