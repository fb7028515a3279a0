//! A fake-GPU node: the folder that stands where a driver's root would.
//!
//! In: a topology file and the built library. Out: `lib/`, `dev/`, `proc/`, `sys/`
//! and `topology.yaml`, as a driver and a kernel lay them out. Never: the state
//! file, which the library makes and which a second run keeps.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

use crate::topology::{Gpu, Node, TopologyError};

/// GPU instances that the driver has minor numbers for, per GPU.
const INSTANCES: u32 = 15;
/// Compute instances that the driver has minor numbers for, per GPU instance.
const COMPUTE_INSTANCES: u32 = 8;

/// Why a driver root could not be made.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The topology is no good.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The library was not built.
    #[error("{path} cannot be copied: {source}; build it with cargo build -p fake-nvml")]
    Library {
        /// Where it should be.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A device node was refused.
    #[error(
        "the device node {path} cannot be made: {source}; run as root with CAP_MKNOD, on a \
         file system that is not mounted nodev"
    )]
    DeviceNode {
        /// The node.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another file was refused.
    #[error("{path} cannot be written: {source}; name a folder that is writable")]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// What goes into `dev/`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceNodes {
    /// Character devices that behave as `/dev/null`; needs `CAP_MKNOD`.
    Character,
    /// Empty regular files, for tests that only look at paths.
    Files,
}

/// The built library, where cargo puts it for an executable of the same build: beside
/// it, or in the folder of dependencies. The newer one where both are there: tests are
/// built without the first, which may be of an earlier build.
#[must_use]
pub fn library_beside_executable() -> Option<PathBuf> {
    let folder = std::env::current_exe().ok()?.parent()?.to_owned();
    ["libfake_nvml.so", "deps/libfake_nvml.so"]
        .into_iter()
        .map(|name| folder.join(name))
        .filter_map(|path| {
            let built = fs::metadata(&path).and_then(|library| library.modified());
            Some((built.ok()?, path))
        })
        .max()
        .map(|(_, path)| path)
}

/// Makes a driver root in `out`, or brings an existing one up to date.
///
/// `name` is the node's: two nodes of one topology with different names have
/// different GPU UUIDs and serial numbers, as different machines do.
///
/// # Errors
/// When the topology is no good, the library is missing, or a file is refused.
pub fn build(
    topology: &Path,
    out: &Path,
    library: &Path,
    name: Option<&str>,
    device_nodes: DeviceNodes,
) -> Result<(), NodeError> {
    Node::read(topology)?;
    let text = fs::read_to_string(topology).map_err(|source| NodeError::Write {
        path: topology.to_owned(),
        source,
    })?;
    let text = match name {
        Some(name) => seeded(&text, name),
        None => text,
    };
    let node = Node::parse(topology, &text)?;
    write(&out.join("topology.yaml"), &text)?;
    place_library(library, out)?;
    write_proc(&node, out)?;
    for gpu in &node.gpus {
        write_sysfs(gpu, out)?;
    }
    write_dev(&node, out, device_nodes)
}

/// Puts the library into `root` as `lib/libnvidia-ml.so.1`. The file is replaced, not
/// overwritten: a process that has it mapped keeps the old one.
///
/// # Errors
/// When the library is missing or the folder is not writable.
pub fn place_library(library: &Path, root: &Path) -> Result<(), NodeError> {
    let folder = root.join("lib");
    fs::create_dir_all(&folder).map_err(|source| NodeError::Write {
        path: folder.clone(),
        source,
    })?;
    let temporary = folder.join(".libnvidia-ml.so.1.new");
    fs::copy(library, &temporary).map_err(|source| NodeError::Library {
        path: library.to_owned(),
        source,
    })?;
    let path = folder.join("libnvidia-ml.so.1");
    fs::rename(&temporary, &path).map_err(|source| NodeError::Write { path, source })
}

/// Puts the tool that makes something happen to the hardware (`fake-nvml`) into `root` as
/// `bin/fake-nvml`, so that it can be run on the node itself.
///
/// # Errors
/// When the tool is missing or the folder is not writable.
pub fn place_tool(tool: &Path, root: &Path) -> Result<(), NodeError> {
    place_program(tool, &root.join("bin"), "fake-nvml")
}

/// The built stand-in for the MPS control daemon, where cargo puts it for an executable of
/// the same build.
#[must_use]
pub fn mps_control_beside_executable() -> Option<PathBuf> {
    let folder = std::env::current_exe().ok()?.parent()?.to_owned();
    ["fake-mps-control", "../fake-mps-control"]
        .into_iter()
        .map(|name| folder.join(name))
        .filter_map(|path| {
            let built = fs::metadata(&path).and_then(|library| library.modified());
            Some((built.ok()?, path))
        })
        .max()
        .map(|(_, path)| path)
}

/// Puts the stand-in for the MPS control daemon ([`crate::mps`]) into `root` where a driver
/// has the real one.
///
/// # Errors
/// When it is missing or the folder is not writable.
pub fn place_mps_control(program: &Path, root: &Path) -> Result<(), NodeError> {
    place_program(program, &root.join("usr/bin"), "nvidia-cuda-mps-control")
}

/// Like the library, a program is replaced, not overwritten: it may be running.
fn place_program(program: &Path, folder: &Path, name: &str) -> Result<(), NodeError> {
    fs::create_dir_all(folder).map_err(|source| NodeError::Write {
        path: folder.to_owned(),
        source,
    })?;
    let temporary = folder.join(format!(".{name}.new"));
    fs::copy(program, &temporary).map_err(|source| NodeError::Library {
        path: program.to_owned(),
        source,
    })?;
    let path = folder.join(name);
    fs::rename(&temporary, &path).map_err(|source| NodeError::Write { path, source })
}

fn seeded(text: &str, name: &str) -> String {
    let mut lines: Vec<_> = text
        .lines()
        .filter(|line| !line.starts_with("seed:"))
        .collect();
    let seed = format!("seed: {name:?}");
    lines.push(&seed);
    lines.join("\n") + "\n"
}

fn write(path: &Path, text: &str) -> Result<(), NodeError> {
    let failed = |source| NodeError::Write {
        path: path.to_owned(),
        source,
    };
    // A process that reads it now must not find half of what it holds already.
    if fs::read_to_string(path).is_ok_and(|now| now == text) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    fs::write(path, text).map_err(failed)
}

/// The minor number of a GPU instance's access capability. The driver counts three
/// for itself, then 15 GPU instances of 1 + 8 numbers for each GPU.
fn capability_minor(gpu: u32, gi: u32) -> u32 {
    3 + (1 + COMPUTE_INSTANCES) * (INSTANCES * gpu + gi)
}

fn mig_gpus(node: &Node) -> impl Iterator<Item = &Gpu> {
    node.gpus.iter().filter(|gpu| gpu.model.mig.is_some())
}

fn write_proc(node: &Node, out: &Path) -> Result<(), NodeError> {
    let proc = out.join("proc");
    let version = &node.driver.version;
    write(
        &proc.join("driver/nvidia/version"),
        &format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  (fake)\n"),
    )?;
    write(
        &proc.join("devices"),
        "Character devices:\n195 nvidia\n195 nvidiactl\n234 nvidia-caps\n235 nvidia-uvm\n\n\
         Block devices:\n",
    )?;
    for gpu in &node.gpus {
        let text = format!(
            "Model: \t\t {}\nGPU UUID: \t {}\nBus Type: \t PCIe\nBus Location: \t {}\n\
             Device Minor: \t {}\nGPU Excluded:\t No\n",
            gpu.model.name, gpu.uuid, gpu.pci, gpu.minor
        );
        write(
            &proc.join(format!("driver/nvidia/gpus/{}/information", gpu.pci)),
            &text,
        )?;
    }
    let mut minors = String::from("config 1\nmonitor 2\n");
    for gpu in mig_gpus(node) {
        for gi in 0..INSTANCES {
            let minor = capability_minor(gpu.minor, gi);
            minors += &format!("gpu{}/gi{gi}/access {minor}\n", gpu.minor);
            for ci in 0..COMPUTE_INSTANCES {
                minors += &format!("gpu{}/gi{gi}/ci{ci}/access {}\n", gpu.minor, minor + 1 + ci);
            }
        }
    }
    if mig_gpus(node).next().is_some() {
        write(&proc.join("driver/nvidia-caps/mig-minors"), &minors)?;
    }
    Ok(())
}

fn write_sysfs(gpu: &Gpu, out: &Path) -> Result<(), NodeError> {
    let sys = out.join("sys");
    // Each GPU sits behind one root port of its root complex.
    let port = format!("{}:01.0", gpu.root.trim_start_matches("pci"));
    let device = format!("devices/{}/{port}/{}", gpu.root, gpu.pci);
    let id = |word: u32| format!("0x{:04x}\n", word & 0xffff);
    let files = [
        ("vendor", id(gpu.model.pci_device_id)),
        ("device", id(gpu.model.pci_device_id >> 16)),
        ("subsystem_vendor", id(gpu.model.pci_subsystem_id)),
        ("subsystem_device", id(gpu.model.pci_subsystem_id >> 16)),
        ("class", "0x030200\n".to_owned()),
        // The kernel says -1 for none.
        (
            "numa_node",
            gpu.numa
                .map_or("-1\n".to_owned(), |numa| format!("{numa}\n")),
        ),
    ];
    for (name, text) in files {
        write(&sys.join(&device).join(name), &text)?;
    }
    let folder = sys.join("bus/pci/devices");
    let path = folder.join(gpu.pci.to_string());
    let link = || {
        fs::create_dir_all(&folder)?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        symlink(Path::new("../../..").join(&device), &path)
    };
    link().map_err(|source| NodeError::Write {
        path: path.clone(),
        source,
    })
}

fn write_dev(node: &Node, out: &Path, kind: DeviceNodes) -> Result<(), NodeError> {
    let dev = out.join("dev");
    let mut names: Vec<String> = [
        "nvidiactl",
        "nvidia-uvm",
        "nvidia-uvm-tools",
        "nvidia-modeset",
    ]
    .map(String::from)
    .into_iter()
    .chain(node.gpus.iter().map(|gpu| format!("nvidia{}", gpu.minor)))
    .collect();
    if mig_gpus(node).next().is_some() {
        names.extend([
            "nvidia-caps/nvidia-cap1".into(),
            "nvidia-caps/nvidia-cap2".into(),
        ]);
    }
    for gpu in mig_gpus(node) {
        let minors = capability_minor(gpu.minor, 0)..capability_minor(gpu.minor + 1, 0);
        names.extend(minors.map(|minor| format!("nvidia-caps/nvidia-cap{minor}")));
    }
    for folder in [dev.clone(), dev.join("nvidia-caps")] {
        fs::create_dir_all(&folder).map_err(|source| NodeError::Write {
            path: folder,
            source,
        })?;
    }
    let first = dev.join("nvidiactl");
    match kind {
        DeviceNodes::Files => write(&first, "")?,
        DeviceNodes::Character => make_null(&first)?,
    }
    // All are one device; a thousand links are made much sooner than a thousand nodes.
    for path in names.into_iter().map(|name| dev.join(name)) {
        match fs::hard_link(&first, &path) {
            Err(source) if source.kind() != io::ErrorKind::AlreadyExists => {
                return Err(NodeError::DeviceNode { path, source });
            }
            _ => {}
        }
    }
    Ok(())
}

/// A character device that reads as empty and swallows writes (1:3, `/dev/null`).
fn make_null(path: &Path) -> Result<(), NodeError> {
    let failed = |source| NodeError::DeviceNode {
        path: path.to_owned(),
        source,
    };
    let mode = Mode::from_raw_mode(0o666);
    match mknodat(CWD, path, FileType::CharacterDevice, mode, makedev(1, 3)) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(errno) => return Err(failed(errno.into())),
    }
    // The mask of the process does not count: any user of a container may open it.
    fs::set_permissions(path, fs::Permissions::from_mode(0o666)).map_err(failed)
}
