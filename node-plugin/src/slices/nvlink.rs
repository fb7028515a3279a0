//! Which GPUs of a node reach each other over NVLink.
//!
//! In: the GPUs with their links. Out: for each GPU with NVLink its clique and how many peers
//! it has. Never: a clique in which two GPUs have no NVLink between them, directly or through
//! a switch.

use std::collections::BTreeMap;

use gpu::{Gpu, NvLinkRemote, PciAddress};

/// How a GPU is connected to the others of its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Connected {
    /// The same for GPUs of which each reaches each other.
    pub(super) clique: String,
    /// How many GPUs of the node it reaches.
    pub(super) peers: u32,
    /// All its links together in one direction, in MB/s; 0 where the driver does not tell.
    pub(super) bandwidth_mbps: u64,
}

/// The GPUs that have NVLink to another one, or to a fabric.
pub(super) fn connections(gpus: &[Gpu]) -> BTreeMap<PciAddress, Connected> {
    // Where the links alone tell: each GPU joins the first clique of which it reaches all. A
    // fabric tells itself, and may reach beyond this node.
    let mut cliques: Vec<Vec<&Gpu>> = Vec::new();
    for gpu in gpus {
        let fits = |clique: &&mut Vec<&Gpu>| clique.iter().all(|other| reaches(gpu, other));
        match cliques.iter_mut().find(fits) {
            Some(clique) => clique.push(gpu),
            None => cliques.push(vec![gpu]),
        }
    }
    let mut connected = BTreeMap::new();
    for clique in &cliques {
        for gpu in clique {
            let peers = gpus.iter().filter(|other| reaches(gpu, other)).count();
            let of_more_nodes = fabric(gpu).filter(|(cluster, _)| !is_of_one_node(cluster));
            let name = match of_more_nodes {
                Some((cluster, number)) => format!("{cluster}/{number}"),
                None if peers == 0 => continue,
                // The UUID of its first GPU, so that no other node has one of this name.
                None => clique.first().unwrap_or(gpu).uuid.clone(),
            };
            let clique = Connected {
                clique: name,
                peers: u32::try_from(peers).unwrap_or(u32::MAX),
                bandwidth_mbps: gpu.nvlinks.iter().map(|link| link.mbps).sum(),
            };
            connected.insert(gpu.pci, clique);
        }
    }
    connected
}

/// Whether two GPUs have NVLink between them.
fn reaches(a: &Gpu, b: &Gpu) -> bool {
    if a.pci == b.pci {
        return false;
    }
    let is_linked = |from: &Gpu, to: &Gpu| {
        let mut links = from.nvlinks.iter();
        links.any(|link| link.remote == NvLinkRemote::Gpu(to.pci))
    };
    let has_switch = |gpu: &Gpu| {
        let mut links = gpu.nvlinks.iter();
        links.any(|link| link.remote == NvLinkRemote::Switch)
    };
    // A fabric may be divided into cliques behind the same switches.
    match (fabric(a), fabric(b)) {
        (Some(a), Some(b)) => a == b,
        (Some(_), None) | (None, Some(_)) => false,
        (None, None) => is_linked(a, b) || is_linked(b, a) || has_switch(a) && has_switch(b),
    }
}

fn fabric(gpu: &Gpu) -> Option<(&str, u32)> {
    let (cluster, clique) = gpu.fabric_clique.as_ref()?;
    Some((cluster, *clique))
}

/// A cluster UUID of zeros is a fabric of one node, and every such node has it.
fn is_of_one_node(cluster: &str) -> bool {
    cluster.chars().all(|c| c == '0' || c == '-')
}
