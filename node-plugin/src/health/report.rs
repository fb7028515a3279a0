//! The health of each device, for the kubelet and through it for the status of pods.
//!
//! In: what is wanted, with its faults. Out: one report for each device of the pool.
//! Never: healthy where a taint says otherwise.

use super::Severity;
use crate::slices::{SliceContent, View, Wanted, affecting, pool};

/// The health of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceReport {
    /// The device's name in the pool.
    pub device: String,
    /// Whether it can be used.
    pub healthy: bool,
    /// Why not, or what else there is to say; at most 1024 characters.
    pub message: String,
}

/// The longest message that a kubelet keeps.
const MAX_MESSAGE: usize = 1024;

/// The health of every device that may be published.
#[must_use]
pub fn devices(wanted: &Wanted) -> Vec<DeviceReport> {
    let faults = wanted.all_faults();
    let devices = pool(wanted, View::FULL)
        .into_iter()
        .flat_map(|slice| match slice {
            SliceContent::Devices(devices) => devices,
            SliceContent::Counters(_) => Vec::new(),
        });
    devices
        .map(|device| {
            let mut own: Vec<_> = affecting(&device, &faults).collect();
            own.sort_by_key(|fault| (std::cmp::Reverse(fault.severity), fault.since));
            let messages: Vec<&str> = own.iter().map(|fault| fault.message.as_str()).collect();
            let mut message = messages.join("; ");
            while message.len() > MAX_MESSAGE {
                message.pop();
            }
            DeviceReport {
                device: device.name,
                healthy: own
                    .iter()
                    .all(|fault| fault.severity == Severity::Information),
                message,
            }
        })
        .collect()
}
