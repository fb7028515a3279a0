//! How a GPU is doing: error counters, row remapping, throttling, temperature, and what
//! the driver asks for.
//!
//! In: a GPU by PCI address. Out: a [`HealthReading`]; what the card or its driver does not
//! tell is `None`. Never: a judgement about what a reading means for a claim.

use serde::{Deserialize, Serialize};

use crate::error::{Error, NvmlCode};
use crate::instances::on;
use crate::raw::{self, Failed};
use crate::{Gpus, PciAddress};

/// One look at a GPU's health. Everything but the identity is optional: cards without ECC,
/// virtual GPUs and older drivers tell less.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthReading {
    /// The GPU.
    pub pci: PciAddress,
    /// Its UUID: another card in the same slot has another.
    pub uuid: String,
    /// Uncorrectable ECC errors since the driver was loaded or the GPU was reset
    /// (`nvmlDeviceGetTotalEccErrors`, uncorrected, volatile).
    pub ecc_uncorrected_volatile: Option<u64>,
    /// Row remapping (`nvmlDeviceGetRemappedRows`, Ampere and later).
    pub remapped_rows: Option<RemappedRows>,
    /// Why the clocks are lowered now, as far as that is a fault.
    pub slowdown: Slowdown,
    /// The GPU's temperature in degrees Celsius.
    pub temperature_celsius: Option<u32>,
    /// What the driver says has to be done (`NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`, driver 570
    /// and later).
    pub recovery_action: Option<RecoveryAction>,
}

/// Memory rows that were replaced by spare ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemappedRows {
    /// Rows remapped because of correctable errors.
    pub correctable: u32,
    /// Rows remapped because of uncorrectable errors.
    pub uncorrectable: u32,
    /// Whether a remapping waits for the next reset of the GPU.
    pub pending: bool,
    /// Whether a remapping failed: there was no spare row left.
    pub failed: bool,
}

/// Slowdowns that are faults of cooling or power, not of load
/// (`nvmlDeviceGetCurrentClocksEventReasons`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slowdown {
    /// The hardware halves the clocks, or worse: too hot.
    pub hw_thermal: bool,
    /// The driver lowers the clocks: near the temperature limit.
    pub sw_thermal: bool,
    /// The hardware lowers the clocks: the power supply asserts its brake.
    pub hw_power_brake: bool,
}

/// What the driver says has to be done with a GPU (`nvmlDeviceGpuRecoveryAction_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RecoveryAction {
    /// Nothing: the GPU is fine.
    None,
    /// Reset the GPU.
    GpuReset,
    /// Reboot the node.
    NodeReboot,
    /// End all peer-to-peer traffic; then look again.
    DrainP2P,
    /// End all work on the GPU, then reset it: it works still, with less capacity.
    DrainAndReset,
    /// An action that only a newer `nvml.h` names.
    Other(u32),
}

impl RecoveryAction {
    fn of(value: u32) -> Self {
        match value {
            0 => Self::None,
            1 => Self::GpuReset,
            2 => Self::NodeReboot,
            3 => Self::DrainP2P,
            4 => Self::DrainAndReset,
            other => Self::Other(other),
        }
    }
}

impl Gpus {
    /// Reads a GPU's health now: about eight short calls, none of which takes a lock that
    /// another GPU's calls need.
    ///
    /// # Errors
    /// When the GPU does not answer; one that has fallen off the bus gives an error for
    /// which [`Error::is_lost`] holds.
    pub fn health(&self, pci: PciAddress) -> Result<HealthReading, Error> {
        let device = self.handle(pci)?;
        let read = || -> raw::Result<HealthReading> {
            let nvml = &self.nvml;
            Ok(HealthReading {
                pci,
                uuid: raw::uuid(nvml, device)?,
                ecc_uncorrected_volatile: told(raw::ecc_uncorrected_volatile(nvml, device))?,
                remapped_rows: told(raw::remapped_rows(nvml, device))?,
                slowdown: told(raw::slowdown(nvml, device))?.unwrap_or_default(),
                temperature_celsius: told(raw::temperature(nvml, device))?,
                recovery_action: told(raw::recovery_action(nvml, device))?.map(RecoveryAction::of),
            })
        };
        read().map_err(|failed| {
            // After a reset or a rescan of the bus the GPU may have another handle.
            self.forget(pci);
            on(pci.to_string(), failed)
        })
    }
}

/// A reading that this card, driver or process cannot have is none, not a failure.
fn told<T>(reading: raw::Result<T>) -> raw::Result<Option<T>> {
    match reading {
        Ok(value) => Ok(Some(value)),
        Err(Failed {
            code:
                NvmlCode::NotSupported
                | NvmlCode::MissingSymbol
                | NvmlCode::VersionMismatch
                | NvmlCode::NoPermission,
            ..
        }) => Ok(None),
        Err(failed) => Err(failed),
    }
}
