//! How GPUs are linked and how fast their memory is.
//!
//! In: a model's part of a topology file. Out: what NVML tells of links. Never: a guess
//! about a link that the file does not describe.

use serde::Deserialize;

use super::{Gpu, Node, Pci};

/// A model's memory interface.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct MemoryBus {
    /// The width in bits.
    pub bits: u32,
    /// The highest clock in MHz.
    pub mhz: u32,
}

/// The PCIe link of a model.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Pcie {
    /// The generation.
    pub generation: u32,
    /// The number of lanes.
    pub width: u32,
}

/// The NVLinks of a model, all active.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct NvLinks {
    /// How many.
    pub count: u32,
    /// The generation: 3 on Ampere, 4 on Hopper, 5 on Blackwell.
    pub generation: u32,
    /// The speed of one link in one direction, in MB/s, as the driver tells it.
    pub mbps: u32,
    /// Where they lead.
    pub to: LinkTo,
}

/// Where NVLinks lead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LinkTo {
    /// To the other GPUs of the group, as many to each.
    Peers,
    /// To `NVSwitches`.
    Switch,
}

/// The `NVSwitch` fabric that a group of GPUs has joined.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Fabric {
    /// The cluster's UUID; zeros for a fabric of one node.
    pub cluster: ClusterUuid,
    /// The clique.
    pub clique: u32,
}

/// The UUID of a cluster of NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct ClusterUuid(pub [u8; 16]);

impl TryFrom<String> for ClusterUuid {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let digits: String = text.chars().filter(|c| *c != '-').collect();
        match u128::from_str_radix(&digits, 16) {
            Ok(number) if digits.len() == 32 => Ok(Self(number.to_be_bytes())),
            _ => Err(format!(
                "{text:?} is not a UUID; write 00000000-0000-0000-0000-000000000000"
            )),
        }
    }
}

/// What is at the other end of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkEnd {
    /// Another GPU.
    Gpu(Pci),
    /// An `NVSwitch`.
    Switch,
}

impl Node {
    /// What is at the other end of a GPU's link; `None` where there is no such link.
    #[must_use]
    pub fn link_end(&self, gpu: &Gpu, link: u32) -> Option<LinkEnd> {
        let links = gpu.model.nvlink.as_ref()?;
        if link >= links.count {
            return None;
        }
        match links.to {
            LinkTo::Switch => Some(LinkEnd::Switch),
            LinkTo::Peers => {
                let peers: Vec<&Gpu> = self
                    .gpus
                    .iter()
                    .filter(|other| other.group == gpu.group && other.pci != gpu.pci)
                    .collect();
                let each = links.count / u32::try_from(peers.len()).ok().filter(|n| *n > 0)?;
                let peer = peers.get(link.checked_div(each)? as usize)?;
                Some(LinkEnd::Gpu(peer.pci))
            }
        }
    }
}
