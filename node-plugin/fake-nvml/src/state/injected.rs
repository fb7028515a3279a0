//! What happens to a GPU without a client's doing.
//!
//! In: nothing; these are types. Out: parts of the state file. Never: a rule about what
//! a client sees of them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What functions of `nvml.h` do instead of what they should, by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Faults {
    /// The return codes that they answer with instead of acting.
    #[serde(rename = "faults", default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) codes: BTreeMap<String, u32>,
    /// How long they hang before they act, in milliseconds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) delays_ms: BTreeMap<String, u64>,
}

/// Calls to go, by function.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct CountDown(pub(crate) BTreeMap<String, u64>);

impl CountDown {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn contains_key(&self, function: &str) -> bool {
        self.0.contains_key(function)
    }

    /// Counts one call; whether it was the one that is meant, which is then forgotten.
    pub(crate) fn count_down(&mut self, function: &str) -> bool {
        let Some(left) = self.0.get_mut(function) else {
            return false;
        };
        *left = left.saturating_sub(1);
        let meant = *left == 0;
        if meant {
            self.0.remove(function);
        }
        meant
    }
}

/// An event of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Event {
    /// Its number, counted from 1.
    pub(crate) number: u64,
    /// The GPU's UUID.
    pub(crate) gpu: String,
    /// One of `nvmlEventType…`.
    pub(crate) kind: u64,
    /// The XID.
    #[serde(default)]
    pub(crate) data: u64,
    /// The GPU instance that it happened to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) gi: Option<u32>,
    /// The compute instance that it happened to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ci: Option<u32>,
}

/// How a GPU is doing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct Health {
    /// Correctable ECC errors since the last reset.
    pub(crate) ecc_corrected: u64,
    /// Uncorrectable ECC errors since the last reset.
    pub(crate) ecc_uncorrected: u64,
    /// Remapped rows.
    pub(crate) rows: Rows,
    /// Why the clocks are lowered, as `nvmlClocksEventReason…` bits.
    pub(crate) clocks_event_reasons: u64,
    /// The temperature in degrees Celsius; absent: that of an idle card.
    pub(crate) temperature: Option<u32>,
    /// What the driver asks for, `nvmlDeviceGpuRecoveryAction_t`.
    pub(crate) recovery_action: u32,
}

/// Remapped rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct Rows {
    /// Because of correctable errors.
    pub(crate) correctable: u32,
    /// Because of uncorrectable errors.
    pub(crate) uncorrectable: u32,
    /// Whether one waits for a reset.
    pub(crate) pending: bool,
    /// Whether one failed.
    pub(crate) failed: bool,
}

impl Health {
    pub(crate) fn is_fine(&self) -> bool {
        *self == Self::default()
    }

    /// What a reset or a boot leaves: what is in the card's InfoROM, with what was pending done.
    pub(crate) fn after_reset(&self) -> Self {
        Self {
            rows: Rows {
                pending: false,
                ..self.rows
            },
            ..Self::default()
        }
    }
}

/// A process that computes on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Process {
    /// Its id.
    pub(crate) pid: u32,
    /// The memory that it uses, in MiB.
    pub(crate) memory_mib: u64,
    /// The GPU instance that it is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) gi: Option<u32>,
    /// The compute instance that it is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ci: Option<u32>,
}
