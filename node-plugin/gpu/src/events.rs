//! Events of GPUs: critical errors (XID) and ECC errors, as the driver reports them.
//!
//! In: GPUs by PCI address. Out: [`GpuEvent`]s, one at a time, from a call that blocks.
//! Never: an event from before the set was made (NVML keeps none), nor a judgement.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nvml_wrapper::Nvml;
use serde::{Deserialize, Serialize};

use crate::error::{Error, NvmlCode};
use crate::instances::on;
use crate::raw::{self, DeviceHandle, EventSet, Failed};
use crate::{Gpus, PciAddress};

/// Something that happened to a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuEvent {
    /// The GPU.
    pub pci: PciAddress,
    /// What happened.
    pub kind: EventKind,
    /// The MIG instance that it happened to; `None` for the whole GPU, or where the driver
    /// cannot tell.
    pub instance: Option<EventInstance>,
}

/// What happened to a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EventKind {
    /// A critical error, with the number that NVIDIA's XID catalogue explains.
    Xid(u64),
    /// An uncorrectable ECC error.
    DoubleBitEcc,
    /// A correctable ECC error.
    SingleBitEcc,
}

/// A MIG instance, by the ids that the driver gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventInstance {
    /// The GPU instance id.
    pub gpu_instance: u32,
    /// The compute instance id, where it was one of several, or the driver tells it.
    pub compute_instance: Option<u32>,
}

impl EventInstance {
    /// NVML's ids, where all ones mean none.
    pub(crate) fn of(gpu_instance: u32, compute_instance: u32) -> Option<Self> {
        let told = |id: u32| (id != u32::MAX).then_some(id);
        Some(Self {
            gpu_instance: told(gpu_instance)?,
            compute_instance: told(compute_instance),
        })
    }
}

/// A registration for the events of some GPUs. Belongs on a thread of its own that calls
/// [`Events::wait`] in a loop; to stop it, let it look at a flag between two waits and drop
/// this. NVML stays loaded until then, also when [`Gpus`] is dropped before.
#[derive(Debug)]
pub struct Events {
    nvml: Arc<Nvml>,
    /// Held during a wait, so that a second waiter waits for its turn.
    set: Mutex<EventSet>,
    watched: Mutex<BTreeMap<PciAddress, DeviceHandle>>,
}

impl Gpus {
    /// Registers for the events of some GPUs from now on. A GPU that refuses (it is lost, or
    /// has no events) is left out and logged; [`Events::watched`] tells which are in.
    ///
    /// # Errors
    /// When NVML has no event sets.
    pub fn events(&self, gpus: &[PciAddress]) -> Result<Events, Error> {
        let mut handles = BTreeMap::new();
        for pci in gpus {
            match self.handle(*pci) {
                Ok(handle) => {
                    handles.insert(*pci, handle);
                }
                Err(error) => unwatched(*pci, &error),
            }
        }
        let (set, watched) = register(&self.nvml, handles)?;
        Ok(Events {
            nvml: Arc::clone(&self.nvml),
            set: Mutex::new(set),
            watched: Mutex::new(watched),
        })
    }
}

impl Events {
    /// Waits for the next event, at most so long (in whole milliseconds); `None` when there
    /// was none. Blocks this thread only: no other call of NVML waits for it.
    ///
    /// When a GPU is lost meanwhile, it is left out from then on (see [`Events::watched`])
    /// and the others are waited for. The driver's XID 79 may or may not come before, and an
    /// event of another GPU at that very moment may be lost: read all GPUs' health then.
    ///
    /// # Errors
    /// When NVML does not wait, or a GPU is lost that it does not name. Pause before the next
    /// call: the error may come at once again.
    pub fn wait(&self, timeout: Duration) -> Result<Option<GpuEvent>, Error> {
        // One less than the largest: some drivers take that for "for ever".
        let timeout = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX - 1);
        let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        match set.wait(timeout) {
            Ok(event) => Ok(self.understood(&event)),
            Err(Failed {
                code: NvmlCode::Timeout,
                ..
            }) => Ok(None),
            Err(
                failed @ Failed {
                    code: NvmlCode::GpuLost,
                    ..
                },
            ) => {
                if self.leave_out_lost(&mut set)? {
                    Ok(None)
                } else {
                    Err(on("the events of this node's GPUs".into(), failed))
                }
            }
            Err(failed) => Err(on("the events of this node's GPUs".into(), failed)),
        }
    }

    /// The GPUs whose events come; one that is lost is not among them. When a GPU comes back,
    /// register anew with [`Gpus::events`].
    #[must_use]
    pub fn watched(&self) -> Vec<PciAddress> {
        self.locked().keys().copied().collect()
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<PciAddress, DeviceHandle>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An event in plain data; one of another kind, or of an unknown GPU, is logged.
    fn understood(&self, event: &raw::RawEvent) -> Option<GpuEvent> {
        let known = self
            .locked()
            .iter()
            .find(|(_, handle)| **handle == event.device)
            .map(|(pci, _)| *pci);
        let pci = known.or_else(|| raw::pci_address(&self.nvml, event.device).ok().flatten());
        let kind = match event.kind {
            raw::XID => Some(EventKind::Xid(event.data)),
            raw::DOUBLE_BIT_ECC => Some(EventKind::DoubleBitEcc),
            raw::SINGLE_BIT_ECC => Some(EventKind::SingleBitEcc),
            _ => None,
        };
        let (Some(pci), Some(kind)) = (pci, kind) else {
            tracing::warn!(
                kind = event.kind,
                data = event.data,
                gpu = ?pci,
                "An event of an unknown GPU or of an unknown kind was left aside."
            );
            return None;
        };
        Some(GpuEvent {
            pci,
            kind,
            instance: EventInstance::of(event.gpu_instance, event.compute_instance),
        })
    }

    /// Registers anew without the GPUs that are lost; whether there were any.
    fn leave_out_lost(&self, set: &mut EventSet) -> Result<bool, Error> {
        let mut left = self.locked().clone();
        let before = left.len();
        left.retain(|_, device| !is_lost(&self.nvml, *device));
        if left.len() == before {
            return Ok(false);
        }
        let (fresh, watched) = register(&self.nvml, left)?;
        let mut known = self.locked();
        for pci in known.keys().filter(|pci| !watched.contains_key(pci)) {
            tracing::warn!(gpu = %pci, "The GPU is lost; its events are not waited for any more.");
        }
        *known = watched;
        *set = fresh;
        Ok(true)
    }
}

/// Whether the GPU has fallen off the bus. The first call asks the hardware; the other may be
/// answered from what the driver remembers, but every card has it.
fn is_lost(nvml: &Nvml, device: DeviceHandle) -> bool {
    let lost = |failed: Failed| failed.code == NvmlCode::GpuLost;
    raw::temperature(nvml, device).is_err_and(lost)
        || raw::supported_events(nvml, device).is_err_and(lost)
}

type Registered = (EventSet, BTreeMap<PciAddress, DeviceHandle>);

fn register(
    nvml: &Arc<Nvml>,
    mut gpus: BTreeMap<PciAddress, DeviceHandle>,
) -> Result<Registered, Error> {
    let set = EventSet::create(nvml).map_err(|failed| on("this node".into(), failed))?;
    gpus.retain(|pci, device| {
        let registered = raw::supported_events(nvml, *device).and_then(|supported| {
            let wanted = supported & (raw::XID | raw::DOUBLE_BIT_ECC | raw::SINGLE_BIT_ECC);
            set.register(*device, wanted)
        });
        registered
            .map_err(|failed| unwatched(*pci, &on(pci.to_string(), failed)))
            .is_ok()
    });
    Ok((set, gpus))
}

fn unwatched(pci: PciAddress, error: &Error) {
    tracing::warn!(gpu = %pci, %error, "The events of a GPU cannot be had.");
}
