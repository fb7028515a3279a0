//! `controller uninstall`: what happens before the platform is removed.
//!
//! In: what the cluster holds, and whether the administrator confirmed. Out: a refusal that lists
//! the orders and classes that remain; or else the end of the controllers and of every order's
//! workload. Never: an order or an administrator's class removed, an object touched that was not
//! made for an order, a finalizer: what is left can be deleted at any time.

use crate::FIELD_MANAGER;
use crate::component::Component;
use crate::delete::delete_one;
use crate::view::LABEL_MANAGED_BY;
use anyhow::{Context as _, bail};
use inference_api::names::{DEFAULT_CLASS, MANAGED_BY};
use inference_api::{
    InferenceService, InferenceServiceClass, InferenceServiceStatus, OrderCondition as C,
    OrderReason as R, Phase, ReplicasStatus, default_class, set_condition,
};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{ListParams, Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt::{self, Debug, Display, Formatter};
use std::time::Duration;
use tracing::{info, warn};

/// Names of one namespace that a refusal lists.
const LISTED: usize = 10;
/// How long the controllers' pods may take to end: their own grace is 15 s.
const CONTROLLERS_END_WITHIN: Duration = Duration::from_secs(90);

/// What the command is told.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether workloads may be removed although orders remain.
    pub confirmed: bool,
    /// Namespace of the platform.
    pub namespace: String,
    /// Deployments that run the components.
    pub deployments: Vec<String>,
}

/// What an uninstallation leaves without anybody to look after it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remains {
    /// Orders by namespace.
    pub orders: BTreeMap<String, Vec<String>>,
    /// Classes, without a built-in one that nobody edited.
    pub classes: Vec<String>,
}

impl Remains {
    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.orders.is_empty() && self.classes.is_empty()
    }
}

impl Display for Remains {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let names = |names: &[String]| match names.split_at_checked(LISTED) {
            Some((first, rest)) if !rest.is_empty() => {
                format!("{} and {} more", first.join(", "), rest.len())
            }
            _ => names.join(", "),
        };
        let orders: usize = self.orders.values().map(Vec::len).sum();
        writeln!(f, "orders: {orders}")?;
        for (namespace, of) in &self.orders {
            writeln!(f, "  namespace {namespace}: {}", names(of))?;
        }
        write!(f, "classes: {}", self.classes.len())?;
        if !self.classes.is_empty() {
            write!(f, "\n  {}", names(&self.classes))?;
        }
        Ok(())
    }
}

/// Asks, or removes the workloads.
///
/// # Errors
/// Where something remains and nobody confirmed; where a controller does not end, so that it would
/// make anew what is removed; where the API server does not answer. Another run goes on from there.
pub async fn run(client: Client, options: &Options) -> anyhow::Result<()> {
    let orders = all::<InferenceService>(&client, "").await?;
    let classes = all::<InferenceServiceClass>(&client, "").await?;
    let shipped = classes.iter().find(|class| is_as_shipped(class));
    let shipped = shipped.map(|class| (class.name_any(), class.uid()));
    let mut remains = Remains::default();
    for order in &orders {
        let namespace = order.namespace().unwrap_or_default();
        remains
            .orders
            .entry(namespace)
            .or_default()
            .push(order.name_any());
    }
    let mine = classes.iter().map(ResourceExt::name_any);
    remains.classes = mine
        .filter(|name| shipped.as_ref().is_none_or(|(own, _)| own != name))
        .collect();
    if !remains.is_empty() && !options.confirmed {
        bail!(
            "the platform is not uninstalled, since this remains:\n{remains}\n\
             Clean up first: kubectl delete inferenceservices --all --all-namespaces, then \
             kubectl delete inferenceserviceclasses --all; and uninstall again. Or, to keep them: \
             helm rollback with the last revision of helm history, since Helm takes a refused \
             removal for one that is under way; then helm upgrade --reuse-values --set \
             uninstall.confirm=true, and uninstall again: the orders' copies and endpoints are removed then, and orders and classes stay, with nobody \
             to reconcile them, until you delete them"
        );
    }
    info!("Uninstalling; this remains:\n{remains}");
    stop_controllers(&client, options).await?;
    let ours = format!("{LABEL_MANAGED_BY}={MANAGED_BY}");
    let removed = [
        remove::<StatefulSet>(&client, &ours).await?,
        remove::<Service>(&client, &ours).await?,
        remove::<ResourceClaimTemplate>(&client, &ours).await?,
        remove::<PodDisruptionBudget>(&client, &ours).await?,
    ];
    info!(
        statefulsets = removed[0],
        services = removed[1],
        claim_templates = removed[2],
        disruption_budgets = removed[3],
        "Removed the workloads; their pods and volumes go with them."
    );
    for order in &orders {
        tell(&client, order).await?;
    }
    if let Some((name, uid)) = shipped {
        let classes: Api<InferenceServiceClass> = Api::all(client.clone());
        delete(&classes, &name, uid).await?;
    }
    let leases: Api<Lease> = Api::namespaced(client.clone(), &options.namespace);
    for component in Component::ALL {
        delete(&leases, component.name(), None).await?;
    }
    Ok(())
}

/// Whether a class is the built-in one, as some version of the platform made it: then it is the
/// platform's to remove. One that an administrator edited is theirs.
fn is_as_shipped(class: &InferenceServiceClass) -> bool {
    class.name_any() == DEFAULT_CLASS
        && default_class().is_ok_and(|shipped| shipped.spec == class.spec)
}

/// All objects of a kind with these labels; none where the kind is not served. What cannot be read
/// is told and left out: it has no workload of this version's.
async fn all<K>(client: &Client, labels: &str) -> anyhow::Result<Vec<K>>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let api: Api<DeserializeGuard<K>> = Api::all(client.clone());
    let found = match api.list(&ListParams::default().labels(labels)).await {
        Ok(list) => list.items,
        Err(kube::Error::Api(status)) if status.code == 404 => vec![],
        Err(error) => return Err(error).with_context(|| format!("listing {}", K::plural(&()))),
    };
    let read = found.into_iter().filter_map(|object| match object.0 {
        Ok(object) => Some(object),
        Err(invalid) => {
            warn!(kind = %K::kind(&()), name = ?invalid.metadata.name, "An object can't be read; leaving it.");
            None
        }
    });
    Ok(read.collect())
}

/// Ends the processes that would make anew what is removed, and waits until they are gone.
async fn stop_controllers(client: &Client, options: &Options) -> anyhow::Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), &options.namespace);
    let none = Patch::Merge(serde_json::json!({"spec": {"replicas": 0}}));
    for name in &options.deployments {
        match deployments
            .patch_scale(name, &PatchParams::default(), &none)
            .await
        {
            Ok(_) => info!(deployment = name, "Asked the controllers to end."),
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(error).with_context(|| format!("scaling Deployment {name}")),
        }
    }
    let pods: Api<Pod> = Api::namespaced(client.clone(), &options.namespace);
    let names = options.deployments.join(",");
    let theirs = ListParams::default().labels(&format!(
        "app.kubernetes.io/part-of=ai-inference,app.kubernetes.io/name in ({names})"
    ));
    let ended = async {
        loop {
            let standing = pods.list(&theirs).await?.items;
            for pod in &standing {
                let uid = pod.uid().unwrap_or_default();
                let gone = conditions::is_deleted(&uid);
                await_condition(pods.clone(), &pod.name_any(), gone).await?;
            }
            // One may have been made while the others ended.
            if standing.is_empty() {
                return anyhow::Ok(());
            }
        }
    };
    tokio::time::timeout(CONTROLLERS_END_WITHIN, ended)
        .await
        .with_context(|| {
            format!(
                "a pod of {names} in {} does not end, so nothing was removed; look at its node, \
                 delete the pod, and uninstall again",
                options.namespace
            )
        })?
        .context("waiting for the controllers' pods to end")
}

/// Removes what was made for orders; gives how many there were.
async fn remove<K>(client: &Client, labels: &str) -> anyhow::Result<usize>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Debug,
{
    let mut removed = 0;
    for object in all::<K>(client, labels).await? {
        // Anybody may give an object our label.
        if !is_of_an_order(&object) {
            continue;
        }
        let namespace = object.namespace().unwrap_or_default();
        let api: Api<K> = Api::namespaced(client.clone(), &namespace);
        delete(&api, &object.name_any(), object.uid()).await?;
        removed += 1;
    }
    Ok(removed)
}

fn is_of_an_order<K: Resource>(object: &K) -> bool {
    let owners = object.meta().owner_references.iter().flatten();
    let kind = InferenceService::kind(&());
    owners
        .filter(|owner| owner.controller == Some(true))
        .any(|owner| owner.kind == kind && owner.api_version == InferenceService::api_version(&()))
}

async fn delete<K>(api: &Api<K>, name: &str, uid: Option<String>) -> anyhow::Result<()>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let deleted = delete_one(api, name, uid).await;
    deleted.with_context(|| format!("deleting {} {name}", K::kind(&())))
}

/// The status of an order that nobody reconciles any more.
fn left(order: &InferenceService, now: &Time) -> InferenceServiceStatus {
    let mut status = order.status.clone().unwrap_or_default();
    let words = "the platform was uninstalled; its copies and its endpoint were removed";
    for condition in [C::WorkloadReady, C::Ready] {
        let update = condition.unmet(R::PlatformUninstalled, words);
        set_condition(
            &mut status.conditions,
            update,
            order.metadata.generation,
            now,
        );
    }
    let update = C::RuntimeCurrent.unmet(R::WorkloadNotCreated, "there are no copies");
    set_condition(
        &mut status.conditions,
        update,
        order.metadata.generation,
        now,
    );
    status.phase = Some(Phase::Pending);
    status.endpoint = None;
    status.replicas = status.replicas.map(|replicas| ReplicasStatus {
        current: 0,
        ready: 0,
        summary: format!("0/{}", replicas.desired),
        ..replicas
    });
    status
}

/// Writes into an order that nobody reconciles it: it would say for ever that it serves.
async fn tell(client: &Client, order: &InferenceService) -> anyhow::Result<()> {
    let (name, namespace) = (order.name_any(), order.namespace().unwrap_or_default());
    let body = serde_json::json!({
        "apiVersion": InferenceService::api_version(&()),
        "kind": InferenceService::kind(&()),
        "metadata": {"name": name, "uid": order.uid()},
        "status": left(order, &Time(k8s_openapi::jiff::Timestamp::now())),
    });
    let orders: Api<InferenceService> = Api::namespaced(client.clone(), &namespace);
    let params = PatchParams::apply(FIELD_MANAGER).force();
    match orders
        .patch_status(&name, &params, &Patch::Apply(&body))
        .await
    {
        Ok(_) => Ok(()),
        // Deleted, or another of the same name, in the meantime.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(error)
            .with_context(|| format!("patching the status of InferenceService {namespace}/{name}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_remains_is_listed_by_namespace_and_long_lists_are_cut_a_120() {
        let orders = (1..=12).map(|i| format!("chat-{i}")).collect();
        let remains = Remains {
            orders: [
                ("team-a".to_owned(), vec!["rag".to_owned()]),
                ("team-b".to_owned(), orders),
            ]
            .into(),
            classes: vec!["gold".into(), "silver".into()],
        };
        let expected = "orders: 13\n  namespace team-a: rag\n  namespace team-b: chat-1, chat-2, \
            chat-3, chat-4, chat-5, chat-6, chat-7, chat-8, chat-9, chat-10 and 2 more\nclasses: 2\n  gold, silver";
        assert_eq!(remains.to_string(), expected);
        assert_eq!(Remains::default().to_string(), "orders: 0\nclasses: 0");
    }

    #[test]
    fn only_an_unedited_built_in_class_is_the_platforms_to_remove() {
        let mut class = default_class().unwrap();
        assert!(is_as_shipped(&class));
        class.spec.model_storage_class_name = Some("fast".into());
        assert!(!is_as_shipped(&class));
        let mut other = default_class().unwrap();
        other.metadata.name = Some("other".into());
        assert!(!is_as_shipped(&other));
    }
}
