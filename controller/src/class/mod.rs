//! The class's reconciler: Validated and Ready, and the built-in class.
//!
//! In: a class, whether what it names exists, and what its orders found about its
//! selectors. Out: its two conditions, an event when they change, the number of orders
//! that use it. `judge` is pure. Never: a word of these in an order's status.

mod builtin;

pub use builtin::ensure_default_class;

use crate::component::{Component, PLANNER_LOG};
use crate::metrics::Metrics;
use crate::view;
use dra_cel::Selector;
use inference_api::{
    ClassCondition as C, ClassEvent, ClassReason as R, ConditionUpdate, ExposureType,
    InferenceService, InferenceServiceClass, InferenceServiceClassSpec,
    InferenceServiceClassStatus, InferenceServiceStatus, OrderCondition, OrderReason,
    set_condition,
};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceSlice};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::runtime::controller::Action;
use kube::runtime::events::{Event, EventType, Recorder};
use kube::runtime::reflector::Store;
use kube::{Api, Client, Resource, ResourceExt};
use planner::{BrokenSelector, SelectorHolder};
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
    /// Selectors that an order of the class found no placement for.
    pub broken: &'a [BrokenSelector],
}

/// What a class needs of an order's status: that its placement could not be judged.
pub fn verdict(order: &InferenceService) -> Option<InferenceServiceStatus> {
    let conditions = order.status.as_ref().map(|s| s.conditions.as_slice());
    let planned = OrderCondition::Planned.find(conditions.unwrap_or_default())?;
    (planned.reason == OrderReason::PlacementUndecidable.as_str()).then(|| InferenceServiceStatus {
        conditions: vec![planned.clone()],
        ..InferenceServiceStatus::default()
    })
}

/// Whether an order's placement could not be judged.
pub fn is_undecidable(order: &InferenceService) -> bool {
    verdict(order).is_some()
}

/// A reconcile that could not be finished.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The class cannot be read; only a change mends it.
    #[error("the class can't be read: {0}")]
    Malformed(String),
    /// The API server did not list the slices.
    #[error("list ResourceSlices for the selectors of InferenceServiceClass {name}: {source}")]
    Slices {
        /// The class.
        name: String,
        /// The API server's words.
        #[source]
        source: Box<kube::Error>,
    },
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
    if let Some(message) = undecidable(cluster.broken) {
        return ready(R::SelectorUndecidable, message);
    }
    [
        validated,
        C::Ready.met(
            R::Ready,
            format!(
                "orders can be served under the class{}",
                not_yet(&class.spec)
            ),
        ),
    ]
}

/// The first broken selector in full: here its administrator reads it, while
/// the orders' users read only that there is one.
fn undecidable(broken: &[BrokenSelector]) -> Option<String> {
    let first = broken.first()?;
    let device = first
        .device
        .as_deref()
        .map(|d| format!(" on the device {d}"));
    let more = match broken.len() {
        1 => String::new(),
        n => format!("; {} more cannot be judged either", n - 1),
    };
    let holder = match &first.holder {
        SelectorHolder::ServiceClass => "spec.acceleratorPolicy.selectors".to_owned(),
        SelectorHolder::DeviceClass(name) => format!("the selector of DeviceClass {name}"),
    };
    Some(format!(
        "an order found no placement: {holder} `{}` cannot be judged{}: {}{more}",
        first.expression,
        device.unwrap_or_default(),
        first.error
    ))
}

/// What the class says and this version does not do yet.
fn not_yet(spec: &InferenceServiceClassSpec) -> String {
    let mut words = Vec::new();
    let exposure = &spec.exposure_policy;
    if exposure.type_ == ExposureType::External {
        words
            .push("endpoints are not published outside the cluster (exposurePolicy.type External)");
    }
    if exposure.https.is_some() {
        words.push("no certificate is made or used (exposurePolicy.https)");
    }
    let scaling = spec.scaling();
    if scaling.min_replicas < scaling.max_replicas {
        words.push("orders keep minReplicas copies and do not grow to maxReplicas (scalingPolicy)");
    }
    if words.is_empty() {
        return String::new();
    }
    format!(
        "; this version does not do all of it yet: {}",
        words.join("; ")
    )
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
    let (mut orders, mut undecidable) = (0usize, false);
    for order in cx.orders.state() {
        let order = order.0.as_ref();
        if let Some(order) = order
            .ok()
            .filter(|o| o.spec.inference_service_class_name == name)
        {
            orders += 1;
            undecidable |= is_undecidable(order);
        }
    }
    let broken = if undecidable {
        broken(class, &cx).await?
    } else {
        vec![]
    };
    let cluster = Cluster {
        device_classes: &device_classes,
        storage_classes: &storage_classes,
        device_api: cx.device_api,
        broken: &broken,
    };
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

/// The selectors that cannot be judged on the cluster's devices. They are looked for only
/// when an order ran into one, so slices are listed then and not kept.
async fn broken(class: &InferenceServiceClass, cx: &Context) -> Result<Vec<BrokenSelector>, Error> {
    if !cx.device_api {
        return Ok(vec![]);
    }
    let slices: Api<ResourceSlice> = Api::all(cx.client.clone());
    let slices = slices
        .list(&Default::default())
        .await
        .map_err(|source| Error::Slices {
            name: class.name_any(),
            source: Box::new(source),
        })?;
    let slices: Vec<_> = slices.items.into_iter().map(Arc::new).collect();
    let snapshot = view::snapshot(&slices, &cx.device_classes.state(), &[], &[]);
    let policy = class.spec.accelerators();
    let selectors: Vec<String> = policy
        .selectors
        .iter()
        .flatten()
        .map(|s| s.cel.expression.clone())
        .collect();
    let names = policy.device_class_names.as_deref();
    Ok(planner::broken_selectors(&snapshot, names, &selectors))
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
        Error::Slices { .. } | Error::Status { .. } => {
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
            broken: &[],
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

    fn class_of(spec: &str) -> InferenceServiceClass {
        serde_saphyr::from_str(&format!(
            "apiVersion: ai.deckhouse.io/v1alpha1\nkind: InferenceServiceClass\nmetadata: {{name: c}}\nspec: {{modelPolicy: {{allowedEndpointTypes: [Chat]}}, {spec}}}\n"
        ))
        .unwrap()
    }

    fn ready(class: &InferenceServiceClass, broken: &[BrokenSelector]) -> ConditionUpdate {
        let cluster = Cluster {
            device_classes: &["gpu".to_owned()],
            storage_classes: &[],
            device_api: true,
            broken,
        };
        let [_, ready] = judge(class, cluster);
        ready
    }

    #[test]
    fn a_selector_that_an_order_ran_into_is_told_in_full_on_the_class_a_106() {
        let broken = BrokenSelector {
            holder: SelectorHolder::DeviceClass("mig.example.com".into()),
            expression: "device.zebra".into(),
            error: "no such key".into(),
            device: Some("example.com/node/gpu-0".into()),
        };
        let told = ready(&class_of(""), &[broken.clone(), broken]);
        assert_eq!(told.reason, "SelectorUndecidable");
        for part in [
            "DeviceClass mig.example.com",
            "device.zebra",
            "gpu-0",
            "1 more",
        ] {
            assert!(told.message.contains(part), "{}", told.message);
        }
    }

    #[rstest]
    #[case::all_done("exposurePolicy: {type: ClusterLocal}", &[])]
    #[case::external("exposurePolicy: {type: External}", &["External"])]
    #[case::https("exposurePolicy: {type: External, https: {mode: Disabled}}", &["External", "exposurePolicy.https"])]
    #[case::growth("exposurePolicy: {type: ClusterLocal}, scalingPolicy: {minReplicas: 1, maxReplicas: 4}", &["maxReplicas"])]
    fn a_class_says_what_this_version_does_not_do_yet_a_062_a_085(
        #[case] spec: &str,
        #[case] named: &[&str],
    ) {
        let told = ready(&class_of(spec), &[]);
        assert_eq!(told.reason, "Ready");
        for part in [
            "External",
            "exposurePolicy.https",
            "maxReplicas",
            "not do all",
        ] {
            let wanted = named.contains(&part) || (part == "not do all" && !named.is_empty());
            assert_eq!(
                told.message.contains(part),
                wanted,
                "{part}: {}",
                told.message
            );
        }
    }
}
