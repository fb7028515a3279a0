//! The class's reconciler: Validated and Ready, and the built-in class.
//!
//! In: a class, and whether what it names exists. Out: its two conditions, an
//! event when they change, the number of orders that use it. `judge` is pure.

mod builtin;

pub use builtin::ensure_default_class;

use crate::component::{Component, PLANNER_LOG};
use crate::metrics::Metrics;
use dra_cel::Selector;
use inference_api::{
    ClassCondition as C, ClassEvent, ClassReason as R, ConditionUpdate, InferenceService,
    InferenceServiceClass, InferenceServiceClassStatus, set_condition,
};
use k8s_openapi::api::resource::v1::DeviceClass;
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::runtime::controller::Action;
use kube::runtime::events::{Event, EventType, Recorder};
use kube::runtime::reflector::Store;
use kube::{Api, Client, Resource, ResourceExt};
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};

/// Shared by all reconciles of classes.
pub struct Context {
    /// Client of the API server.
    pub client: Client,
    /// Device classes.
    pub device_classes: Store<DeviceClass>,
    /// Storage classes.
    pub storage_classes: Store<StorageClass>,
    /// Orders of all namespaces.
    pub orders: Store<DeserializeGuard<InferenceService>>,
    /// Whether the cluster serves resource.k8s.io/v1.
    pub device_api: bool,
    /// Events.
    pub recorder: Recorder,
    /// Figures.
    pub metrics: Arc<Metrics>,
}

/// What there is of what classes name.
#[derive(Clone, Copy, Debug)]
pub struct Cluster<'a> {
    /// Names of the device classes.
    pub device_classes: &'a [String],
    /// Names of the storage classes.
    pub storage_classes: &'a [String],
    /// Whether the cluster serves resource.k8s.io/v1.
    pub device_api: bool,
}

/// A reconcile that could not be finished.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The class cannot be read; only a change mends it.
    #[error("the class can't be read: {0}")]
    Malformed(String),
    /// The API server did not take the status.
    #[error("patch the status of InferenceServiceClass {name}: {source}")]
    Status {
        /// The class.
        name: String,
        /// The API server's words.
        #[source]
        source: Box<kube::Error>,
    },
}

/// Both conditions of a class.
pub fn judge(class: &InferenceServiceClass, cluster: Cluster<'_>) -> [ConditionUpdate; 2] {
    let policy = class.spec.accelerators();
    let broken = policy
        .selectors
        .iter()
        .flatten()
        .enumerate()
        .find_map(|(i, s)| {
            let error = Selector::compile(&s.cel.expression).err()?;
            Some(format!(
                "spec.acceleratorPolicy.selectors[{i}] {:?}: {error}",
                s.cel.expression
            ))
        });
    if let Some(message) = broken {
        return [
            C::Validated.unmet(R::SelectorInvalid, message),
            C::Ready.unmet(R::NotValidated, "the class did not pass validation"),
        ];
    }
    let validated = C::Validated.met(R::Validated, "everything that the class says can be judged");
    let ready = |reason, message: String| [validated.clone(), C::Ready.unmet(reason, message)];
    if !cluster.device_api {
        return ready(
            R::DeviceApiUnavailable,
            "the cluster does not serve resource.k8s.io/v1; it must be Kubernetes 1.34 or later"
                .into(),
        );
    }
    let missing =
        |names: &[String], there: &[String]| names.iter().find(|n| !there.contains(n)).cloned();
    if let Some(names) = &policy.device_class_names
        && let Some(name) = missing(names, cluster.device_classes)
    {
        return ready(
            R::DeviceClassNotFound,
            format!(
                "there is no DeviceClass {name}; create it or correct spec.acceleratorPolicy.deviceClassNames"
            ),
        );
    }
    if cluster.device_classes.is_empty() {
        return ready(
            R::NoDeviceClass,
            "the cluster has no DeviceClass; install a driver of accelerators".into(),
        );
    }
    if let Some(name) = &class.spec.model_storage_class_name
        && !cluster.storage_classes.contains(name)
    {
        return ready(
            R::StorageClassNotFound,
            format!(
                "there is no StorageClass {name}; create it or correct spec.modelStorageClassName"
            ),
        );
    }
    [
        validated,
        C::Ready.met(R::Ready, "orders can be served under the class"),
    ]
}

/// Reconciles one class.
///
/// # Errors
/// [`Error`].
pub async fn reconcile(
    class: Arc<DeserializeGuard<InferenceServiceClass>>,
    cx: Arc<Context>,
) -> Result<Action, Error> {
    let class = match &class.0 {
        Ok(class) => class,
        Err(invalid) => return Err(Error::Malformed(invalid.error.clone())),
    };
    cx.metrics.reconciles.inc();
    if class.meta().deletion_timestamp.is_some() {
        return Ok(Action::await_change());
    }
    let name = class.name_any();
    let device_classes = names(&cx.device_classes);
    let storage_classes = names(&cx.storage_classes);
    let cluster = Cluster {
        device_classes: &device_classes,
        storage_classes: &storage_classes,
        device_api: cx.device_api,
    };
    let orders = cx
        .orders
        .state()
        .iter()
        .filter(|o| {
            o.0.as_ref()
                .is_ok_and(|o| o.spec.inference_service_class_name == name)
        })
        .count();
    let old = class.status.clone().unwrap_or_default();
    let mut fresh = InferenceServiceClassStatus {
        observed_generation: class.metadata.generation,
        conditions: old.conditions.clone(),
        orders: Some(i32::try_from(orders).unwrap_or(i32::MAX)),
    };
    let now = Time(k8s_openapi::jiff::Timestamp::now());
    for update in judge(class, cluster) {
        set_condition(
            &mut fresh.conditions,
            update,
            class.metadata.generation,
            &now,
        );
    }
    if class.status.as_ref() == Some(&fresh) {
        return Ok(Action::await_change());
    }
    announce(class, &old, &fresh, &cx).await;
    let body = serde_json::json!({
        "apiVersion": "ai.deckhouse.io/v1alpha1",
        "kind": "InferenceServiceClass",
        "metadata": {"name": name, "uid": class.uid()},
        "status": fresh,
    });
    let api: Api<InferenceServiceClass> = Api::all(cx.client.clone());
    match api
        .patch_status(
            &name,
            &PatchParams::apply(Component::Planner.name()).force(),
            &Patch::Apply(&body),
        )
        .await
    {
        Ok(_) => {
            cx.metrics.writes.inc();
            info!(target: PLANNER_LOG, class = name, "Wrote the class's status.");
            Ok(Action::await_change())
        }
        Err(kube::Error::Api(s)) if matches!(s.code, 404 | 409) => Ok(Action::await_change()),
        Err(source) => Err(Error::Status {
            name,
            source: Box::new(source),
        }),
    }
}

async fn announce(
    class: &InferenceServiceClass,
    old: &InferenceServiceClassStatus,
    fresh: &InferenceServiceClassStatus,
    cx: &Context,
) {
    let reason =
        |s: &InferenceServiceClassStatus| C::Ready.find(&s.conditions).map(|c| c.reason.clone());
    if reason(old) == reason(fresh) {
        return;
    }
    let Some(ready) = C::Ready.find(&fresh.conditions) else {
        return;
    };
    let validated = C::Validated
        .find(&fresh.conditions)
        .filter(|c| c.status != "True");
    let event = if ready.status == "True" {
        ClassEvent::ClassReady
    } else {
        ClassEvent::ClassRefused
    };
    let note = validated.map_or(&ready.message, |c| &c.message);
    record(&cx.recorder, class, event, note.clone()).await;
}

async fn record(
    recorder: &Recorder,
    class: &InferenceServiceClass,
    event: ClassEvent,
    note: String,
) {
    let event = Event {
        type_: if event.is_warning() {
            EventType::Warning
        } else {
            EventType::Normal
        },
        reason: event.as_str().to_owned(),
        note: Some(note.chars().take(1000).collect()),
        action: "Reconcile".to_owned(),
        secondary: None,
    };
    if let Err(error) = recorder.publish(&event, &class.object_ref(&())).await {
        warn!(target: PLANNER_LOG, class = class.name_any(), %error, "An event could not be recorded.");
    }
}

/// When a failed reconcile is tried again.
pub fn error_policy(
    class: Arc<DeserializeGuard<InferenceServiceClass>>,
    error: &Error,
    cx: Arc<Context>,
) -> Action {
    warn!(target: PLANNER_LOG, class = class.name_any(), %error, "The class was not reconciled.");
    match error {
        Error::Malformed(_) => {
            cx.metrics.failed("malformed");
            Action::await_change()
        }
        Error::Status { .. } => {
            cx.metrics.failed("api");
            Action::requeue(Duration::from_secs(10))
        }
    }
}

fn names<K: Resource<DynamicType = ()> + Clone + 'static>(store: &Store<K>) -> Vec<String> {
    store.state().iter().map(|o| o.name_any()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::sound("", "Validated", "Ready")]
    #[case::broken(
        "acceleratorPolicy: {selectors: [{cel: {expression: 'device.driver ='}}]}",
        "SelectorInvalid",
        "NotValidated"
    )]
    #[case::shares_alone(
        "acceleratorPolicy: {allowedSharingModes: [Shared]}",
        "Validated",
        "Ready"
    )]
    #[case::no_such_device_class(
        "acceleratorPolicy: {deviceClassNames: [gpu, none]}",
        "Validated",
        "DeviceClassNotFound"
    )]
    #[case::no_such_storage_class(
        "modelStorageClassName: none",
        "Validated",
        "StorageClassNotFound"
    )]
    #[case::named_and_there(
        "modelStorageClassName: fast, acceleratorPolicy: {deviceClassNames: [gpu]}",
        "Validated",
        "Ready"
    )]
    fn a_class_is_judged_by_what_it_names_a_014_a_105(
        #[case] spec: &str,
        #[case] validated: &str,
        #[case] ready: &str,
    ) {
        let class: InferenceServiceClass = serde_saphyr::from_str(&format!(
            "apiVersion: ai.deckhouse.io/v1alpha1\nkind: InferenceServiceClass\nmetadata: {{name: c}}\nspec: {{modelPolicy: {{allowedEndpointTypes: [Chat]}}, {spec}}}\n"
        ))
        .unwrap();
        let (device, storage) = (["gpu".to_owned()], ["fast".to_owned()]);
        let cluster = Cluster {
            device_classes: &device,
            storage_classes: &storage,
            device_api: true,
        };
        let got = judge(&class, cluster);
        assert_eq!(
            (got[0].reason, got[1].reason),
            (validated, ready),
            "{got:?}"
        );
        let old = Cluster {
            device_api: false,
            ..cluster
        };
        if validated == "Validated" {
            assert_eq!(
                judge(&class, old)[1].reason,
                "DeviceApiUnavailable",
                "A-014"
            );
        }
    }
}
