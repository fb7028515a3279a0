//! The labels of the metrics.
//!
//! In: nothing. Out: enums whose text is a label's value. Never: a value that is not in
//! one of these lists, but for a GPU's address: a label that grows with claims, pods or
//! error texts would grow the monitoring's memory for ever.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};

use crate::claims::ClaimError;
use crate::claims::checkpoint::Target;
use crate::claims::core::CoreError;
use crate::claims::sharing::What;

/// Defines an enum, the list of its values, and each value's text.
macro_rules! label {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $value:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$of])* $value,)+ }

        impl $name {
            /// Every value.
            pub const ALL: &[Self] = &[$(Self::$value,)+];

            /// The value as it stands in the label.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$value => $text,)+ }
            }
        }

        impl EncodeLabelValue for $name {
            fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
                self.as_str().encode(encoder)
            }
        }
    };
}

label! {
    /// What the kubelet asked for.
    Operation {
        /// Prepare of one claim.
        Prepare = "prepare",
        /// Unprepare of one claim.
        Unprepare = "unprepare",
    }
}

label! {
    /// How something ended.
    Outcome {
        /// As asked.
        Success = "success",
        /// With an error.
        Error = "error",
    }
}

impl Outcome {
    /// The outcome of a result.
    pub fn of<T, E>(result: &Result<T, E>) -> Self {
        if result.is_ok() {
            Self::Success
        } else {
            Self::Error
        }
    }
}

label! {
    /// What a claim's devices are.
    DeviceKind {
        /// Whole GPUs.
        Gpu = "gpu",
        /// MIG partitions.
        Mig = "mig",
        /// Shares.
        Share = "share",
        /// Devices of several kinds.
        Mixed = "mixed",
        /// No device: an unknown claim, or one that failed before its devices were known.
        None = "none",
    }
}

impl DeviceKind {
    /// The kinds that one device can be.
    pub const OF_DEVICES: [Self; 3] = [Self::Gpu, Self::Mig, Self::Share];

    /// The kind of a prepared device.
    #[must_use]
    pub fn of(target: &Target) -> Self {
        match target {
            Target::Whole { .. } => Self::Gpu,
            Target::Partition { .. } => Self::Mig,
            Target::Share { .. } => Self::Share,
        }
    }

    /// The kind of a device by its name.
    #[must_use]
    pub fn of_name(device: &str) -> Self {
        if device.ends_with("-shared") {
            Self::Share
        } else if device.contains("-mig-") {
            Self::Mig
        } else {
            Self::Gpu
        }
    }
}

label! {
    /// A part of the work on a claim.
    Phase {
        /// Reading the claim from the API server.
        ReadClaim = "read_claim",
        /// Waiting for the locks of the claim and its GPUs.
        Lock = "lock",
        /// Calls of the GPU: reading it, making and destroying MIG instances.
        Hardware = "hardware",
        /// Waiting for the daemons of shared devices.
        Daemon = "daemon",
        /// Finding the driver's files, and writing or removing the CDI file.
        Cdi = "cdi",
        /// Reading, writing and removing checkpoints.
        Checkpoint = "checkpoint",
    }
}

label! {
    /// What happened to the MPS daemon of a shared device.
    DaemonEvent {
        /// It was started.
        Started = "started",
        /// It ended although claims use its device.
        Died = "died",
        /// It could not be started or told its limits.
        Failed = "failed",
        /// It was stopped: no claim uses its device.
        Stopped = "stopped",
    }
}

impl DaemonEvent {
    /// The event of a report.
    #[must_use]
    pub fn of(what: &What) -> Self {
        match what {
            What::Started => Self::Started,
            What::Died => Self::Died,
            What::Failed(_) => Self::Failed,
            What::Stopped => Self::Stopped,
        }
    }
}

label! {
    /// Why a claim could not be prepared or unprepared.
    Cause {
        /// The API server did not answer.
        ApiServer = "api_server",
        /// The claim's object does not exist.
        ClaimGone = "claim_gone",
        /// The claim is another one, is not allocated, or carries a wrong configuration.
        ClaimInvalid = "claim_invalid",
        /// The device is not on this node.
        UnknownDevice = "unknown_device",
        /// Another claim holds the hardware.
        Held = "held",
        /// More is granted of a shared device than there is.
        OverCommitted = "over_committed",
        /// The device cannot be shared as it was allocated, or its daemon does not come up.
        Sharing = "sharing",
        /// A MIG instance that no claim made is in the way.
        ForeignInstance = "foreign_instance",
        /// Another card is at the address now.
        Swapped = "swapped",
        /// MIG mode needs a reset to change.
        MigMode = "mig_mode",
        /// NVML returned an error, or is not loaded.
        Hardware = "hardware",
        /// A file of the driver is missing.
        DriverFiles = "driver_files",
        /// The CDI file could not be written or removed.
        Cdi = "cdi",
        /// The checkpoint could not be read or written.
        Checkpoint = "checkpoint",
        /// A lock file could not be used.
        Lock = "lock",
        /// The work goes on for longer than the kubelet waits.
        Slow = "slow",
        /// The work ended unexpectedly.
        Died = "died",
    }
}

impl Cause {
    /// The cause behind an error.
    #[must_use]
    pub fn of(error: &ClaimError) -> Self {
        match error {
            ClaimError::Read { .. } => Self::ApiServer,
            ClaimError::Gone { .. } => Self::ClaimGone,
            ClaimError::Allocation { .. } => Self::ClaimInvalid,
            ClaimError::Lock { .. } => Self::Lock,
            ClaimError::Slow { .. } => Self::Slow,
            ClaimError::Died { .. } => Self::Died,
            ClaimError::Core { source, .. } => match &**source {
                CoreError::UnknownDevice { .. } => Self::UnknownDevice,
                CoreError::Held { .. } => Self::Held,
                CoreError::OverCommitted(_) => Self::OverCommitted,
                CoreError::NotShared { .. }
                | CoreError::SeveralDaemons { .. }
                | CoreError::Sharing(_) => Self::Sharing,
                CoreError::Foreign { .. } | CoreError::NotOurs { .. } => Self::ForeignInstance,
                CoreError::Swapped { .. } => Self::Swapped,
                CoreError::MigOn { .. } => Self::MigMode,
                CoreError::Hardware { .. } => Self::Hardware,
                CoreError::Driver { .. } => Self::DriverFiles,
                CoreError::Cdi { .. } | CoreError::Metadata { .. } => Self::Cdi,
                CoreError::Checkpoint(_) | CoreError::Doubtful { .. } => Self::Checkpoint,
            },
        }
    }
}

label! {
    /// A call of NVML, as the plugin makes it: one of these may be many of the library's.
    Call {
        /// Loading the library and asking for its version.
        Open = "open",
        /// Reading everything there is to publish.
        Inventory = "inventory",
        /// Reading one GPU's MIG instances.
        Instances = "instances",
        /// Making a MIG instance.
        CreateInstance = "create_instance",
        /// Destroying a MIG instance.
        DestroyInstance = "destroy_instance",
        /// Switching MIG mode off.
        DisableMig = "disable_mig",
        /// Reading one GPU's health.
        Health = "health",
        /// Setting one GPU's compute mode.
        SetComputeMode = "set_compute_mode",
        /// Listing the processes on one GPU.
        Processes = "processes",
        /// Asking to be told of events.
        Events = "events",
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct OperationLabels {
    pub(super) operation: Operation,
    pub(super) kind: DeviceKind,
    pub(super) outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct PhaseLabels {
    pub(super) operation: Operation,
    pub(super) kind: DeviceKind,
    pub(super) phase: Phase,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ErrorLabels {
    pub(super) operation: Operation,
    pub(super) cause: Cause,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct KindLabel {
    pub(super) kind: DeviceKind,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct OutcomeLabel {
    pub(super) outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct CallLabels {
    pub(super) call: Call,
    pub(super) outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct DaemonLabel {
    pub(super) event: DaemonEvent,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct GpuLabel {
    pub(super) gpu: String,
}
