//! What every reconcile shares: clients, stores, settings, memories.

use super::Refusal;
use super::copies::Copy;
use crate::metrics::Metrics;
use crate::model::{Hub, ModelFacts, ModelRequest};
use crate::recipe::RecipeBook;
use crate::render::Installation;
use crate::view;
use inference_api::{InferenceService, InferenceServiceClass};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::{
    DeviceClass, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use kube::core::DeserializeGuard;
use kube::runtime::events::Recorder;
use kube::runtime::reflector::Store;
use kube::{Client, Resource, ResourceExt};
use planner::Snapshot;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// First and longest pause between attempts.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// Facts remembered; beyond that, all are forgotten and asked for again.
const REMEMBERED_FACTS: usize = 512;

/// What the installation decides.
#[derive(Clone, Debug)]
pub struct Settings {
    /// About every pod.
    pub installation: Installation,
    /// Whether the tie to the model catalog is on.
    pub catalog: bool,
    /// ServiceAccount of the controller, for messages about rights.
    pub service_account: String,
}

/// What the cluster holds, as the watches last saw it.
#[derive(Clone)]
pub struct Stores {
    /// Classes.
    pub classes: Store<DeserializeGuard<InferenceServiceClass>>,
    /// Slices of every driver.
    pub slices: Store<ResourceSlice>,
    /// Device classes.
    pub device_classes: Store<DeviceClass>,
    /// Claims of every namespace.
    pub claims: Store<ResourceClaim>,
    /// Nodes.
    pub nodes: Store<Node>,
    /// StatefulSets that were made for orders.
    pub statefulsets: Store<StatefulSet>,
    /// Services that were made for orders.
    pub services: Store<Service>,
    /// Pods of orders.
    pub pods: Store<Pod>,
    /// Disruption budgets that were made for orders.
    pub budgets: Store<PodDisruptionBudget>,
    /// Claims of volumes that were made for orders.
    pub volumes: Store<PersistentVolumeClaim>,
    /// Claim templates that were made for orders.
    pub templates: Store<ResourceClaimTemplate>,
}

/// A facts request, the commit that an order is pinned to, and as whom it was made.
/// Without the commit an order of today would get the branch as it was for another
/// order long ago; one order's token opens nothing to another.
type FactsKey = (ModelRequest, String, Option<(String, String)>);

/// Shared by all reconciles.
pub struct Context {
    /// Client of the API server.
    pub client: Client,
    /// What the watches saw.
    pub stores: Stores,
    /// Whether the cluster serves resource.k8s.io/v1.
    pub device_api: bool,
    /// The hub.
    pub hub: Hub,
    /// Client of pods' download progress.
    pub progress: reqwest::Client,
    /// Runtimes.
    pub recipes: RecipeBook,
    /// What the installation decides.
    pub settings: Settings,
    /// Events.
    pub recorder: Recorder,
    /// Figures.
    pub metrics: Arc<Metrics>,
    /// Bumped by every change that a plan may depend on.
    pub changes: Arc<AtomicU64>,
    pub(crate) memory: Mutex<Memory>,
}

/// What is remembered between reconciles; losing it costs only time.
#[derive(Default)]
pub(crate) struct Memory {
    facts: HashMap<FactsKey, ModelFacts>,
    attempts: HashMap<String, u32>,
    snapshot: Option<(u64, Arc<Snapshot>)>,
    /// UIDs of copies whose deletion was asked for, by order. The watch tells of it
    /// later, and until then another copy must not be taken for the same reason.
    ending: HashMap<String, HashSet<String>>,
    /// Orders whose token Secret was seen to.
    pub(crate) tokens: HashSet<String>,
}

impl Context {
    pub(crate) fn remembered(&self) -> std::sync::MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn recall_facts(&self, key: &FactsKey) -> Option<ModelFacts> {
        self.remembered().facts.get(key).cloned()
    }

    pub(crate) fn remember_facts(&self, key: FactsKey, facts: &ModelFacts) {
        let mut memory = self.remembered();
        if memory.facts.len() >= REMEMBERED_FACTS {
            memory.facts.clear();
        }
        memory.facts.insert(key, facts.clone());
    }

    /// The cluster now; converted anew only after a change.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        let version = self.changes.load(Ordering::Acquire);
        if let Some((seen, snapshot)) = &self.remembered().snapshot
            && *seen == version
        {
            return snapshot.clone();
        }
        let s = &self.stores;
        let snapshot = Arc::new(view::snapshot(
            &s.slices.state(),
            &s.device_classes.state(),
            &s.claims.state(),
            &s.nodes.state(),
        ));
        self.remembered().snapshot = Some((version, snapshot.clone()));
        snapshot
    }

    /// A copy's deletion was asked for.
    pub(crate) fn remember_ending(&self, order: &InferenceService, copy: &str) {
        let uid = order.uid().unwrap_or_default();
        let mut memory = self.remembered();
        memory
            .ending
            .entry(uid)
            .or_default()
            .insert(copy.to_owned());
    }

    /// Marks copies whose deletion was asked for, and forgets those that are gone.
    pub(crate) fn mark_ending(&self, order: &InferenceService, copies: &mut [Copy]) {
        let uid = order.uid().unwrap_or_default();
        let mut memory = self.remembered();
        let Some(asked) = memory.ending.get_mut(&uid) else {
            return;
        };
        asked.retain(|a| copies.iter().any(|c| c.uid == *a));
        for copy in copies.iter_mut() {
            copy.ending |= asked.contains(&copy.uid);
        }
        if asked.is_empty() {
            memory.ending.remove(&uid);
        }
    }

    /// The pause before the next attempt for this object, longer each time.
    pub fn next_pause(&self, uid: &str) -> Duration {
        let mut memory = self.remembered();
        let attempts = memory.attempts.entry(uid.to_owned()).or_default();
        let pause = FIRST_PAUSE.saturating_mul(1 << (*attempts).min(10));
        *attempts = attempts.saturating_add(1);
        pause.min(LONGEST_PAUSE)
    }

    /// The pause after a refusal that time may mend; none after any other.
    pub(crate) fn pause(
        &self,
        order: &InferenceService,
        refusal: Option<&Refusal>,
    ) -> Option<Duration> {
        let uid = order.uid().unwrap_or_default();
        refusal
            .filter(|r| r.transient)
            .map(|_| self.next_pause(&uid))
    }

    /// Forgets earlier attempts once nothing transient is in the way.
    pub(crate) fn settle_backoff(&self, order: &InferenceService, refusal: Option<&Refusal>) {
        if !refusal.is_some_and(|r| r.transient) {
            self.remembered()
                .attempts
                .remove(order.meta().uid.as_deref().unwrap_or_default());
        }
    }
}
