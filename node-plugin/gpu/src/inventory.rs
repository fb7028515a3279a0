//! What one node's GPUs are, as plain data.
//!
//! In: nothing; these are the types that [`crate::Gpus::inventory`] fills.
//! Out: values that `node-plugin`'s `slices` turns into ResourceSlices and its
//! `claims` into prepared devices.
//! Never: a handle, a pointer or a call into NVML.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{ComputeMode, NvLink, Pcie};

/// Everything that is known about the GPUs of one node at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    /// The kernel driver's version, such as `580.82.07` (`nvmlSystemGetDriverVersion`).
    pub driver_version: String,
    /// The highest CUDA version the driver serves, as (major, minor).
    pub cuda_version: (u32, u32),
    /// The GPUs, sorted by PCI address.
    pub gpus: Vec<Gpu>,
    /// GPUs that could not be read: they are reported, never published as healthy.
    pub unreadable: Vec<UnreadableGpu>,
}

/// A GPU that NVML lists but cannot describe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnreadableGpu {
    /// NVML's index of the device.
    pub index: u32,
    /// What failed and with which NVML error.
    pub reason: String,
}

/// One physical GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// The PCI address: the one identity that survives a reboot and a drained neighbour.
    pub pci: PciAddress,
    /// NVML's index; for people only, it moves when a card is drained.
    pub index: u32,
    /// The minor number of `/dev/nvidia<minor>`.
    pub minor: u32,
    /// The UUID, `GPU-…`.
    pub uuid: String,
    /// The product name, such as `NVIDIA H100 80GB HBM3`.
    pub product_name: String,
    /// The architecture in lower case, such as `hopper`.
    pub architecture: String,
    /// The brand, such as `Tesla` or `Nvidia`.
    pub brand: String,
    /// The CUDA compute capability, as (major, minor).
    pub compute_capability: (u32, u32),
    /// Device memory in bytes (`nvmlDeviceGetMemoryInfo_v2.total`).
    pub memory_bytes: u64,
    /// The NUMA node of the PCI device (sysfs); absent where the kernel says -1 or nothing.
    pub numa_node: Option<u32>,
    /// The PCIe root complex, such as `pci0000:64` (sysfs).
    pub pcie_root: Option<String>,
    /// The PCIe link at its best.
    pub pcie: Option<Pcie>,
    /// Device memory bandwidth in MB/s, from the bus width and the highest memory clock.
    pub memory_bandwidth_mbps: Option<u64>,
    /// The active NVLinks by number; empty without NVLink.
    pub nvlinks: Vec<NvLink>,
    /// The `NVSwitch` fabric that the GPU has joined: the cluster's UUID and the clique in
    /// it, within which any GPU reaches any other. A UUID of zeros is a fabric of this node
    /// alone (HGX boards), and then says nothing across nodes.
    pub fabric_clique: Option<(String, u32)>,
    /// Who may compute on it.
    pub compute_mode: ComputeMode,
    /// What MIG can do on this GPU now.
    pub mig: MigMode,
    /// The GPU instance profiles that NVML reports, with their placements; empty without MIG.
    pub profiles: Vec<MigProfile>,
    /// The MIG instances that exist now.
    pub instances: Vec<MigInstance>,
}

/// The MIG mode of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum MigMode {
    /// The hardware has no MIG.
    Unsupported,
    /// MIG is off. `switchable` says whether it can be turned on without a GPU
    /// reset (Hopper and later; Ampere needs the reset).
    Disabled {
        /// Whether turning it on takes effect at once.
        switchable: bool,
    },
    /// MIG is on.
    Enabled {
        /// Whether turning it off takes effect at once.
        switchable: bool,
    },
}

/// One GPU instance profile (`nvmlDeviceGetGpuInstanceProfileInfo`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigProfile {
    /// The device-specific profile id that create calls take (19 for 1g on an H100).
    pub id: u32,
    /// The name, such as `1g.10gb` or `1g.10gb+me`.
    pub name: String,
    /// Usable memory in bytes; the name rounds, this does not.
    pub memory_bytes: u64,
    /// Compute slices of the GPU instance.
    pub compute_slices: u32,
    /// Memory slices, which is the size of each placement.
    pub memory_slices: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Copy engines.
    pub copy_engines: u32,
    /// Video decoders.
    pub decoders: u32,
    /// Video encoders.
    pub encoders: u32,
    /// JPEG engines.
    pub jpeg_engines: u32,
    /// Optical flow engines.
    pub ofa_engines: u32,
    /// How many instances of this profile fit on an empty GPU.
    pub max_instances: u32,
    /// The compute instance profile that spans the whole GPU instance.
    pub compute_instance_profile_id: u32,
    /// Where an instance of this profile may start, ascending.
    pub placements: Vec<Placement>,
}

/// A run of memory slices on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Placement {
    /// The first memory slice.
    pub start: u32,
    /// The number of memory slices.
    pub size: u32,
}

impl Placement {
    /// Whether the two share a memory slice.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.start + other.size && other.start < self.start + self.size
    }
}

/// A MIG instance that exists on the hardware.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigInstance {
    /// The GPU instance id.
    pub gpu_instance_id: u32,
    /// The GPU instance profile id.
    pub profile_id: u32,
    /// Where it sits.
    pub placement: Placement,
    /// Its compute instances; empty for a GPU instance that a crash left half made.
    pub compute_instances: Vec<ComputeInstance>,
}

/// A compute instance inside a GPU instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeInstance {
    /// The compute instance id.
    pub id: u32,
    /// The compute instance profile id.
    pub profile_id: u32,
    /// The MIG device UUID, `MIG-…`.
    pub uuid: String,
}

/// A PCI address: domain, bus, device, function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    /// The PCI domain.
    pub domain: u32,
    /// The bus.
    pub bus: u8,
    /// The device.
    pub device: u8,
    /// The function.
    pub function: u8,
}

/// A text that is not a PCI address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a PCI address: want domain:bus:device.function in hexadecimal, such as 0000:65:00.0"
)]
pub struct PciAddressError(pub String);

impl PciAddress {
    /// The address as part of a DNS label: `0000-65-00-0`.
    #[must_use]
    pub fn dns_label(self) -> String {
        format!(
            "{:04x}-{:02x}-{:02x}-{:x}",
            self.domain, self.bus, self.device, self.function
        )
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:04x}:{:02x}:{:02x}.{:x}",
            self.domain, self.bus, self.device, self.function
        )
    }
}

impl std::str::FromStr for PciAddress {
    type Err = PciAddressError;

    /// Reads both sysfs' form (`0000:65:00.0`) and NVML's (`00000000:65:00.0`).
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (domain, rest) = text.split_once(':')?;
            let (bus, rest) = rest.split_once(':')?;
            let (device, function) = rest.split_once('.')?;
            Some(Self {
                domain: u32::from_str_radix(domain, 16).ok()?,
                bus: u8::from_str_radix(bus, 16).ok()?,
                device: u8::from_str_radix(device, 16).ok()?,
                function: u8::from_str_radix(function, 16).ok()?,
            })
        };
        parse().ok_or_else(|| PciAddressError(text.to_owned()))
    }
}

impl TryFrom<String> for PciAddress {
    type Error = PciAddressError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> Self {
        address.to_string()
    }
}
