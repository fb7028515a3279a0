//! Keeps the node's slices at the API server as they should be.
//!
//! In: the wanted state over a channel, and a watch of this node's own slices. Out:
//! writes where they differ. Never: a cache of the cluster, and never a write in an
//! unchanged world.
//!
//! The kubelet deletes a node's slices when it starts and when a driver was gone for
//! 30 s, and anybody may delete one by hand: the watch shows it and they are back
//! within a second.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, pin_mut};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceTaint, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::layout::{resource_slice, slice_name};
use super::{SliceContent, Stored, View, Wanted, plan_writes, pool, stored, view};
use crate::DRIVER;
use crate::events::NodeEvents;
use crate::metrics::{Metrics, Outcome};
use crate::readiness::{Part, Readiness};

/// A wipe deletes slice by slice; this gathers its events into one reaction.
const GATHER: Duration = Duration::from_millis(100);
/// The first and the longest wait after a failed write.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// How often a server that dropped fields is asked again, besides each time that its watch
/// broke: behind a load balancer, servers are upgraded one after the other.
const ASK_AGAIN: Duration = Duration::from_secs(600);

/// The taint of devices whose plugin ended without a successor.
pub const UNSERVED: &str = "gpu.ai.deckhouse.io/unserved";

/// What a publisher works with.
pub struct Publisher {
    client: Client,
    node: String,
    wanted: watch::Receiver<Option<Arc<Wanted>>>,
    events: NodeEvents,
    metrics: Metrics,
    readiness: Readiness,
    owner: Option<OwnerReference>,
    view: Option<(View, Instant)>,
    observed: BTreeMap<String, Stored>,
    /// The watch failed: what was observed may be old.
    in_doubt: bool,
    last_generation: i64,
}

/// Publishing failed and is tried again.
#[derive(Debug, thiserror::Error)]
enum PublishError {
    #[error("cannot read Node {node}: {source}")]
    Node {
        node: String,
        source: Box<kube::Error>,
    },
    #[error("cannot list the ResourceSlices of node {node}: {source}")]
    List {
        node: String,
        source: Box<kube::Error>,
    },
    #[error("cannot {verb} ResourceSlice {name}: {source}")]
    Slice {
        verb: &'static str,
        name: String,
        source: Box<kube::Error>,
    },
    #[error(
        "the API server stored ResourceSlice {name} with other content than was sent; it is \
         older than this driver or has a feature gate off"
    )]
    Changed { name: String, kept: View },
}

impl PublishError {
    /// Whether the API server has another state than was observed: the watch lags, or a slice
    /// came, went or changed in between.
    fn is_outdated(&self) -> bool {
        match self {
            Self::Slice { source, .. } => {
                matches!(&**source, kube::Error::Api(status) if matches!(status.code, 404 | 409))
            }
            _ => false,
        }
    }
}

impl Publisher {
    /// A publisher of one node's pool.
    #[must_use]
    pub fn new(
        client: Client,
        node: String,
        wanted: watch::Receiver<Option<Arc<Wanted>>>,
        events: NodeEvents,
        metrics: Metrics,
        readiness: Readiness,
    ) -> Self {
        Self {
            client,
            node,
            wanted,
            events,
            metrics,
            readiness,
            owner: None,
            view: None,
            observed: BTreeMap::new(),
            in_doubt: false,
            last_generation: 0,
        }
    }

    /// Publishes until it is stopped. Where this instance is `alone` then, nobody serves
    /// the node any more, and its last write says so.
    pub async fn run(mut self, stop: CancellationToken, alone: impl Future<Output = bool>) {
        let api: Api<ResourceSlice> = Api::all(self.client.clone());
        let config = watcher::Config::default().fields(&self.selector());
        let events = watcher(api, config).default_backoff();
        pin_mut!(events);
        let mut relist = BTreeMap::new();
        let mut synced = false;
        let mut due: Option<Instant> = None;
        let mut backoff = RETRY.0;
        loop {
            let timer = async {
                match due {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => break,
                changed = self.wanted.changed() => {
                    if changed.is_err() {
                        break; // Discovery ends with the same sign, and may be first.
                    }
                    due = Some(Instant::now());
                }
                event = events.next() => match event {
                    Some(Ok(event)) => {
                        // A list is complete; after it, changes come one by one.
                        let listed = matches!(event, Event::InitDone);
                        synced |= listed;
                        if self.observe(event, &mut relist) {
                            let wait = if listed { Duration::ZERO } else { GATHER };
                            let soon = Instant::now() + wait;
                            due = Some(due.map_or(soon, |at| at.min(soon)));
                        }
                    }
                    Some(Err(error)) => {
                        let reason = format!("cannot watch this node's ResourceSlices: {error}");
                        tracing::warn!("{reason}.");
                        self.readiness.not_ready(Part::Slices, &reason);
                        self.in_doubt = true;
                        if let Some((_, until)) = &mut self.view {
                            *until = Instant::now(); // It may come back as a later version.
                        }
                        let later = Instant::now() + RETRY.0;
                        due = Some(due.map_or(later, |at| at.min(later)));
                    }
                    None => return,
                },
                () = timer => {
                    due = None;
                    if !synced {
                        continue;
                    }
                    let start = Instant::now();
                    let published = self.publish().await;
                    self.metrics.publish(Outcome::of(&published), start.elapsed());
                    match published {
                        Ok(next) => {
                            backoff = RETRY.0;
                            due = next;
                        }
                        Err(error) => {
                            tracing::error!(%error, "The slices could not be published.");
                            self.readiness.not_ready(Part::Slices, &error.to_string());
                            due = Some(Instant::now() + backoff);
                            backoff = (backoff * 2).min(RETRY.1);
                        }
                    }
                }
            }
        }
        if synced
            && alone.await
            && let Err(error) = self.leave().await
        {
            tracing::warn!(%error, "The devices could not be marked as unserved.");
        }
    }

    /// Taints every device: the slices outlive the plugin by 30 s, and a pod that is
    /// placed here meanwhile would wait for a driver that does not come. They are not
    /// withdrawn, because what is allocated has to stay published: the scheduler counts a
    /// GPU's rest from it. The next instance's first write takes the taints away.
    async fn leave(&mut self) -> Result<(), PublishError> {
        let Some(wanted) = self.wanted.borrow().clone() else {
            return Ok(());
        };
        let mut content = pool(&wanted, View::FULL);
        mark_unserved(&mut content);
        let view = self.choose_view(&content).await?;
        if !view.taints {
            return Ok(());
        }
        let mut content = pool(&wanted, view);
        mark_unserved(&mut content);
        self.write_all(&content).await?;
        tracing::info!("No other instance is here: the devices are marked as unserved.");
        Ok(())
    }

    /// Takes an event in; says whether there may be something to do.
    fn observe(
        &mut self,
        event: Event<ResourceSlice>,
        relist: &mut BTreeMap<String, Stored>,
    ) -> bool {
        match event {
            Event::Init => {
                relist.clear();
                false
            }
            Event::InitApply(slice) => {
                relist.insert(slice.name_any(), slice.into());
                false
            }
            Event::InitDone => {
                self.observed = std::mem::take(relist);
                true
            }
            Event::Apply(slice) => {
                let name = slice.name_any();
                if self.is_stale(&name, &slice) {
                    return false;
                }
                self.observed.insert(name, slice.into());
                true
            }
            Event::Delete(slice) => {
                let name = slice.name_any();
                if self.is_stale(&name, &slice) {
                    return false;
                }
                self.observed.remove(&name);
                true
            }
        }
    }

    /// Whether an event tells of a time before our own last write: the watch lags.
    fn is_stale(&self, name: &str, event: &ResourceSlice) -> bool {
        let known = self.observed.get(name).and_then(Stored::version);
        match (known, stored::version(event)) {
            (Some(known), Some(told)) => told <= known,
            _ => false,
        }
    }

    /// Makes the API server's slices what is wanted; returns when to look again.
    async fn publish(&mut self) -> Result<Option<Instant>, PublishError> {
        let Some(wanted) = self.wanted.borrow_and_update().clone() else {
            return Ok(None);
        };
        if self.owner.is_none() {
            self.owner = Some(self.node_owner().await?);
        }
        if self.in_doubt {
            self.look().await?;
        }
        let mut view = self.choose_view(&pool(&wanted, View::FULL)).await?;
        let content = loop {
            let content = pool(&wanted, view);
            match self.write_all(&content).await {
                Ok(0) => break content,
                Ok(writes) => {
                    let slices = content.len();
                    tracing::info!(writes, slices, ?view, "The slices were written.");
                    break content;
                }
                // A gate is off since it was asked for, or this is another server than
                // answered then. What was begun must not stay: devices without the counters
                // that keep them apart. It is a narrower view each time, so this ends.
                Err(PublishError::Changed { kept, .. }) if view.both(kept) != view => {
                    view = view.both(kept);
                    self.settle_for(view).await;
                }
                Err(error) => return Err(error),
            }
        };
        let devices = content.iter().map(|slice| match slice {
            SliceContent::Devices(devices) => devices.len(),
            SliceContent::Counters(_) => 0,
        });
        self.metrics.published(devices.sum());
        self.metrics.health().published();
        self.readiness.ready(Part::Slices);
        Ok(self
            .view
            .filter(|(view, _)| *view != View::FULL)
            .map(|(_, until)| until))
    }

    /// Writes where the API server's slices differ; returns how many writes that took. Where
    /// somebody else wrote meanwhile, such as the kubelet that wipes them, it looks again, once.
    async fn write_all(&mut self, content: &[SliceContent]) -> Result<usize, PublishError> {
        match self.write_differences(content).await {
            Err(error) if error.is_outdated() => {
                tracing::debug!(%error, "The slices changed while they were written.");
                self.look().await?;
                self.write_differences(content).await
            }
            result => result,
        }
    }

    async fn write_differences(&mut self, content: &[SliceContent]) -> Result<usize, PublishError> {
        let plan = plan_writes(
            content,
            &self.observed,
            &self.node,
            self.owner.as_ref(),
            self.last_generation,
        );
        for name in &plan.obsolete {
            let result = self.delete(name).await;
            self.metrics.slice_write(Outcome::of(&result));
            result?;
        }
        for index in &plan.apply {
            let existing = self.observed.get(&slice_name(&self.node, *index));
            let existing = existing.map(Stored::slice);
            let (node, owner) = (&self.node, self.owner.as_ref());
            let slice = plan.slice(content, *index, node, owner, existing.as_ref());
            let result = self.store(slice, existing).await;
            self.metrics.slice_write(Outcome::of(&result));
            result?;
        }
        Ok(plan.len())
    }

    /// Lists what is there. A watch that failed resumes without a word, and may never say
    /// one in an unchanged world; a list that is answered ends the doubt.
    async fn look(&mut self) -> Result<(), PublishError> {
        let api: Api<ResourceSlice> = Api::all(self.client.clone());
        let params = ListParams::default().fields(&self.selector());
        let list = api
            .list(&params)
            .await
            .map_err(|source| PublishError::List {
                node: self.node.clone(),
                source: Box::new(source),
            })?;
        let slices = list.items.into_iter();
        self.observed = slices
            .map(|slice| (slice.name_any(), slice.into()))
            .collect();
        self.in_doubt = false;
        Ok(())
    }

    fn selector(&self) -> String {
        format!("spec.nodeName={},spec.driver={DRIVER}", self.node)
    }

    async fn delete(&mut self, name: &str) -> Result<(), PublishError> {
        let api: Api<ResourceSlice> = Api::all(self.client.clone());
        match api.delete(name, &DeleteParams::default()).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            Err(source) => {
                return Err(PublishError::Slice {
                    verb: "delete",
                    name: name.to_owned(),
                    source: Box::new(source),
                });
            }
        }
        self.observed.remove(name);
        Ok(())
    }

    async fn store(
        &mut self,
        slice: ResourceSlice,
        existing: Option<ResourceSlice>,
    ) -> Result<(), PublishError> {
        let api: Api<ResourceSlice> = Api::all(self.client.clone());
        let stored = match existing {
            Some(existing) => replace(&api, &slice, existing).await,
            None => create(&api, &slice, false).await,
        };
        let stored = stored.inspect_err(|error| self.in_doubt |= error.is_outdated())?;
        let name = slice.name_any();
        let same = view::same_content(&slice, &stored);
        let kept = view::kept(&slice, &stored);
        self.last_generation = self.last_generation.max(stored.spec.pool.generation);
        self.observed.insert(name.clone(), stored.into());
        if !same {
            return Err(PublishError::Changed { name, kept });
        }
        Ok(())
    }

    /// What the API server keeps, where what is wanted has anything that it might drop.
    /// Once it keeps everything it is not asked again: a write that comes back changed tells.
    async fn choose_view(&mut self, full: &[SliceContent]) -> Result<View, PublishError> {
        if let Some((view, until)) = self.view
            && (view == View::FULL || Instant::now() < until)
        {
            return Ok(view);
        }
        if view::is_plain(full) {
            return Ok(View::FULL); // Ask when there is something.
        }
        let view = match self.ask(View::FULL).await? {
            Some(view) => view,
            // Refused, and not each field need be why.
            None => {
                let mut view = View::REDUCED;
                for field in View::EACH {
                    if let Some(kept) = self.ask(field).await? {
                        view = view.or(kept.both(field));
                    }
                }
                view
            }
        };
        self.settle_for(view).await;
        Ok(view)
    }

    /// Asks what the server keeps of a device with these fields; `None` where it refuses it.
    async fn ask(&self, fields: View) -> Result<Option<View>, PublishError> {
        let content = view::probe(fields);
        let mut probe = resource_slice(&content, &self.node, self.owner.as_ref(), 0, 1, 1);
        probe.metadata.name = Some(format!("probe-{}", probe.name_any()));
        let api: Api<ResourceSlice> = Api::all(self.client.clone());
        match create(&api, &probe, true).await {
            Ok(stored) => Ok(Some(view::kept(&probe, &stored))),
            Err(PublishError::Slice { source, .. }) if is_refusal(&source) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Publishes for this view from now on, and says so where it is another one.
    async fn settle_for(&mut self, view: View) {
        let before = self.view.map_or(View::FULL, |(view, _)| view);
        self.view = Some((view, Instant::now() + ASK_AGAIN));
        if view == before {
            return;
        }
        let action = "PublishResourceSlices";
        if view == View::FULL {
            let note = "The API server keeps all fields of ResourceSlices now: everything is \
                        offered.";
            tracing::info!("{note}");
            self.events.tell("FullResourceSlices", action, note).await;
        } else {
            let note = view.explanation();
            tracing::warn!("{note}");
            self.events
                .warn("ReducedResourceSlices", action, &note)
                .await;
        }
    }

    async fn node_owner(&self) -> Result<OwnerReference, PublishError> {
        let api: Api<Node> = Api::all(self.client.clone());
        let node = api
            .get(&self.node)
            .await
            .map_err(|source| PublishError::Node {
                node: self.node.clone(),
                source: Box::new(source),
            })?;
        Ok(OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: self.node.clone(),
            uid: node.uid().unwrap_or_default(),
            controller: Some(true),
            block_owner_deletion: None,
        })
    }
}

/// Whether a server says that an object is not one, and not that it cannot answer.
fn is_refusal(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 400 | 422))
}

/// Creates a slice. Server-side apply would do for both writes, but costs the API server ten
/// times as much for a slice of 50 devices: it keeps a list of every field's owner.
async fn create(
    api: &Api<ResourceSlice>,
    slice: &ResourceSlice,
    dry_run: bool,
) -> Result<ResourceSlice, PublishError> {
    let params = PostParams {
        dry_run,
        ..PostParams::default()
    };
    stored("create", slice, api.create(&params, slice).await)
}

/// Replaces the slice that was observed; whoever changed it meanwhile makes this fail.
async fn replace(
    api: &Api<ResourceSlice>,
    slice: &ResourceSlice,
    mut whole: ResourceSlice,
) -> Result<ResourceSlice, PublishError> {
    whole.spec.clone_from(&slice.spec);
    let owners = &slice.metadata.owner_references;
    whole.metadata.owner_references.clone_from(owners);
    let name = slice.name_any();
    let answer = api.replace(&name, &PostParams::default(), &whole).await;
    stored("update", slice, answer)
}

fn stored(
    verb: &'static str,
    slice: &ResourceSlice,
    answer: Result<ResourceSlice, kube::Error>,
) -> Result<ResourceSlice, PublishError> {
    answer.map_err(|source| PublishError::Slice {
        verb,
        name: slice.name_any(),
        source: Box::new(source),
    })
}

/// The most devices of a slice in which one has a taint.
const TAINTED_LIMIT: usize = 64;

fn mark_unserved(content: &mut [SliceContent]) {
    for slice in content {
        let SliceContent::Devices(devices) = slice else {
            continue;
        };
        if devices.len() > TAINTED_LIMIT {
            continue;
        }
        for device in devices {
            let taint = DeviceTaint {
                key: UNSERVED.to_owned(),
                effect: "NoSchedule".to_owned(),
                ..DeviceTaint::default()
            };
            device.taints.get_or_insert_default().push(taint);
        }
    }
}
