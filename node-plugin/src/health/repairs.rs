//! An administrator's word that a GPU was repaired, for drivers that do not tell.
//!
//! In: the annotation of this plugin's Node. Out: GPUs and the times until which they were
//! repaired. Never: a write to the Node.
//!
//! The annotation names a time, so that it can stay: it ends the faults that began before
//! it and none that begins later.

use std::time::Duration;

use gpu::PciAddress;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};

/// `0000:65:00.0=2026-11-30T12:00:00Z`, several with commas between them.
pub const ANNOTATION: &str = "gpu.ai.deckhouse.io/repaired";

/// How long the API server may take.
const READ: Duration = Duration::from_secs(10);

/// Where the annotation is read.
#[derive(Clone)]
pub struct Repairs {
    nodes: Api<Node>,
    node: String,
}

impl Repairs {
    /// The annotation of a node.
    #[must_use]
    pub fn new(client: Client, node: &str) -> Self {
        Self {
            nodes: Api::all(client),
            node: node.to_owned(),
        }
    }

    /// What it says now; nothing where it cannot be read.
    pub(super) async fn read(&self) -> Vec<(PciAddress, i64)> {
        let node = match tokio::time::timeout(READ, self.nodes.get(&self.node)).await {
            Ok(Ok(node)) => node,
            Ok(Err(error)) => {
                tracing::warn!(%error, "The Node cannot be read for repaired GPUs.");
                return Vec::new();
            }
            Err(_) => return Vec::new(),
        };
        let annotations = node.metadata.annotations.unwrap_or_default();
        annotations
            .get(ANNOTATION)
            .map(|text| parse(text))
            .unwrap_or_default()
    }
}

fn parse(text: &str) -> Vec<(PciAddress, i64)> {
    let entries = text.split(',').map(str::trim).filter(|e| !e.is_empty());
    let read = |entry: &str| -> Option<(PciAddress, i64)> {
        let (pci, at) = entry.split_once('=')?;
        let at: jiff::Timestamp = at.trim().parse().ok()?;
        Some((pci.trim().parse().ok()?, at.as_second()))
    };
    entries
        .filter_map(|entry| {
            let read = read(entry);
            if read.is_none() {
                tracing::warn!(
                    entry,
                    "The annotation {ANNOTATION} wants <PCI address>=<RFC 3339 time>."
                );
            }
            read
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_entry_names_a_gpu_and_a_time_and_a_bad_one_spoils_no_other() {
        let text =
            "0000:65:00.0=2026-01-01T00:00:10Z, nonsense,0000:66:00.0 = 1970-01-01T00:00:01Z";
        let read = parse(text);
        assert_eq!(read.len(), 2);
        assert_eq!(read[1], ("0000:66:00.0".parse().unwrap(), 1));
        assert!(parse("").is_empty());
    }
}
