//! What is wrong with the GPUs, since when, and what follows from it.
//!
//! In: NVML's events and readings, over the calls of [`crate::claims::hardware`]. Out:
//! [`Fault`]s, which the slices turn into taints and the kubelet's health stream into
//! the status of pods. Never: a device withdrawn: one that is allocated has to stay.
//!
//! [`catalogue`] is the one table of what each fault means; [`core`] decides what begins
//! and ends; [`monitor`] is the shell with the clock, the threads and the disk.

mod calls;
pub mod catalogue;
pub mod core;
pub mod handle;
mod memory;
mod metrics;
pub mod monitor;
mod notices;
mod repairs;
pub mod report;
mod store;

use gpu::{PciAddress, Placement};
use serde::{Deserialize, Serialize};

pub use handle::Health;
pub use memory::{Memory, Remembered};
pub use metrics::HealthMetrics;
pub use monitor::{Beside, Monitor, Settings};
pub use repairs::{ANNOTATION, Repairs};

/// What kind of thing is wrong; each kind has a taint key of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The driver reported an XID; the value is its number.
    Xid,
    /// Memory errors that ECC could not correct.
    Ecc,
    /// A row of memory waits to be replaced, or could not be.
    RowRemap,
    /// NVML says that the GPU has to be reset, or the node rebooted.
    Recovery,
    /// The GPU has fallen off the bus, or NVML no longer finds it.
    Lost,
    /// The hardware slows the GPU down.
    Thermal,
    /// NVML cannot read the GPU, or does not answer.
    Unreadable,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::Xid,
        Self::Ecc,
        Self::RowRemap,
        Self::Recovery,
        Self::Lost,
        Self::Thermal,
        Self::Unreadable,
    ];

    /// The word for it in keys and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Xid => "xid",
            Self::Ecc => "ecc",
            Self::RowRemap => "row-remap",
            Self::Recovery => "recovery",
            Self::Lost => "lost",
            Self::Thermal => "thermal",
            Self::Unreadable => "unreadable",
        }
    }

    /// The key of its taint.
    #[must_use]
    pub fn key(self) -> String {
        format!("{}/{}", crate::DRIVER, self.name())
    }
}

/// How bad a fault is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Says nothing about the device: no taint, and the device stays healthy.
    Information,
    /// New work should go elsewhere; work that runs may go on.
    Degraded,
    /// Work on the device fails or cannot be trusted: it has to go elsewhere.
    Fatal,
}

impl Severity {
    /// All severities.
    pub const ALL: [Self; 3] = [Self::Information, Self::Degraded, Self::Fatal];

    /// The word for it in documents and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Information => "information",
            Self::Degraded => "degraded",
            Self::Fatal => "fatal",
        }
    }
}

/// What a taint does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Effect {
    /// No new claim gets the device.
    #[value(name = "NoSchedule")]
    NoSchedule,
    /// Besides, pods that use the device are evicted.
    #[value(name = "NoExecute")]
    NoExecute,
}

impl Effect {
    /// The API's word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NoSchedule => "NoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }
}

/// What part of the hardware a fault is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Scope {
    /// A whole GPU, with everything on it.
    Gpu(PciAddress),
    /// The memory slices of one MIG instance.
    Instance {
        /// The GPU.
        pci: PciAddress,
        /// Where the instance sits, or sat.
        placement: Placement,
    },
}

impl Scope {
    /// The GPU.
    #[must_use]
    pub fn pci(self) -> PciAddress {
        match self {
            Self::Gpu(pci) | Self::Instance { pci, .. } => pci,
        }
    }

    /// Whether a device of a GPU is affected; `placement` is the device's, `None` for
    /// one that spans the GPU.
    #[must_use]
    pub fn overlaps(self, pci: PciAddress, placement: Option<Placement>) -> bool {
        self.pci() == pci
            && match (self, placement) {
                (Self::Instance { placement, .. }, Some(device)) => placement.overlaps(device),
                _ => true,
            }
    }
}

impl std::fmt::Display for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Gpu(pci) => write!(f, "GPU {pci}"),
            Self::Instance { pci, placement } => write!(
                f,
                "the MIG instance at memory slices {} to {} of GPU {pci}",
                placement.start,
                placement.start + placement.size.saturating_sub(1)
            ),
        }
    }
}

/// Something that is wrong now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// What kind of thing.
    pub kind: Kind,
    /// Which one of its kind, such as an XID's number; empty where there is but one.
    pub value: String,
    /// How bad it is.
    pub severity: Severity,
    /// What its taint does; `None` is no taint.
    pub effect: Option<Effect>,
    /// What it is about.
    pub scope: Scope,
    /// A sentence for people.
    pub message: String,
    /// Since when, in seconds since the Unix epoch.
    pub since: i64,
}
