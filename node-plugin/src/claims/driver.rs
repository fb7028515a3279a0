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

/// On the library path of CUDA images.
const CONTAINER_LIBRARIES: &str = "/usr/local/nvidia/lib64";
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

    /// The driver's libraries and tools, read-only in the container under
    /// `/usr/local/nvidia`: every `*.so*` beside NVML that is, or points to, a file of
    /// this driver version. A driver root without such files (fake-GPU mode) gives none.
    #[must_use]
    pub fn driver_files(&self, version: &str) -> Vec<DriverFile> {
        let mut files = self.libraries(version);
        for folder in ["usr/bin", "bin", "usr/local/bin"] {
            let path = self.roots.driver.join(folder).join("nvidia-smi");
            if let Ok(real) = path.canonicalize() {
                files.extend(self.to_host(&real).map(|host| DriverFile {
                    container: Path::new(CONTAINER_BINARIES).join("nvidia-smi"),
                    host,
                }));
                break;
            }
        }
        files
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
        let mut files: Vec<DriverFile> = fs::read_dir(folder)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().contains(".so"))
            .filter_map(|entry| {
                let real = entry.path().canonicalize().ok()?;
                let ours = real.file_name()?.to_string_lossy().ends_with(&suffix);
                let container = Path::new(CONTAINER_LIBRARIES).join(entry.file_name());
                ours.then_some(DriverFile {
                    container,
                    host: self.to_host(&real)?,
                })
            })
            .collect();
        files.sort_by(|a, b| a.container.cmp(&b.container));
        files
    }

    /// The host's path of a file below the driver root; `None` for one outside it,
    /// which the host may not have.
    fn to_host(&self, real: &Path) -> Option<PathBuf> {
        let root = self.roots.driver.canonicalize().ok()?;
        Some(self.roots.host_driver.join(real.strip_prefix(root).ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpu::Placement;

    fn root() -> (tempfile::TempDir, Driver) {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        for sub in [
            "dev/nvidia-caps",
            "proc/driver/nvidia-caps",
            "usr/lib64",
            "usr/bin",
        ] {
            fs::create_dir_all(at.join(sub)).unwrap();
        }
        for node in [
            "nvidia0",
            "nvidiactl",
            "nvidia-caps/nvidia-cap12",
            "nvidia-caps/nvidia-cap13",
        ] {
            fs::write(at.join("dev").join(node), "").unwrap();
        }
        fs::write(
            at.join("proc/driver/nvidia-caps/mig-minors"),
            "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu0/gi11/access 102\n",
        )
        .unwrap();
        let libraries = at.join("usr/lib64");
        fs::write(libraries.join("libcuda.so.580.82.07"), "").unwrap();
        std::os::unix::fs::symlink("libcuda.so.580.82.07", libraries.join("libcuda.so.1")).unwrap();
        fs::write(libraries.join("libnvidia-ml.so.580.82.07"), "").unwrap();
        std::os::unix::fs::symlink(
            "libnvidia-ml.so.580.82.07",
            libraries.join("libnvidia-ml.so.1"),
        )
        .unwrap();
        fs::write(libraries.join("libcuda.so.550.1"), "").unwrap();
        fs::write(libraries.join("libc.so.6"), "").unwrap();
        fs::write(at.join("usr/bin/nvidia-smi"), "").unwrap();
        let roots = Roots {
            driver: at.to_owned(),
            host_driver: "/run/nvidia/driver".into(),
            dev: at.join("dev"),
            proc: at.join("proc"),
        };
        (folder, Driver::new(roots))
    }

    #[test]
    fn libraries_are_mounted_from_whichever_folder_nvml_is_loaded_from() {
        let folder = tempfile::tempdir().unwrap();
        let libraries = folder.path().join("usr/local/nvidia/lib64");
        fs::create_dir_all(&libraries).unwrap();
        for name in ["libnvidia-ml.so.1", "libcuda.so.580.82.07"] {
            fs::write(libraries.join(name), "").unwrap();
        }
        let driver = Driver::new(Roots {
            driver: folder.path().to_owned(),
            host_driver: "/home/kubernetes/bin".into(),
            dev: folder.path().join("dev"),
            proc: folder.path().join("proc"),
        });
        assert_eq!(driver.driver_files("580.82.07").len(), 1);
    }

    fn partition(gpu_instance: u32) -> Target {
        Target::Partition {
            pci: "0000:65:00.0".parse().unwrap(),
            uuid: "GPU-1".into(),
            minor: 0,
            profile: "1g.10gb".into(),
            profile_id: 19,
            placement: Placement { start: 6, size: 1 },
            adopted: false,
            instance: Some(InstanceIds {
                gpu_instance,
                compute_instance: 0,
                uuid: "MIG-1".into(),
            }),
        }
    }

    #[test]
    fn a_partition_gets_its_gpu_and_its_two_capabilities() {
        let (_folder, driver) = root();
        let nodes = driver.nodes_of(&partition(1)).unwrap();
        let paths: Vec<_> = nodes
            .iter()
            .map(|n| n.container.to_str().unwrap())
            .collect();
        assert_eq!(
            paths,
            [
                "/dev/nvidia0",
                "/dev/nvidia-caps/nvidia-cap12",
                "/dev/nvidia-caps/nvidia-cap13"
            ]
        );
        let error = driver.nodes_of(&partition(2)).unwrap_err().to_string();
        assert!(error.contains("gpu0/gi2/ci0/access"), "{error}");
    }

    #[test]
    fn a_missing_node_is_an_error_that_a_later_call_does_not_remember() {
        let (folder, driver) = root();
        let whole = Target::Whole {
            pci: "0000:66:00.0".parse().unwrap(),
            uuid: "GPU-2".into(),
            minor: 1,
        };
        assert!(matches!(
            driver.nodes_of(&whole),
            Err(DriverError::MissingNode(_))
        ));
        fs::write(folder.path().join("dev/nvidia1"), "").unwrap();
        assert_eq!(driver.nodes_of(&whole).unwrap().len(), 1);
    }

    #[test]
    fn only_libraries_of_this_driver_version_are_mounted_under_their_own_names() {
        let (_folder, driver) = root();
        let files = driver.driver_files("580.82.07");
        let pairs: Vec<_> = files
            .iter()
            .map(|f| (f.container.to_str().unwrap(), f.host.to_str().unwrap()))
            .collect();
        let host = "/run/nvidia/driver/usr/lib64";
        assert_eq!(
            pairs,
            [
                (
                    "/usr/local/nvidia/lib64/libcuda.so.1",
                    format!("{host}/libcuda.so.580.82.07").as_str()
                ),
                (
                    "/usr/local/nvidia/lib64/libcuda.so.580.82.07",
                    format!("{host}/libcuda.so.580.82.07").as_str()
                ),
                (
                    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
                    format!("{host}/libnvidia-ml.so.580.82.07").as_str()
                ),
                (
                    "/usr/local/nvidia/lib64/libnvidia-ml.so.580.82.07",
                    format!("{host}/libnvidia-ml.so.580.82.07").as_str()
                ),
                (
                    "/usr/local/nvidia/bin/nvidia-smi",
                    "/run/nvidia/driver/usr/bin/nvidia-smi"
                ),
            ]
        );
    }
}
