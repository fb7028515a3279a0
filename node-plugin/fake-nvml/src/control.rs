//! What happens to fake hardware: errors, heat, loss, hangs, crashes.
//!
//! In: a driver root made by [`crate::node::build`], and what is to happen there. Out: its
//! state file changed, which every process that has the library loaded sees at its next
//! call. Never: a call of a client; this stands for the hardware, not for the driver.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nvml_wrapper_sys::bindings as sys;

use crate::session::Code;
use crate::state::{Event, GpuState, Process, State, Store};
use crate::topology::{Gpu, Node, TopologyError};

/// Events that are kept: more than a waiting client can be behind.
const KEPT_EVENTS: usize = 1024;

/// Why nothing happened to the hardware.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// The topology is no good.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The node has no such GPU.
    #[error(
        "there is no GPU {name:?} on this node; name one by index, UUID or PCI address: {}",
        known.join(", ")
    )]
    NoGpu {
        /// What was asked for.
        name: String,
        /// The PCI addresses there are.
        known: Vec<String>,
    },
    /// The state file was refused; the library has said why on stderr.
    #[error("the state file {} cannot be changed; make it readable and writable", .0.display())]
    State(PathBuf),
}

/// A MIG instance: the GPU instance's id, and the compute instance's.
pub type Instance = (u32, Option<u32>);

/// Rows of memory to be remapped; see [`Hardware::remap_rows`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RowRemap {
    /// Rows remapped because of correctable errors.
    pub correctable: u32,
    /// Rows remapped because of uncorrectable errors.
    pub uncorrectable: u32,
    /// Whether one waits for a reset.
    pub pending: bool,
    /// Whether one failed.
    pub failed: bool,
}

/// Why clocks are lowered; see [`Hardware::heat`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Slowdown {
    /// The hardware lowers them: too hot.
    pub hw_thermal: bool,
    /// The driver lowers them: nearly too hot.
    pub sw_thermal: bool,
    /// The hardware lowers them: the power supply wants it.
    pub power_brake: bool,
}

/// When a call kills its process; see [`Hardware::kill`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KillAt {
    /// Before it acts.
    Begin,
    /// After it has acted, before its caller knows.
    End,
}

/// The hardware of a fake-GPU node.
pub struct Hardware {
    node: Node,
    path: PathBuf,
    store: Store,
}

impl Hardware {
    /// The hardware behind a driver root: its `topology.yaml` and `state.json`.
    ///
    /// # Errors
    /// When there is no good topology.
    pub fn of(root: &Path) -> Result<Self, ControlError> {
        Self::new(&root.join("topology.yaml"), root.join("state.json"))
    }

    /// The hardware of a topology with its state file, as the library takes them from
    /// `FAKE_NVML_TOPOLOGY` and `FAKE_NVML_STATE`.
    ///
    /// # Errors
    /// When there is no good topology.
    pub fn new(topology: &Path, state: PathBuf) -> Result<Self, ControlError> {
        Ok(Self {
            node: Node::read(topology)?,
            path: state.clone(),
            store: Store::file(state),
        })
    }

    /// The PCI addresses of the GPUs, in NVML's order.
    #[must_use]
    pub fn gpus(&self) -> Vec<String> {
        self.node
            .gpus
            .iter()
            .map(|gpu| gpu.pci.to_string())
            .collect()
    }

    /// A GPU by index, UUID, PCI address, or the address as part of a name
    /// (`gpu-0000-65-00-0`).
    fn gpu(&self, name: &str) -> Result<&Gpu, ControlError> {
        let found = if let Ok(index) = name.parse::<usize>() {
            self.node.gpus.get(index)
        } else {
            let label = |gpu: &Gpu| gpu.pci.to_string().replace([':', '.'], "-");
            self.node.gpus.iter().find(|gpu| {
                gpu.uuid == name
                    || name.parse() == Ok(gpu.pci)
                    || name.strip_prefix("gpu-") == Some(&label(gpu))
            })
        };
        found.ok_or_else(|| ControlError::NoGpu {
            name: name.to_owned(),
            known: self.gpus(),
        })
    }

    fn change(
        &self,
        change: impl FnOnce(&mut State) -> Result<(), Code>,
    ) -> Result<(), ControlError> {
        self.store
            .update(&self.node, change)
            .map_err(|_| ControlError::State(self.path.clone()))
    }

    fn change_gpu(
        &self,
        gpu: &str,
        change: impl FnOnce(&mut GpuState),
    ) -> Result<(), ControlError> {
        let gpu = self.gpu(gpu)?;
        self.change(|state| {
            change(state.gpus.get_mut(&gpu.uuid).ok_or(Code::UNKNOWN)?);
            Ok(())
        })
    }

    fn event(
        &self,
        gpu: &str,
        (kind, data): (u32, u64),
        instance: Option<Instance>,
        change: impl FnOnce(&mut GpuState),
    ) -> Result<(), ControlError> {
        let gpu = self.gpu(gpu)?;
        self.change(|state| {
            change(state.gpus.get_mut(&gpu.uuid).ok_or(Code::UNKNOWN)?);
            state.last_event += 1;
            state.events.push(Event {
                number: state.last_event,
                gpu: gpu.uuid.clone(),
                kind: kind.into(),
                data,
                gi: instance.map(|(gi, _)| gi),
                ci: instance.and_then(|(_, ci)| ci),
            });
            let old = state.events.len().saturating_sub(KEPT_EVENTS);
            state.events.drain(..old);
            Ok(())
        })
    }

    /// A critical error: an event for those who wait for one now, and nothing else.
    ///
    /// # Errors
    /// When there is no such GPU or the state file is refused; so for all below.
    pub fn xid(&self, gpu: &str, xid: u64, instance: Option<Instance>) -> Result<(), ControlError> {
        let event = (sys::nvmlEventTypeXidCriticalError, xid);
        self.event(gpu, event, instance, |_| {})
    }

    /// So many ECC errors: counted, and one event.
    ///
    /// # Errors
    /// As [`Hardware::xid`].
    pub fn ecc(&self, gpu: &str, uncorrectable: bool, count: u64) -> Result<(), ControlError> {
        let kind = if uncorrectable {
            sys::nvmlEventTypeDoubleBitEccError
        } else {
            sys::nvmlEventTypeSingleBitEccError
        };
        self.event(gpu, (kind, 0), None, |state| {
            if uncorrectable {
                state.health.ecc_uncorrected += count;
            } else {
                state.health.ecc_corrected += count;
            }
        })
    }

    /// Rows are remapped: the counts are added, the flags set.
    ///
    /// # Errors
    /// As [`Hardware::xid`].
    pub fn remap_rows(&self, gpu: &str, rows: RowRemap) -> Result<(), ControlError> {
        self.change_gpu(gpu, |state| {
            let now = &mut state.health.rows;
            now.correctable += rows.correctable;
            now.uncorrectable += rows.uncorrectable;
            now.pending |= rows.pending;
            now.failed |= rows.failed;
        })
    }

    /// The temperature in degrees Celsius, and why clocks are lowered from now on. `None` and
    /// no reason: an idle card again.
    ///
    /// # Errors
    /// As [`Hardware::xid`].
    pub fn heat(
        &self,
        gpu: &str,
        celsius: Option<u32>,
        slowdown: Slowdown,
    ) -> Result<(), ControlError> {
        let reasons = [
            (
                slowdown.hw_thermal,
                sys::nvmlClocksThrottleReasonHwThermalSlowdown,
            ),
            (
                slowdown.sw_thermal,
                sys::nvmlClocksEventReasonSwThermalSlowdown,
            ),
            (
                slowdown.power_brake,
                sys::nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
            ),
        ];
        let bits = reasons
            .iter()
            .filter(|(on, _)| *on)
            .map(|(_, bit)| u64::from(*bit))
            .sum();
        self.change_gpu(gpu, |state| {
            state.health.temperature = celsius;
            state.health.clocks_event_reasons = bits;
        })
    }

    /// What the driver asks for from now on (`nvmlDeviceGpuRecoveryAction_t`; 0: nothing).
    ///
    /// # Errors
    /// As [`Hardware::xid`].
    pub fn recovery_action(&self, gpu: &str, action: u32) -> Result<(), ControlError> {
        self.change_gpu(gpu, |state| state.health.recovery_action = action)
    }

    /// The GPU falls off the bus: every call on it says so, until it recovers.
    ///
    /// # Errors
    /// As [`Hardware::xid`].
    pub fn lose(&self, gpu: &str) -> Result<(), ControlError> {
        self.change_gpu(gpu, |state| state.lost = true)
    }

    /// A reset: ends loss, errors, heat, processes and MIG instances; what is in the card's
    /// memory (remapped rows) stays, with what was pending done. Faults of calls stay.
    ///
    /// # Errors
    /// As [`Hardware::xid`].
    pub fn reset(&self, gpu: &str) -> Result<(), ControlError> {
        self.change_gpu(gpu, |state| {
            *state = GpuState {
                // A mode that waits for a reset takes effect.
                mig: state.mig_pending,
                mig_pending: state.mig_pending,
                health: state.health.after_reset(),
                faults: std::mem::take(&mut state.faults),
                ..GpuState::default()
            };
        })
    }

    /// A process computes on the GPU, or in an instance of it, which is in use then.
    ///
    /// # Errors
    /// As [`Hardware::xid`].
    pub fn start_process(
        &self,
        gpu: &str,
        pid: u32,
        memory_mib: u64,
        instance: Option<(u32, u32)>,
    ) -> Result<(), ControlError> {
        self.change_gpu(gpu, |state| {
            state.processes.push(Process {
                pid,
                memory_mib,
                gi: instance.map(|(gi, _)| gi),
                ci: instance.map(|(_, ci)| ci),
            });
        })
    }

    /// A process ends.
    ///
    /// # Errors
    /// As [`Hardware::xid`].
    pub fn end_process(&self, gpu: &str, pid: u32) -> Result<(), ControlError> {
        self.change_gpu(gpu, |state| {
            state.processes.retain(|process| process.pid != pid)
        })
    }

    /// A function of `nvml.h` answers with a code instead of acting, on one GPU or on all;
    /// `None` ends it.
    ///
    /// # Errors
    /// As [`Hardware::xid`].
    pub fn fail(
        &self,
        gpu: Option<&str>,
        function: &str,
        code: Option<u32>,
    ) -> Result<(), ControlError> {
        self.faults(gpu, |faults| match code {
            Some(code) => {
                faults.codes.insert(function.to_owned(), code);
            }
            None => {
                faults.codes.remove(function);
            }
        })
    }

    /// A function of `nvml.h` hangs so long before it acts, on one GPU or on all; zero ends it.
    /// A call that hangs already goes on hanging for its time.
    ///
    /// # Errors
    /// As [`Hardware::xid`].
    pub fn delay(
        &self,
        gpu: Option<&str>,
        function: &str,
        delay: Duration,
    ) -> Result<(), ControlError> {
        let milliseconds = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        self.faults(gpu, |faults| {
            if milliseconds == 0 {
                faults.delays_ms.remove(function);
            } else {
                faults.delays_ms.insert(function.to_owned(), milliseconds);
            }
        })
    }

    fn faults(
        &self,
        gpu: Option<&str>,
        change: impl FnOnce(&mut crate::state::Faults),
    ) -> Result<(), ControlError> {
        match gpu {
            Some(gpu) => self.change_gpu(gpu, |state| change(&mut state.faults)),
            None => self.change(|state| {
                change(&mut state.faults);
                Ok(())
            }),
        }
    }

    /// The nth call of a function from now on, counted from 1 and over all processes, kills
    /// its process with SIGKILL, once; 0 ends it.
    ///
    /// # Errors
    /// As [`Hardware::xid`].
    pub fn kill(&self, function: &str, nth: u64, at: KillAt) -> Result<(), ControlError> {
        self.change(|state| {
            let kills = match at {
                KillAt::Begin => &mut state.kill.0,
                KillAt::End => &mut state.kill_after.0,
            };
            if nth == 0 {
                kills.remove(function);
            } else {
                kills.insert(function.to_owned(), nth);
            }
            Ok(())
        })
    }

    /// Takes back everything that was made to happen here, on one GPU or on all (then also
    /// what was set for all calls); MIG mode, instances and compute mode stay.
    ///
    /// # Errors
    /// As [`Hardware::xid`].
    pub fn clear(&self, gpu: Option<&str>) -> Result<(), ControlError> {
        fn clear(state: &mut GpuState) {
            *state = GpuState {
                mig: state.mig,
                mig_pending: state.mig_pending,
                compute_mode: state.compute_mode,
                instances: std::mem::take(&mut state.instances),
                ..GpuState::default()
            };
        }
        match gpu {
            Some(gpu) => self.change_gpu(gpu, clear),
            None => self.change(|state| {
                state.gpus.values_mut().for_each(clear);
                state.events.clear();
                state.faults = Default::default();
                state.kill = Default::default();
                state.kill_after = Default::default();
                Ok(())
            }),
        }
    }
}
