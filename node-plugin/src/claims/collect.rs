//! Ending claims that the kubelet forgot.
//!
//! In: the records, and the API server's claims one by one. Out: claims that are gone are
//! unprepared, damaged records made anew, instances on GPUs that came back destroyed.
//! Never: a claim ended because the API server does not answer, and never a burst of
//! requests: a claim is looked for once in each sweep, spread over its time, in the API
//! server's cache. A list or a watch would bring every claim of the cluster to every node.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;

use super::checkpoint::{CheckpointError, ClaimRef, Stage};
use super::reconcile::Report;
use super::{ClaimError, Claims, allocation};

/// What one sweep did.
#[derive(Debug, Default)]
pub struct Sweep {
    /// How many claims were ended.
    pub collected: usize,
    /// What people should know of, each once.
    pub reports: Vec<Report>,
}

/// Sweeps, and remembers what the last ones saw.
pub struct Collector {
    claims: Claims,
    /// Since when a claim has been seen to be gone, by UID.
    gone: HashMap<String, Instant>,
    said: HashSet<String>,
}

impl Collector {
    /// A collector for this node's claims.
    #[must_use]
    pub fn new(claims: Claims) -> Self {
        Self {
            claims,
            gone: HashMap::new(),
            said: HashSet::new(),
        }
    }

    /// Looks for each claim once, within about `spread`. One that is gone, was replaced or
    /// is no longer allocated here is ended when it has been so for `grace`: the kubelet
    /// ends the claims it knows itself, after their containers.
    pub async fn sweep(&mut self, spread: Duration, grace: Duration) -> Sweep {
        let mut sweep = Sweep::default();
        let all = match self.claims.core.checkpoints.all() {
            Ok(all) => all,
            Err(error) => {
                tracing::error!(%error, "The checkpoints cannot be read; no claim is collected.");
                return sweep;
            }
        };
        let mut claims: Vec<ClaimRef> = Vec::new();
        for record in &all.records {
            if record.stage == Stage::Unprepared {
                match self.claims.end_unprepared(&record.claim).await {
                    Ok(()) => {}
                    Err(error) => {
                        tracing::warn!(%error, "An ended claim's instance is still there.")
                    }
                }
            } else {
                claims.push(record.claim.clone());
            }
        }
        for unreadable in &all.unreadable {
            let outcome = self.claims.mend_damaged(&unreadable.uid).await;
            let is_damaged = matches!(unreadable.error, CheckpointError::Corrupt { .. });
            if outcome.is_err() && is_damaged {
                claims.extend(self.claims.core.salvaged(&unreadable.uid).claim);
            }
            let report = Report::of(unreadable, &outcome);
            if self.said.insert(report.text.clone()) {
                tracing::error!(
                    reason = report.reason,
                    "A checkpoint cannot be used: {}.",
                    report.text
                );
                sweep.reports.push(report);
            }
        }
        let pause = spread / u32::try_from(claims.len().max(1)).unwrap_or(u32::MAX);
        for claim in &claims {
            let Some(reason) = self.claims.glance(claim).await else {
                self.gone.remove(&claim.uid);
                tokio::time::sleep(pause).await;
                continue;
            };
            let since = *self
                .gone
                .entry(claim.uid.clone())
                .or_insert_with(Instant::now);
            if since.elapsed() >= grace {
                sweep.collected += usize::from(self.claims.collect_logged(claim, &reason).await);
            }
            tokio::time::sleep(pause).await;
        }
        let there: BTreeSet<&String> = claims.iter().map(|claim| &claim.uid).collect();
        self.gone.retain(|uid, _| there.contains(uid));
        self.claims.remove_files_of_unknown_claims().await;
        sweep
    }
}

impl Claims {
    /// Ends at once every claim that is gone, was replaced or is no longer allocated here.
    /// Returns how many.
    pub async fn collect_garbage(&self) -> usize {
        let mut collector = Collector::new(self.clone());
        let sweep = collector.sweep(Duration::ZERO, Duration::ZERO).await;
        sweep.collected
    }

    async fn collect_logged(&self, claim: &ClaimRef, reason: &str) -> bool {
        let result = self.collect(claim.clone()).await;
        let _span = claim.span().entered();
        match result {
            Ok(collected) => {
                if collected {
                    tracing::info!(reason, "A claim that the kubelet forgot was unprepared.");
                }
                collected
            }
            Err(error) => {
                tracing::warn!(%error, reason, "A forgotten claim cannot be unprepared yet.");
                false
            }
        }
    }

    /// Unprepares a claim that is not in use, which is asked once more behind its lock:
    /// it may have been allocated and prepared anew since.
    async fn collect(&self, claim: ClaimRef) -> Result<bool, ClaimError> {
        let this = self.clone();
        self.detached(claim, move |claim| async move {
            let held = this.lock(&claim, BTreeSet::new()).await?;
            if this.why_unused(&claim).await.is_none() {
                return Ok(false);
            }
            this.give_back(claim, held, None).await.map(|()| true)
        })
        .await
    }

    /// Why a claim is not in use on this node any more; `None` while it is or may be.
    pub(super) async fn why_unused(&self, claim: &ClaimRef) -> Option<String> {
        let object = self.source.get(&claim.namespace, &claim.name).await;
        self.why_unused_by(claim, object)
    }

    async fn glance(&self, claim: &ClaimRef) -> Option<String> {
        let object = self.source.glance(&claim.namespace, &claim.name).await;
        self.why_unused_by(claim, object)
    }

    fn why_unused_by(
        &self,
        claim: &ClaimRef,
        object: Result<Option<k8s_openapi::api::resource::v1::ResourceClaim>, String>,
    ) -> Option<String> {
        match object {
            Err(_) => None, // No answer is not an absence.
            Ok(None) => Some("it does not exist any more".to_owned()),
            Ok(Some(object)) => allocation::why_unused(&object, claim, &self.node),
        }
    }
}
