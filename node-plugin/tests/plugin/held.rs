//! What claims hold stays published, whatever the node's devices become under it.

use std::collections::{BTreeMap, BTreeSet};

use gpu::PciAddress;
use node_plugin::slices::{Holding, MigPolicy, SharingKind, View, Wanted, pool};

use crate::first_fit::{FirstFit, text};
use crate::golden::shared_by;
use crate::limits::assert_within_limits;
use crate::node::TestNode;
use crate::shares::devices;

/// One GPU, shared, of which claims hold these devices.
fn one_gpu(held: &[(&str, &str, u32)]) -> Wanted {
    let mut inventory = TestNode::new("h100-80gb-8").inventory();
    inventory.gpus.truncate(1);
    let gpu = &inventory.gpus[0];
    let name = format!("gpu-{}", gpu.pci.dns_label());
    let held: BTreeMap<String, (PciAddress, Holding)> = held
        .iter()
        .map(|(device, profile, start)| {
            let profile = gpu.profiles.iter().find(|p| p.name == *profile);
            let holding = profile.map_or(Holding::Whole, |profile| Holding::Partition {
                profile_id: profile.id,
                placement: *profile
                    .placements
                    .iter()
                    .find(|at| at.start == *start)
                    .unwrap(),
            });
            (format!("{name}{device}"), (gpu.pci, holding))
        })
        .collect();
    let sharing = shared_by(SharingKind::Mps, &inventory);
    Wanted::new(inventory, BTreeSet::new())
        .shared(sharing)
        .holding(held)
}

/// The scheduler after it was told which published devices are allocated.
fn scheduler(wanted: &Wanted) -> FirstFit {
    let content = pool(wanted, View::FULL);
    assert_within_limits(&content);
    let mut scheduler = FirstFit::new(&content);
    for name in wanted.held.keys() {
        scheduler.take(|device| device.name == *name);
    }
    scheduler
}

#[test]
fn holding_a_device_that_is_offered_changes_nothing_that_is_published() {
    let with = one_gpu(&[("-mig-1g10gb-6", "1g.10gb", 6), ("-shared", "", 0)]);
    let without = one_gpu(&[]);
    assert_eq!(pool(&with, View::FULL), pool(&without, View::FULL));
}

#[test]
fn a_partition_whose_profile_has_another_name_after_an_upgrade_still_takes_its_place() {
    let mut wanted = one_gpu(&[("-mig-3g40gb-4", "3g.40gb", 4)]);
    for profile in &mut wanted.inventory.gpus[0].profiles {
        if profile.name == "3g.40gb" {
            "3g.39gb".clone_into(&mut profile.name); // As older drivers call it.
        }
    }
    let all = devices(&wanted, View::FULL);
    let old = all
        .iter()
        .find(|d| d.name.ends_with("-mig-3g40gb-4"))
        .unwrap();
    let new = all
        .iter()
        .find(|d| d.name.ends_with("-mig-3g39gb-4"))
        .unwrap();
    assert_eq!(old.consumes_counters, new.consumes_counters);
    // No new claim gets it under the old name.
    let taint = &old.taints.as_ref().unwrap()[0];
    assert_eq!(
        (taint.key.as_str(), taint.effect.as_str()),
        ("gpu.ai.deckhouse.io/withdrawn", "NoSchedule")
    );
    assert!(all.iter().filter(|d| d.taints.is_some()).count() == 1);

    let placed = |wanted: &Wanted| scheduler(wanted).take_profile("1g.10gb").unwrap();
    assert!(placed(&wanted).ends_with("-mig-1g10gb-3"));
    // What would happen: the same hardware twice.
    wanted.held.clear();
    assert!(placed(&wanted).ends_with("-mig-1g10gb-6"));
}

#[test]
fn a_share_keeps_its_gpu_from_others_after_sharing_was_switched_off() {
    let mut wanted = one_gpu(&[("-shared", "", 0)]);
    wanted.sharing.clear();
    let mut after = scheduler(&wanted);
    assert_eq!(after.take(|device| text(device, "type") != "share"), None);
    wanted.held.clear();
    assert!(
        scheduler(&wanted)
            .take(|device| text(device, "type") == "gpu")
            .is_some()
    );
}

#[test]
fn a_claims_partition_outlives_the_policy_that_created_it_until_the_claim_is_gone() {
    let mut wanted = one_gpu(&[("-mig-1g10gb-6", "1g.10gb", 6)]).under(MigPolicy::Static);
    wanted.inventory.gpus[0].mig = gpu::MigMode::Enabled { switchable: true };
    let names = |wanted: &Wanted| -> Vec<String> {
        devices(wanted, View::FULL)
            .into_iter()
            .map(|d| d.name)
            .collect()
    };
    assert_eq!(names(&wanted).len(), 1);
    assert!(names(&wanted)[0].ends_with("-mig-1g10gb-6"));
    wanted.held.clear();
    assert_eq!(names(&wanted), Vec::<String>::new());
}

#[test]
fn a_whole_gpu_that_a_claim_holds_is_not_withdrawn_for_an_administrators_instance() {
    let mut wanted = one_gpu(&[("", "", 0)]);
    let gpu = &wanted.inventory.gpus[0];
    let profile = gpu.profiles.iter().find(|p| p.name == "1g.10gb").unwrap();
    wanted.statics.insert(node_plugin::slices::StaticInstance {
        pci: gpu.pci,
        profile_id: profile.id,
        placement: profile.placements[0],
    });
    assert_eq!(scheduler(&wanted).take_profile("1g.10gb"), None);
    wanted.held.clear();
    assert!(scheduler(&wanted).take_profile("1g.10gb").is_some());
}

#[test]
fn without_counters_nothing_that_overlaps_is_published_for_a_claims_sake() {
    let mut wanted = one_gpu(&[("-shared", "", 0), ("-mig-3g39gb-4", "3g.40gb", 4)]);
    wanted.sharing.clear();
    assert_eq!(devices(&wanted, View::REDUCED).len(), 1);
}

#[tokio::test]
async fn claims_tell_what_they_hold_by_the_names_of_their_allocation() {
    let node = TestNode::new("h100-80gb-8");
    let plugin = node.plugin();
    let (whole, part) = (node.device(1, ""), node.device(0, "1g10gb-6"));
    let claim = node.claim("order", "uid-1", &[&whole, &part]);
    plugin.prepare(claim.clone()).await.unwrap();
    let looking = node.admin_claim("watch", "uid-2", &[&node.device(2, "")]);
    plugin.prepare(looking).await.unwrap();
    let held = plugin.held().await.unwrap();
    assert_eq!(
        held.keys().collect::<BTreeSet<_>>(),
        BTreeSet::from([&part, &whole])
    );
    assert_eq!(held[&whole].1, Holding::Whole);
    assert!(matches!(held[&part].1, Holding::Partition { placement, .. } if placement.start == 6));
    plugin.unprepare(claim).await.unwrap();
    assert!(plugin.held().await.unwrap().is_empty());
}
