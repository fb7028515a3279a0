//! GPUs in memory, for tests that need very many of them for a moment.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use gpu::{
    ComputeInstance, ComputeMode, Gpu, HealthReading, Inventory, MigInstance, MigMode, PciAddress,
    Placement, Process,
};
use node_plugin::claims::hardware::{GpuEvents, Hardware, HardwareError};
use node_plugin::slices::Described;

/// The state of the GPUs, which outlives the plugin.
pub(crate) struct Double {
    state: Mutex<State>,
}

struct State {
    inventory: Inventory,
    lost: BTreeSet<PciAddress>,
    made: u64,
}

impl Double {
    /// GPUs as they are described here.
    pub(crate) fn new(inventory: Inventory) -> Arc<Self> {
        let state = State {
            inventory,
            lost: BTreeSet::new(),
            made: 0,
        };
        Arc::new(Self {
            state: Mutex::new(state),
        })
    }

    /// Loses a GPU, or finds it again.
    pub(crate) fn lose(&self, index: usize, lost: bool) {
        let mut state = self.state.lock().unwrap();
        let pci = state.inventory.gpus[index].pci;
        if lost {
            state.lost.insert(pci);
        } else {
            state.lost.remove(&pci);
        }
    }

    /// A reboot: every instance is gone and every GPU back.
    pub(crate) fn reboot(&self) {
        let mut state = self.state.lock().unwrap();
        state.lost.clear();
        for gpu in &mut state.inventory.gpus {
            gpu.instances.clear();
        }
    }

    /// The UUIDs of all instances, whatever is lost, and where they are.
    pub(crate) fn instances(&self) -> BTreeMap<String, (PciAddress, Placement)> {
        let state = self.state.lock().unwrap();
        let gpus = state.inventory.gpus.iter();
        gpus.flat_map(|gpu| {
            let instances = gpu.instances.iter();
            instances.map(|i| (i.compute_instances[0].uuid.clone(), (gpu.pci, i.placement)))
        })
        .collect()
    }
}

impl State {
    fn gpu(&mut self, pci: PciAddress) -> Result<&mut Gpu, HardwareError> {
        if self.lost.contains(&pci) {
            return Err(HardwareError::Lost(format!("{pci} is lost")));
        }
        let mut gpus = self.inventory.gpus.iter_mut();
        gpus.find(|gpu| gpu.pci == pci)
            .ok_or(HardwareError::Absent(pci))
    }
}

impl Hardware for Double {
    fn inventory(&self) -> Result<Inventory, HardwareError> {
        let state = self.state.lock().unwrap();
        let mut inventory = state.inventory.clone();
        inventory.gpus.retain(|gpu| !state.lost.contains(&gpu.pci));
        Ok(inventory)
    }

    fn gpu(&self, pci: PciAddress) -> Result<Gpu, HardwareError> {
        self.state.lock().unwrap().gpu(pci).cloned()
    }

    fn described(&self) -> Arc<Described> {
        Arc::new(self.state.lock().unwrap().inventory.clone().into())
    }

    fn create_instance(
        &self,
        pci: PciAddress,
        profile_id: u32,
        placement: Placement,
    ) -> Result<MigInstance, HardwareError> {
        let mut state = self.state.lock().unwrap();
        let made = state.made;
        let gpu = state.gpu(pci)?;
        if gpu
            .instances
            .iter()
            .any(|i| i.placement.overlaps(placement))
        {
            return Err(HardwareError::Failed(format!("{placement:?} is taken")));
        }
        gpu.mig = MigMode::Enabled { switchable: true };
        let free = (1..15).find(|id| gpu.instances.iter().all(|i| i.gpu_instance_id != *id));
        let instance = MigInstance {
            gpu_instance_id: free.unwrap(),
            profile_id,
            placement,
            compute_instances: vec![ComputeInstance {
                id: 0,
                profile_id: 0,
                uuid: format!("MIG-{made}"),
            }],
        };
        gpu.instances.push(instance.clone());
        state.made += 1;
        Ok(instance)
    }

    fn destroy_instance(&self, pci: PciAddress, id: u32) -> Result<(), HardwareError> {
        let mut state = self.state.lock().unwrap();
        let gpu = state.gpu(pci)?;
        gpu.instances.retain(|i| i.gpu_instance_id != id);
        Ok(())
    }

    fn disable_mig(&self, pci: PciAddress) -> Result<(), HardwareError> {
        let mut state = self.state.lock().unwrap();
        let gpu = state.gpu(pci)?;
        if !gpu.instances.is_empty() {
            return Err(HardwareError::Failed("there are instances".to_owned()));
        }
        gpu.mig = MigMode::Disabled { switchable: true };
        Ok(())
    }

    fn health(&self, pci: PciAddress) -> Result<HealthReading, HardwareError> {
        Err(HardwareError::Absent(pci))
    }

    fn set_compute_mode(&self, _: PciAddress, _: ComputeMode) -> Result<(), HardwareError> {
        Ok(())
    }

    fn processes(&self, _: PciAddress) -> Result<Vec<Process>, HardwareError> {
        Ok(Vec::new())
    }

    fn events(&self, _: &[PciAddress]) -> Result<Box<dyn GpuEvents>, HardwareError> {
        Err(HardwareError::Failed("there are none".to_owned()))
    }
}
