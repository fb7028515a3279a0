//! The loaded NVML and the inventory that is read from it.
//!
//! In: the library and the roots of `/proc` and `/sys`. Out: an [`Inventory`]. Never:
//! one GPU's failure as everybody's; a GPU that cannot be described is listed as such.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use nvml_wrapper::bitmasks::InitFlags;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use crate::error::{Error, NvmlCode};
use crate::instances::on;
use crate::raw::{self, DeviceHandle, Failed};
use crate::topology::{self, Topology};
use crate::{
    ComputeMode, Gpu, Inventory, Library, MigMode, PciAddress, UnreadableGpu, profile, sysfs,
};

/// Where the kernel's file systems are, as this process sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots {
    /// `/proc` of the node.
    pub proc: PathBuf,
    /// `/sys` of the node.
    pub sys: PathBuf,
}

/// The GPUs of this node, through one NVML that stays initialised. Calls block; they
/// are safe from several threads at once.
pub struct Gpus {
    /// Shared with the event sets, which must not outlive it.
    pub(crate) nvml: Arc<Nvml>,
    /// Lookups by PCI address take the driver's lock and are slow under load.
    handles: Mutex<HashMap<PciAddress, DeviceHandle>>,
}

impl std::fmt::Debug for Gpus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpus").finish_non_exhaustive()
    }
}

impl Gpus {
    /// Loads and initialises NVML. A node whose driver finds no GPU is no error: its
    /// inventory is empty.
    ///
    /// # Errors
    /// [`Error::NoDriver`] where there is no library, [`Error::NotLoadable`] or
    /// [`Error::NotInitialised`] where it does not work.
    pub fn open(library: &Library) -> Result<Self, Error> {
        let path = library.locate()?;
        let nvml = Nvml::builder()
            .lib_path(path.as_os_str())
            .flags(InitFlags::NO_GPUS)
            .init()
            .map_err(|error| match error {
                NvmlError::LibloadingError(error) => Error::NotLoadable {
                    library: path.clone(),
                    reason: error.to_string(),
                },
                NvmlError::FailedToLoadSymbol(reason) => Error::NotLoadable {
                    library: path.clone(),
                    reason,
                },
                error => Error::NotInitialised {
                    library: path.clone(),
                    code: NvmlCode::of_wrapper(&error),
                },
            })?;
        Ok(Self {
            nvml: Arc::new(nvml),
            handles: Mutex::default(),
        })
    }

    /// Reads everything about the node's GPUs now.
    ///
    /// # Errors
    /// When NVML cannot tell its versions or the number of GPUs. A failure of one GPU is
    /// in [`Inventory::unreadable`] instead.
    pub fn inventory(&self, roots: &Roots) -> Result<Inventory, Error> {
        let node = |call, error: &NvmlError| {
            on(
                "this node".into(),
                Failed {
                    call,
                    code: NvmlCode::of_wrapper(error),
                },
            )
        };
        let driver_version = self
            .nvml
            .sys_driver_version()
            .map_err(|error| node("nvmlSystemGetDriverVersion", &error))?;
        let cuda = self
            .nvml
            .sys_cuda_driver_version()
            .map_err(|error| node("nvmlSystemGetCudaDriverVersion_v2", &error))?;
        let count = self
            .nvml
            .device_count()
            .map_err(|error| node("nvmlDeviceGetCount_v2", &error))?;
        // A GPU that came back after a reset may have another handle.
        self.handles
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
        let (mut gpus, mut unreadable) = (Vec::new(), Vec::new());
        for index in 0..count {
            match self.describe(index, roots) {
                Ok(gpu) => gpus.push(gpu),
                Err(error) => unreadable.push(UnreadableGpu {
                    index,
                    reason: error.to_string(),
                }),
            }
        }
        gpus.sort_by_key(|gpu: &Gpu| gpu.pci);
        Ok(Inventory {
            driver_version,
            cuda_version: (cuda.unsigned_abs() / 1000, cuda.unsigned_abs() % 1000 / 10),
            gpus,
            unreadable,
        })
    }

    fn describe(&self, index: u32, roots: &Roots) -> Result<Gpu, Error> {
        let on_index = |call| {
            move |error: NvmlError| {
                let failed = Failed {
                    call,
                    code: NvmlCode::of_wrapper(&error),
                };
                on(format!("GPU with index {index}"), failed)
            }
        };
        let device = self
            .nvml
            .device_by_index(index)
            .map_err(on_index("nvmlDeviceGetHandleByIndex_v2"))?;
        let pci = device
            .pci_info()
            .map_err(on_index("nvmlDeviceGetPciInfo_v3"))?;
        let pci: PciAddress = pci
            .bus_id
            .parse()
            .map_err(|error: crate::PciAddressError| Error::Nonsense {
                on: format!("GPU with index {index}"),
                problem: error.to_string(),
            })?;
        let at = |call| {
            move |error: NvmlError| {
                on(
                    pci.to_string(),
                    Failed {
                        call,
                        code: NvmlCode::of_wrapper(&error),
                    },
                )
            }
        };
        let capability = device
            .cuda_compute_capability()
            .map_err(at("nvmlDeviceGetCudaComputeCapability"))?;
        let memory_bytes = device
            .memory_info()
            .map_err(at("nvmlDeviceGetMemoryInfo_v2"))?
            .total;
        let handle = raw::handle(&device);
        self.handles
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(pci, handle);
        let failed = |failed| on(pci.to_string(), failed);
        let mig = self.mig(handle).map_err(failed)?;
        let (mut profiles, mut instances) = (Vec::new(), Vec::new());
        if mig != MigMode::Unsupported {
            for info in profile::infos(&self.nvml, handle).map_err(failed)? {
                let found = profile::profile(&self.nvml, handle, memory_bytes, &info);
                profiles.extend(found.map_err(failed)?);
            }
            instances = self.list(handle).map_err(failed)?;
        }
        let Topology {
            nvlinks,
            fabric_clique,
            memory_bandwidth_mbps,
            pcie,
        } = topology::read(&self.nvml, handle).map_err(failed)?;
        Ok(Gpu {
            pci,
            index,
            minor: device
                .minor_number()
                .map_err(at("nvmlDeviceGetMinorNumber"))?,
            uuid: device.uuid().map_err(at("nvmlDeviceGetUUID"))?,
            product_name: device.name().map_err(at("nvmlDeviceGetName"))?,
            architecture: architecture(&device),
            brand: brand(&device),
            compute_capability: (
                capability.major.unsigned_abs(),
                capability.minor.unsigned_abs(),
            ),
            memory_bytes,
            numa_node: sysfs::numa_node(&roots.sys, pci),
            pcie_root: sysfs::pcie_root(&roots.sys, pci),
            pcie,
            memory_bandwidth_mbps,
            nvlinks,
            fabric_clique,
            // Where there are no modes, as on a virtual GPU, anybody may compute.
            compute_mode: raw::compute_mode(&self.nvml, handle).unwrap_or(ComputeMode::Default),
            mig,
            profiles,
            instances,
        })
    }

    /// The MIG mode of one GPU now.
    ///
    /// # Errors
    /// When NVML refuses, other than by saying that the GPU has no MIG.
    pub fn mig_mode(&self, pci: PciAddress) -> Result<MigMode, Error> {
        let device = self.handle(pci)?;
        self.mig(device)
            .map_err(|failed| on(pci.to_string(), failed))
    }

    fn mig(&self, device: DeviceHandle) -> raw::Result<MigMode> {
        let switchable = self.is_mig_switchable(device);
        match raw::mig_mode(&self.nvml, device) {
            Ok((true, _)) => Ok(MigMode::Enabled { switchable }),
            Ok((false, _)) => Ok(MigMode::Disabled { switchable }),
            Err(Failed {
                code: NvmlCode::NotSupported | NvmlCode::MissingSymbol,
                ..
            }) => Ok(MigMode::Unsupported),
            Err(failed) => Err(failed),
        }
    }

    /// Whether a change of the MIG mode takes effect at once. NVML does not tell; NVIDIA's
    /// MIG guide says that Ampere needs a reset and Hopper and later do not.
    pub(crate) fn is_mig_switchable(&self, device: DeviceHandle) -> bool {
        raw::compute_capability(&self.nvml, device).is_ok_and(|(major, _)| major >= 9)
    }

    /// Drops a GPU's handle, so that the next call looks it up again.
    pub(crate) fn forget(&self, pci: PciAddress) {
        self.handles
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&pci);
    }

    /// A GPU's handle, looked up once.
    pub(crate) fn handle(&self, pci: PciAddress) -> Result<DeviceHandle, Error> {
        let known = self
            .handles
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&pci)
            .copied();
        if let Some(handle) = known {
            return Ok(handle);
        }
        let handle = raw::device_by_pci(&self.nvml, &pci.to_string())
            .map_err(|failed| on(pci.to_string(), failed))?;
        self.handles
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(pci, handle);
        Ok(handle)
    }
}

/// The architecture in lower case; a newer one than the bindings know is `unknown`.
fn architecture(device: &Device<'_>) -> String {
    device
        .architecture()
        .map_or_else(|_| "unknown".into(), |a| format!("{a:?}").to_lowercase())
}

/// The brand; a newer one than the bindings know is `Unknown`.
fn brand(device: &Device<'_>) -> String {
    device
        .brand()
        .map_or_else(|_| "Unknown".into(), |brand| format!("{brand:?}"))
}
