//! The topology file: what the node's GPUs are.
//!
//! In: the text of a YAML file. Out: a [`Node`], checked and with every default
//! filled in. Never: a number about a GPU that is not in the file.

mod check;
mod links;
mod names;

pub use links::{ClusterUuid, Fabric, LinkEnd, LinkTo, MemoryBus, NvLinks, Pcie};
pub use names::{MajorMinor, Pci};

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use serde_saphyr::Spanned;

/// Why a topology cannot be used: the file, the line, what is wrong and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct TopologyError {
    /// The file.
    pub path: PathBuf,
    /// The line, counted from 1, where one is known.
    pub line: Option<u64>,
    /// What is wrong and with which object.
    pub problem: String,
    /// What to do about it.
    pub remedy: String,
}

impl fmt::Display for TopologyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "topology {}", self.path.display())?;
        if let Some(line) = self.line {
            write!(f, ", line {line}")?;
        }
        write!(f, ": {}; {}", self.problem, self.remedy)
    }
}

/// A node's GPUs, ready to answer from.
#[derive(Debug, Clone)]
pub struct Node {
    /// The versions that the library reports.
    pub driver: Driver,
    /// The GPUs in NVML's order.
    pub gpus: Vec<Gpu>,
}

/// One GPU of the node.
#[derive(Debug, Clone)]
pub struct Gpu {
    /// What kind of card it is.
    pub model: Arc<Model>,
    /// Where it sits.
    pub pci: Pci,
    /// `GPU-…`.
    pub uuid: String,
    /// The board's serial number.
    pub serial: String,
    /// The minor number of `/dev/nvidia<minor>`.
    pub minor: u32,
    /// The NUMA node of the PCI device.
    pub numa: Option<u32>,
    /// The PCIe root complex, such as `pci0000:64`.
    pub root: String,
    /// The MIG mode before anybody changed it.
    pub mig_enabled: bool,
    /// Which GPUs it is linked with: those of the same number.
    pub group: usize,
    /// The fabric that it has joined.
    pub fabric: Option<Fabric>,
}

/// The versions of driver, NVML and CUDA.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Driver {
    /// The kernel driver's version.
    pub version: String,
    /// NVML's version: CUDA major, then the driver's version.
    pub nvml: String,
    /// The CUDA version that the driver serves, `major.minor`.
    pub cuda: MajorMinor,
}

/// One GPU model.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Model {
    /// The product name.
    pub name: String,
    /// NVML's brand number (`nvmlBrandType_t`).
    pub brand: u32,
    /// NVML's architecture number (`NVML_DEVICE_ARCH_*`).
    pub architecture: u32,
    /// The CUDA compute capability, `major.minor`.
    pub compute_capability: MajorMinor,
    /// Device id in the upper, vendor id in the lower half.
    pub pci_device_id: u32,
    /// Subsystem id in the upper, subsystem vendor id in the lower half.
    pub pci_subsystem_id: u32,
    /// Device memory in MiB.
    pub memory_mib: u64,
    /// The part of it that the driver keeps, in MiB.
    pub reserved_mib: u64,
    /// Power at rest, in watts.
    pub idle_watts: u32,
    /// The power limit, in watts.
    pub limit_watts: u32,
    /// The memory interface; absent: the driver does not tell.
    pub memory_bus: Option<MemoryBus>,
    /// The PCIe link; absent: the driver does not tell.
    pub pcie: Option<Pcie>,
    /// The NVLinks; absent on a card without NVLink.
    pub nvlink: Option<NvLinks>,
    /// Whether the memory has ECC.
    #[serde(default = "yes")]
    pub ecc: bool,
    /// What MIG offers; absent on a card without MIG.
    #[serde(default)]
    pub mig: Option<Mig>,
}

fn yes() -> bool {
    true
}

/// The MIG tables of a model.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Mig {
    /// Memory slices of the GPU; a power of two.
    pub memory_slices: u32,
    /// Compute slices of the GPU, which is also the largest number of MIG devices.
    pub compute_slices: u32,
    /// What a change of the MIG mode takes.
    pub mode_switch: ModeSwitch,
    /// How the driver numbers GPU instances.
    pub instance_ids: InstanceIds,
    /// The GPU instance profiles.
    pub profiles: Vec<Spanned<Profile>>,
    /// The compute instance profiles.
    pub compute_profiles: Vec<ComputeProfile>,
}

/// What a change of the MIG mode takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ModeSwitch {
    /// Hopper and later: at once, and forgotten at the next boot.
    Immediate,
    /// Ampere: after a GPU reset, and kept over boots.
    Reset,
}

/// How the driver numbers GPU instances. Ids form a binary tree over the memory
/// slices: the whole GPU is 0, its halves 1 and 2, and so on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum InstanceIds {
    /// From the lowest slice up (A30).
    Ascending,
    /// The upper half of each level first (8-slice parts).
    UpperHalfFirst,
}

/// One GPU instance profile.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Profile {
    /// The id that create calls take.
    pub id: u32,
    /// The enum value of `nvml.h` under which the profile is looked up.
    pub nvml_profile: u32,
    /// The name, such as `1g.10gb`.
    pub name: String,
    /// Compute slices.
    pub slices: u32,
    /// Usable memory in MiB.
    pub memory_mib: u64,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Copy engines.
    pub copy: u32,
    /// Video decoders.
    pub dec: u32,
    /// Video encoders.
    #[serde(default)]
    pub enc: u32,
    /// JPEG engines.
    pub jpeg: u32,
    /// Optical flow engines.
    pub ofa: u32,
    /// How many fit on an empty GPU.
    pub max: u32,
    /// The memory slices at which an instance may start.
    pub starts: Vec<u32>,
    /// The memory slices of one instance.
    pub size: u32,
}

/// One compute instance profile.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ComputeProfile {
    /// The id that create calls take.
    pub id: u32,
    /// The enum value of `nvml.h` under which the profile is looked up.
    pub nvml_profile: u32,
    /// Compute slices.
    pub slices: u32,
    /// The compute slices at which an instance may start.
    pub starts: Vec<u32>,
}

/// The file as written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct File {
    driver: Driver,
    /// What the UUIDs and serial numbers that are not given are derived from: two
    /// nodes made from one topology differ in it.
    #[serde(default)]
    seed: String,
    models: BTreeMap<String, Model>,
    gpus: Vec<Spanned<Group>>,
}

/// GPUs that are alike but for their place.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Group {
    model: String,
    #[serde(default)]
    mig_enabled: bool,
    fabric: Option<Fabric>,
    devices: Vec<Spanned<Device>>,
}

/// What differs between the GPUs of a group.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Device {
    pci: Pci,
    root: String,
    numa: Option<u32>,
    uuid: Option<String>,
    minor: Option<u32>,
    serial: Option<String>,
}

impl Node {
    /// Reads and checks a topology file.
    ///
    /// # Errors
    /// When the file cannot be read, is not YAML of this form, or contradicts itself.
    pub fn read(path: &Path) -> Result<Self, TopologyError> {
        let text = std::fs::read_to_string(path).map_err(|error| TopologyError {
            path: path.to_owned(),
            line: None,
            problem: format!("cannot be read: {error}"),
            remedy: "name a readable topology file in FAKE_NVML_TOPOLOGY".to_owned(),
        })?;
        Self::parse(path, &text)
    }

    /// Checks the text of a topology file; `path` is only named in errors.
    ///
    /// # Errors
    /// When the text is not YAML of this form or contradicts itself.
    pub fn parse(path: &Path, text: &str) -> Result<Self, TopologyError> {
        let fail = |line: Option<u64>, problem: String, remedy: &str| TopologyError {
            path: path.to_owned(),
            line,
            problem,
            remedy: remedy.to_owned(),
        };
        let file: File = serde_saphyr::from_str(text).map_err(|error| {
            let line = error.location().map(|location| location.line());
            // Its first line without the place, which is said already; a drawing follows.
            let text = error.to_string();
            let problem = text.lines().next().unwrap_or_default();
            let problem = problem
                .split_once(" column ")
                .and_then(|(_, rest)| rest.split_once(": "))
                .map_or(problem, |(_, rest)| rest);
            fail(
                line,
                problem.to_owned(),
                "compare it with tests/fixtures/topologies",
            )
        })?;
        let mut models = BTreeMap::new();
        for (name, model) in file.models {
            if let Some(mig) = &model.mig {
                check::mig(&name, &model, mig)
                    .map_err(|(line, problem, remedy)| fail(line, problem, remedy))?;
            }
            models.insert(name, Arc::new(model));
        }
        let mut gpus: Vec<Gpu> = Vec::new();
        for (number, group) in file.gpus.into_iter().enumerate() {
            let line = Some(group.referenced.line());
            let group = group.value;
            let Some(model) = models.get(&group.model) else {
                let known: Vec<_> = models.keys().map(String::as_str).collect();
                let problem = format!("the model {:?} is not in models", group.model);
                return Err(fail(
                    line,
                    problem,
                    &format!("use one of {}", known.join(", ")),
                ));
            };
            if group.mig_enabled && model.mig.is_none() {
                let problem = format!(
                    "migEnabled on the model {:?}, which has no mig",
                    group.model
                );
                return Err(fail(line, problem, "drop migEnabled"));
            }
            if let Some((problem, remedy)) = check::links(&group, model) {
                return Err(fail(line, problem, remedy));
            }
            let kind = Kind {
                model,
                mig_enabled: group.mig_enabled,
                group: number,
                fabric: group.fabric.as_ref(),
            };
            for device in group.devices {
                let line = Some(device.referenced.line());
                let gpu = resolve(device.value, &file.seed, gpus.len(), kind);
                if let Some((problem, remedy)) = check::conflict(&gpus, &gpu) {
                    return Err(fail(line, problem, remedy));
                }
                gpus.push(gpu);
            }
        }
        Ok(Self {
            driver: file.driver,
            gpus,
        })
    }
}

/// What a group's GPUs have in common.
#[derive(Clone, Copy)]
struct Kind<'a> {
    model: &'a Arc<Model>,
    mig_enabled: bool,
    group: usize,
    fabric: Option<&'a Fabric>,
}

fn resolve(device: Device, seed: &str, index: usize, kind: Kind<'_>) -> Gpu {
    let pci = device.pci;
    let id = derive_id(&[seed, &pci.to_string()]);
    Gpu {
        model: Arc::clone(kind.model),
        uuid: device.uuid.unwrap_or_else(|| format!("GPU-{}", dashed(id))),
        serial: device
            .serial
            .unwrap_or_else(|| format!("165{:010}", id % 10_000_000_000)),
        minor: device.minor.unwrap_or(index as u32),
        numa: device.numa,
        root: device.root,
        pci,
        mig_enabled: kind.mig_enabled,
        group: kind.group,
        fabric: kind.fabric.cloned(),
    }
}

impl Mig {
    /// The GPU instance profile with this id.
    #[must_use]
    pub fn profile(&self, id: u32) -> Option<&Profile> {
        self.profiles
            .iter()
            .map(|spanned| &spanned.value)
            .find(|profile| profile.id == id)
    }

    /// The GPU instance profile under this enum value of `nvml.h`.
    #[must_use]
    pub fn nvml_profile(&self, value: u32) -> Option<&Profile> {
        self.profiles
            .iter()
            .map(|spanned| &spanned.value)
            .find(|p| p.nvml_profile == value)
    }

    /// The id that the driver gives to an instance on these memory slices.
    #[must_use]
    pub fn instance_id(&self, start: u32, size: u32) -> u32 {
        let siblings = self.memory_slices / size;
        let position = start / size;
        let position = match self.instance_ids {
            InstanceIds::Ascending => position,
            InstanceIds::UpperHalfFirst => (position + siblings / 2) % siblings,
        };
        siblings - 1 + position
    }
}

/// A stable 128-bit id of some texts (FNV-1a): no two GPUs of a test cluster may
/// share a UUID, and a test must get the same one each time.
pub(crate) fn derive_id(texts: &[&str]) -> u128 {
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    for text in texts {
        for byte in text.bytes().chain([0xff]) {
            hash ^= u128::from(byte);
            hash = hash.wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }
    hash
}

/// An id in the form of a UUID.
pub(crate) fn dashed(id: u128) -> String {
    let hex = format!("{id:032x}");
    format!(
        "{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}

#[cfg(test)]
mod tests;
