//! Who may compute on a GPU, and who does.
//!
//! In: a GPU by PCI address. Out: its compute mode, changed or read, and its processes.
//! Never: a process ended.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::instances::on;
use crate::raw;
use crate::{EventInstance, Gpus, PciAddress};

/// Who may make CUDA contexts on a GPU (`nvmlComputeMode_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ComputeMode {
    /// Any number of processes.
    Default,
    /// One process at a time, such as an MPS server.
    ExclusiveProcess,
    /// No process.
    Prohibited,
}

/// A process that holds a CUDA context on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its id in the node's PID namespace. In a container without the host's PID namespace
    /// some drivers report nothing.
    pub pid: u32,
    /// Device memory that it uses, in bytes, where the driver tells.
    pub memory_bytes: Option<u64>,
    /// The MIG instance that it is in.
    pub instance: Option<EventInstance>,
}

impl Gpus {
    /// Sets who may make CUDA contexts on a GPU. It lasts until the driver is unloaded.
    ///
    /// # Errors
    /// When NVML refuses: it takes root, and a virtual GPU has no modes.
    pub fn set_compute_mode(&self, pci: PciAddress, mode: ComputeMode) -> Result<(), Error> {
        let device = self.handle(pci)?;
        raw::set_compute_mode(&self.nvml, device, mode)
            .map_err(|failed| on(pci.to_string(), failed))
    }

    /// The processes that compute on a GPU now, those in its MIG instances included. Of
    /// the clients of an MPS server only the server is told.
    ///
    /// # Errors
    /// When NVML refuses.
    pub fn processes(&self, pci: PciAddress) -> Result<Vec<Process>, Error> {
        let device = self.handle(pci)?;
        raw::processes(&self.nvml, device).map_err(|failed| on(pci.to_string(), failed))
    }
}
