//! The slices of each topology, as people can read them and as the API server took them.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::ResourceSlice;
use node_plugin::slices::{View, Wanted, pool, resource_slice};

use crate::node::{NODE, TestNode, repository, topologies};

/// The slices that a node of a topology publishes at first.
pub(crate) fn slices(topology: &str) -> Vec<ResourceSlice> {
    let inventory = TestNode::new(topology).inventory();
    let content = pool(&Wanted::new(inventory, BTreeSet::new()), View::Full);
    content
        .iter()
        .enumerate()
        .map(|(index, slice)| resource_slice(slice, NODE, None, index, content.len(), 1))
        .collect()
}

/// `UPDATE_GOLDEN=1` writes the files anew; then look at the difference.
#[test]
fn the_slices_of_every_topology_are_the_golden_ones() {
    let folder = repository().join("tests/golden/slices");
    let update = std::env::var_os("UPDATE_GOLDEN").is_some();
    assert!(!topologies().is_empty());
    for topology in topologies() {
        let documents = slices(&topology).into_iter().map(|slice| {
            let yaml = serde_saphyr::to_string(&slice).unwrap();
            format!("---\n{}\n", yaml.trim_end())
        });
        let head = "# Written by UPDATE_GOLDEN=1 cargo test -p node-plugin golden; do not edit.\n";
        let text = head.to_owned() + &documents.collect::<String>();
        let path = folder.join(&topology).with_extension("yaml");
        if update {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, text).unwrap();
            continue;
        }
        let golden = std::fs::read_to_string(&path).unwrap_or_default();
        let difference = golden.lines().zip(text.lines()).position(|(a, b)| a != b);
        assert!(
            golden == text,
            "{} is stale, first at line {:?}; see UPDATE_GOLDEN",
            path.display(),
            difference.map(|line| line + 1)
        );
    }
}
