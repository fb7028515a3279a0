//! Why a shared device has not the daemon that its claims need.
//!
//! In: what failed. Out: with which device, and what to do. Never: a decision.

use std::io;
use std::path::PathBuf;

use super::SharedDevice;
use super::process::ControlError;
use crate::claims::hardware::HardwareError;

/// A device's daemon is not what its claims need.
#[derive(Debug, thiserror::Error)]
pub enum SharingError {
    /// The driver has no control daemon.
    #[error(
        "device {device} is shared by MPS and the driver root {root} has no nvidia-cuda-mps-control; install the driver's compute utilities, or set sharing.mode to time-slicing and delete the claims"
    )]
    NoProgram {
        /// The device.
        device: SharedDevice,
        /// Where it was looked for.
        root: PathBuf,
    },
    /// The folder of the daemon cannot be used.
    #[error("cannot prepare {path} for the MPS daemon of device {device}: {source}")]
    Folder {
        /// The device.
        device: SharedDevice,
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The records cannot be read, or the turn cannot be taken.
    #[error("cannot tell what the MPS daemon of device {device} should be: {reason}")]
    Unknown {
        /// The device.
        device: SharedDevice,
        /// Why.
        reason: String,
    },
    /// The GPU refuses the compute mode.
    #[error("the GPU of device {device} refuses the compute mode that MPS needs: {source}")]
    ComputeMode {
        /// The device.
        device: SharedDevice,
        /// NVML's error.
        source: HardwareError,
    },
    /// The daemon does not come up.
    #[error("the MPS daemon of device {device} did not start: {reason}; its log is in {log}")]
    Start {
        /// The device.
        device: SharedDevice,
        /// What is known.
        reason: String,
        /// Where to look.
        log: PathBuf,
    },
    /// The daemon does not take its limits.
    #[error("device {device}: {source}")]
    Control {
        /// The device.
        device: SharedDevice,
        /// What it said.
        source: ControlError,
    },
}
