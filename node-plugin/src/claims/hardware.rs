//! What claims need of the GPUs.
//!
//! In: a PCI address, a profile, a placement. Out: MIG instances that exist or are
//! gone. Never: a decision; the calls block and belong on a blocking thread.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use gpu::{
    ComputeMode, Gpu, GpuEvent, Gpus, HealthReading, Inventory, MigInstance, MigMode, NvmlCode,
    PciAddress, Placement, Process, Roots,
};

use crate::metrics::{Call, Calls};
use crate::slices::{Described, MigPolicy};

/// A call to the GPUs that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HardwareError {
    /// NVML describes every GPU of the node, and this one is not among them.
    #[error("there is no GPU at {0} on this node")]
    Absent(PciAddress),
    /// The GPU has fallen off the bus, with NVML's error in the text.
    #[error("{0}")]
    Lost(String),
    /// It does not answer, and will not before somebody does something about it: it needs a
    /// reset, or its driver is away. With NVML's error in the text.
    #[error("{0}")]
    Unreachable(String),
    /// Anything else, with NVML's error in the text.
    #[error("{0}")]
    Failed(String),
}

impl HardwareError {
    /// Whether the GPU does not answer at all, and will not by itself.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Lost(_) | Self::Unreachable(_))
    }
}

/// The GPUs of this node. Implementations may be called from several threads at once;
/// callers hold the GPU's lock for every call that changes it.
pub trait Hardware: Send + Sync + 'static {
    /// Reads everything there is to publish.
    ///
    /// # Errors
    /// When the driver does not answer at all; one broken GPU is in
    /// [`Inventory::unreadable`].
    fn inventory(&self) -> Result<Inventory, HardwareError>;

    /// Reads one GPU: its instances as they are now, the rest as it was last read.
    ///
    /// # Errors
    /// When there is no such GPU or it does not answer.
    fn gpu(&self, pci: PciAddress) -> Result<Gpu, HardwareError>;

    /// Every GPU as it was last read, one that cannot be read now among them: what does
    /// not change in a claim's life, without a call to NVML.
    fn described(&self) -> Arc<Described>;

    /// Creates a GPU instance at a placement with one compute instance that spans it,
    /// switching MIG mode on first where it is off.
    ///
    /// # Errors
    /// When the placement is taken, or the GPU refuses.
    fn create_instance(
        &self,
        pci: PciAddress,
        profile_id: u32,
        placement: Placement,
    ) -> Result<MigInstance, HardwareError>;

    /// Destroys a GPU instance and what is in it; one that does not exist is a success.
    ///
    /// # Errors
    /// When it is in use.
    fn destroy_instance(&self, pci: PciAddress, gpu_instance_id: u32) -> Result<(), HardwareError>;

    /// Switches MIG mode off where it is on, so that the whole GPU can be used.
    ///
    /// # Errors
    /// When instances exist.
    fn disable_mig(&self, pci: PciAddress) -> Result<(), HardwareError>;

    /// Reads a GPU's error counters, throttling and temperature.
    ///
    /// # Errors
    /// [`HardwareError::Lost`] when it has fallen off the bus, else when it does not answer.
    fn health(&self, pci: PciAddress) -> Result<HealthReading, HardwareError>;

    /// Sets who may make CUDA contexts on a GPU.
    ///
    /// # Errors
    /// When the GPU refuses.
    fn set_compute_mode(&self, pci: PciAddress, mode: ComputeMode) -> Result<(), HardwareError>;

    /// The processes that compute on a GPU now, those in its MIG instances included.
    ///
    /// # Errors
    /// When the GPU refuses.
    fn processes(&self, pci: PciAddress) -> Result<Vec<Process>, HardwareError>;

    /// Registers for the events of some GPUs from now on; see [`gpu::Gpus::events`].
    ///
    /// # Errors
    /// When the driver has no events.
    fn events(&self, gpus: &[PciAddress]) -> Result<Box<dyn GpuEvents>, HardwareError>;
}

/// Events of GPUs as they come; see [`gpu::Events`].
pub trait GpuEvents: Send + Sync {
    /// Waits for the next event, at most so long; blocks its thread.
    ///
    /// # Errors
    /// When the driver does not wait; the next call may fail at once again.
    fn wait(&self, timeout: Duration) -> Result<Option<GpuEvent>, HardwareError>;

    /// The GPUs whose events come; one that was lost meanwhile is not among them.
    fn watched(&self) -> Vec<PciAddress>;
}

impl GpuEvents for gpu::Events {
    fn wait(&self, timeout: Duration) -> Result<Option<GpuEvent>, HardwareError> {
        Self::wait(self, timeout).map_err(failed)
    }

    fn watched(&self) -> Vec<PciAddress> {
        Self::watched(self)
    }
}

/// The GPUs behind a loaded NVML.
#[derive(Debug)]
pub struct NvmlGpus {
    gpus: Gpus,
    roots: Roots,
    calls: Calls,
    mig: MigPolicy,
    /// What does not change between two looks; reading it all takes hundreds of calls.
    known: RwLock<Option<Arc<Inventory>>>,
    /// The same, with the GPUs that were read before and cannot be read now.
    described: RwLock<Arc<Described>>,
}

impl NvmlGpus {
    /// The GPUs of an NVML, with the roots of `/proc` and `/sys`.
    #[must_use]
    pub fn new(gpus: Gpus, roots: Roots) -> Self {
        Self {
            gpus,
            roots,
            calls: Calls::default(),
            mig: MigPolicy::default(),
            known: RwLock::new(None),
            described: RwLock::new(Arc::new(nothing())),
        }
    }

    /// The same, with calls that are counted and known while they run.
    #[must_use]
    pub fn with_calls(self, calls: Calls) -> Self {
        Self { calls, ..self }
    }

    /// The same under a policy for MIG: [`MigPolicy::Static`] refuses to create an instance
    /// and to switch a mode. Instances that a claim made before are still destroyed with it.
    #[must_use]
    pub fn under(mut self, mig: MigPolicy) -> Self {
        self.mig = mig;
        self
    }

    fn known(&self, pci: PciAddress) -> Option<Gpu> {
        let known = self
            .known
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()?;
        known.gpus.iter().find(|gpu| gpu.pci == pci).cloned()
    }
}

/// The description of a node whose GPUs were never read.
pub(super) fn nothing() -> Described {
    Described::from(Inventory {
        driver_version: String::new(),
        cuda_version: (0, 0),
        gpus: Vec::new(),
        unreadable: Vec::new(),
    })
}

fn failed(error: gpu::Error) -> HardwareError {
    let text = error.to_string();
    match error.code() {
        _ if error.is_lost() => HardwareError::Lost(text),
        Some(NvmlCode::ResetRequired | NvmlCode::DriverNotLoaded) => {
            HardwareError::Unreachable(text)
        }
        _ => HardwareError::Failed(text),
    }
}

impl Hardware for NvmlGpus {
    fn inventory(&self) -> Result<Inventory, HardwareError> {
        let read = || self.gpus.inventory(&self.roots);
        let inventory = self.calls.make(Call::Inventory, read).map_err(failed)?;
        let known = Some(Arc::new(inventory.clone()));
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = known;
        let mut described = self
            .described
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let mut all = inventory.clone();
        let lost = |gpu: &&Gpu| !inventory.gpus.iter().any(|new| new.pci == gpu.pci);
        all.gpus.extend(described.gpus.iter().filter(lost).cloned());
        all.gpus.sort_by_key(|gpu| gpu.pci);
        *described = Arc::new(Described::from(all));
        drop(described);
        Ok(inventory)
    }

    fn described(&self) -> Arc<Described> {
        self.described
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn gpu(&self, pci: PciAddress) -> Result<Gpu, HardwareError> {
        if let Some(mut gpu) = self.known(pci) {
            if gpu.mig != gpu::MigMode::Unsupported {
                let read = || self.gpus.instances(pci);
                gpu.instances = self.calls.make(Call::Instances, read).map_err(failed)?;
            }
            return Ok(gpu);
        }
        let inventory = self.inventory()?;
        let broken: Vec<_> = inventory
            .unreadable
            .iter()
            .map(|gpu| gpu.reason.as_str())
            .collect();
        inventory
            .gpus
            .into_iter()
            .find(|gpu| gpu.pci == pci)
            .ok_or_else(|| {
                let absent = HardwareError::Absent(pci);
                if broken.is_empty() {
                    return absent;
                }
                HardwareError::Unreachable(format!("{absent} (unreadable: {})", broken.join("; ")))
            })
    }

    fn create_instance(
        &self,
        pci: PciAddress,
        profile_id: u32,
        placement: Placement,
    ) -> Result<MigInstance, HardwareError> {
        if self.mig == MigPolicy::Static {
            return Err(HardwareError::Failed(format!(
                "there is no such MIG instance on GPU {pci}, and this node's policy \
                 (--mig-mode=static) creates none; create it (nvidia-smi mig -i {pci} -cgi \
                 {profile_id}:{} -C) or use another device",
                placement.start
            )));
        }
        let create = || self.gpus.create_instance(pci, profile_id, placement);
        self.calls
            .make(Call::CreateInstance, create)
            .map_err(failed)
    }

    fn destroy_instance(&self, pci: PciAddress, gpu_instance_id: u32) -> Result<(), HardwareError> {
        let destroy = || self.gpus.destroy_instance(pci, gpu_instance_id);
        self.calls
            .make(Call::DestroyInstance, destroy)
            .map_err(failed)
    }

    fn disable_mig(&self, pci: PciAddress) -> Result<(), HardwareError> {
        if self.mig == MigPolicy::Static {
            return match self.gpus.mig_mode(pci).map_err(failed)? {
                MigMode::Enabled { .. } => Err(HardwareError::Failed(format!(
                    "MIG mode of GPU {pci} is on, and this node's policy (--mig-mode=static) \
                     leaves it on; switch it off (nvidia-smi -i {pci} -mig 0) or use one of its \
                     instances"
                ))),
                MigMode::Disabled { .. } | MigMode::Unsupported => Ok(()),
            };
        }
        let disable = || self.gpus.disable_mig(pci);
        self.calls.make(Call::DisableMig, disable).map_err(failed)
    }

    fn health(&self, pci: PciAddress) -> Result<HealthReading, HardwareError> {
        let read = || self.gpus.health(pci);
        self.calls.make(Call::Health, read).map_err(failed)
    }

    fn set_compute_mode(&self, pci: PciAddress, mode: ComputeMode) -> Result<(), HardwareError> {
        let set = || self.gpus.set_compute_mode(pci, mode);
        self.calls.make(Call::SetComputeMode, set).map_err(failed)?;
        // What is remembered of the GPU is of before, and the next to ask puts back what it
        // finds.
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        let gpus = known.as_mut().map(|known| &mut Arc::make_mut(known).gpus);
        for gpu in gpus.into_iter().flatten().filter(|gpu| gpu.pci == pci) {
            gpu.compute_mode = mode;
        }
        Ok(())
    }

    fn processes(&self, pci: PciAddress) -> Result<Vec<Process>, HardwareError> {
        let list = || self.gpus.processes(pci);
        self.calls.make(Call::Processes, list).map_err(failed)
    }

    fn events(&self, gpus: &[PciAddress]) -> Result<Box<dyn GpuEvents>, HardwareError> {
        let events = self
            .calls
            .make(Call::Events, || self.gpus.events(gpus))
            .map_err(failed)?;
        Ok(Box::new(events))
    }
}

/// Stands in while NVML is not loaded: whole devices can still be given back.
pub(super) struct NoHardware;

impl Hardware for NoHardware {
    fn inventory(&self) -> Result<Inventory, HardwareError> {
        Err(unavailable())
    }

    fn gpu(&self, _: PciAddress) -> Result<Gpu, HardwareError> {
        Err(unavailable())
    }

    fn described(&self) -> Arc<Described> {
        Arc::new(nothing())
    }

    fn create_instance(
        &self,
        _: PciAddress,
        _: u32,
        _: Placement,
    ) -> Result<MigInstance, HardwareError> {
        Err(unavailable())
    }

    fn destroy_instance(&self, _: PciAddress, _: u32) -> Result<(), HardwareError> {
        Err(unavailable())
    }

    fn disable_mig(&self, _: PciAddress) -> Result<(), HardwareError> {
        Err(unavailable())
    }

    fn health(&self, _: PciAddress) -> Result<HealthReading, HardwareError> {
        Err(unavailable())
    }

    fn set_compute_mode(&self, _: PciAddress, _: ComputeMode) -> Result<(), HardwareError> {
        Err(unavailable())
    }

    fn processes(&self, _: PciAddress) -> Result<Vec<Process>, HardwareError> {
        Err(unavailable())
    }

    fn events(&self, _: &[PciAddress]) -> Result<Box<dyn GpuEvents>, HardwareError> {
        Err(unavailable())
    }
}

/// The answer to every hardware call while NVML is not loaded.
#[must_use]
pub fn unavailable() -> HardwareError {
    HardwareError::Unreachable(
        "NVML is not loaded on this node; /readyz of the node plugin says why, and the call is retried"
            .to_owned(),
    )
}
