//! Broken topologies are refused with the place, the reason and the remedy.

use std::path::Path;

use super::*;

const H100: &str = include_str!("../../../../tests/fixtures/topologies/h100-80gb-8.yaml");

/// The refusal of the H100 topology with one text replaced.
fn refusal(from: &str, to: &str) -> String {
    assert!(H100.contains(from), "{from:?} is not in the topology");
    let text = H100.replacen(from, to, 1);
    Node::parse(Path::new("h100.yaml"), &text)
        .unwrap_err()
        .to_string()
}

/// The line of the H100 topology on which a text first stands.
fn line_of(text: &str) -> usize {
    H100.lines().position(|line| line.contains(text)).unwrap() + 1
}

#[test]
fn broken_topologies_are_refused_with_what_is_wrong_and_where() {
    // What is replaced, by what, the line's mark, and what the refusal says.
    for (from, to, mark, says) in [
        (
            "idleWatts: 70",
            "idleWats: 70",
            "idleWatts",
            "unknown field",
        ),
        (
            "computeCapability: \"9.0\"",
            "computeCapability: nine",
            "computeCap",
            "major.minor",
        ),
        (
            "0000:43:00.0",
            "0000:1b:00.0",
            "0000:43",
            "two GPUs have the PCI address 0000:1b:00.0",
        ),
        (
            "0000:43:00.0",
            "0000:43:00",
            "0000:43",
            "is not a PCI address",
        ),
        ("pci0000:37", "host37", "pci0000:37", "is not a PCIe root"),
        (
            "starts: [0, 4], size: 4",
            "starts: [0, 8], size: 4",
            "id: 9,",
            "3g.40gb of model \"h100-80gb\" is placed at 8:4",
        ),
        (
            "starts: [0, 4], size: 4",
            "starts: [0, 2], size: 4",
            "id: 9,",
            "is placed at 2:4",
        ),
        (
            "starts: [0, 4], size: 4",
            "starts: [0], size: 4",
            "id: 9,",
            "2 fit, with 1 placements",
        ),
        (
            "starts: [0, 4], size: 4",
            "starts: [0, 4], size: 3",
            "id: 9,",
            "takes 3 memory slices",
        ),
        (
            "id: 9,  nvmlProfile: 2",
            "id: 14, nvmlProfile: 2",
            "id: 9,",
            "the id or nvmlProfile of 2g.20gb",
        ),
        (
            "slices: 3, memoryMib: 40448",
            "slices: 5, memoryMib: 40448",
            "id: 9,",
            "no compute profile spans",
        ),
        (
            "to: switch }",
            "to: peers }",
            "- model: h100",
            "18 links of the model \"h100-80gb\" cannot lead to 7 peers alike",
        ),
        (
            "generation: 4, mbps",
            "generation: 9, mbps",
            "- model: h100",
            "NVLink generation 9",
        ),
        (
            "cluster: 00000000-0000",
            "cluster: 0000",
            "fabric:",
            "is not a UUID",
        ),
        (
            "memoryMib: 81152",
            "memoryMib: 99999",
            "7g.80gb",
            "more memory than the GPU",
        ),
    ] {
        let refusal = refusal(from, to);
        let place = format!("topology h100.yaml, line {}: ", line_of(mark));
        assert!(refusal.starts_with(&place), "{to}: {refusal}");
        assert!(refusal.contains(says), "{to}: {refusal}");
        assert!(refusal.contains("; "), "no remedy: {refusal}");
    }
}

#[test]
fn a_group_of_an_unknown_model_names_the_known_ones() {
    let refusal = refusal("- model: h100-80gb", "- model: h100");
    assert!(refusal.contains("the model \"h100\" is not in models; use one of h100-80gb"));
}

#[test]
fn mig_on_a_card_without_it_is_refused() {
    let t4 = include_str!("../../../../tests/fixtures/topologies/t4-1.yaml");
    let text = t4.replace("- model: t4", "- model: t4\n    migEnabled: true");
    let refusal = Node::parse(Path::new("t4.yaml"), &text)
        .unwrap_err()
        .to_string();
    assert!(
        refusal.contains("migEnabled on the model \"t4\", which has no mig"),
        "{refusal}"
    );
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let refusal = Node::read(Path::new("/nowhere/h100.yaml"))
        .unwrap_err()
        .to_string();
    assert!(
        refusal.starts_with("topology /nowhere/h100.yaml: cannot be read"),
        "{refusal}"
    );
    assert!(refusal.contains("FAKE_NVML_TOPOLOGY"), "{refusal}");
}

#[test]
fn nodes_with_different_seeds_have_different_gpus_and_one_seed_always_the_same() {
    let uuids = |seed: &str| -> Vec<String> {
        let text = H100.replace("seed: h100-80gb-8", &format!("seed: {seed}"));
        let node = Node::parse(Path::new("h100.yaml"), &text).unwrap();
        node.gpus.into_iter().map(|gpu| gpu.uuid).collect()
    };
    assert_eq!(uuids("a"), uuids("a"));
    let mut both = uuids("a");
    both.extend(uuids("b"));
    both.sort();
    both.dedup();
    assert_eq!(both.len(), 16);
}

#[test]
fn gpu_instance_ids_are_those_that_the_driver_gives() {
    let node = Node::parse(Path::new("h100.yaml"), H100).unwrap();
    let mig = node.gpus[0].model.mig.as_ref().unwrap();
    // Real `nvidia-smi mig -lgi` on an 8-slice card.
    let ones: Vec<u32> = (0..7).map(|start| mig.instance_id(start, 1)).collect();
    assert_eq!(ones, [11, 12, 13, 14, 7, 8, 9]);
    let twos: Vec<u32> = [0, 2, 4].map(|start| mig.instance_id(start, 2)).into();
    assert_eq!(twos, [5, 6, 3]);
    assert_eq!(
        (
            mig.instance_id(0, 4),
            mig.instance_id(4, 4),
            mig.instance_id(0, 8)
        ),
        (2, 1, 0)
    );
}
