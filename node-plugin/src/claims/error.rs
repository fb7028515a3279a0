//! Why something with claims failed.
//!
//! In: the error of a step. Out: the claim it was about, what was wrong and what to do.
//! Never: a decision; who catches one decides.

use std::path::PathBuf;
use std::time::Duration;

use gpu::PciAddress;

use super::allocation::AllocationError;
use super::checkpoint::{CheckpointError, ClaimRef};
use super::driver::DriverError;
use super::hardware::HardwareError;
use super::sharing::SharingError;
use super::sharing::limits::OverCommitted;

/// A claim that could not be prepared or unprepared.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// The API server did not answer.
    #[error("claim {claim}: cannot read it from the API server: {reason}")]
    Read {
        /// The claim.
        claim: ClaimRef,
        /// What failed.
        reason: String,
    },
    /// There is no such claim.
    #[error("claim {claim}: it does not exist; the pod that refers to it has to be recreated")]
    Gone {
        /// The claim.
        claim: ClaimRef,
    },
    /// The claim cannot be prepared as it stands.
    #[error("claim {claim}: {source}")]
    Allocation {
        /// The claim.
        claim: ClaimRef,
        /// Why.
        source: AllocationError,
    },
    /// A step failed.
    #[error("claim {claim}: {source}")]
    Core {
        /// The claim.
        claim: ClaimRef,
        /// Why.
        source: Box<CoreError>,
    },
    /// A lock file cannot be used.
    #[error("claim {claim}: cannot lock: {source}; check the plugin's folder")]
    Lock {
        /// The claim.
        claim: ClaimRef,
        /// Why.
        source: std::io::Error,
    },
    /// The work takes longer than the kubelet waits.
    #[error(
        "claim {claim}: still at work after {} s, because a GPU or the disk is slow to answer; the kubelet's next call gets the result", .after.as_secs()
    )]
    Slow {
        /// The claim.
        claim: ClaimRef,
        /// How long.
        after: Duration,
    },
    /// The work died.
    #[error("claim {claim}: the attempt ended unexpectedly; it is retried")]
    Died {
        /// The claim.
        claim: ClaimRef,
    },
}

/// What exists on the node could not be told.
#[derive(Debug, thiserror::Error)]
pub enum LookError {
    /// The GPUs do not answer.
    #[error("the GPUs cannot be read: {0}")]
    Gpus(String),
    /// The checkpoints cannot be read: whose an instance is, is not known.
    #[error("the checkpoints cannot be read: {0}")]
    Checkpoints(#[from] CheckpointError),
    /// The work died.
    #[error("the look at the GPUs ended unexpectedly")]
    Died,
}

/// The state of this node's claims cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The boot id cannot be read.
    #[error("cannot read the boot id from {path}: {source}")]
    BootId {
        /// Where it was looked for.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A folder cannot be made.
    #[error("cannot create {path}: {source}; it has to be a writable folder of the host")]
    Folder {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The checkpoints cannot be opened.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// Why a claim could not be prepared or unprepared.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// The device is not on this node.
    #[error(
        "device {device} does not exist on this node; the GPU is gone or its partitions changed since the claim was allocated"
    )]
    UnknownDevice {
        /// The device.
        device: String,
    },
    /// Another claim holds the same hardware.
    #[error(
        "device {device} overlaps {other_device}, which claim {holder} holds; the claim can be prepared when that one is unprepared"
    )]
    Held {
        /// The device that was asked for.
        device: String,
        /// The device that is in use.
        other_device: String,
        /// The claim that uses it.
        holder: ClaimRef,
    },
    /// A claim whose record cannot be read may hold it.
    #[error(
        "device {device} may be held by the claim with UID {uid}, whose record cannot be used ({reason}); the claim can be prepared when that one is mended or has ended"
    )]
    Doubtful {
        /// The device.
        device: String,
        /// The other claim.
        uid: String,
        /// Why its record cannot be used.
        reason: String,
    },
    /// An administrator's MIG instance is in the way.
    #[error(
        "device {device} overlaps MIG instance {instance} on GPU {pci}, which no claim created; destroy it (nvidia-smi mig -dci/-dgi) or use another device"
    )]
    Foreign {
        /// The device.
        device: String,
        /// The GPU instance id.
        instance: u32,
        /// The GPU.
        pci: PciAddress,
    },
    /// An administrator's MIG instance that the claim was to be given is not usable.
    #[error("device {device}: the MIG instance on GPU {pci}, which no claim created, {problem}")]
    NotOurs {
        /// The device.
        device: String,
        /// The GPU.
        pci: PciAddress,
        /// What is wrong and what to do.
        problem: &'static str,
    },
    /// Another card is at the address now.
    #[error(
        "device {device}: the GPU at {pci} is {found} now, the claim was prepared with {expected}; delete the pod and its claim"
    )]
    Swapped {
        /// The device.
        device: String,
        /// The address.
        pci: PciAddress,
        /// The UUID that is there.
        found: String,
        /// The UUID that was recorded.
        expected: String,
    },
    /// MIG mode needs a reset to change.
    #[error(
        "device {device}: MIG mode of GPU {pci} is on and cannot be switched off without a GPU reset"
    )]
    MigOn {
        /// The device.
        device: String,
        /// The GPU.
        pci: PciAddress,
    },
    /// Sharing is switched off, or impossible under the policy.
    #[error(
        "device {device} cannot be shared on this node: the plugin runs with --sharing=off, or with --sharing=mps where MPS cannot run; delete the pod, so that its claim is allocated anew"
    )]
    NotShared {
        /// The device.
        device: String,
    },
    /// More is granted than there is.
    #[error("{0}")]
    OverCommitted(Box<OverCommitted>),
    /// A container can reach one MPS daemon.
    #[error(
        "request {request} has shares of several devices, {device} among them: a container reaches the MPS daemon of one device only; ask for one share, or for whole devices or partitions"
    )]
    SeveralDaemons {
        /// The request.
        request: String,
        /// One of the devices.
        device: String,
    },
    /// The daemon that keeps shares apart is not there.
    #[error(transparent)]
    Sharing(#[from] Box<SharingError>),
    /// The GPU refused.
    #[error("device {device}: {source}")]
    Hardware {
        /// The device.
        device: String,
        /// NVML's error.
        source: HardwareError,
    },
    /// A driver file is missing.
    #[error("device {device}: {source}")]
    Driver {
        /// The device.
        device: String,
        /// What is missing.
        source: DriverError,
    },
    /// The CDI file could not be written or removed.
    #[error("cannot write the CDI file {path}: {source}; check the CDI folder")]
    Cdi {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The metadata files could not be written or removed.
    #[error("cannot write the device metadata below {path}: {source}; check the plugin's folder")]
    Metadata {
        /// The claim's folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The checkpoint could not be read or written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}
