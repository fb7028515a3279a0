//! Making checkpoint, CDI files and API server agree again.
//!
//! In: what a crash, a reboot or a lost unprepare left behind. Out: each difference
//! mended and said. Never: an administrator's MIG instance destroyed, and never one
//! bad entry that keeps the others from being mended.

use std::collections::BTreeSet;

use tracing::Instrument;

use super::checkpoint::{CheckpointError, ClaimRef, Record, Stage};
use super::{ClaimError, Claims, Loaded, allocation};

impl Claims {
    /// Start-up: puts corrupt checkpoints aside, undoes what was only started, restores
    /// what completed claims of this boot are missing, and removes the files of
    /// unknown claims. Returns the checkpoints that were put aside, for people.
    pub async fn reconcile(&self, loaded: Option<Loaded>) -> Vec<String> {
        let mut reports = Vec::new();
        let (records, broken) = match self.core.checkpoints.all() {
            Ok(all) => all,
            Err(error) => {
                tracing::error!(%error, "The checkpoints cannot be read.");
                return vec![error.to_string()];
            }
        };
        for error in broken {
            tracing::error!(%error, "A checkpoint cannot be used.");
            reports.push(error.to_string());
            if let CheckpointError::Corrupt { path, .. } = &error {
                match self.core.checkpoints.quarantine(path) {
                    Ok(aside) => tracing::error!(path = %aside.display(),
                        "The corrupt checkpoint was put aside; the kubelet prepares its claim anew."),
                    Err(error) => tracing::error!(%error, "It cannot be put aside."),
                }
            }
        }
        for record in records {
            let span = record.claim.span();
            if let Err(error) = self.mend(&record, loaded.clone()).instrument(span).await {
                tracing::error!(%error, "A claim could not be mended; the kubelet's next call tries again.");
            }
        }
        self.remove_files_of_unknown_claims().await;
        reports
    }

    async fn mend(&self, record: &Record, loaded: Option<Loaded>) -> Result<(), ClaimError> {
        match record.stage {
            Stage::PrepareStarted => {
                // Behind the claim's lock: the other instance of a rolling update may
                // be preparing it this moment, and then it has completed by now.
                let held = self.lock(&record.claim, BTreeSet::new()).await?;
                let read = self.core.checkpoints.read(&record.claim.uid).ok().flatten();
                if read.is_none_or(|now| now.stage != Stage::PrepareStarted) {
                    return Ok(());
                }
                tracing::warn!(claim = %record.claim, "An interrupted prepare is undone.");
                self.give_back(record.claim.clone(), held, None).await
            }
            // After a reboot the kubelet prepares it again or the sweep forgets it.
            Stage::PrepareCompleted if record.boot_id != self.core.boot_id => Ok(()),
            Stage::PrepareCompleted => {
                let Some(loaded) = loaded else { return Ok(()) };
                let held = self.lock(&record.claim, BTreeSet::new()).await?;
                let (core, record) = (self.core.clone(), record.clone());
                super::blocking(record.claim.clone(), held, move || {
                    // Containers restart in a living sandbox without another prepare,
                    // and need the file.
                    core.restore_if_known(&*loaded.hardware, &loaded.driver_version, &record)
                })
                .await
            }
        }
    }

    async fn remove_files_of_unknown_claims(&self) {
        let uids = match self.core.uids_with_files() {
            Ok(uids) => uids,
            Err(error) => {
                tracing::error!(%error, "The CDI files and metadata files cannot be listed.");
                return;
            }
        };
        for uid in uids {
            let Ok(_held) = self.locks.claim(&uid).await else {
                continue;
            };
            let unknown = matches!(self.core.checkpoints.read(&uid), Ok(None));
            if unknown {
                match self.core.remove_files(&uid) {
                    Ok(()) => tracing::warn!(uid, "The files of an unknown claim were removed."),
                    Err(error) => tracing::error!(uid, %error, "Files cannot be removed."),
                }
            }
        }
    }

    /// Unprepares claims that are gone, were replaced or are no longer allocated here:
    /// the kubelet never asks for those it has forgotten. Returns how many.
    pub async fn collect_garbage(&self) -> usize {
        let Ok((records, _)) = self.core.checkpoints.all() else {
            return 0;
        };
        let mut collected = 0;
        for record in records {
            let claim = record.claim.clone();
            let Some(reason) = self.why_unused(&claim).await else {
                continue;
            };
            let result = self.collect(claim.clone()).await;
            let _span = claim.span().entered();
            match result {
                Ok(true) => {
                    collected += 1;
                    tracing::info!(reason, "A claim that the kubelet forgot was unprepared.");
                }
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(%error, reason, "A forgotten claim cannot be unprepared yet.");
                }
            }
        }
        collected
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

    async fn why_unused(&self, claim: &ClaimRef) -> Option<String> {
        match self.source.get(&claim.namespace, &claim.name).await {
            Err(_) => None, // No answer is not an absence.
            Ok(None) => Some("it does not exist any more".to_owned()),
            Ok(Some(object)) => allocation::why_unused(&object, claim, &self.node),
        }
    }
}
