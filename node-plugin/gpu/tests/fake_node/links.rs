//! How GPUs are connected.

use gpu::{NvLinkRemote, Pcie};

use super::FakeNode;

#[test]
fn every_link_of_an_hgx_board_leads_to_a_switch_and_its_gpus_are_one_clique() {
    for (name, generation, mbps) in [
        ("h100-80gb-8", 4, 26562),
        ("h200-141gb-8", 4, 26562),
        ("b200-180gb-8", 5, 53125),
    ] {
        for gpu in FakeNode::new(name).inventory().gpus {
            assert_eq!(gpu.nvlinks.len(), 18, "{name}");
            for (number, link) in (0..).zip(&gpu.nvlinks) {
                assert_eq!(link.link, number);
                assert_eq!(link.version, Some(generation));
                assert_eq!(link.remote, NvLinkRemote::Switch);
                assert_eq!(link.mbps, mbps);
            }
            let zeros = "00000000-0000-0000-0000-000000000000";
            assert_eq!(gpu.fabric_clique, Some((zeros.into(), 0)));
        }
    }
}

#[test]
fn four_a100_are_linked_each_with_each_by_four_links() {
    let gpus = FakeNode::new("a100-80gb-4").inventory().gpus;
    for gpu in &gpus {
        assert_eq!(gpu.fabric_clique, None);
        for peer in gpus.iter().filter(|peer| peer.pci != gpu.pci) {
            let to_peer = gpu
                .nvlinks
                .iter()
                .filter(|link| link.remote == NvLinkRemote::Gpu(peer.pci));
            assert_eq!(to_peer.count(), 4, "{} to {}", gpu.pci, peer.pci);
        }
        assert_eq!(gpu.nvlinks.len(), 12);
        assert_eq!(gpu.nvlinks[0].version, Some(3));
    }
}

#[test]
fn a_bridge_joins_two_a30_and_a_t4_has_no_link() {
    let pair = FakeNode::new("a30-2").inventory().gpus;
    let remotes: Vec<_> = pair[0].nvlinks.iter().map(|link| link.remote).collect();
    assert_eq!(remotes, [NvLinkRemote::Gpu(pair[1].pci); 4]);
    let t4 = &FakeNode::new("t4-1").inventory().gpus[0];
    assert!(t4.nvlinks.is_empty());
    assert_eq!(t4.fabric_clique, None);
}

#[test]
fn memory_bandwidth_is_the_data_sheets_and_the_link_is_the_best_not_the_idle_one() {
    for (name, gb_per_second, generation) in [
        ("t4-1", 320, 3),
        ("a30-2", 933, 4),
        ("a100-80gb-4", 2039, 4),
        ("h100-80gb-8", 3352, 5),
        ("h200-141gb-8", 4916, 5),
        ("b200-180gb-8", 7672, 5),
    ] {
        let gpu = &FakeNode::new(name).inventory().gpus[0];
        let told = gpu.memory_bandwidth_mbps.unwrap();
        assert_eq!(told / 1000, gb_per_second, "{name}: {told}");
        let width = 16;
        assert_eq!(gpu.pcie, Some(Pcie { generation, width }), "{name}");
    }
}

#[test]
fn an_older_driver_tells_of_the_fabric_by_the_older_call() {
    let node = FakeNode::new("h100-80gb-8");
    // Such a driver does not know the version of the newer struct.
    node.hardware()
        .fail(None, "nvmlDeviceGetGpuFabricInfoV", Some(25))
        .unwrap();
    assert!(node.inventory().gpus[0].fabric_clique.is_some());
}

#[test]
fn a_gpu_that_is_lost_while_it_is_read_is_unreadable() {
    let node = FakeNode::new("h100-80gb-8");
    node.hardware()
        .fail(Some("0"), "nvmlDeviceGetNvLinkState", Some(15))
        .unwrap();
    let inventory = node.inventory();
    assert_eq!((inventory.gpus.len(), inventory.unreadable.len()), (7, 1));
}
