//! The shell around [`super::core`]: the clock, the calls into NVML, the disk, and those
//! who have to know.
//!
//! In: the GPUs from discovery, readings and events from NVML, an administrator's word on
//! the Node. Out: the faults, into what is wanted and so into slices and the kubelet's
//! stream. Never: a wait for NVML, for the disk or for the API server between a fault and
//! those who have to know of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpu::{EventKind, PciAddress};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::Fault;
use super::calls::{self, Answer};
use super::core::{Change, Observation, Policy, State};
use super::handle::{Command, Health};
use super::notices::{self, Notice};
use super::repairs::Repairs;
use super::store;
use crate::claims::hardware::{Hardware, HardwareError};
use crate::events::NodeEvents;
use crate::metrics::Metrics;
use crate::readiness::{Part, Readiness};
use crate::slices::Wanted;

/// How long after a failure events are waited for again.
const LISTEN_AGAIN: Duration = Duration::from_secs(10);

/// How the monitor works.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The plugin's own folder.
    pub folder: PathBuf,
    /// This boot.
    pub boot_id: String,
    /// What an administrator decides.
    pub policy: Policy,
    /// How long between two readings of a GPU.
    pub interval: Duration,
    /// How long a reading may take until the GPU counts as unreadable.
    pub deadline: Duration,
    /// How often an administrator's word is looked for while a fault waits for it.
    pub repairs: Duration,
}

/// A reading that was asked for.
struct Asked {
    at: Instant,
    /// The same for people.
    clock: jiff::Timestamp,
    hangs: bool,
}

/// Those who wait for the answers of some GPUs.
struct Waiting {
    left: BTreeSet<PciAddress>,
    done: oneshot::Sender<()>,
}

/// Watches the health of a node's GPUs.
pub struct Monitor {
    settings: Settings,
    state: State,
    commands: mpsc::UnboundedReceiver<Command>,
    own: mpsc::UnboundedSender<Command>,
    faults: watch::Sender<Arc<Vec<Fault>>>,
    wanted: watch::Sender<Option<Arc<Wanted>>>,
    keep: watch::Sender<Option<State>>,
    notices: mpsc::UnboundedSender<Notice>,
    repairs: Option<Repairs>,
    metrics: Metrics,
    readiness: Readiness,
    hardware: Option<Arc<dyn Hardware>>,
    gpus: BTreeSet<PciAddress>,
    asked: BTreeMap<PciAddress, Asked>,
    waiting: Vec<Waiting>,
    answers: (
        mpsc::UnboundedSender<Answer>,
        mpsc::UnboundedReceiver<Answer>,
    ),
    /// Counts the threads that waited for events.
    watches: u64,
    unwanted: Arc<AtomicBool>,
    listen_again: Option<Instant>,
    /// Whether what other instances kept was taken over.
    merged: bool,
    /// Whether NVML answers about no GPU.
    all_hang: bool,
    /// Whether it answers about one.
    answered: watch::Sender<bool>,
}

/// What runs beside the monitor and is waited for when it stops.
pub struct Beside {
    saver: tokio::task::JoinHandle<()>,
}

impl Monitor {
    /// A monitor with the faults that were kept.
    #[must_use]
    pub fn new(
        settings: Settings,
        wanted: watch::Sender<Option<Arc<Wanted>>>,
        events: NodeEvents,
        repairs: Option<Repairs>,
        metrics: Metrics,
        readiness: Readiness,
    ) -> (Health, Self, Beside) {
        let path = settings.folder.join("health.json");
        let (notices, notice_receiver) = mpsc::unbounded_channel();
        let state = recall(&path, &settings.boot_id, &notices);
        let kept = state.faults(&settings.policy);
        for fault in &kept {
            tracing::warn!(
                fault = fault.message,
                since = fault.since,
                "A fault from before the start is still there."
            );
        }
        metrics.health().faults(&kept);
        let (faults, fault_receiver) = watch::channel(Arc::new(kept));
        let (own, commands) = mpsc::unbounded_channel();
        let (keep, to_keep) = watch::channel(None);
        let saver = tokio::spawn(save(path, to_keep));
        tokio::spawn(notices::announce(events, notice_receiver));
        let (answered, answered_receiver) = watch::channel(false);
        let health = Health {
            commands: own.clone(),
            faults: fault_receiver,
            answered: answered_receiver,
        };
        let monitor = Self {
            settings,
            state,
            commands,
            own,
            faults,
            wanted,
            keep,
            notices,
            repairs,
            metrics,
            readiness,
            hardware: None,
            gpus: BTreeSet::new(),
            asked: BTreeMap::new(),
            waiting: Vec::new(),
            answers: mpsc::unbounded_channel(),
            watches: 0,
            unwanted: Arc::default(),
            listen_again: None,
            merged: false,
            all_hang: false,
            answered,
        };
        (health, monitor, Beside { saver })
    }

    /// Watches until it is stopped.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(self.settings.interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut repairs = tokio::time::interval(self.settings.repairs);
        repairs.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let deadline = self.next_deadline();
            let timer = async {
                match deadline {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => break,
                Some(command) = self.commands.recv() => self.command(command),
                Some(answer) = self.answers.1.recv() => self.answer(answer),
                _ = ticks.tick() => self.read_all(),
                _ = repairs.tick() => self.look_for_repairs(),
                () = timer => {}
            }
            self.judge_silence();
        }
        self.unwanted.store(true, Ordering::Relaxed);
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Watch { hardware, gpus } => {
                let gpus: BTreeSet<PciAddress> = gpus.into_iter().collect();
                let same = (self.hardware.as_ref()).is_some_and(|old| Arc::ptr_eq(old, &hardware));
                if same && gpus == self.gpus {
                    return;
                }
                self.hardware = Some(hardware);
                self.gpus = gpus;
                self.listen();
                self.read_all();
            }
            Command::Unavailable { gpus, reason } => {
                // What this NVML says does not count until it is loaded anew.
                self.hardware = None;
                self.gpus.clear();
                self.unwanted.store(true, Ordering::Relaxed);
                for pci in gpus {
                    self.failed(pci, false, &reason);
                }
            }
            Command::Check(done) => {
                self.read_all();
                let left: BTreeSet<PciAddress> = self
                    .asked
                    .iter()
                    .filter(|(_, asked)| !asked.hangs)
                    .map(|(pci, _)| *pci)
                    .collect();
                if !left.is_empty() {
                    self.waiting.push(Waiting { left, done });
                }
            }
            Command::DriverReplaced => self.observe(Observation::DriverReplaced),
            Command::Repaired(repaired) => {
                for (pci, at) in repaired {
                    self.observe(Observation::Repaired { pci, at });
                }
            }
        }
    }

    /// Asks every GPU that owes no answer.
    fn read_all(&mut self) {
        let gpus: Vec<PciAddress> = self.gpus.iter().copied().collect();
        for pci in gpus {
            self.read(pci);
        }
    }

    fn read(&mut self, pci: PciAddress) {
        let Some(hardware) = self.hardware.clone() else {
            return;
        };
        if self.asked.contains_key(&pci) {
            return;
        }
        if let Err(error) = calls::read(&hardware, pci, &self.answers.0) {
            let reason = format!("no thread can be made to read it: {error}");
            self.failed(pci, false, &reason);
            return;
        }
        let asked = Asked {
            at: Instant::now(),
            clock: now(),
            hangs: false,
        };
        self.asked.insert(pci, asked);
    }

    /// Waits for the events of the GPUs from now on, instead of before.
    fn listen(&mut self) {
        let Some(hardware) = self.hardware.clone() else {
            return;
        };
        self.watches += 1;
        let before = std::mem::take(&mut self.unwanted);
        let gpus = self.gpus.iter().copied().collect();
        let unwanted = Arc::clone(&self.unwanted);
        let made = calls::watch(&hardware, gpus, self.watches, unwanted, &self.answers.0);
        // Only now, so that no event falls between the two.
        before.store(true, Ordering::Relaxed);
        self.listen_again = None;
        if let Err(error) = made {
            self.deaf(&error.to_string());
        }
    }

    fn deaf(&mut self, reason: &str) {
        tracing::warn!(
            reason,
            "The driver's events cannot be waited for; it is tried again."
        );
        self.listen_again = Some(Instant::now() + LISTEN_AGAIN);
    }

    fn answer(&mut self, answer: Answer) {
        match answer {
            Answer::Reading { pci, result } => {
                let hung = self.asked.remove(&pci).is_some_and(|asked| asked.hangs);
                if hung {
                    tracing::info!(gpu = %pci, "NVML answers again.");
                }
                self.settled(pci);
                if !self.gpus.contains(&pci) {
                    return; // Another NVML, or other GPUs, since it was asked.
                }
                match result {
                    Ok(reading) => self.observe(Observation::Reading(&reading)),
                    Err(error) => {
                        let lost = !matches!(error, HardwareError::Failed(_));
                        self.failed(pci, lost, &error.to_string());
                    }
                }
            }
            Answer::Event {
                pci,
                kind,
                placement,
            } => {
                tracing::warn!(gpu = %pci, ?kind, ?placement, "The driver reported an event.");
                if let EventKind::Xid(number) = kind {
                    self.metrics.health().xid(number);
                }
                self.observe(Observation::Event {
                    pci,
                    kind,
                    placement,
                });
                self.read(pci); // What the driver says to it.
            }
            Answer::Listening if !self.merged => {
                // What was reported until now another instance has kept.
                self.merged = true;
                self.merge();
            }
            Answer::Listening => {}
            Answer::Deaf { watch, reason } => {
                if watch == self.watches {
                    self.deaf(&reason);
                }
            }
        }
    }

    /// Takes over what another instance has kept since this one started.
    fn merge(&mut self) {
        let path = self.settings.folder.join("health.json");
        match store::read::<State>(&path) {
            Ok(Some(other)) => {
                self.state.merge(other);
                self.keep.send_replace(Some(self.state.durable()));
                self.tell(Instant::now());
            }
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "What another instance kept cannot be read."),
        }
    }

    /// One GPU has answered, or will not.
    fn settled(&mut self, pci: PciAddress) {
        for waiting in &mut self.waiting {
            waiting.left.remove(&pci);
        }
        let done = self
            .waiting
            .extract_if(.., |waiting| waiting.left.is_empty());
        for waiting in done {
            waiting.done.send(()).ok();
        }
    }

    /// When the next GPU has been silent for too long, or events are waited for again.
    fn next_deadline(&self) -> Option<Instant> {
        let owed = self.asked.values().filter(|asked| !asked.hangs);
        let owed = owed.map(|asked| asked.at + self.settings.deadline);
        owed.chain(self.listen_again).min()
    }

    /// Finds those that have been silent for too long.
    fn judge_silence(&mut self) {
        if self.listen_again.is_some_and(|at| at <= Instant::now()) {
            self.listen();
        }
        let deadline = self.settings.deadline;
        let mut silent = Vec::new();
        for (pci, asked) in &mut self.asked {
            if !asked.hangs && asked.at.elapsed() >= deadline {
                asked.hangs = true;
                silent.push((*pci, asked.clock));
            }
        }
        for (pci, since) in silent {
            let reason = format!("NVML does not answer since {since:.0}");
            self.settled(pci);
            self.failed(pci, false, &reason);
        }
        let hangs = |pci: &PciAddress| self.asked.get(pci).is_some_and(|asked| asked.hangs);
        let all_hang = !self.gpus.is_empty() && self.gpus.iter().all(hangs);
        let is_answered = !self.gpus.is_empty() && !all_hang;
        self.answered.send_replace(is_answered);
        if std::mem::replace(&mut self.all_hang, all_hang) == all_hang {
            return;
        }
        if all_hang {
            let reason = "NVML does not answer, about no GPU";
            tracing::error!("{reason}.");
            self.readiness.not_ready(Part::Gpus, reason);
        } else {
            self.readiness.ready(Part::Gpus);
        }
    }

    fn look_for_repairs(&self) {
        let Some(repairs) = self.repairs.clone() else {
            return;
        };
        let latched = self.gpus.iter().any(|pci| self.state.is_latched(*pci));
        if latched {
            let own = self.own.clone();
            tokio::spawn(async move {
                let repaired = repairs.read().await;
                own.send(Command::Repaired(repaired)).ok();
            });
        }
    }

    /// A GPU cannot be read; `lost` says whether NVML knows that it is gone.
    fn failed(&mut self, pci: PciAddress, lost: bool, reason: &str) {
        self.observe(Observation::Failed { pci, lost, reason });
    }

    /// Takes an observation in and tells everybody.
    fn observe(&mut self, seen: Observation<'_>) {
        let at = Instant::now();
        let policy = &self.settings.policy;
        let change = self.state.observe(policy, now().as_second(), seen);
        if change == Change::default() {
            return;
        }
        self.tell(at);
        if change.durable {
            self.keep.send_replace(Some(self.state.durable()));
        }
        let back = change.ended.iter().any(|ended| {
            matches!(
                ended.fault.kind,
                super::Kind::Lost | super::Kind::Unreadable
            )
        });
        if back {
            self.listen(); // A GPU that was away is no longer in the set.
        }
        for notice in notices::of_change(change) {
            self.notices.send(notice).ok();
        }
    }

    /// Gives the faults to those who publish them.
    fn tell(&self, seen: Instant) {
        let faults = self.state.faults(&self.settings.policy);
        let taints = |faults: &[Fault]| -> Vec<Fault> {
            let tainting = faults.iter().filter(|fault| fault.effect.is_some());
            tainting.cloned().collect()
        };
        if taints(&faults) != taints(&self.faults.borrow()) {
            self.metrics.health().changed(seen);
        }
        self.metrics.health().faults(&faults);
        self.faults.send_replace(Arc::new(faults.clone()));
        self.wanted.send_if_modified(|wanted| {
            let Some(known) = wanted.as_ref().filter(|known| known.faults != faults) else {
                return false;
            };
            let mut new = Wanted::clone(known);
            new.faults = faults;
            *wanted = Some(Arc::new(new));
            true
        });
    }
}

impl Beside {
    /// Waits until everything that was to be kept is kept; the monitor has to be gone.
    pub async fn finish(self) {
        self.saver.await.ok();
    }
}

fn now() -> jiff::Timestamp {
    jiff::Timestamp::now()
}

fn recall(path: &std::path::Path, boot_id: &str, notices: &mpsc::UnboundedSender<Notice>) -> State {
    match store::read::<State>(path) {
        Ok(Some(state)) => state.restore(boot_id),
        Ok(None) => State::new(boot_id),
        Err(error) => {
            tracing::error!(%error, "The faults from before the start cannot be read.");
            notices.send(Notice::state_unusable(&error)).ok();
            State::new(boot_id)
        }
    }
}

/// Writes each state that is to be kept; those that come meanwhile count as one.
async fn save(path: PathBuf, mut states: watch::Receiver<Option<State>>) {
    while states.changed().await.is_ok() {
        let Some(state) = states.borrow_and_update().clone() else {
            continue;
        };
        let path = path.clone();
        let write = move || store::write(&path, &state).map_err(|error| error.to_string());
        let written = tokio::task::spawn_blocking(write).await;
        if let Err(error) = written.unwrap_or_else(|error| Err(error.to_string())) {
            tracing::error!(error, "A fault cannot be kept over a restart.");
        }
    }
}
