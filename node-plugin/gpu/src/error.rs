//! What can go wrong with NVML, each with its object and its remedy.
//!
//! In: NVML's return codes. Out: errors that a person can act on. Never: a retry.

use std::fmt;
use std::path::PathBuf;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as sys;

use crate::PciAddress;

/// A failed NVML call's return code (`nvmlReturn_t`), or that the library lacks the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NvmlCode {
    /// The device or the driver cannot do this.
    NotSupported,
    /// An argument is wrong; for a handle, the object is gone.
    InvalidArgument,
    /// The process may not do this.
    NoPermission,
    /// There is no such object.
    NotFound,
    /// No kernel driver is loaded.
    DriverNotLoaded,
    /// A client, or a compute instance, still uses the object.
    InUse,
    /// The memory slices are taken, also by an equal instance.
    InsufficientResources,
    /// The GPU has fallen off the bus.
    GpuLost,
    /// The GPU must be reset first.
    ResetRequired,
    /// The struct version is not the library's.
    VersionMismatch,
    /// The driver did not answer in time.
    Timeout,
    /// The library has no such function: an older driver.
    MissingSymbol,
    /// Any other code.
    Other(u32),
}

impl NvmlCode {
    /// The code of a return value; `None` for success.
    pub(crate) fn of(value: sys::nvmlReturn_t) -> Option<Self> {
        Some(match value {
            sys::nvmlReturn_enum_NVML_SUCCESS => return None,
            sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED => Self::NotSupported,
            sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT => Self::InvalidArgument,
            sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION => Self::NoPermission,
            sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND => Self::NotFound,
            sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED => Self::DriverNotLoaded,
            sys::nvmlReturn_enum_NVML_ERROR_IN_USE => Self::InUse,
            sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES => Self::InsufficientResources,
            sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST => Self::GpuLost,
            sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED => Self::ResetRequired,
            sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH => Self::VersionMismatch,
            sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT => Self::Timeout,
            other => Self::Other(other),
        })
    }

    /// The code of an error of the safe wrapper.
    pub(crate) fn of_wrapper(error: &NvmlError) -> Self {
        match error {
            NvmlError::NotSupported => Self::NotSupported,
            NvmlError::InvalidArg => Self::InvalidArgument,
            NvmlError::NoPermission => Self::NoPermission,
            NvmlError::NotFound => Self::NotFound,
            NvmlError::DriverNotLoaded => Self::DriverNotLoaded,
            NvmlError::InUse => Self::InUse,
            NvmlError::GpuLost => Self::GpuLost,
            NvmlError::ResetRequired => Self::ResetRequired,
            NvmlError::Timeout => Self::Timeout,
            NvmlError::FailedToLoadSymbol(_) => Self::MissingSymbol,
            // The wrapper hands on codes that it does not know under this name.
            NvmlError::UnexpectedVariant(code) => Self::of(*code).unwrap_or(Self::Other(*code)),
            _ => Self::Other(sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN),
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn remedy(self) -> &'static str {
        match self {
            Self::NotSupported => "check that the card and its driver have this feature",
            Self::InvalidArgument => "compare the request with the GPU's inventory",
            Self::NoPermission => {
                "run as root, with access to the device nodes and MIG capabilities"
            }
            Self::NotFound => "read the inventory again: the object is gone",
            Self::DriverNotLoaded => "load the NVIDIA kernel module and check nvidia-smi",
            Self::InUse => "end the processes that use it and try again",
            Self::InsufficientResources => {
                "free the overlapping instances or choose another placement"
            }
            Self::GpuLost => {
                "drain the node and reset or replace the GPU; the kernel log has an Xid"
            }
            Self::ResetRequired => {
                "drain the GPU and reset it with nvidia-smi --gpu-reset, or reboot"
            }
            Self::VersionMismatch | Self::MissingSymbol => "update the NVIDIA driver",
            Self::Timeout => "try again; if it persists, look for an Xid in the kernel log",
            Self::Other(_) => "look for NVRM lines in the kernel log",
        }
    }
}

impl fmt::Display for NvmlCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSupported => f.write_str("NOT_SUPPORTED"),
            Self::InvalidArgument => f.write_str("INVALID_ARGUMENT"),
            Self::NoPermission => f.write_str("NO_PERMISSION"),
            Self::NotFound => f.write_str("NOT_FOUND"),
            Self::DriverNotLoaded => f.write_str("DRIVER_NOT_LOADED"),
            Self::InUse => f.write_str("IN_USE"),
            Self::InsufficientResources => f.write_str("INSUFFICIENT_RESOURCES"),
            Self::GpuLost => f.write_str("GPU_IS_LOST"),
            Self::ResetRequired => f.write_str("RESET_REQUIRED"),
            Self::VersionMismatch => f.write_str("ARGUMENT_VERSION_MISMATCH"),
            Self::Timeout => f.write_str("TIMEOUT"),
            Self::MissingSymbol => f.write_str("the library has no such function"),
            Self::Other(code) => write!(f, "NVML error {code}"),
        }
    }
}

/// Why an operation on GPUs failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no NVML: not a GPU node, or the driver is not there yet.
    #[error(
        "no NVIDIA driver on this node: libnvidia-ml.so.1 is not in {}; install the driver or \
         name the library",
        list(searched)
    )]
    NoDriver {
        /// Where the library was looked for.
        searched: Vec<PathBuf>,
    },
    /// The library is there and cannot be loaded.
    #[error("{} cannot be loaded as NVML: {reason}; install a driver for this architecture", library.display())]
    NotLoadable {
        /// The library.
        library: PathBuf,
        /// What the loader said.
        reason: String,
    },
    /// The library is loaded and cannot be initialised.
    #[error("{} cannot be initialised: nvmlInit: {code}; {}", library.display(), code.remedy())]
    NotInitialised {
        /// The library.
        library: PathBuf,
        /// NVML's answer.
        code: NvmlCode,
    },
    /// An NVML call failed.
    #[error("{on}: {call}: {code}; {}", code.remedy())]
    Call {
        /// The function of `nvml.h`.
        call: &'static str,
        /// The GPU, instance or node that it was called on.
        on: String,
        /// NVML's answer.
        code: NvmlCode,
    },
    /// NVML answered with something that makes no sense.
    #[error("{on}: {problem}; update the NVIDIA driver")]
    Nonsense {
        /// The GPU it was asked of.
        on: String,
        /// What it said.
        problem: String,
    },
    /// MIG is off and turning it on does not take effect.
    #[error("{pci}: MIG is off and cannot be turned on now: {code}; {}", code.remedy())]
    MigModeNotSwitchable {
        /// The GPU.
        pci: PciAddress,
        /// NVML's activation status.
        code: NvmlCode,
    },
    /// No compute instance profile covers the whole GPU instance.
    #[error(
        "{pci}: no compute instance profile spans GPU instance profile {profile_id}; choose \
         another profile"
    )]
    NoSpanningComputeInstance {
        /// The GPU.
        pci: PciAddress,
        /// The GPU instance profile.
        profile_id: u32,
    },
    /// The compute instance could not be made, and the GPU instance could not be undone.
    #[error(
        "{cause}; and GPU instance {gpu_instance_id} could not be destroyed after it: {undo}; \
         destroy it with nvidia-smi mig -dgi"
    )]
    HalfMade {
        /// Why the compute instance was not made.
        cause: Box<Error>,
        /// Why the GPU instance is still there.
        undo: Box<Error>,
        /// The GPU instance.
        gpu_instance_id: u32,
    },
}

impl Error {
    /// Whether the GPU has fallen off the bus, or cannot be reached for another reason.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.code() == Some(NvmlCode::GpuLost)
    }

    /// NVML's code, where the error came from NVML.
    #[must_use]
    pub fn code(&self) -> Option<NvmlCode> {
        match self {
            Self::NotInitialised { code, .. }
            | Self::Call { code, .. }
            | Self::MigModeNotSwitchable { code, .. } => Some(*code),
            Self::HalfMade { cause, .. } => cause.code(),
            _ => None,
        }
    }
}

fn list(paths: &[PathBuf]) -> String {
    let names: Vec<_> = paths
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    names.join(", ")
}
