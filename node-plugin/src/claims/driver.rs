//! The kernel driver's and user-space driver's files on this node.
//!
//! In: the roots under which they lie. Out: the device nodes of a device, and the
//! libraries and tools that a container needs beside it. Never: a guess: a device node
//! that is missing is an error of this one call and is looked for again in the next,
//! because a fresh node makes its nodes late.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use gpu::{MigMinors, MigMinorsError};

use super::checkpoint::{InstanceIds, Target};
use super::sharing::Places;

/// On the library path of CUDA images.
const CONTAINER_LIBRARIES: &str = "/usr/local/nvidia/lib64";
/// The names by which programs load CUDA and NVML: a driver installed without its
/// development files, or before `ldconfig` ran, lacks some.
const LOADED_AS: [(&str, &str); 3] = [
    ("libcuda", "libcuda.so"),
    ("libcuda", "libcuda.so.1"),
    ("libnvidia-ml", "libnvidia-ml.so.1"),
];
/// On the executable path of CUDA images.
const CONTAINER_BINARIES: &str = "/usr/local/nvidia/bin";

/// A device node as a container sees it and as the host has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceNode {
    /// The path in the container, below `/dev`.
    pub container: PathBuf,
    /// The path on the host.
    pub host: PathBuf,
}

/// A file of the driver that a container gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverFile {
    /// The path in the container.
    pub container: PathBuf,
    /// The path on the host.
    pub host: PathBuf,
}

/// The metadata of one request, which only containers that use it get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetadataMount {
    /// The request, without a subrequest.
    pub request: String,
    /// The file.
    pub mount: DriverFile,
}

/// All files for one claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeFiles {
    /// Device nodes that every GPU container needs.
    pub common: Vec<DeviceNode>,
    /// Device nodes by device name.
    pub of_device: BTreeMap<String, Vec<DeviceNode>>,
    /// Libraries and tools.
    pub driver: Vec<DriverFile>,
    /// What the containers are told about their devices.
    pub metadata: Vec<MetadataMount>,
    /// The folders of the MPS daemons of shared devices, by device name.
    pub mps: BTreeMap<String, Places>,
}

/// Files that a container would need and that are not there.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// A device node is missing.
    #[error(
        "the device node {0} does not exist; load the kernel driver's modules on the node (nvidia-modprobe -c0 -u creates the nodes), the pod is then retried"
    )]
    MissingNode(PathBuf),
    /// The MIG capability of an instance is not listed.
    #[error(
        "{path} has no line for {capability}; the MIG instance or the driver's capability files are not ready, the pod is then retried"
    )]
    MissingCapability {
        /// The file that lists them.
        path: PathBuf,
        /// The capability.
        capability: String,
    },
    /// A file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The list of MIG capabilities is not what the driver writes.
    #[error("{path}: {source}")]
    Minors {
        /// The file that lists them.
        path: PathBuf,
        /// Which line.
        source: MigMinorsError,
    },
    /// A partition without ids.
    #[error("the partition has no instance yet")]
    NoInstance,
}

/// The roots of one node. All are paths as this process sees them.
#[derive(Debug, Clone)]
pub struct Roots {
    /// Of the user-space driver.
    pub driver: PathBuf,
    /// The same folder as the host and its container runtime see it.
    pub host_driver: PathBuf,
    /// Of device nodes, the same on the host.
    pub dev: PathBuf,
    /// Of the proc file system.
    pub proc: PathBuf,
}

/// The libraries as they were listed: for this folder, as it was changed at this time,
/// and this driver version.
#[derive(Debug)]
struct Libraries {
    folder: PathBuf,
    changed: SystemTime,
    version: String,
    files: Vec<DriverFile>,
}

/// The driver's files.
#[derive(Debug)]
pub struct Driver {
    roots: Roots,
    /// Listing the libraries is slow; it is redone when the folder or the version changes.
    libraries: Mutex<Option<Libraries>>,
}

impl Driver {
    /// The files below these roots.
    #[must_use]
    pub fn new(roots: Roots) -> Self {
        Self {
            roots,
            libraries: Mutex::new(None),
        }
    }

    /// Where the driver's files lie.
    #[must_use]
    pub fn roots(&self) -> &Roots {
        &self.roots
    }

    /// The folder that holds NVML: the driver's other libraries lie beside it.
    fn library_folder(&self) -> Option<PathBuf> {
        let nvml = gpu::Library::InDriverRoot(self.roots.driver.clone()).locate();
        nvml.ok()?.parent().map(Path::to_owned)
    }

    /// The nodes that every GPU container needs; those that a driver build does not
    /// have are left out, except the control node.
    ///
    /// # Errors
    /// When the control node is missing.
    pub fn common_nodes(&self) -> Result<Vec<DeviceNode>, DriverError> {
        let mut nodes = vec![self.node("nvidiactl")?];
        for optional in ["nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"] {
            nodes.extend(self.node(optional).ok());
        }
        Ok(nodes)
    }

    /// The nodes of one device: the GPU's, and for a partition the two capability
    /// nodes that open it.
    ///
    /// # Errors
    /// When one is missing.
    pub fn nodes_of(&self, target: &Target) -> Result<Vec<DeviceNode>, DriverError> {
        match target {
            Target::Whole { minor, .. } => Ok(vec![self.node(&format!("nvidia{minor}"))?]),
            Target::Share { of, .. } => self.nodes_of(of),
            Target::Partition {
                minor, instance, ..
            } => {
                let ids = instance.as_ref().ok_or(DriverError::NoInstance)?;
                let (gpu, compute) = self.capability_minors(*minor, ids)?;
                Ok(vec![
                    self.node(&format!("nvidia{minor}"))?,
                    self.node(&format!("nvidia-caps/nvidia-cap{gpu}"))?,
                    self.node(&format!("nvidia-caps/nvidia-cap{compute}"))?,
                ])
            }
        }
    }

    /// The minor numbers of a MIG instance's capabilities. `mig-minors` has a line for
    /// every instance that could exist (`gpu0/gi1/ci0/access 13`), keyed by the GPU's
    /// minor number.
    fn capability_minors(&self, minor: u32, ids: &InstanceIds) -> Result<(u32, u32), DriverError> {
        let path = self.roots.proc.join("driver/nvidia-caps/mig-minors");
        let text = fs::read_to_string(&path).map_err(|source| DriverError::Read {
            path: path.clone(),
            source,
        })?;
        let minors = MigMinors::parse(&text).map_err(|source| DriverError::Minors {
            path: path.clone(),
            source,
        })?;
        let InstanceIds {
            gpu_instance,
            compute_instance,
            ..
        } = ids;
        minors
            .access(minor, *gpu_instance, *compute_instance)
            .ok_or_else(|| {
                let capability = format!("gpu{minor}/gi{gpu_instance}/ci{compute_instance}/access");
                DriverError::MissingCapability { path, capability }
            })
    }

    fn node(&self, name: &str) -> Result<DeviceNode, DriverError> {
        let host = self.roots.dev.join(name);
        if !host.exists() {
            return Err(DriverError::MissingNode(host));
        }
        Ok(DeviceNode {
            container: Path::new("/dev").join(name),
            host,
        })
    }

    /// The driver's files that a container gets, read-only. A driver root without them
    /// (fake-GPU mode) gives none.
    ///
    /// - Under `/usr/local/nvidia/lib64`: every `*.so*` beside NVML that is, or points
    ///   to, a file of this driver version, and the names by which programs load CUDA and
    ///   NVML, whether the host has those links or not.
    /// - `nvidia-smi` under `/usr/local/nvidia/bin`.
    /// - The GSP firmware, where the kernel looks for it: up to Linux 5.9 the first process
    ///   to open an idle GPU loads it, from its own mount namespace.
    ///
    /// Left out are the sockets of `nvidia-persistenced` and `nvidia-fabricmanager`: CUDA
    /// needs neither, and a mount of a socket whose daemon has ended keeps a container
    /// from restarting. So are the programs of MPS: whoever can run the control program can
    /// lift the limits of the daemon's other clients.
    #[must_use]
    pub fn driver_files(&self, version: &str) -> Vec<DriverFile> {
        let mut files = self.libraries(version);
        let tool = ["usr/bin", "bin", "usr/local/bin"]
            .iter()
            .find_map(|folder| self.file(&Path::new(folder).join("nvidia-smi")));
        files.extend(tool.map(|host| DriverFile {
            container: Path::new(CONTAINER_BINARIES).join("nvidia-smi"),
            host,
        }));
        files
    }

    /// The host's path of a file below the driver root.
    fn file(&self, below: &Path) -> Option<PathBuf> {
        let real = gpu::resolve(&self.roots.driver, below)?;
        Some(self.roots.host_driver.join(real))
    }

    fn libraries(&self, version: &str) -> Vec<DriverFile> {
        let Some(folder) = self.library_folder() else {
            return Vec::new();
        };
        let Ok(changed) = fs::metadata(&folder).and_then(|meta| meta.modified()) else {
            return Vec::new();
        };
        let mut cached = self
            .libraries
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = cached.as_ref()
            && known.folder == folder
            && known.changed == changed
            && known.version == version
        {
            return known.files.clone();
        }
        let files = self.list_libraries(&folder, version);
        let version = version.to_owned();
        *cached = Some(Libraries {
            folder,
            changed,
            version,
            files: files.clone(),
        });
        files
    }

    fn list_libraries(&self, folder: &Path, version: &str) -> Vec<DriverFile> {
        let suffix = format!(".so.{version}");
        let Ok(below) = folder.strip_prefix(&self.roots.driver) else {
            return Vec::new();
        };
        let mut files: BTreeMap<PathBuf, PathBuf> = fs::read_dir(folder)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().contains(".so"))
            .filter_map(|entry| {
                let host = self.file(&below.join(entry.file_name()))?;
                let ours = host.file_name()?.to_string_lossy().ends_with(&suffix);
                let container = Path::new(CONTAINER_LIBRARIES).join(entry.file_name());
                ours.then_some((container, host))
            })
            .collect();
        for (library, name) in LOADED_AS {
            let real = Path::new(CONTAINER_LIBRARIES).join(format!("{library}{suffix}"));
            if let Some(host) = files.get(&real).cloned() {
                let name = Path::new(CONTAINER_LIBRARIES).join(name);
                files.entry(name).or_insert(host);
            }
        }
        files.extend(self.firmware(version));
        let files = files.into_iter();
        files
            .map(|(container, host)| DriverFile { container, host })
            .collect()
    }

    fn firmware(&self, version: &str) -> Vec<(PathBuf, PathBuf)> {
        let below = Path::new("lib/firmware/nvidia").join(version);
        let Some(folder) = gpu::resolve(&self.roots.driver, &below) else {
            return Vec::new();
        };
        let entries = fs::read_dir(self.roots.driver.join(folder));
        let names = entries.into_iter().flatten().flatten();
        names
            .map(|entry| entry.file_name())
            .filter(|name| {
                let name = name.to_string_lossy();
                name.starts_with("gsp") && name.ends_with(".bin")
            })
            .filter_map(|name| {
                let host = self.file(&below.join(&name))?;
                Some((Path::new("/").join(&below).join(name), host))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests;
