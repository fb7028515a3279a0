//! A node for tests: a fake driver root, folders, and claims in memory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use fake_nvml::node::{self as fake, DeviceNodes};
use futures::FutureExt;
use futures::future::BoxFuture;
use gpu::{ComputeMode, Gpus, Inventory, Library, MigInstance, PciAddress, Placement, Roots};
use k8s_openapi::api::resource::v1::ResourceClaim;
use node_plugin::claims::checkpoint::{Checkpoints, ClaimRef, Stage, Target};
use node_plugin::claims::core::{Step, StepHook};
use node_plugin::claims::hardware::{Hardware, NvmlGpus};
use node_plugin::claims::{ClaimSource, Claims, Loaded, Settings, cdi, driver, sharing};
use node_plugin::slices::MigPolicy;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::watch;

/// The name of the node and of its pool.
pub(crate) const NODE: &str = "worker-7";

/// The executable that MPS daemons are launched through.
pub(crate) const LAUNCHER: &str = env!("CARGO_BIN_EXE_node-plugin");

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

impl MemoryClaims {
    pub(crate) fn put(&self, name: &str, object: ResourceClaim) {
        let key = ("team".to_owned(), name.to_owned());
        self.claims.lock().unwrap().insert(key, object);
    }

    pub(crate) fn delete(&self, name: &str) {
        let key = ("team".to_owned(), name.to_owned());
        self.claims.lock().unwrap().remove(&key);
    }
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

/// Dies at a step, as far as a test can without a process of its own: nothing after it
/// runs, locks are freed. `killed` does it in earnest.
pub(crate) fn dies_at(step: Step) -> StepHook {
    Arc::new(move |reached| assert!(reached != step, "the process dies here"))
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
        let topology = repository()
            .join("tests/fixtures/topologies")
            .join(topology)
            .with_extension("yaml");
        Self::of(&topology)
    }

    /// A node with so many H100s: fewer are quicker to read.
    pub(crate) fn with_gpus(count: usize) -> Self {
        let eight = repository().join("tests/fixtures/topologies/h100-80gb-8.yaml");
        let mut left = count;
        let text = std::fs::read_to_string(eight).unwrap();
        let lines = text.lines().filter(|line| {
            let is_gpu = line.trim_start().starts_with("- { pci:");
            let kept = !is_gpu || left > 0;
            left -= usize::from(is_gpu && kept);
            kept
        });
        let lines: Vec<&str> = lines.collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), lines.join("\n")).unwrap();
        Self::of(file.path())
    }

    fn of(topology: &Path) -> Self {
        let folder = tempfile::Builder::new().prefix("np").tempdir().unwrap();
        let library = library();
        let root = folder.path().join("driver");
        fake::build(topology, &root, library, Some(NODE), DeviceNodes::Files).unwrap();
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
        hardware_at(self.folder.path(), mig)
    }

    /// Makes an instance on the first GPU as an administrator does: of this profile, at its
    /// nth placement.
    pub(crate) fn make_instance(&self, profile: &str, nth: usize) -> (PciAddress, MigInstance) {
        let hardware = self.hardware();
        let gpu = hardware.inventory().unwrap().gpus.remove(0);
        let profile = gpu.profiles.iter().find(|p| p.name == profile).unwrap();
        let at = profile.placements[nth];
        let made = hardware.create_instance(gpu.pci, profile.id, at).unwrap();
        (gpu.pci, made)
    }

    /// What happens to the GPUs by itself.
    pub(crate) fn control(&self) -> fake_nvml::control::Hardware {
        fake_nvml::control::Hardware::of(&self.path("driver")).unwrap()
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
        settings_at(self.folder.path())
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

    /// An instance that hears of the GPUs in its own time.
    pub(crate) fn plugin_on(&self, loaded: watch::Receiver<Option<Loaded>>) -> Claims {
        let after = Arc::new(|_| ());
        Claims::open(self.settings(), self.claims.clone(), loaded, after).unwrap()
    }

    /// An instance with other settings.
    pub(crate) fn plugin_with(&self, settings: Settings) -> Claims {
        let (_sender, receiver) = watch::channel(Some(self.loaded()));
        let after = Arc::new(|_| ());
        Claims::open(settings, self.claims.clone(), receiver, after).unwrap()
    }

    pub(crate) fn loaded(&self) -> Loaded {
        loaded_at(self.folder.path())
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

    /// Puts a claim object there.
    pub(crate) fn put(&self, name: &str, uid: &str, object: ResourceClaim) -> ClaimRef {
        self.claims.put(name, object);
        ClaimRef {
            namespace: "team".to_owned(),
            name: name.to_owned(),
            uid: uid.to_owned(),
        }
    }

    pub(crate) fn delete_claim(&self, name: &str) {
        self.claims.delete(name);
    }

    /// A claim as the API server has it.
    pub(crate) fn object(&self, name: &str) -> ResourceClaim {
        let claims = self.claims.claims.lock().unwrap();
        claims[&("team".to_owned(), name.to_owned())].clone()
    }

    /// The names in a folder, in order.
    pub(crate) fn names(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(folder)).into_iter().flatten();
        let mut names: Vec<String> = entries
            .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// Holds checkpoint, hardware, CDI files, metadata files and the API server's
    /// allocations against each other: exactly these claims are prepared.
    #[track_caller]
    pub(crate) fn agrees(&self, claims: &[&ClaimRef]) {
        let mut uids: Vec<&str> = claims.iter().map(|claim| claim.uid.as_str()).collect();
        uids.sort_unstable();
        let files = |prefix: &str, suffix: &str| -> Vec<String> {
            let names = uids.iter().map(|uid| format!("{prefix}{uid}{suffix}"));
            names.collect()
        };
        assert_eq!(self.names("plugin/claims"), files("", ".json"), "records");
        let prefix = "gpu.ai.deckhouse.io-claim_";
        assert_eq!(self.names("cdi"), files(prefix, ".json"), "CDI files");
        let metadata = self.names("plugin/dra-device-metadata");
        assert_eq!(metadata, files("", ""), "metadata files");

        let records = Checkpoints::open(self.path("plugin/claims")).unwrap();
        let records = records.all().unwrap();
        assert!(records.unreadable.is_empty(), "{:?}", records.unreadable);
        let mut recorded = Vec::new();
        for record in &records.records {
            assert_eq!(record.stage, Stage::PrepareCompleted);
            let object = self.object(&record.claim.name);
            let allocation = object.status.unwrap().allocation.unwrap().devices.unwrap();
            let allocated = allocation.results.unwrap();
            let allocated: Vec<&str> = allocated.iter().map(|r| r.device.as_str()).collect();
            let devices = record.devices.iter();
            assert_eq!(
                devices.map(|d| d.device.as_str()).collect::<Vec<_>>(),
                allocated
            );
            for device in &record.devices {
                if let Target::Partition {
                    pci,
                    profile_id,
                    placement,
                    instance,
                    ..
                } = &device.target
                {
                    let ids = instance.clone().unwrap();
                    recorded.push((
                        *pci,
                        *profile_id,
                        *placement,
                        ids.gpu_instance,
                        vec![ids.uuid],
                    ));
                }
            }
        }
        let inventory = self.inventory();
        let mut existing = Vec::new();
        for gpu in &inventory.gpus {
            existing.extend(gpu.instances.iter().map(|i| {
                let uuids = i.compute_instances.iter().map(|c| c.uuid.clone()).collect();
                (gpu.pci, i.profile_id, i.placement, i.gpu_instance_id, uuids)
            }));
        }
        let order = |of: &mut Vec<(PciAddress, u32, Placement, u32, Vec<String>)>| {
            of.sort_by_key(|(pci, _, at, ..)| (*pci, at.start));
        };
        if claims.is_empty() {
            assert_eq!(self.names("mps"), Vec::<String>::new(), "MPS daemons");
            let modes = inventory.gpus.iter().map(|gpu| gpu.compute_mode);
            assert!(modes.into_iter().all(|mode| mode == ComputeMode::Default));
        }
        order(&mut recorded);
        order(&mut existing);
        assert_eq!(existing, recorded, "MIG instances");
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

    /// The device name of a GPU, or of a partition of it.
    pub(crate) fn device_of(&self, gpu: &gpu::Gpu, partition: &str) -> String {
        let whole = format!("gpu-{}", gpu.pci.dns_label());
        if partition.is_empty() {
            whole
        } else {
            format!("{whole}-mig-{partition}")
        }
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

/// The GPUs of the node in this folder.
fn hardware_at(folder: &Path, mig: MigPolicy) -> Arc<NvmlGpus> {
    let root = folder.join("driver");
    let gpus = Gpus::open(&Library::InDriverRoot(root.clone())).unwrap();
    let roots = Roots {
        proc: root.join("proc"),
        sys: root.join("sys"),
    };
    Arc::new(NvmlGpus::new(gpus, roots).under(mig))
}

/// The same as claims get them.
pub(crate) fn loaded_at(folder: &Path) -> Loaded {
    let hardware = hardware_at(folder, MigPolicy::Dynamic);
    let driver_version = hardware.inventory().unwrap().driver_version;
    Loaded {
        hardware,
        driver_version,
    }
}

/// Where the claims of the node in this folder keep their state.
pub(crate) fn settings_at(folder: &Path) -> Settings {
    let root = folder.join("driver");
    Settings {
        node: NODE.to_owned(),
        folder: folder.join("plugin"),
        cdi: folder.join("cdi"),
        roots: driver::Roots {
            host_driver: root.clone(),
            dev: root.join("dev"),
            proc: root.join("proc"),
            driver: root,
        },
        sharing: sharing::Settings {
            policy: sharing::Policy::Auto,
            folder: folder.join("mps"),
            launcher: LAUNCHER.into(),
            cgroups: None,
            reports: None,
        },
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
