//! The watches: one store for each kind, and which change wakes which order.
//!
//! In: the API server's events. Out: stores, a counter that grows with each
//! change that a plan may depend on, and the orders and classes to look at again.
//! An order that waits for room is woken by every change of slices, allocations,
//! device classes and nodes; an order that serves by none of them.

use crate::class;
use crate::order::context::Stores;
use crate::render::short_hash;
use crate::view::{self, LABEL_MANAGED_BY, order_of};
use futures::channel::mpsc;
use futures::{SinkExt, StreamExt};
use inference_api::names::MANAGED_BY;
use inference_api::{
    ClassCondition, InferenceService, InferenceServiceClass, OrderCondition, OrderReason as R,
};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::core::DeserializeGuard;
use kube::runtime::WatchStreamExt;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::warn;

type Order = DeserializeGuard<InferenceService>;
type Class = DeserializeGuard<InferenceServiceClass>;

/// Room in a wake-up queue; a full one makes its watch wait, which loses nothing.
const QUEUE: usize = 1024;

/// What the order's reconciler works from.
pub struct Orders {
    /// What it reads.
    pub stores: Stores,
    /// Grows with each change that a plan may depend on.
    pub changes: Arc<AtomicU64>,
    all: Store<Order>,
    device_api: bool,
}

impl Orders {
    /// Waits until every store has its first complete list.
    pub async fn ready(&self) {
        // A writer that is dropped means that the process ends anyway.
        let s = &self.stores;
        let _ = s.classes.wait_until_ready().await;
        let _ = self.all.wait_until_ready().await;
        let _ = s.nodes.wait_until_ready().await;
        let _ = s.statefulsets.wait_until_ready().await;
        let _ = s.services.wait_until_ready().await;
        let _ = s.pods.wait_until_ready().await;
        let _ = s.volumes.wait_until_ready().await;
        let _ = s.budgets.wait_until_ready().await;
        if self.device_api {
            let _ = s.slices.wait_until_ready().await;
            let _ = s.device_classes.wait_until_ready().await;
            let _ = s.claims.wait_until_ready().await;
            let _ = s.templates.wait_until_ready().await;
        }
    }
}

/// What the class's reconciler works from.
pub struct Classes {
    /// Device classes.
    pub device_classes: Store<DeviceClass>,
    /// Storage classes.
    pub storage_classes: Store<StorageClass>,
    /// Orders of all namespaces, without their status.
    pub orders: Store<Order>,
    all: Store<Class>,
    device_api: bool,
}

impl Classes {
    /// Waits until every store has its first complete list.
    pub async fn ready(&self) {
        let _ = self.all.wait_until_ready().await;
        let _ = self.orders.wait_until_ready().await;
        let _ = self.storage_classes.wait_until_ready().await;
        if self.device_api {
            let _ = self.device_classes.wait_until_ready().await;
        }
    }
}

/// Whom a change concerns.
enum Concerns {
    /// Orders that wait for room.
    Waiting,
    /// Every class.
    Classes,
    /// One order.
    Order(String, String),
    /// The orders of a class.
    OrdersOf(String),
    /// One class, named as before and as now.
    Class(Vec<String>),
    /// Everything: a watch was broken, and what went away meanwhile is not told.
    Everything,
    Nobody,
}

/// Wakes the reconciler that has a queue; what concerns the other is not its business.
#[derive(Clone)]
struct Wake {
    orders: Option<mpsc::Sender<ObjectRef<Order>>>,
    classes: Option<mpsc::Sender<ObjectRef<Class>>>,
    all_orders: Store<Order>,
    all_classes: Store<Class>,
    changes: Arc<AtomicU64>,
}

/// Whether an order waits for the cluster to change.
fn waits(order: &InferenceService) -> bool {
    let conditions = order
        .status
        .as_ref()
        .map(|s| s.conditions.as_slice())
        .unwrap_or_default();
    let reason = |c: OrderCondition| {
        c.find(conditions)
            .filter(|c| c.status == "False")
            .and_then(|c| R::parse(&c.reason))
    };
    matches!(
        reason(OrderCondition::Planned),
        Some(R::ResourceClaimExhausted | R::PlacementUndecidable | R::NoDeviceClass)
    ) || matches!(
        reason(OrderCondition::WorkloadReady),
        Some(R::ReplicasUnschedulable | R::ScaleUpBlocked)
    )
}

impl Wake {
    async fn up(&mut self, concerns: Concerns) {
        let (mut orders, mut classes) = (Vec::new(), Vec::new());
        let pick = |store: &Store<Order>,
                    keep: &dyn Fn(&InferenceService) -> bool|
         -> Vec<ObjectRef<Order>> {
            let kept = store.state_filter(|o| o.0.as_ref().is_ok_and(keep));
            kept.iter().map(|o| ObjectRef::from_obj(&**o)).collect()
        };
        let every_class = || {
            self.all_classes
                .state()
                .iter()
                .map(|c| ObjectRef::from_obj(&**c))
                .collect::<Vec<_>>()
        };
        match concerns {
            Concerns::Nobody => {}
            Concerns::Waiting => {
                self.changes.fetch_add(1, Ordering::AcqRel);
                orders = pick(&self.all_orders, &waits);
            }
            Concerns::Everything => {
                self.changes.fetch_add(1, Ordering::AcqRel);
                orders = pick(&self.all_orders, &|_| true);
                classes = every_class();
            }
            Concerns::Classes => classes = every_class(),
            Concerns::Order(namespace, name) => {
                orders.push(ObjectRef::new(&name).within(&namespace))
            }
            Concerns::OrdersOf(class) => {
                orders = pick(&self.all_orders, &|o| {
                    o.spec.inference_service_class_name == class
                });
            }
            Concerns::Class(names) => classes = names.iter().map(|n| ObjectRef::new(n)).collect(),
        }
        // A receiver that is gone means that the process ends.
        if let Some(queue) = &mut self.orders {
            for order in orders {
                let _ = queue.send(order).await;
            }
        }
        if let Some(queue) = &mut self.classes {
            for class in classes {
                let _ = queue.send(class).await;
            }
        }
    }
}

struct Watch<'a> {
    client: &'a Client,
    tasks: &'a TaskTracker,
    stop: &'a CancellationToken,
    wake: &'a Wake,
}

impl Watch<'_> {
    /// Watches one kind. `fingerprint` is what a change must differ in to count;
    /// `concerns` is given the object, and its fingerprints before and now.
    fn run<K>(
        &self,
        pair: (Store<K>, reflector::store::Writer<K>),
        config: watcher::Config,
        fingerprint: impl Fn(&K) -> String + Send + 'static,
        concerns: impl Fn(&K, Option<&str>, Option<&str>) -> Concerns + Send + 'static,
    ) -> Store<K>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
        K::DynamicType: Default + Eq + Hash + Clone + Debug + Unpin + Send,
    {
        self.run_without(|_| {}, pair, config, fingerprint, concerns)
    }

    /// The same, keeping objects without what `strip` takes from them.
    fn run_without<K>(
        &self,
        strip: fn(&mut K),
        (store, writer): (Store<K>, reflector::store::Writer<K>),
        config: watcher::Config,
        fingerprint: impl Fn(&K) -> String + Send + 'static,
        concerns: impl Fn(&K, Option<&str>, Option<&str>) -> Concerns + Send + 'static,
    ) -> Store<K>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
        K::DynamicType: Default + Eq + Hash + Clone + Debug + Unpin + Send,
    {
        let api: Api<K> = Api::all(self.client.clone());
        let stream = watcher::watcher(api, config)
            .default_backoff()
            .modify(move |o| {
                o.meta_mut().managed_fields = None;
                strip(o);
            });
        let stream = reflector::reflector(writer, stream);
        let (mut wake, stop) = (self.wake.clone(), self.stop.clone());
        self.tasks.spawn(async move {
            let kind = K::kind(&K::DynamicType::default()).into_owned();
            let mut stream = std::pin::pin!(stream.take_until(stop.cancelled_owned()));
            let mut known: HashMap<(Option<String>, String), String> = HashMap::new();
            // The reconcilers begin with everything when the first lists are complete;
            // until then nobody takes wake-ups, and a full queue would hold up the list.
            let (mut first, mut listing) = (true, true);
            while let Some(event) = stream.next().await {
                let (object, gone) = match event {
                    Ok(Event::Apply(o) | Event::InitApply(o)) => (o, false),
                    Ok(Event::Delete(o)) => (o, true),
                    Ok(Event::Init) => {
                        known.clear();
                        listing = true;
                        continue;
                    }
                    Ok(Event::InitDone) => {
                        if !first {
                            wake.up(Concerns::Everything).await;
                        }
                        (first, listing) = (false, false);
                        continue;
                    }
                    Err(error) => {
                        warn!(kind, %error, "A watch broke and will be taken up again.");
                        continue;
                    }
                };
                let key = (object.namespace(), object.name_any());
                let now = (!gone).then(|| fingerprint(&object));
                let before = match &now {
                    Some(now) => known.insert(key, now.clone()),
                    None => known.remove(&key),
                };
                if !listing && (before != now || gone) {
                    wake.up(concerns(&object, before.as_deref(), now.as_deref()))
                        .await;
                }
            }
        });
        store
    }

    fn owned<K>(&self, config: watcher::Config) -> Store<K>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    {
        self.run(reflector::store(), config, version, |o, _, _| {
            match (o.namespace(), order_of(o.labels())) {
                (Some(namespace), Some(name)) => Concerns::Order(namespace, name.to_owned()),
                _ => Concerns::Nobody,
            }
        })
    }
}

/// What a class is told of an order: that it is its own, and whether it finds that a
/// selector cannot be judged (`?`), which the class's condition then explains.
fn class_print(order: &InferenceService) -> String {
    let mark = if class::is_undecidable(order) {
        '?'
    } else {
        '.'
    };
    format!("{mark}{}", order.spec.inference_service_class_name)
}

/// What orders are told of their class: its generation, and whether it was found valid.
fn class_verdict(class: &Class) -> String {
    let conditions = class.0.as_ref().ok().and_then(|c| c.status.as_ref());
    let conditions = conditions.map(|s| s.conditions.as_slice());
    let verdict = ClassCondition::Validated.find(conditions.unwrap_or_default());
    let verdict = verdict.map(|c| (&c.status, c.observed_generation));
    format!("{:?} {verdict:?}", class.meta().generation)
}

fn version<K: Resource>(object: &K) -> String {
    object.meta().resource_version.clone().unwrap_or_default()
}

/// Starts the watches for orders. `device_api` says whether the cluster serves
/// resource.k8s.io/v1; without it the stores of its kinds stay empty.
pub fn of_orders(
    client: &Client,
    device_api: bool,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> (Orders, mpsc::Receiver<ObjectRef<Order>>) {
    let (queue, wakeups) = mpsc::channel(QUEUE);
    let changes = Arc::new(AtomicU64::new(1));
    let (order_store, class_store) = (reflector::store::<Order>(), reflector::store::<Class>());
    let wake = Wake {
        orders: Some(queue),
        classes: None,
        all_orders: order_store.0.clone(),
        all_classes: class_store.0.clone(),
        changes: changes.clone(),
    };
    let watch = Watch {
        client,
        tasks,
        stop,
        wake: &wake,
    };
    let any = watcher::Config::default();
    let ours = watcher::Config::default().labels(&format!("{LABEL_MANAGED_BY}={MANAGED_BY}"));

    // The reconciler has its own watch of orders; this one only says which of them there are.
    let all = watch.run(
        order_store,
        any.clone(),
        |_| String::new(),
        |_, _, _| Concerns::Nobody,
    );
    let classes = watch.run(class_store, any.clone(), class_verdict, |c, _, _| {
        Concerns::OrdersOf(c.name_any())
    });
    // Kinds that an old cluster does not serve are not watched, and their stores stay empty.
    let (slices, device_classes, claims, templates) = if device_api {
        (
            watch.run(
                reflector::store(),
                any.clone(),
                version,
                |_: &ResourceSlice, _, _| Concerns::Waiting,
            ),
            watch.run(
                reflector::store(),
                any.clone(),
                version,
                |_: &DeviceClass, _, _| Concerns::Waiting,
            ),
            watch.run(
                reflector::store(),
                any.clone(),
                |c: &ResourceClaim| view::claim(c).map(|c| short_hash(&c)).unwrap_or_default(),
                // A claim without an allocation takes nothing from anybody.
                |_, before, now| match (before.unwrap_or_default(), now.unwrap_or_default()) {
                    ("", "") => Concerns::Nobody,
                    _ => Concerns::Waiting,
                },
            ),
            watch.owned(ours.clone()),
        )
    } else {
        (
            reflector::store().0,
            reflector::store().0,
            reflector::store().0,
            reflector::store().0,
        )
    };
    let stores = Stores {
        classes,
        slices,
        device_classes,
        claims,
        nodes: watch.run(
            reflector::store(),
            any,
            // Not its heartbeats.
            |n: &Node| short_hash(&view::node(n)),
            |_, _, _| Concerns::Waiting,
        ),
        statefulsets: watch.owned(ours.clone()),
        services: watch.owned(ours.clone()),
        pods: watch.owned(ours.clone()),
        budgets: watch.owned(ours.clone()),
        volumes: watch.owned(ours),
        templates,
    };
    let watched = Orders {
        stores,
        changes,
        all,
        device_api,
    };
    (watched, wakeups)
}

/// Starts the watches for classes. `device_api` as in [`of_orders`].
pub fn of_classes(
    client: &Client,
    device_api: bool,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> (Classes, mpsc::Receiver<ObjectRef<Class>>) {
    let (queue, wakeups) = mpsc::channel(QUEUE);
    let (order_store, class_store) = (reflector::store::<Order>(), reflector::store::<Class>());
    let wake = Wake {
        orders: None,
        classes: Some(queue),
        all_orders: order_store.0.clone(),
        all_classes: class_store.0.clone(),
        changes: Arc::default(),
    };
    let watch = Watch {
        client,
        tasks,
        stop,
        wake: &wake,
    };
    let any = watcher::Config::default();
    let orders = watch.run_without(
        |o: &mut Order| {
            if let Ok(order) = &mut o.0 {
                order.status = class::verdict(order);
            }
        },
        order_store,
        any.clone(),
        |o: &Order| o.0.as_ref().map(class_print).unwrap_or_default(),
        |_, before, now| {
            Concerns::Class(
                [before, now]
                    .into_iter()
                    .flatten()
                    .filter_map(|print| print.strip_prefix(['?', '.']))
                    .map(str::to_owned)
                    .collect(),
            )
        },
    );
    // The reconciler has its own watch of classes; this one only says which of them there are.
    let all = watch.run(
        class_store,
        any.clone(),
        |_| String::new(),
        |_, _, _| Concerns::Nobody,
    );
    let device_classes = if device_api {
        watch.run(
            reflector::store(),
            any.clone(),
            version,
            |_: &DeviceClass, _, _| Concerns::Classes,
        )
    } else {
        reflector::store().0
    };
    let storage_classes = watch.run(
        reflector::store(),
        any,
        version,
        |_: &StorageClass, _, _| Concerns::Classes,
    );
    let watched = Classes {
        device_classes,
        storage_classes,
        orders,
        all,
        device_api,
    };
    (watched, wakeups)
}
