//! The devices of a node by their names.
//!
//! In: the GPUs as they were read. Out: a device as it is, or would be, published. How the GPUs
//! are connected is found once, since each prepared claim asks. Never: a call of NVML.

use std::collections::BTreeMap;
use std::ops::Deref;

use gpu::{Inventory, PciAddress};
use k8s_openapi::api::resource::v1::Device;

use super::nvlink::{self, Connected};

/// GPUs whose devices can be described.
#[derive(Debug, Clone)]
pub struct Described {
    inventory: Inventory,
    connections: BTreeMap<PciAddress, Connected>,
}

impl From<Inventory> for Described {
    fn from(inventory: Inventory) -> Self {
        let connections = nvlink::connections(&inventory.gpus);
        Self {
            inventory,
            connections,
        }
    }
}

impl Deref for Described {
    type Target = Inventory;

    fn deref(&self) -> &Inventory {
        &self.inventory
    }
}

impl Described {
    /// A device with the attributes and capacities under which it is published, without what it
    /// consumes and without what only the other instances on its GPU and the node's policies
    /// tell; `None` where the GPUs have no such device.
    #[must_use]
    pub fn device(&self, name: &str) -> Option<Device> {
        super::devices::describe(&self.inventory, &self.connections, name)
    }
}
