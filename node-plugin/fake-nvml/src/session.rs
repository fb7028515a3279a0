//! The loaded library: what `nvmlInit` makes and `nvmlShutdown` drops.
//!
//! In: environment and the library's own path. Out: a [`Session`] for each call,
//! or NVML's code for why there is none. Never: a pointer of a caller.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nvml_wrapper_sys::bindings as sys;

use crate::call::Call;
use crate::state::{GpuState, State, Store};
use crate::topology::{Gpu, Mig, Node};

/// A return code other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) sys::nvmlReturn_t);

macro_rules! codes {
    ($($name:ident = $value:ident;)*) => {
        impl Code { $(pub(crate) const $name: Self = Self(sys::$value);)* }
    };
}

codes! {
    UNINITIALIZED = nvmlReturn_enum_NVML_ERROR_UNINITIALIZED;
    INVALID_ARGUMENT = nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
    NOT_SUPPORTED = nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;
    NOT_FOUND = nvmlReturn_enum_NVML_ERROR_NOT_FOUND;
    INSUFFICIENT_SIZE = nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE;
    DRIVER_NOT_LOADED = nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED;
    GPU_IS_LOST = nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST;
    TIMEOUT = nvmlReturn_enum_NVML_ERROR_TIMEOUT;
    RESET_REQUIRED = nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED;
    IN_USE = nvmlReturn_enum_NVML_ERROR_IN_USE;
    INSUFFICIENT_RESOURCES = nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES;
    VERSION_MISMATCH = nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    UNKNOWN = nvmlReturn_enum_NVML_ERROR_UNKNOWN;
}

/// The node that this process sees.
pub(crate) struct Session {
    /// What never changes.
    pub(crate) node: Node,
    /// What does.
    pub(crate) store: Store,
}

impl Session {
    /// A GPU by NVML's index.
    pub(crate) fn gpu(&self, index: u32) -> Result<&Gpu, Code> {
        self.node
            .gpus
            .get(index as usize)
            .ok_or(Code::INVALID_ARGUMENT)
    }

    /// A GPU's MIG tables.
    pub(crate) fn mig(&self, index: u32) -> Result<(&Gpu, &Mig), Code> {
        let gpu = self.gpu(index)?;
        gpu.model
            .mig
            .as_ref()
            .map(|mig| (gpu, mig))
            .ok_or(Code::NOT_SUPPORTED)
    }

    /// A GPU's state now.
    pub(crate) fn state(&self, gpu: &Gpu) -> Result<GpuState, Code> {
        let state = self.store.read(&self.node)?;
        state.gpus.get(&gpu.uuid).cloned().ok_or(Code::UNKNOWN)
    }

    /// Changes a GPU's state. The second argument of `change` counts compute instances.
    pub(crate) fn update<T>(
        &self,
        gpu: &Gpu,
        change: impl FnOnce(&mut GpuState, &mut u64) -> Result<T, Code>,
    ) -> Result<T, Code> {
        self.store.update(&self.node, |state: &mut State| {
            let State { gpus, created, .. } = state;
            let state = gpus.get_mut(&gpu.uuid).ok_or(Code::UNKNOWN)?;
            change(state, created)
        })
    }
}

struct Loaded {
    users: u32,
    session: Option<Arc<Session>>,
}

static LOADED: Mutex<Loaded> = Mutex::new(Loaded {
    users: 0,
    session: None,
});

/// `nvmlInit`: counts its callers; the first one loads the topology.
pub(crate) fn init(function: &'static str) -> Result<(), Code> {
    // Loaded and delayed outside the lock, which every other call needs.
    let session = match current() {
        Ok(session) => session,
        Err(_) => Arc::new(load()?),
    };
    Call::begin(Arc::clone(&session), function)?.end();
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    loaded.session.get_or_insert(session);
    loaded.users += 1;
    Ok(())
}

/// `nvmlShutdown`: the last caller drops the topology.
pub(crate) fn shutdown() -> Result<(), Code> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    loaded.users = loaded.users.checked_sub(1).ok_or(Code::UNINITIALIZED)?;
    if loaded.users == 0 {
        loaded.session = None;
    }
    Ok(())
}

/// The session of the callers so far.
pub(crate) fn current() -> Result<Arc<Session>, Code> {
    let loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    loaded.session.clone().ok_or(Code::UNINITIALIZED)
}

fn load() -> Result<Session, Code> {
    let named = std::env::var_os("FAKE_NVML_TOPOLOGY").map(PathBuf::from);
    let root = crate::abi::library_path()
        .and_then(|path| Some(path.parent()?.parent()?.to_owned()))
        .filter(|root| root.join("topology.yaml").exists());
    let topology = match (named, &root) {
        (Some(named), _) => named,
        (None, Some(root)) => root.join("topology.yaml"),
        (None, None) => {
            complain(
                "there is no topology: FAKE_NVML_TOPOLOGY is unset and no topology.yaml is in \
                 the folder above the library's; set FAKE_NVML_TOPOLOGY to a topology file",
            );
            return Err(Code::DRIVER_NOT_LOADED);
        }
    };
    let node = Node::read(&topology).map_err(|error| {
        complain(&error.to_string());
        Code::UNKNOWN
    })?;
    let state = std::env::var_os("FAKE_NVML_STATE")
        .map(PathBuf::from)
        .or_else(|| {
            let root = root.filter(|root| same_file(&root.join("topology.yaml"), &topology))?;
            Some(root.join("state.json"))
        });
    let store = state.map_or_else(|| Store::Memory(Mutex::default()), Store::file);
    // An unusable state file is found here, not at the first MIG call.
    store.read(&node)?;
    Ok(Session { node, store })
}

fn same_file(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Says a reason on stderr, the only channel that NVML's codes leave; each reason once.
pub(crate) fn complain(reason: &str) {
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if !said.iter().any(|earlier| earlier == reason) {
        eprintln!("fake-nvml: {reason}");
        said.push(reason.to_owned());
    }
}
