//! The CDI file of a claim: what the container runtime injects.
//!
//! In: a claim's prepared devices, their device nodes and the driver's files. Out: one
//! file in the CDI folder, there exactly as long as the claim is prepared. Never: a
//! device node that does not exist, and never a device name used for two claims
//! (runtimes cache specs by name).

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::checkpoint::{ClaimRef, PreparedDevice, replace};
use super::driver::{DeviceNode, DriverFile, NodeFiles};
use crate::DRIVER;

/// The lowest version of the specification that has `hostPath` of device nodes; a
/// higher one would shut out older runtimes for nothing.
const VERSION: &str = "0.5.0";

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
pub fn device_id(uid: &str, device: &str) -> String {
    format!("{}={}", kind(), device_name(uid, device))
}

fn device_name(uid: &str, device: &str) -> String {
    format!("{uid}-{device}")
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

    /// Whether a claim's file holds exactly this.
    #[must_use]
    pub fn holds(&self, uid: &str, spec: &Spec) -> bool {
        fs::read(self.path(uid))
            .ok()
            .and_then(|bytes| serde_json::from_slice::<Spec>(&bytes).ok())
            .is_some_and(|existing| existing == *spec)
    }

    /// Writes a claim's file so that a runtime sees all of it or none. It is not
    /// flushed: the folder is usually a tmpfs, and what a power failure takes, the
    /// checkpoint gives back.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn write(&self, uid: &str, spec: &Spec) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let mut bytes = serde_json::to_vec_pretty(spec)?;
        bytes.push(b'\n');
        replace(&self.path(uid), &bytes, |_| Ok(()))
    }

    /// Removes a claim's file; a missing one is a success.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn remove(&self, uid: &str) -> io::Result<()> {
        match fs::remove_file(self.path(uid)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
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
        let name = device_name(&claim.uid, &device.device);
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
        entries.push(Device {
            name,
            container_edits: Edits {
                env: vec![env],
                device_nodes: nodes.iter().map(node).collect(),
                mounts: Vec::new(),
            },
        });
    }

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
    let variable = |text: &str| -> String {
        text.chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
            .collect()
    };
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
