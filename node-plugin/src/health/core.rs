//! What begins and what ends: the state of all faults, one observation at a time.
//!
//! In: readings, events and failures with the time they were seen. Out: the faults that
//! there are, and what began and ended. Never: a clock, a call or a write.
//!
//! A fault is known by its kind, value and scope. It begins once and keeps the time of
//! its beginning, over repetitions and over restarts (see [`State::restore`]).

use std::collections::{BTreeMap, BTreeSet};

use gpu::{EventKind, HealthReading, PciAddress, Placement, RecoveryAction};
use serde::{Deserialize, Serialize};

use super::catalogue::{self, Cure, Reach};
use super::{Effect, Fault, Kind, Scope, Severity};

/// The longest message: the kubelet's limit.
const MAX_MESSAGE: usize = 1024;

/// What an administrator decides, and how patient to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// What the taint of a fatal fault does.
    pub fatal: Effect,
    /// XIDs that are left aside.
    pub ignored: BTreeSet<u64>,
    /// How long a fault that a reset cures lasts at least, in seconds: the driver needs a
    /// moment to say what has to be done.
    pub hold: i64,
    /// How long after it was last seen a fault ends that ends by itself, in seconds.
    pub quiet: i64,
    /// How long a slowdown has to last to be a fault, in seconds.
    pub slow: i64,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            fatal: Effect::NoExecute,
            ignored: BTreeSet::new(),
            hold: 60,
            quiet: 600,
            slow: 30,
        }
    }
}

/// Something that was seen.
#[derive(Debug, Clone, Copy)]
pub enum Observation<'a> {
    /// A GPU was read.
    Reading(&'a HealthReading),
    /// A GPU could not be read.
    Failed {
        /// The GPU.
        pci: PciAddress,
        /// Whether it is gone, and not only silent.
        lost: bool,
        /// What failed.
        reason: &'a str,
    },
    /// The driver reported something.
    Event {
        /// The GPU.
        pci: PciAddress,
        /// What.
        kind: EventKind,
        /// Where the MIG instance sits that it happened to.
        placement: Option<Placement>,
    },
    /// An administrator says that a GPU was repaired at a time.
    Repaired {
        /// The GPU.
        pci: PciAddress,
        /// When, in seconds since the Unix epoch: what began later stays.
        at: i64,
    },
    /// The driver was loaded anew, which resets the GPUs.
    DriverReplaced,
}

/// A fault that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// Which.
    pub fault: Fault,
    /// What ended it, for people.
    pub why: &'static str,
}

/// What one observation changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    /// Faults that were not there before.
    pub begun: Vec<Fault>,
    /// Faults that are there no longer.
    pub ended: Vec<Ended>,
    /// Whether the state on the disk is out of date.
    pub durable: bool,
}

/// A fault as it is kept: what follows from the catalogue and the policy is not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    kind: Kind,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    value: String,
    scope: Scope,
    /// In seconds since the Unix epoch.
    since: i64,
    /// When it was last seen.
    seen: i64,
    /// What NVML said, where that tells more than the catalogue.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    detail: String,
}

impl Record {
    fn entry(&self) -> &'static catalogue::Entry {
        catalogue::lookup(self.kind, &self.value)
    }

    /// Whether it stays when nobody looks: a reset or a reboot has to end it.
    fn is_latched(&self) -> bool {
        self.entry().cure != Cure::Reading && self.entry().severity > Severity::Information
    }

    fn fault(&self, policy: &Policy) -> Fault {
        let entry = self.entry();
        let what = match self.kind {
            Kind::Xid => format!("XID {} on {}", self.value, self.scope),
            _ => self.scope.to_string(),
        };
        let mut message = format!("{what}: {}", entry.meaning);
        if !self.detail.is_empty() {
            message = format!("{message} ({})", self.detail);
        }
        while message.len() > MAX_MESSAGE {
            message.pop();
        }
        Fault {
            kind: self.kind,
            value: self.value.clone(),
            severity: entry.severity,
            effect: match entry.severity {
                Severity::Information => None,
                Severity::Degraded => Some(Effect::NoSchedule),
                Severity::Fatal => Some(policy.fatal),
            },
            scope: self.scope,
            message,
            since: self.since,
        }
    }
}

/// What is remembered of one GPU besides its faults.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Notes {
    /// The count of uncorrected errors up to which a recovery has dealt with them.
    #[serde(default)]
    ecc_settled: u64,
    /// Since when each slowdown lasts.
    #[serde(skip)]
    slow_since: BTreeMap<String, i64>,
    /// Whether it was read since the start.
    #[serde(skip)]
    was_read: bool,
}

/// All faults of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct State {
    /// The boot in which they were seen.
    boot_id: String,
    #[serde(default)]
    records: Vec<Record>,
    #[serde(default)]
    gpus: BTreeMap<PciAddress, Notes>,
}

impl State {
    /// No faults, in this boot.
    #[must_use]
    pub fn new(boot_id: &str) -> Self {
        Self {
            boot_id: boot_id.to_owned(),
            ..Self::default()
        }
    }

    /// The state that was kept, as it is in this boot: a reboot resets every GPU, and what
    /// it does not cure the first reading shows again.
    #[must_use]
    pub fn restore(self, boot_id: &str) -> Self {
        if self.boot_id == boot_id {
            self
        } else {
            Self::new(boot_id)
        }
    }

    /// What belongs on the disk.
    #[must_use]
    pub fn durable(&self) -> Self {
        let mut kept = self.clone();
        kept.records
            .retain(|record| record.entry().severity > Severity::Information);
        kept
    }

    /// Adds what another instance of the plugin has kept meanwhile and this one did not see.
    pub fn merge(&mut self, other: Self) {
        if other.boot_id != self.boot_id {
            return;
        }
        for record in other.records {
            if record.is_latched()
                && self
                    .find(record.kind, &record.value, record.scope)
                    .is_none()
            {
                self.records.push(record);
            }
        }
    }

    /// The faults that there are, in a fixed order.
    #[must_use]
    pub fn faults(&self, policy: &Policy) -> Vec<Fault> {
        let ignored = |record: &&Record| {
            record.kind != Kind::Xid
                || !(record.value.parse()).is_ok_and(|xid: u64| policy.ignored.contains(&xid))
        };
        let mut faults: Vec<Fault> = self
            .records
            .iter()
            .filter(ignored)
            .map(|record| record.fault(policy))
            .collect();
        faults.sort_by(|a, b| {
            (a.scope, a.kind, &a.value, a.since).cmp(&(b.scope, b.kind, &b.value, b.since))
        });
        faults
    }

    /// Whether a GPU has a fault that ends neither by a reading nor by itself.
    #[must_use]
    pub fn is_latched(&self, pci: PciAddress) -> bool {
        self.records
            .iter()
            .any(|record| record.scope.pci() == pci && record.is_latched())
    }

    /// Takes an observation in.
    pub fn observe(&mut self, policy: &Policy, now: i64, seen: Observation<'_>) -> Change {
        let before = self.durable();
        let mut step = Step {
            state: self,
            policy,
            now,
            change: Change::default(),
        };
        match seen {
            Observation::Reading(reading) => step.reading(reading),
            Observation::Failed { pci, lost, reason } => step.failed(pci, lost, reason),
            Observation::Event {
                pci,
                kind,
                placement,
            } => step.event(pci, kind, placement),
            Observation::Repaired { pci, at } => step.end(
                "an administrator said that the GPU was repaired",
                |record| record.is_latched() && record.scope.pci() == pci && record.since <= at,
            ),
            Observation::DriverReplaced => {
                step.end("the driver was loaded anew", Record::is_latched);
            }
        }
        let mut change = step.change;
        // When a lasting fault was last seen is not worth a write.
        let stamps = |mut state: Self| {
            state.records.iter_mut().for_each(|record| record.seen = 0);
            state
        };
        change.durable = stamps(self.durable()) != stamps(before);
        change
    }

    fn find(&self, kind: Kind, value: &str, scope: Scope) -> Option<usize> {
        self.records
            .iter()
            .position(|r| r.kind == kind && r.value == value && r.scope == scope)
    }
}

/// One observation while it is taken in.
struct Step<'a> {
    state: &'a mut State,
    policy: &'a Policy,
    now: i64,
    change: Change,
}

impl Step<'_> {
    /// A fault is seen: it begins, or goes on.
    fn assert(&mut self, kind: Kind, value: &str, scope: Scope, detail: String) {
        if let Some(at) = self.state.find(kind, value, scope) {
            self.state.records[at].seen = self.now;
            return;
        }
        let record = Record {
            kind,
            value: value.to_owned(),
            scope,
            since: self.now,
            seen: self.now,
            detail,
        };
        self.change.begun.push(record.fault(self.policy));
        self.state.records.push(record);
    }

    /// Ends the faults for which `over` holds.
    fn end(&mut self, why: &'static str, over: impl Fn(&Record) -> bool) {
        let policy = self.policy;
        let ended = self.state.records.extract_if(.., |record| over(record));
        let ended = ended.map(|record| Ended {
            fault: record.fault(policy),
            why,
        });
        self.change.ended.extend(ended);
    }

    /// A condition that a reading shows, or does not show any more.
    fn shown(&mut self, kind: Kind, value: &str, pci: PciAddress, is: bool, detail: String) {
        let scope = Scope::Gpu(pci);
        if is {
            self.assert(kind, value, scope, detail);
        } else {
            self.end("NVML does not show it any more", |r| {
                r.kind == kind && r.value == value && r.scope == scope
            });
        }
    }

    fn failed(&mut self, pci: PciAddress, lost: bool, reason: &str) {
        let scope = Scope::Gpu(pci);
        if lost {
            self.end("the GPU is lost instead", |r| {
                r.kind == Kind::Unreadable && r.scope == scope
            });
            self.assert(Kind::Lost, "", scope, reason.to_owned());
        } else if self.state.find(Kind::Lost, "", scope).is_none() {
            // A lost GPU may fail in any way; it is lost until it can be read.
            self.assert(Kind::Unreadable, "", scope, reason.to_owned());
        }
    }

    fn event(&mut self, pci: PciAddress, kind: EventKind, placement: Option<Placement>) {
        match kind {
            EventKind::Xid(number) => {
                if self.policy.ignored.contains(&number) {
                    return;
                }
                let scope = match (catalogue::xid(number).reach, placement) {
                    (Reach::Instance, Some(placement)) => Scope::Instance { pci, placement },
                    _ => Scope::Gpu(pci),
                };
                self.assert(Kind::Xid, &number.to_string(), scope, String::new());
            }
            EventKind::DoubleBitEcc => {
                self.assert(Kind::Ecc, "", Scope::Gpu(pci), String::new());
            }
            EventKind::SingleBitEcc => {} // Corrected.
        }
    }

    fn reading(&mut self, reading: &HealthReading) {
        let pci = reading.pci;
        let scope = Scope::Gpu(pci);
        if self.state.find(Kind::Lost, "", scope).is_some() {
            self.was_reset(reading, "the GPU came back, which takes a reset");
        }
        self.end("the GPU can be read again", |r| {
            r.scope == scope && matches!(r.kind, Kind::Lost | Kind::Unreadable)
        });
        self.recovery_action(reading);
        if let Some(rows) = reading.remapped_rows {
            let detail = |is: bool| match is {
                true => format!(
                    "rows replaced so far: {}",
                    rows.correctable + rows.uncorrectable
                ),
                false => String::new(),
            };
            for (value, is) in [("pending", rows.pending), ("failed", rows.failed)] {
                self.shown(Kind::RowRemap, value, pci, is, detail(is));
            }
        }
        self.slowdown(reading);
        self.ecc(reading);
        self.over(reading);
        self.state.gpus.entry(pci).or_default().was_read = true;
    }

    fn recovery_action(&mut self, reading: &HealthReading) {
        let Some(action) = reading.recovery_action else {
            return; // This driver does not tell.
        };
        let told = match action {
            RecoveryAction::None => "",
            RecoveryAction::GpuReset => "gpu-reset",
            RecoveryAction::NodeReboot => "node-reboot",
            RecoveryAction::DrainP2P => "drain-p2p",
            RecoveryAction::DrainAndReset => "drain-and-reset",
            RecoveryAction::Other(_) => "other",
        };
        for value in [
            "gpu-reset",
            "node-reboot",
            "drain-p2p",
            "drain-and-reset",
            "other",
        ] {
            self.shown(
                Kind::Recovery,
                value,
                reading.pci,
                value == told,
                String::new(),
            );
        }
    }

    fn slowdown(&mut self, reading: &HealthReading) {
        let (pci, scope) = (reading.pci, Scope::Gpu(reading.pci));
        let slow = reading.slowdown;
        for (value, is) in [
            ("hw-thermal", slow.hw_thermal),
            ("power-brake", slow.hw_power_brake),
            ("sw-thermal", slow.sw_thermal),
        ] {
            let notes = self.state.gpus.entry(pci).or_default();
            if !is {
                notes.slow_since.remove(value);
                let (now, hold) = (self.now, self.policy.hold);
                self.end("the slowdown is over", |r| {
                    r.kind == Kind::Thermal
                        && r.value == value
                        && r.scope == scope
                        && now - r.seen >= hold
                });
                continue;
            }
            let since = *notes.slow_since.entry(value.to_owned()).or_insert(self.now);
            let known = self.state.find(Kind::Thermal, value, scope).is_some();
            if known || self.now - since >= self.policy.slow {
                let detail = reading
                    .temperature_celsius
                    .map(|celsius| format!("{celsius} °C when it began"));
                self.assert(Kind::Thermal, value, scope, detail.unwrap_or_default());
            }
        }
    }

    /// Uncorrected errors: a count that grew is a fault, until a reset sets it to zero or
    /// NVML says that nothing is left to do about it.
    fn ecc(&mut self, reading: &HealthReading) {
        let Some(count) = reading.ecc_uncorrected_volatile else {
            return;
        };
        let (pci, scope) = (reading.pci, Scope::Gpu(reading.pci));
        if self.state.gpus.entry(pci).or_default().ecc_settled > count {
            self.was_reset(reading, "the GPU was reset: it counts its errors anew");
        }
        let known = self.state.find(Kind::Ecc, "", scope).is_some();
        let notes = self.state.gpus.entry(pci).or_default();
        notes.ecc_settled = notes.ecc_settled.min(count);
        if count == 0 {
            let (now, hold) = (self.now, self.policy.hold);
            self.end("the GPU was reset", |r| {
                r.kind == Kind::Ecc && r.scope == scope && now - r.seen >= hold
            });
            return;
        }
        if count <= notes.ecc_settled {
            return;
        }
        // Errors from before this plugin, about which NVML has nothing left to say.
        let is_old = !notes.was_read && !known;
        if is_old && reading.recovery_action == Some(RecoveryAction::None) {
            notes.ecc_settled = count;
            return;
        }
        // Each growth is a fault anew; the same count is the same fault.
        notes.ecc_settled = count;
        let detail = format!("{count} of them when it was seen");
        self.assert(Kind::Ecc, "", scope, detail);
    }

    /// A sign of a reset ends what a reset cures, where the driver itself does not tell.
    fn was_reset(&mut self, reading: &HealthReading, why: &'static str) {
        if reading.recovery_action.is_none() {
            self.end(why, |r| r.scope.pci() == reading.pci && r.is_latched());
        }
    }

    /// Ends what a reset or time has ended.
    fn over(&mut self, reading: &HealthReading) {
        let (pci, now, policy) = (reading.pci, self.now, self.policy);
        let is_own = |r: &Record| r.scope.pci() == pci;
        self.end("it was not seen again", |r| {
            is_own(r) && r.entry().cure == Cure::Quiet && now - r.seen >= policy.quiet
        });
        if reading.recovery_action == Some(RecoveryAction::None) {
            self.end("NVML says that nothing is left to do", |r| {
                is_own(r) && r.is_latched() && now - r.seen >= policy.hold
            });
        }
    }
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
