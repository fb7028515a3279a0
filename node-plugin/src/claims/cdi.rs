//! The CDI file of a claim: what the container runtime injects.
//!
//! In: a claim's prepared devices, their device nodes and the driver's files. Out: one
//! file in the CDI folder, there exactly as long as the claim is prepared. Never: a
//! device node that does not exist, and never a device name used for two claims
//! (runtimes cache specs by name).
//!
//! The types are written out here. The crate `container-device-interface` (1.1.1) has
//! them too, with the cache, the JSON schema checker and the HTTP client of a container
//! runtime: some 200 crates for the 80 lines below, which only write. What a runtime
//! checks when it reads a file is checked by a test instead.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::checkpoint::{ClaimRef, PreparedDevice, Target};
use super::driver::{DeviceNode, DriverFile, NodeFiles};
use super::files::{self, Flush};
use super::sharing::{Places, Portion};
use crate::DRIVER;

/// The lowest version of the specification that has `hostPath` of device nodes; a
/// higher one would shut out older runtimes for nothing.
const VERSION: &str = "0.5.0";

/// Where a CUDA process looks for its MPS daemon.
const MPS_PIPE: &str = "/tmp/nvidia-mps";

/// A CDI specification, as far as it is used here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Spec {
    /// The version of the specification.
    pub cdi_version: String,
    /// Vendor and class of the devices.
    pub kind: String,
    /// The devices.
    pub devices: Vec<Device>,
    /// What every container gets that uses any of the devices.
    pub container_edits: Edits,
}

/// A device that a container can ask for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// Its name in the spec.
    pub name: String,
    /// What the container gets.
    pub container_edits: Edits,
}

/// Changes to a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Edits {
    /// Environment, `NAME=value`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<Node>,
    /// Bind mounts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
}

/// A device node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Node {
    /// Its path in the container.
    pub path: String,
    /// Its path on the host, where that is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
}

/// A bind mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    /// The path on the host.
    pub host_path: String,
    /// The path in the container.
    pub container_path: String,
    /// Mount options.
    pub options: Vec<String>,
}

/// The CDI kind of this driver's devices.
#[must_use]
pub fn kind() -> String {
    format!("{DRIVER}/claim")
}

/// The fully qualified CDI device of a claim's device.
#[must_use]
pub fn device_id(uid: &str, device: &str, share: Option<&str>) -> String {
    format!("{}={}", kind(), device_name(uid, device, share))
}

/// The fully qualified CDI device that mounts the metadata of a claim's request. The
/// names of DRA devices begin with `gpu-`, so that it is never one of theirs.
#[must_use]
pub fn metadata_id(uid: &str, request: &str) -> String {
    format!("{}={}", kind(), metadata_name(uid, request))
}

fn metadata_name(uid: &str, request: &str) -> String {
    format!("{uid}-metadata-{request}")
}

/// Two shares of one device in a claim are two CDI devices.
fn device_name(uid: &str, device: &str, share: Option<&str>) -> String {
    match share {
        Some(share) => format!("{uid}-{device}-{share}"),
        None => format!("{uid}-{device}"),
    }
}

/// The CDI folder.
#[derive(Debug)]
pub struct CdiFiles {
    folder: PathBuf,
}

impl CdiFiles {
    /// Opens the folder, creating it if it is missing: it is often a tmpfs.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn open(folder: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&folder)?;
        Ok(Self { folder })
    }

    /// The file of a claim.
    #[must_use]
    pub fn path(&self, uid: &str) -> PathBuf {
        self.folder.join(format!("{}{uid}.json", prefix()))
    }

    /// Writes a claim's file where it holds anything else, so that a runtime sees all of
    /// it or none, and reads it back: the CDI ids of the answer are resolved in it. It is
    /// not flushed: the folder is usually a tmpfs, and what a power failure takes, the
    /// checkpoint gives back.
    ///
    /// # Errors
    /// When the disk refuses, or does not hold what was written.
    pub fn write(&self, uid: &str, spec: &Spec) -> io::Result<()> {
        let path = self.path(uid);
        let mut bytes = serde_json::to_vec_pretty(spec)?;
        bytes.push(b'\n');
        if fs::read(&path).is_ok_and(|there| there == bytes) {
            return Ok(());
        }
        fs::create_dir_all(&self.folder)?;
        files::replace(&path, &bytes, Flush::None)?;
        if fs::read(&path)? != bytes {
            return Err(io::Error::other("it does not hold what was written to it"));
        }
        Ok(())
    }

    /// Removes a claim's file; a missing one is a success.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn remove(&self, uid: &str) -> io::Result<()> {
        files::remove(&self.path(uid))
    }

    /// The names of the devices in a claim's file; none where it is missing or damaged.
    pub(super) fn devices(&self, uid: &str) -> Vec<String> {
        let bytes = fs::read(self.path(uid)).unwrap_or_default();
        let Ok(spec) = serde_json::from_slice::<serde_json::Value>(&bytes) else {
            return Vec::new();
        };
        let devices = spec.get("devices").and_then(serde_json::Value::as_array);
        devices
            .into_iter()
            .flatten()
            .filter_map(|device| {
                let name = device.get("name")?.as_str()?;
                let name = name.strip_prefix(uid)?.strip_prefix('-')?;
                // Behind a share's device comes its id.
                let shared = name.find("-shared-").map(|at| at + "-shared".len());
                Some(shared.map_or(name, |end| &name[..end]).to_owned())
            })
            .collect()
    }

    /// The UIDs for which a write was interrupted, as [`super::checkpoint`] has them.
    pub(super) fn interrupted(&self) -> Vec<String> {
        let names = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        names
            .filter_map(|entry| {
                let name = entry.file_name();
                let name = files::of_temporary(name.to_str()?)?.strip_prefix(&prefix())?;
                Some(name.strip_suffix(".json")?.to_owned())
            })
            .collect()
    }

    /// Removes what an interrupted write of a claim's file left; the claim is locked.
    pub(super) fn remove_interrupted(&self, uid: &str) {
        files::remove_temporary(&self.path(uid));
    }

    /// The UIDs of the claims that have a file.
    ///
    /// # Errors
    /// When the folder cannot be listed.
    pub fn uids(&self) -> io::Result<Vec<String>> {
        let mut uids = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let name = entry?.file_name();
            let uid = name
                .to_str()
                .and_then(|name| name.strip_prefix(&prefix()))
                .and_then(|name| name.strip_suffix(".json"));
            uids.extend(uid.map(str::to_owned));
        }
        Ok(uids)
    }
}

fn prefix() -> String {
    format!("{DRIVER}-claim_")
}

/// Builds the specification of a claim.
#[must_use]
pub fn spec(claim: &ClaimRef, devices: &[PreparedDevice], files: &NodeFiles) -> Spec {
    let mut by_request: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for device in devices {
        by_request
            .entry(&device.request)
            .or_default()
            .push(&device.device);
    }
    let names: Vec<&str> = devices.iter().map(|d| d.device.as_str()).collect();

    let mut entries: Vec<Device> = Vec::new();
    for device in devices {
        // A device that two requests name (administrative access) is one CDI device.
        let name = device_name(&claim.uid, &device.device, device.share_id.as_deref());
        let env = request_env(&claim.uid, &device.request, &by_request);
        if let Some(entry) = entries.iter_mut().find(|entry| entry.name == name) {
            entry.container_edits.env.push(env);
            continue;
        }
        let nodes = files
            .of_device
            .get(&device.device)
            .map(Vec::as_slice)
            .unwrap_or_default();
        let mut edits = Edits {
            env: vec![env],
            device_nodes: nodes.iter().map(node).collect(),
            mounts: Vec::new(),
        };
        if let Some(portion) = portion(device) {
            edits
                .env
                .push(share_env(&claim.uid, &device.request, devices));
            if let Some(places) = files.mps.get(&device.device) {
                mps(places, portion, &mut edits);
            }
        }
        entries.push(Device {
            name,
            container_edits: edits,
        });
    }

    entries.extend(files.metadata.iter().map(|file| Device {
        name: metadata_name(&claim.uid, &file.request),
        container_edits: Edits {
            mounts: vec![mount(&file.mount)],
            ..Edits::default()
        },
    }));

    Spec {
        cdi_version: VERSION.to_owned(),
        kind: kind(),
        devices: entries,
        container_edits: Edits {
            env: vec![
                // Keeps an old container runtime hook from adding devices of its own.
                "NVIDIA_VISIBLE_DEVICES=void".to_owned(),
                format!("GPU_AI_DECKHOUSE_IO_DEVICES={}", names.join(",")),
            ],
            device_nodes: files.common.iter().map(node).collect(),
            mounts: files.driver.iter().map(mount).collect(),
        },
    }
}

/// `GPU_AI_DECKHOUSE_IO_CLAIM_<uid>_<REQUEST>=<device>[,<device>…]`: unambiguous in a
/// container that uses several claims.
fn request_env(uid: &str, request: &str, by_request: &BTreeMap<&str, Vec<&str>>) -> String {
    let devices = by_request
        .get(request)
        .map(|names| names.join(","))
        .unwrap_or_default();
    let request = variable(request).to_ascii_uppercase();
    format!(
        "GPU_AI_DECKHOUSE_IO_CLAIM_{}_{request}={devices}",
        variable(uid)
    )
}

/// What was granted of a shared device.
fn portion(device: &PreparedDevice) -> Option<Portion> {
    match &device.target {
        Target::Share {
            memory_bytes,
            cores_percent,
            ..
        } => Some(Portion {
            memory_bytes: *memory_bytes,
            cores_percent: *cores_percent,
        }),
        Target::Whole { .. } | Target::Partition { .. } => None,
    }
}

/// `GPU_AI_DECKHOUSE_IO_SHARE_<uid>_<REQUEST>=<bytes>:<percent>[,…]`, in the order of
/// the request's devices.
fn share_env(uid: &str, request: &str, devices: &[PreparedDevice]) -> String {
    let of_request = devices.iter().filter(|device| device.request == request);
    let portions: Vec<String> = of_request
        .filter_map(portion)
        .map(|portion| format!("{}:{}", portion.memory_bytes, portion.cores_percent))
        .collect();
    let (uid, request) = (variable(uid), variable(request).to_ascii_uppercase());
    let portions = portions.join(",");
    format!("GPU_AI_DECKHOUSE_IO_SHARE_{uid}_{request}={portions}")
}

/// What makes a CUDA process a client of the device's daemon, with these limits. The
/// daemon has one device, number 0. `CUDA_VISIBLE_DEVICES` stays unset: the daemon's
/// device is the client's only one, whatever it is called.
fn mps(places: &Places, portion: Portion, edits: &mut Edits) {
    edits.env.extend([
        format!("CUDA_MPS_PIPE_DIRECTORY={MPS_PIPE}"),
        format!(
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={}M",
            portion.memory_mib()
        ),
        format!(
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={}",
            portion.cores_percent
        ),
    ]);
    for (host, container) in [(places.pipe(), MPS_PIPE), (places.shm(), "/dev/shm")] {
        edits.mounts.push(Mount {
            host_path: host.to_string_lossy().into_owned(),
            container_path: container.to_owned(),
            options: ["rw", "nosuid", "nodev", "bind"]
                .map(str::to_owned)
                .to_vec(),
        });
    }
}

/// Text as part of the name of an environment variable.
fn variable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .collect()
}

fn node(node: &DeviceNode) -> Node {
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let (path, host) = (text(&node.container), text(&node.host));
    Node {
        host_path: (host != path).then_some(host),
        path,
    }
}

fn mount(file: &DriverFile) -> Mount {
    Mount {
        host_path: file.host.to_string_lossy().into_owned(),
        container_path: file.container.to_string_lossy().into_owned(),
        options: ["ro", "nosuid", "nodev", "bind"]
            .map(str::to_owned)
            .to_vec(),
    }
}
