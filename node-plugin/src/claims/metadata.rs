//! The device metadata files of KEP-5304: what a container can read about its devices
//! without NVML and without the API server.
//!
//! In: a claim's record and the description of the node's GPUs. Out: one file for each
//! request of the claim, there as long as its CDI file is, and where a container finds
//! it. Never: a CDI file that mounts a file which is not there: files are written
//! before it and removed after it.
//!
//! A file is a stream of the same object in each version of the API, newest first
//! (`k8s.io/dynamic-resource-allocation/api/metadata`). Its attributes are those of the
//! ResourceSlice, under the same names, and what is known only once the claim is
//! prepared, above all a MIG instance's UUID.
//!
//! The Go helper for drivers keeps its files by the claim's name, and mounts them
//! through CDI files of their own. Here the folder is the claim's UID, so that cleaning
//! up after a claim cannot take the files of the next one of that name, and the mount
//! is a device of the claim's own CDI file, so that devices and metadata appear and go
//! in one step. What a container sees is the same.
//!
//! Nothing is flushed: what a power failure takes, the next prepare finds missing or
//! different, and writes again; a container is not started before it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use k8s_openapi::api::resource::v1::DeviceAttribute;
use serde::{Deserialize, Serialize};

use super::facts::Facts;
use super::files::{self as durable, Flush};
use super::record::{ClaimRef, PreparedDevice, Record};
use crate::DRIVER;
use crate::slices::Described;

/// The versions of the API that a file holds, newest first.
const VERSIONS: [&str; 2] = [
    "metadata.resource.k8s.io/v1beta1",
    "metadata.resource.k8s.io/v1alpha1",
];

/// The most attributes that a device may have.
const MAX_ATTRIBUTES: usize = 32;

/// Where containers find the files of all drivers.
const CONTAINER_FOLDER: &str = "/var/run/kubernetes.io/dra-device-attributes";

/// The metadata of one request; the fields are those of `DeviceMetadata`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceMetadata {
    kind: String,
    api_version: String,
    metadata: ObjectMeta,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pod_claim_name: Option<String>,
    requests: Vec<Request>,
}

/// The claim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct ObjectMeta {
    name: String,
    namespace: String,
    uid: String,
    /// Counts the changes of the content.
    generation: i64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Request {
    /// As in the allocation: with the alternative that was allocated, if there are some.
    name: String,
    devices: Vec<Device>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Device {
    driver: String,
    pool: String,
    name: String,
    attributes: BTreeMap<String, DeviceAttribute>,
}

/// One file, for one request of a claim.
#[derive(Debug, Clone, PartialEq)]
pub struct MetadataFile {
    /// The request, without a subrequest.
    pub request: String,
    /// Its path in the container.
    pub container: PathBuf,
    content: DeviceMetadata,
}

impl MetadataFile {
    /// The stream of JSON objects, as it is on the disk.
    fn bytes(&self, generation: i64) -> serde_json::Result<Vec<u8>> {
        let mut object = self.content.clone();
        object.metadata.generation = generation;
        let mut bytes = Vec::new();
        for version in VERSIONS {
            version.clone_into(&mut object.api_version);
            serde_json::to_writer_pretty(&mut bytes, &object)?;
            bytes.push(b'\n');
        }
        Ok(bytes)
    }
}

/// The files of a claim, by request in order of allocation.
#[must_use]
pub fn files(record: &Record, described: &Described) -> Vec<MetadataFile> {
    let mut files: Vec<MetadataFile> = Vec::new();
    for prepared in &record.devices {
        let device = Device {
            driver: DRIVER.to_owned(),
            pool: prepared.pool.clone(),
            name: prepared.device.clone(),
            attributes: attributes(described, prepared),
        };
        let known = files.iter_mut().find(|f| f.request == prepared.request);
        if let Some(file) = known {
            file.content.requests[0].devices.push(device);
            continue;
        }
        let name = match &prepared.subrequest {
            Some(subrequest) => format!("{}/{subrequest}", prepared.request),
            None => prepared.request.clone(),
        };
        files.push(MetadataFile {
            request: prepared.request.clone(),
            container: container_path(record, &prepared.request),
            content: DeviceMetadata {
                kind: "DeviceMetadata".to_owned(),
                api_version: String::new(),
                metadata: ObjectMeta {
                    name: record.claim.name.clone(),
                    namespace: record.claim.namespace.clone(),
                    uid: record.claim.uid.clone(),
                    generation: 0,
                },
                pod_claim_name: record.pod_claim_name.clone(),
                requests: vec![Request {
                    name,
                    devices: vec![device],
                }],
            },
        });
    }
    files
}

/// A claim made from a template has a name that nobody can foresee: its file is found
/// by the name that the pod gives it.
fn container_path(record: &Record, request: &str) -> PathBuf {
    let (kind, claim) = match &record.pod_claim_name {
        Some(name) => ("resourceclaimtemplates", name),
        None => ("resourceclaims", &record.claim.name),
    };
    let mut path = Path::new(CONTAINER_FOLDER).join(kind);
    path.extend([claim, request, &format!("{DRIVER}-metadata.json")]);
    path
}

/// What is published of a device, and what is known only now. Where that is too much,
/// published attributes give way: they can be read in the slice.
fn attributes(described: &Described, device: &PreparedDevice) -> BTreeMap<String, DeviceAttribute> {
    let facts = Facts::of(described, device);
    let mut known = BTreeMap::new();
    let mut add = |name: &str, value: Option<DeviceAttribute>| {
        known.extend(value.map(|value| (name.to_owned(), value)));
    };
    add("uuid", facts.uuid.map(string));
    add("memoryBytes", facts.memory_bytes.and_then(int));
    add("multiprocessors", facts.multiprocessors.and_then(int));
    add("coresPercent", facts.cores_percent.and_then(int));
    // How it is kept apart, which may not be how new shares would be.
    add(
        "sharing",
        facts.sharing.map(|kind| string(kind.as_str().to_owned())),
    );
    add("shareID", device.share_id.clone().map(string));
    if device.admin_access {
        let yes = DeviceAttribute {
            bool: Some(true),
            ..DeviceAttribute::default()
        };
        add("adminAccess", Some(yes));
    }
    let published = described.device(&device.device).and_then(|d| d.attributes);
    for (name, value) in published.into_iter().flatten() {
        if known.len() >= MAX_ATTRIBUTES {
            break;
        }
        known.entry(name).or_insert(value);
    }
    known
}

fn string(value: String) -> DeviceAttribute {
    DeviceAttribute {
        string: Some(value),
        ..DeviceAttribute::default()
    }
}

fn int(value: impl TryInto<i64>) -> Option<DeviceAttribute> {
    Some(DeviceAttribute {
        int: Some(value.try_into().ok()?),
        ..DeviceAttribute::default()
    })
}

/// The folder of metadata files.
#[derive(Debug)]
pub struct MetadataFiles {
    folder: PathBuf,
}

impl MetadataFiles {
    /// The files below this folder, which is made when it is needed. Its path has to be
    /// the same here and on the host.
    #[must_use]
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// The folder of a claim.
    #[must_use]
    pub fn folder(&self, uid: &str) -> PathBuf {
        self.folder.join(uid)
    }

    /// The file of a claim's request.
    #[must_use]
    pub fn path(&self, uid: &str, request: &str) -> PathBuf {
        self.folder(uid).join(format!("{request}.json"))
    }

    /// Writes a claim's files where they are missing or say something else; a container
    /// that has one mounted keeps what it has. Readers see all of a file or none.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn write(&self, uid: &str, files: &[MetadataFile]) -> io::Result<()> {
        for file in files {
            let path = self.path(uid, &file.request);
            let there = fs::read(&path).ok();
            let before = there.as_deref().and_then(generation);
            if let Some(before) = before
                && there == Some(file.bytes(before)?)
            {
                continue;
            }
            let bytes = file.bytes(before.unwrap_or(0) + 1)?;
            fs::create_dir_all(self.folder(uid))?;
            durable::replace(&path, &bytes, Flush::None)?;
        }
        Ok(())
    }

    /// Removes a claim's files; missing ones are a success.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn remove(&self, uid: &str) -> io::Result<()> {
        match fs::remove_dir_all(self.folder(uid)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) => durable::step("metadata removed"),
            Err(_) => {}
        }
        Ok(())
    }

    /// The claim to which a folder belongs, by any of its files.
    pub(super) fn claim(&self, uid: &str) -> Option<ClaimRef> {
        let files = fs::read_dir(self.folder(uid)).ok()?.flatten();
        files
            .filter_map(|file| {
                let bytes = fs::read(file.path()).ok()?;
                let mut objects =
                    serde_json::Deserializer::from_slice(&bytes).into_iter::<DeviceMetadata>();
                let object = objects.next()?.ok()?.metadata;
                (object.uid == uid).then_some(ClaimRef {
                    namespace: object.namespace,
                    name: object.name,
                    uid: object.uid,
                })
            })
            .next()
    }

    /// The UIDs of the claims that have files.
    ///
    /// # Errors
    /// When the folder cannot be listed.
    pub fn uids(&self) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut uids = Vec::new();
        for entry in entries {
            uids.extend(entry?.file_name().into_string().ok());
        }
        Ok(uids)
    }
}

/// The generation of a file that is there.
fn generation(bytes: &[u8]) -> Option<i64> {
    let mut objects = serde_json::Deserializer::from_slice(bytes).into_iter::<DeviceMetadata>();
    Some(objects.next()?.ok()?.metadata.generation)
}
