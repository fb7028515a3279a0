//! A node for tests: a fake driver root, folders, and claims in memory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use fake_nvml::node::{self as fake, DeviceNodes};
use futures::FutureExt;
use futures::future::BoxFuture;
use gpu::{Gpus, Inventory, Library, Roots};
use k8s_openapi::api::resource::v1::ResourceClaim;
use node_plugin::claims::checkpoint::ClaimRef;
use node_plugin::claims::core::StepHook;
use node_plugin::claims::hardware::{Hardware, NvmlGpus};
use node_plugin::claims::{ClaimSource, Claims, Loaded, Settings, cdi, driver};
use node_plugin::slices::MigPolicy;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::watch;

/// The name of the node and of its pool.
pub(crate) const NODE: &str = "worker-7";

/// The repository.
pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_owned()
}

/// The topology files, by name without extension.
pub(crate) fn topologies() -> Vec<String> {
    let folder = repository().join("tests/fixtures/topologies");
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .filter_map(|entry| {
            Some(
                entry
                    .unwrap()
                    .file_name()
                    .to_str()?
                    .strip_suffix(".yaml")?
                    .to_owned(),
            )
        })
        .collect();
    names.sort();
    names
}

/// The built fake NVML, kept aside at the first use: another cargo may link it anew
/// while the tests run, and for that moment it is not there.
fn library() -> &'static Path {
    static KEPT: OnceLock<PathBuf> = OnceLock::new();
    KEPT.get_or_init(|| {
        let deadline = Instant::now() + Duration::from_secs(60);
        let built = loop {
            match fake::library_beside_executable() {
                Some(built) => break built,
                None => assert!(Instant::now() < deadline, "fake-nvml was not built"),
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        let kept = std::env::temp_dir().join(format!("fake-nvml-{}.so", std::process::id()));
        std::fs::copy(built, &kept).unwrap();
        kept
    })
}

/// Claims that a test puts there.
#[derive(Default)]
pub(crate) struct MemoryClaims {
    claims: Mutex<BTreeMap<(String, String), ResourceClaim>>,
}

impl ClaimSource for MemoryClaims {
    fn get<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ResourceClaim>, String>> {
        let claims = self.claims.lock().unwrap();
        let found = claims
            .get(&(namespace.to_owned(), name.to_owned()))
            .cloned();
        async move { Ok(found) }.boxed()
    }
}

/// A node that survives the plugin instances on it.
pub(crate) struct TestNode {
    pub(crate) folder: TempDir,
    pub(crate) claims: Arc<MemoryClaims>,
    gpus: OnceLock<Vec<String>>,
}

impl TestNode {
    /// A node with the GPUs of a topology.
    pub(crate) fn new(topology: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("np").tempdir().unwrap();
        let library = library();
        let topology = repository()
            .join("tests/fixtures/topologies")
            .join(topology)
            .with_extension("yaml");
        let root = folder.path().join("driver");
        fake::build(&topology, &root, library, Some(NODE), DeviceNodes::Files).unwrap();
        let node = Self {
            folder,
            claims: Arc::default(),
            gpus: OnceLock::new(),
        };
        node.boot("first");
        node
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.folder.path().join(below)
    }

    /// Another boot: what a reboot takes away is gone. NVML state is the caller's.
    pub(crate) fn boot(&self, id: &str) {
        let folder = self.path("driver/proc/sys/kernel/random");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("boot_id"), format!("{id}\n")).unwrap();
        std::fs::remove_dir_all(self.path("cdi")).ok();
    }

    /// A reboot takes the MIG instances too.
    pub(crate) fn reboot(&self) {
        self.boot("second");
        std::fs::remove_file(self.path("driver/state.json")).unwrap();
    }

    /// The GPUs, through the fake library.
    pub(crate) fn hardware(&self) -> Arc<NvmlGpus> {
        self.hardware_under(MigPolicy::Dynamic)
    }

    /// The same under a policy for MIG.
    pub(crate) fn hardware_under(&self, mig: MigPolicy) -> Arc<NvmlGpus> {
        let root = self.path("driver");
        let gpus = Gpus::open(&Library::InDriverRoot(root.clone())).unwrap();
        let roots = Roots {
            proc: root.join("proc"),
            sys: root.join("sys"),
        };
        Arc::new(NvmlGpus::new(gpus, roots).under(mig))
    }

    pub(crate) fn inventory(&self) -> Inventory {
        self.hardware().inventory().unwrap()
    }

    /// How many MIG instances exist.
    pub(crate) fn instances(&self) -> usize {
        self.inventory()
            .gpus
            .iter()
            .map(|gpu| gpu.instances.len())
            .sum()
    }

    pub(crate) fn settings(&self) -> Settings {
        let root = self.path("driver");
        Settings {
            node: NODE.to_owned(),
            folder: self.path("plugin"),
            cdi: self.path("cdi"),
            roots: driver::Roots {
                host_driver: root.clone(),
                dev: root.join("dev"),
                proc: root.join("proc"),
                driver: root,
            },
        }
    }

    /// A new instance of the plugin's claims, as after a restart.
    pub(crate) fn plugin(&self) -> Claims {
        self.plugin_stopping(Arc::new(|_| ()))
    }

    /// The same with a hook after each durable step.
    pub(crate) fn plugin_stopping(&self, after: StepHook) -> Claims {
        let (_sender, receiver) = watch::channel(Some(self.loaded()));
        Claims::open(self.settings(), self.claims.clone(), receiver, after).unwrap()
    }

    pub(crate) fn loaded(&self) -> Loaded {
        let hardware = self.hardware();
        let driver_version = hardware.inventory().unwrap().driver_version;
        Loaded {
            hardware,
            driver_version,
        }
    }

    /// Puts a claim there whose request `gpu` was given these devices.
    pub(crate) fn claim(&self, name: &str, uid: &str, devices: &[&str]) -> ClaimRef {
        self.claim_with(name, uid, devices, &json!([]))
    }

    /// The same with configuration.
    pub(crate) fn claim_with(
        &self,
        name: &str,
        uid: &str,
        devices: &[&str],
        config: &Value,
    ) -> ClaimRef {
        self.put(name, uid, claim_object(name, uid, devices, config))
    }

    /// The same for administrative access.
    pub(crate) fn admin_claim(&self, name: &str, uid: &str, devices: &[&str]) -> ClaimRef {
        let mut object = claim_object(name, uid, devices, &json!([]));
        let allocation = object.status.as_mut().unwrap().allocation.as_mut().unwrap();
        let results = allocation.devices.as_mut().unwrap().results.as_mut();
        for result in results.unwrap() {
            result.admin_access = Some(true);
        }
        self.put(name, uid, object)
    }

    /// Puts any claim there.
    pub(crate) fn put_claim(&self, object: Value) -> ClaimRef {
        let object: ResourceClaim = serde_json::from_value(object).unwrap();
        let (name, uid) = (object.metadata.name.clone(), object.metadata.uid.clone());
        self.put(&name.unwrap(), &uid.unwrap(), object)
    }

    fn put(&self, name: &str, uid: &str, object: ResourceClaim) -> ClaimRef {
        let key = ("team".to_owned(), name.to_owned());
        self.claims.claims.lock().unwrap().insert(key, object);
        ClaimRef {
            namespace: "team".to_owned(),
            name: name.to_owned(),
            uid: uid.to_owned(),
        }
    }

    pub(crate) fn delete_claim(&self, name: &str) {
        self.claims
            .claims
            .lock()
            .unwrap()
            .remove(&("team".to_owned(), name.to_owned()));
    }

    /// A claim's CDI file.
    pub(crate) fn cdi(&self, uid: &str) -> Option<cdi::Spec> {
        let path = self
            .path("cdi")
            .join(format!("gpu.ai.deckhouse.io-claim_{uid}.json"));
        Some(serde_json::from_slice(&std::fs::read(path).ok()?).unwrap())
    }

    /// The names of all CDI files.
    pub(crate) fn cdi_files(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.path("cdi")) else {
            return Vec::new();
        };
        entries
            .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
            .collect()
    }

    /// The device name of the `index`th GPU, or of a partition of it.
    pub(crate) fn device(&self, index: usize, partition: &str) -> String {
        let gpus = self.gpus.get_or_init(|| {
            let inventory = self.inventory();
            inventory
                .gpus
                .iter()
                .map(|gpu| gpu.pci.dns_label())
                .collect()
        });
        let pci = &gpus[index];
        if partition.is_empty() {
            format!("gpu-{pci}")
        } else {
            format!("gpu-{pci}-mig-{partition}")
        }
    }
}

/// A claim as the scheduler leaves it.
pub(crate) fn claim_object(
    name: &str,
    uid: &str,
    devices: &[&str],
    config: &Value,
) -> ResourceClaim {
    let results: Vec<Value> = devices
        .iter()
        .map(|device| {
            json!({"request": "gpu", "driver": "gpu.ai.deckhouse.io", "pool": NODE,
                   "device": device})
        })
        .collect();
    serde_json::from_value(json!({
        "metadata": {"namespace": "team", "name": name, "uid": uid},
        "spec": {"devices": {"requests": [
            {"name": "gpu", "exactly": {"deviceClassName": "mig.ai.deckhouse.io"}},
        ]}},
        "status": {"allocation": {"devices": {"results": results, "config": config}}},
    }))
    .unwrap()
}
