//! Making checkpoint, hardware, CDI files and API server agree again.
//!
//! In: what a crash, a reboot or a damaged disk left behind. Out: each difference mended
//! and said. Never: an administrator's MIG instance destroyed, and never one bad entry that
//! keeps the others from being mended.

use std::collections::BTreeSet;

use tracing::Instrument;

use super::checkpoint::{CheckpointError, ClaimRef, Record, Stage, Unreadable};
use super::{ClaimError, Claims, Loaded, Wanted, allocation, status};
use crate::metrics::{Operation, Stopwatch};

/// Something that a person should know of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// One word for it, as an Event's reason.
    pub reason: &'static str,
    /// What it is and what to do.
    pub text: String,
}

impl Report {
    pub(super) fn of(unreadable: &Unreadable, outcome: &Result<(), String>) -> Self {
        let error = &unreadable.error;
        let text = match outcome {
            Ok(()) => format!("{error}: done"),
            Err(reason) => format!("{error}: not yet, {reason}"),
        };
        match error {
            CheckpointError::Corrupt { .. } => Self {
                reason: "CheckpointDamaged",
                text,
            },
            CheckpointError::TooNew { .. } => Self {
                reason: "CheckpointTooNew",
                text: error.to_string(),
            },
            CheckpointError::Io { .. } | CheckpointError::Uid(_) => Self {
                reason: "CheckpointUnreadable",
                text: error.to_string(),
            },
        }
    }
}

impl Claims {
    /// Start-up: makes damaged checkpoints anew, undoes what was only started, restores
    /// what completed claims of this boot are missing, and removes what an interrupted
    /// write left and the files of unknown claims. Returns what people should know of.
    pub async fn reconcile(&self, loaded: Option<Loaded>) -> Vec<Report> {
        let mut reports = Vec::new();
        let all = match self.core.checkpoints.all_anew() {
            Ok(all) => all,
            Err(error) => {
                tracing::error!(%error, "The checkpoints cannot be read.");
                return vec![Report {
                    reason: "CheckpointUnreadable",
                    text: error.to_string(),
                }];
            }
        };
        self.remove_interrupted_writes().await;
        for record in all.records {
            let span = record.claim.span();
            if let Err(error) = self.mend(&record, loaded.clone()).instrument(span).await {
                tracing::error!(%error, "A claim could not be mended; the kubelet's next call tries again.");
            }
        }
        for unreadable in all.unreadable {
            let outcome = self.mend_damaged(&unreadable.uid).await;
            let report = Report::of(&unreadable, &outcome);
            tracing::error!(
                reason = report.reason,
                "A checkpoint cannot be used: {}.",
                report.text
            );
            reports.push(report);
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
            Stage::Unprepared => self.end_unprepared(&record.claim).await,
            // After a reboot the kubelet prepares it again or the sweep forgets it.
            Stage::PrepareCompleted if record.boot_id != self.core.boot_id => Ok(()),
            Stage::PrepareCompleted => {
                let Some(loaded) = loaded else { return Ok(()) };
                let mut held = self.lock(&record.claim, BTreeSet::new()).await?;
                let described = loaded.hardware.described();
                self.statuses.put(status::Report::new(
                    &record.claim,
                    &record.devices,
                    &described,
                    None,
                ));
                let (core, claim) = (self.core.clone(), record.claim.clone());
                let record = record.clone();
                super::blocking(&claim, &mut held, move || {
                    // Containers restart in a living sandbox without another prepare,
                    // and need the file.
                    core.restore_if_known(&*loaded.hardware, &loaded.driver_version, &record)
                })
                .await
            }
        }
    }

    /// Tries again to destroy the instance of a claim that has ended.
    pub(super) async fn end_unprepared(&self, claim: &ClaimRef) -> Result<(), ClaimError> {
        let held = self.lock(claim, BTreeSet::new()).await?;
        let read = self.core.checkpoints.read(&claim.uid).ok().flatten();
        if read.is_none_or(|now| now.stage != Stage::Unprepared) {
            return Ok(()); // The claim is prepared anew.
        }
        self.give_back(claim.clone(), held, None).await
    }

    /// Makes a damaged record anew, if the claim is still allocated to this node. One whose
    /// claim is gone stays until the kubelet unprepares it or the sweep collects it.
    pub(super) async fn mend_damaged(&self, uid: &str) -> Result<(), String> {
        match self.core.checkpoints.read(uid) {
            Ok(_) => return Ok(()),
            Err(CheckpointError::Corrupt { .. }) => {}
            Err(error) => return Err(error.to_string()),
        }
        let Some(claim) = self.core.salvaged(uid).claim else {
            return self.mend_nameless(uid).await;
        };
        let object = self.source.get(&claim.namespace, &claim.name).await;
        let object = object.map_err(|reason| {
            format!("claim {claim} cannot be read from the API server: {reason}")
        })?;
        let object = object.ok_or_else(|| format!("claim {claim} does not exist any more"))?;
        if let Some(reason) = allocation::why_unused(&object, &claim, &self.node) {
            return Err(format!("claim {claim}: {reason}"));
        }
        let devices = allocation::read(&object, &claim, &self.node)
            .map_err(|error| format!("claim {claim}: {error}"))?;
        let wanted = Wanted {
            devices,
            pod_claim_name: allocation::pod_claim_name(&object),
            status: status::devices_of(&object),
        };
        let watch = Stopwatch::start(Operation::Prepare);
        let made = self.attempt(&claim, &wanted, &watch).await;
        made.map(drop).map_err(|error| error.to_string())
    }

    /// A damaged record that does not even tell its claim's name. The kubelet's next call
    /// for the claim does; until then it holds the devices of its CDI file, or, without
    /// one, the instances that nobody else accounts for. With neither it holds nothing.
    async fn mend_nameless(&self, uid: &str) -> Result<(), String> {
        let devices = self.core.salvaged(uid).devices;
        let names: Vec<&str> = devices.iter().map(|d| d.device.as_str()).collect();
        let advice = "its claim's name is lost; it is mended when the kubelet calls for the claim, or delete the file once no pod uses";
        if !names.is_empty() {
            return Err(format!("{advice} {}", names.join(", ")));
        }
        let loaded = self.loaded.borrow().clone();
        let loaded = loaded.ok_or("NVML is not loaded")?;
        let _held = self.locks.claim(uid).await.map_err(|e| e.to_string())?;
        let core = self.core.clone();
        let uid = uid.to_owned();
        tokio::task::spawn_blocking(move || {
            let unaccounted = core.unaccounted(&*loaded.hardware)?;
            if unaccounted > 0 {
                return Err(format!(
                    "{advice} the {unaccounted} MIG instances that no other claim accounts for"
                ));
            }
            let aside = core.checkpoints.move_aside(&uid);
            aside.map(drop).map_err(|error| error.to_string())
        })
        .await
        .map_err(|error| error.to_string())?
    }

    async fn remove_interrupted_writes(&self) {
        let mut uids: BTreeSet<String> = self.core.checkpoints.interrupted().into_iter().collect();
        uids.extend(self.core.cdi.interrupted());
        for uid in uids {
            // Behind the claim's lock it is nobody's write of this moment.
            if let Ok(_held) = self.locks.claim(&uid).await {
                self.core.checkpoints.remove_interrupted(&uid);
                self.core.cdi.remove_interrupted(&uid);
                tracing::warn!(uid, "What an interrupted write left was removed.");
            }
        }
    }

    pub(super) async fn remove_files_of_unknown_claims(&self) {
        let uids = match self.core.uids_with_files() {
            Ok(uids) => uids,
            Err(error) => {
                tracing::error!(%error, "The CDI files and metadata files cannot be listed.");
                return;
            }
        };
        for uid in uids {
            if !matches!(self.core.checkpoints.read(&uid), Ok(None)) {
                continue;
            }
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
}
