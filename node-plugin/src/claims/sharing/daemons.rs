//! The control daemons of this node: each is what the claims' records say.
//!
//! In: records of claims, and what is left of daemons in their folders. Out: a daemon for
//! each device that claims share by MPS, with limits no larger than their largest, and
//! none for any other device. Never: a GPU's lock, a request to the API server, or a daemon
//! of one device that waits for another's.
//!
//! There is one way to change anything, [`Daemons::converge`]: behind the device's turn it
//! reads the records and brings the daemon to them. A prepare calls it after its claim is
//! recorded, an unprepare before its claim is forgotten, start-up and the collector for
//! every device, and a watch when a daemon ends. A turn holds between processes too: during
//! an upgrade two instances of the plugin see to the same daemons.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use gpu::ComputeMode;
use rustix::process::Signal;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::error::SharingError;
use super::launch::{self, Launch};
use super::limits::{self, Needed};
use super::process::Process;
use super::ready::FolderWatch;
use super::state::{State, make_folders};
use super::{Places, Report, Settings, SharedDevice, What, program};
use crate::claims::Loaded;
use crate::claims::core::Core;
use crate::claims::files;
use crate::claims::hardware::{HardwareError, unavailable};
use crate::claims::locks::{Held, Locks};

/// How long a daemon may take until it answers.
const START: Duration = Duration::from_secs(120);
/// How long a daemon that was told to end may take, before it is killed.
const STOP: Duration = Duration::from_secs(10);
/// Between two questions to a daemon whose socket is there and that does not answer yet;
/// nothing announces when it does.
const ASK: Duration = Duration::from_millis(50);
/// The first and the longest wait before a daemon that could not be started is tried again.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The right to change a device's daemon. While it is held, nobody starts or stops it.
#[derive(Debug)]
pub struct Turn {
    _held: Held,
}

/// The daemons. Cloning shares them.
#[derive(Clone)]
pub struct Daemons {
    inner: Arc<Inner>,
}

struct Inner {
    settings: Settings,
    core: Arc<Core>,
    locks: Arc<Locks>,
    loaded: watch::Receiver<Option<Loaded>>,
    /// Which process of each device is waited for.
    watched: Mutex<BTreeMap<SharedDevice, (Process, AbortHandle)>>,
}

impl Daemons {
    pub(in crate::claims) fn new(
        settings: Settings,
        core: Arc<Core>,
        locks: Arc<Locks>,
        loaded: watch::Receiver<Option<Loaded>>,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                settings,
                core,
                locks,
                loaded,
                watched: Mutex::default(),
            }),
        }
    }

    /// Brings a device's daemon to what its claims need: starts it, tells it its limits, or
    /// stops it.
    ///
    /// # Errors
    /// When the daemon does not come up.
    pub async fn converge(&self, device: SharedDevice) -> Result<(), SharingError> {
        self.bring(device, None).await?.1
    }

    /// The same without a claim that is about to be forgotten. Until the answer is dropped,
    /// nobody changes this daemon. That the other claims do not get what they need is not
    /// an error of the one that leaves: it is reported and tried again.
    ///
    /// # Errors
    /// When it cannot be told what the other claims need.
    pub async fn leave(&self, device: SharedDevice, uid: &str) -> Result<Turn, SharingError> {
        let (turn, result) = self.bring(device, Some(uid)).await?;
        if let Err(error) = result {
            tracing::error!(%device, %error, "An MPS daemon is not what its claims need; it is tried again.");
        }
        Ok(turn)
    }

    async fn bring(
        &self,
        device: SharedDevice,
        leaving: Option<&str>,
    ) -> Result<(Turn, Result<(), SharingError>), SharingError> {
        let unknown = |reason: String| SharingError::Unknown { device, reason };
        let held = self.inner.locks.daemon(&device.to_string()).await;
        let turn = Turn {
            _held: held.map_err(|error| unknown(error.to_string()))?,
        };
        let needed = self.needed(device, leaving).await.map_err(unknown)?;
        let places = self.inner.settings.places(device);
        let result = match needed {
            None => Ok(()),
            Some(None) => {
                self.stop(device, &places).await;
                Ok(())
            }
            Some(Some(needed)) => self.run(device, &places, &needed).await,
        };
        if let Err(error) = &result {
            self.report(device, What::Failed(error.to_string()));
        }
        Ok((turn, result))
    }

    /// Brings every daemon to what the claims need: adopts those that live, starts those
    /// that are missing, and stops those that no claim needs.
    pub async fn converge_all(&self) {
        let mut devices = self.folders();
        let core = self.inner.core.clone();
        let all = tokio::task::spawn_blocking(move || core.checkpoints.all()).await;
        if let Ok(Ok(all)) = all {
            let boot = &self.inner.core.boot_id;
            let alive = all.records.iter().filter(|r| r.boot_id == *boot);
            devices.extend(alive.flat_map(|r| limits::daemons_of(r)));
        }
        // One after the other would let a slow start delay the others.
        let all = devices.into_iter().map(|device| async move {
            if let Err(error) = self.converge(device).await {
                tracing::error!(%error, "An MPS daemon is not what its claims need; it is tried again.");
            }
        });
        futures::future::join_all(all).await;
    }

    /// The devices that have a folder.
    fn folders(&self) -> BTreeSet<SharedDevice> {
        let entries = fs::read_dir(&self.inner.settings.folder);
        let names = entries
            .into_iter()
            .flatten()
            .flatten()
            .map(|e| e.file_name());
        names
            .filter_map(|name| name.to_str()?.parse().ok())
            .collect()
    }

    /// What the claims need; `None` where nobody can tell, because a record that cannot be
    /// read may be of a share: then everything stays as it is.
    async fn needed(
        &self,
        device: SharedDevice,
        leaving: Option<&str>,
    ) -> Result<Option<Option<Needed>>, String> {
        let (core, leaving) = (self.inner.core.clone(), leaving.map(str::to_owned));
        tokio::task::spawn_blocking(move || {
            let gpus = BTreeSet::from([device.pci]);
            let others = core.others(leaving.as_deref().unwrap_or_default(), gpus);
            let others = others.map_err(|error| error.to_string())?;
            let needed = limits::needed(others.readable(), device);
            let unknown = others.doubtful.iter().any(|doubtful| {
                let mut names = doubtful.devices.iter();
                doubtful.devices.is_empty() || names.any(|name| name.ends_with("-shared"))
            });
            Ok((needed.is_some() || !unknown).then_some(needed))
        })
        .await
        .map_err(|error| error.to_string())?
    }

    /// A daemon that answers, with these limits.
    async fn run(
        &self,
        device: SharedDevice,
        places: &Places,
        needed: &Needed,
    ) -> Result<(), SharingError> {
        let launcher = &self.inner.settings.launcher;
        let mut state = State::read(places, &self.inner.core.boot_id);
        let process = Process::read(places).filter(|process| {
            let same_boot = state.is_some() && process.uuid == needed.uuid;
            same_boot && process.alive()
        });
        let process = match process {
            Some(process) => process,
            None => {
                if state.as_ref().is_some_and(|state| state.limits.is_some()) {
                    tracing::warn!(%device, "An MPS daemon has ended although claims use its device; it is started again.");
                    self.report(device, What::Died);
                }
                let (new, process) = self.start(device, places, needed, state).await?;
                state = Some(new);
                process
            }
        };
        let current = state.as_ref().and_then(|state| state.limits);
        if current != Some(needed.limits) {
            self.answers(device, places, &process, current.is_none())
                .await?;
            process
                .limit(launcher, needed.limits)
                .await
                .map_err(|source| SharingError::Control { device, source })?;
            if let Some(state) = &mut state {
                state.limits = Some(needed.limits);
                state.save(device, places)?;
            }
        }
        self.watch(device, process);
        Ok(())
    }

    /// Starts a daemon and returns before it answers.
    async fn start(
        &self,
        device: SharedDevice,
        places: &Places,
        needed: &Needed,
        before: Option<State>,
    ) -> Result<(State, Process), SharingError> {
        self.unwatch(device);
        self.end_leftovers(device, places).await;
        let roots = self.inner.core.driver.roots();
        let program = program(&roots.driver).ok_or_else(|| SharingError::NoProgram {
            device,
            root: roots.driver.clone(),
        })?;
        make_folders(device, places)?;
        // What is to be put back is on the disk before it is changed.
        let mut state = State {
            boot_id: self.inner.core.boot_id.clone(),
            uuid: needed.uuid.clone(),
            compute_mode: before.and_then(|before| before.compute_mode),
            limits: None,
        };
        self.exclusive(device, places, &mut state).await?;

        let launch = Launch::Daemon {
            folder: places.folder.clone(),
            program: program.to_owned(),
            driver_root: roots.driver.clone(),
            host_driver_root: roots.host_driver.clone(),
            uuid: needed.uuid.clone(),
            cgroup: self.cgroup(device),
        };
        let failed = |reason: String| SharingError::Start {
            device,
            reason,
            log: places.log(),
        };
        let output = |name: &str| {
            let path = places.log().join(name);
            fs::File::options().create(true).append(true).open(path)
        };
        let argument = serde_json::to_string(&launch).map_err(|e| failed(e.to_string()))?;
        let mut child = tokio::process::Command::new(&self.inner.settings.launcher)
            .arg(launch::COMMAND)
            .arg(argument)
            .stdin(Stdio::null())
            .stdout(output("daemon.log").map_err(|e| failed(e.to_string()))?)
            .stderr(output("daemon.log").map_err(|e| failed(e.to_string()))?)
            .kill_on_drop(false)
            .spawn()
            .map_err(|e| failed(e.to_string()))?;
        files::step("daemon launched");
        // A restart of the plugin ends this wait, not the daemon.
        let exit = tokio::spawn(async move { child.wait().await });
        let process = self.launched(places, &failed, exit).await?;
        tracing::info!(%device, pid = process.pid, "An MPS daemon was started.");
        self.report(device, What::Started);
        Ok((state, process))
    }

    /// Waits for the launcher to become the daemon: it leaves its description first.
    async fn launched(
        &self,
        places: &Places,
        failed: &impl Fn(String) -> SharingError,
        mut exit: tokio::task::JoinHandle<io::Result<std::process::ExitStatus>>,
    ) -> Result<Process, SharingError> {
        let watch = FolderWatch::new(&places.folder).map_err(|e| failed(e.to_string()))?;
        let mut ended = None;
        tokio::time::timeout(START, async {
            loop {
                if let Some(process) = Process::read(places).filter(Process::alive) {
                    return Ok(process);
                }
                if let Some(status) = ended.take() {
                    return Err(failed(format!("{status}; {}", last_words(places))));
                }
                tokio::select! {
                    changed = watch.changed() => changed.map_err(|e| failed(e.to_string()))?,
                    status = &mut exit => ended = Some(match status {
                        Ok(Ok(status)) => status.to_string(),
                        Ok(Err(error)) => error.to_string(),
                        Err(error) => error.to_string(),
                    }),
                }
            }
        })
        .await
        .unwrap_or_else(|_| Err(failed("the launcher hangs".to_owned())))
    }

    /// Waits until the daemon answers.
    async fn answers(
        &self,
        device: SharedDevice,
        places: &Places,
        process: &Process,
        first: bool,
    ) -> Result<(), SharingError> {
        if !first {
            return Ok(());
        }
        let failed = |reason: String| SharingError::Start {
            device,
            reason,
            log: places.log(),
        };
        let launcher = &self.inner.settings.launcher;
        let watch = FolderWatch::new(&places.pipe()).map_err(|e| failed(e.to_string()))?;
        let asked = async {
            while !places.pipe().join("control").exists() {
                watch.changed().await?;
            }
            while process.control(launcher, "get_server_list").await.is_err() {
                tokio::time::sleep(ASK).await;
            }
            io::Result::Ok(())
        };
        let answer = tokio::select! {
            asked = tokio::time::timeout(START, asked) => match asked {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => error.to_string(),
                Err(_) => {
                    // What does not answer is of no use to anybody; the next attempt
                    // starts another.
                    process.signal(Signal::KILL);
                    format!("it did not answer within {} s", START.as_secs())
                }
            },
            _ = process.ended() => format!("it ended: {}", last_words(places)),
        };
        Err(failed(answer))
    }

    /// Lets one process at a time make contexts on the GPU: the MPS server. Whoever does
    /// not come through it is refused. A MIG instance has no mode of its own.
    async fn exclusive(
        &self,
        device: SharedDevice,
        places: &Places,
        state: &mut State,
    ) -> Result<(), SharingError> {
        let failed = |source| SharingError::ComputeMode { device, source };
        let loaded = self.inner.loaded.borrow().clone();
        let loaded = match loaded {
            _ if device.placement.is_some() => return state.save(device, places),
            Some(loaded) => loaded,
            // A daemon that ended is started again without NVML, too.
            None if state.compute_mode.is_some() => return state.save(device, places),
            None => return Err(failed(unavailable())),
        };
        let hardware = loaded.hardware.clone();
        let mode = blocking(move || hardware.gpu(device.pci).map(|gpu| gpu.compute_mode)).await;
        let mode = mode.map_err(failed)?;
        if mode == ComputeMode::ExclusiveProcess {
            return state.save(device, places);
        }
        // What was recorded by an attempt that failed is of before that.
        state.compute_mode.get_or_insert(mode);
        state.save(device, places)?;
        let exclusive = ComputeMode::ExclusiveProcess;
        let set = blocking(move || loaded.hardware.set_compute_mode(device.pci, exclusive));
        set.await.map_err(failed)
    }

    /// Ends a device's daemon and all it left. What cannot be done now is done by a later
    /// call: nobody's pod waits for it.
    async fn stop(&self, device: SharedDevice, places: &Places) {
        self.unwatch(device);
        if !places.folder.exists() {
            return;
        }
        let state = State::read(places, &self.inner.core.boot_id);
        if state.is_some()
            && let Some(process) = Process::read(places).filter(Process::alive)
        {
            let launcher = &self.inner.settings.launcher;
            if let Err(error) = process.control(launcher, "quit").await {
                tracing::warn!(%device, %error, "An MPS daemon does not take the command to end; it is signalled.");
                process.signal(Signal::TERM);
            }
            if tokio::time::timeout(STOP, process.ended()).await.is_err() {
                tracing::warn!(%device, "An MPS daemon did not end by itself; it is killed.");
                process.signal(Signal::KILL);
                process.ended().await.ok();
            }
            files::step("daemon ended");
            tracing::info!(%device, pid = process.pid, "An MPS daemon was stopped.");
            self.report(device, What::Stopped);
        }
        self.end_leftovers(device, places).await;
        if let Some(mode) = state.and_then(|state| state.compute_mode) {
            let Some(loaded) = self.inner.loaded.borrow().clone() else {
                tracing::warn!(%device, ?mode, "NVML is not loaded; the GPU's compute mode is put back when it is.");
                return;
            };
            let set = blocking(move || loaded.hardware.set_compute_mode(device.pci, mode)).await;
            match set {
                Ok(()) | Err(HardwareError::Absent(_)) => {}
                Err(error) => {
                    tracing::error!(%device, ?mode, %error, "The GPU's compute mode cannot be put back; it is tried again.");
                    return;
                }
            }
        }
        if let Err(error) = fs::remove_dir_all(&places.folder) {
            tracing::error!(%device, %error, "The folder of an MPS daemon cannot be removed.");
        }
        files::step("daemon's folder removed");
    }

    /// Kills what is left in the daemon's cgroup: servers without their daemon would keep
    /// the GPU from the next one's.
    async fn end_leftovers(&self, device: SharedDevice, places: &Places) {
        if let Some(process) = Process::read(places).filter(Process::alive)
            && State::read(places, &self.inner.core.boot_id).is_some()
        {
            // It is alive and not the one that is needed: another UUID.
            process.signal(Signal::KILL);
            process.ended().await.ok();
        }
        let Some((root, below)) = self.cgroup(device) else {
            return;
        };
        let groups = launch::hierarchies(&root)
            .into_iter()
            .map(|h| h.join(&below));
        for group in groups {
            let pids = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
            for pid in pids.lines().filter_map(|pid| pid.parse::<i32>().ok()) {
                if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                    rustix::process::kill_process(pid, Signal::KILL).ok();
                }
            }
            fs::remove_dir(&group).ok(); // Empty, or removed the next time.
        }
    }

    fn cgroup(&self, device: SharedDevice) -> Option<(PathBuf, PathBuf)> {
        let root = self.inner.settings.cgroups.clone()?;
        Some((root, Path::new("ai-inference-mps").join(device.to_string())))
    }

    /// Waits for a daemon's end, unless it is waited for already.
    fn watch(&self, device: SharedDevice, process: Process) {
        let mut watched = self.watched();
        if watched.get(&device).is_some_and(|(of, _)| *of == process) {
            return;
        }
        let (this, of) = (self.clone(), process.clone());
        let task = tokio::spawn(async move {
            if let Err(error) = of.ended().await {
                tracing::error!(%device, %error, "An MPS daemon cannot be watched; it is looked at once a minute.");
                return;
            }
            // From here on this is nobody's watch, and a stop does not end it half-way.
            this.watched().retain(|_, (watched, _)| *watched != of);
            let mut wait = RETRY.0;
            while let Err(error) = this.converge(device).await {
                tracing::error!(%device, %error, "An MPS daemon that ended cannot be started again yet.");
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(RETRY.1);
            }
        });
        if let Some((_, before)) = watched.insert(device, (process, task.abort_handle())) {
            before.abort();
        }
    }

    fn unwatch(&self, device: SharedDevice) {
        if let Some((_, task)) = self.watched().remove(&device) {
            task.abort();
        }
    }

    fn watched(&self) -> std::sync::MutexGuard<'_, BTreeMap<SharedDevice, (Process, AbortHandle)>> {
        let watched = self.inner.watched.lock();
        watched.unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self, device: SharedDevice, what: What) {
        if let Some(reports) = &self.inner.settings.reports {
            // Nobody reads them, or not fast enough: the log has it too.
            reports.try_send(Report { device, what }).ok();
        }
    }
}

/// The end of a daemon's output, for people.
fn last_words(places: &Places) -> String {
    let text = fs::read(places.log().join("daemon.log")).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().rev().take(3).collect();
    if lines.is_empty() {
        return "it said nothing".to_owned();
    }
    lines.into_iter().rev().collect::<Vec<_>>().join(" ")
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, HardwareError> + Send + 'static,
) -> Result<T, HardwareError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(HardwareError::Failed(error.to_string())))
}
