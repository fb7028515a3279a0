//! MIG instances of administrators beside those of claims, under both policies.

use std::collections::BTreeSet;

use gpu::{Inventory, MigMode};
use node_plugin::claims::hardware::Hardware;
use node_plugin::slices::{MigPolicy, StaticInstance, View, Wanted, not_offered};

use crate::golden::with_statics;
use crate::node::TestNode;
use crate::shares::devices;

fn names(wanted: &Wanted) -> Vec<String> {
    let devices = devices(wanted, View::FULL);
    devices.into_iter().map(|device| device.name).collect()
}

/// Of the first GPU only.
fn first(wanted: &mut Wanted) {
    wanted.inventory.gpus.truncate(1);
}

#[test]
fn under_the_static_policy_what_exists_is_offered_and_nothing_else_of_that_gpu() {
    let mut wanted = with_statics("h100-80gb-8", &[("2g.20gb", 0), ("1g.10gb", 6)]);
    wanted = wanted.under(MigPolicy::Static);
    let gpus = &wanted.inventory.gpus;
    let label = format!("gpu-{}", gpus[0].pci.dns_label());
    let names = names(&wanted);
    let of_first: Vec<&str> = names
        .iter()
        .filter_map(|n| n.strip_prefix(&label))
        .collect();
    let want = [
        "-mig-1g10gb-6",
        "-mig-2g20gb-0",
        "-mig-1g10gb-6-shared",
        "-mig-2g20gb-0-shared",
    ];
    assert_eq!(of_first, want);
    // The others have MIG mode off, and stay whole.
    assert_eq!(names.len(), 4 + 7 * 2);
    assert!(not_offered(&wanted).is_empty());
}

#[test]
fn a_gpu_with_mig_mode_on_and_nothing_in_it_is_named_with_what_to_do() {
    let mut wanted = with_statics("a30-2", &[]).under(MigPolicy::Static);
    first(&mut wanted);
    assert_eq!(names(&wanted), Vec::<String>::new());
    let told = not_offered(&wanted);
    assert_eq!(told.len(), 1);
    assert!(
        told[0].contains(&wanted.inventory.gpus[0].pci.to_string()),
        "{told:?}"
    );
    assert!(told[0].contains("-cgi"), "{told:?}");
}

/// The first GPU's only instance, an administrator's, with other compute instances.
fn with_compute_instances(change: impl Fn(&mut Vec<gpu::ComputeInstance>)) -> Wanted {
    let mut wanted = with_statics("h100-80gb-8", &[("2g.20gb", 0)]);
    first(&mut wanted);
    change(&mut wanted.inventory.gpus[0].instances[0].compute_instances);
    wanted
}

#[test]
fn a_gpu_instance_without_one_spanning_compute_instance_is_not_offered_and_is_named() {
    let whole = names(&with_compute_instances(|_| ()));
    assert!(whole.iter().any(|name| name.ends_with("-mig-2g20gb-0")));
    let none: fn(&mut Vec<gpu::ComputeInstance>) = Vec::clear;
    let two: fn(&mut Vec<gpu::ComputeInstance>) = |all| all.push(all[0].clone());
    let small: fn(&mut Vec<gpu::ComputeInstance>) = |all| all[0].profile_id = 0;
    for (change, problem) in [
        (none, "has no compute instance"),
        (two, "is divided into 2 compute instances"),
        (small, "does not span it"),
    ] {
        let wanted = with_compute_instances(change);
        let names = names(&wanted);
        // Neither itself nor anything over it, nor its shared device, nor the whole GPU.
        let over = |n: &&String| {
            n.ends_with("2g20gb-0") || n.ends_with("1g10gb-0") || n.ends_with("shared")
        };
        assert_eq!(names.iter().find(over), None, "{problem}");
        assert!(names.iter().any(|name| name.ends_with("-mig-3g40gb-4")));
        assert_eq!(names.len(), whole.len() - 2);
        let told = not_offered(&wanted);
        assert!(told.len() == 1 && told[0].contains(problem), "{told:?}");
        let gpu = &wanted.inventory.gpus[0];
        let id = gpu.instances[0].gpu_instance_id;
        assert!(told[0].contains(&gpu.pci.to_string()), "{told:?}");
        assert!(
            told[0].contains(&format!("GPU instance {id} (2g.20gb at 0)")),
            "{told:?}"
        );
        assert!(told[0].contains("-dgi"), "{told:?}");
    }
}

#[test]
fn an_instance_of_a_profile_that_is_not_listed_is_named_and_its_place_is_not_offered() {
    let mut wanted = with_statics("h100-80gb-8", &[("2g.20gb", 0)]);
    first(&mut wanted);
    let mut instance = *wanted.statics.first().unwrap();
    instance.profile_id = 99;
    wanted.statics = BTreeSet::from([instance]);
    wanted.inventory.gpus[0].instances[0].profile_id = 99;
    assert!(
        !names(&wanted)
            .iter()
            .any(|n| n.ends_with("2g20gb-0") || n.ends_with("1g10gb-1"))
    );
    let told = not_offered(&wanted);
    assert!(
        told.len() == 1 && told[0].contains("profile 99"),
        "{told:?}"
    );
}

#[test]
fn media_engines_that_an_administrators_instance_holds_are_not_offered_a_second_time() {
    let mut wanted = with_statics("h100-80gb-8", &[("1g.10gb+me", 6)]);
    first(&mut wanted);
    let with_media: Vec<String> = names(&wanted)
        .into_iter()
        .filter(|n| n.contains("-me-"))
        .collect();
    assert_eq!(with_media.len(), 2, "{with_media:?}");
    assert!(with_media.iter().all(|n| n.contains("1g10gb-me-6")));
}

#[test]
fn the_layout_of_administrators_is_an_attribute_and_that_of_claims_is_not() {
    let wanted = with_statics(
        "h100-80gb-8",
        &[("2g.20gb", 0), ("1g.10gb", 6), ("1g.10gb", 5)],
    );
    let layout = |device: &k8s_openapi::api::resource::v1::Device| {
        crate::first_fit::text(device, "migLayout").to_owned()
    };
    let label = wanted.inventory.gpus[0].pci.dns_label();
    for device in devices(&wanted, View::FULL) {
        let want = if device.name.contains(&label) {
            "1g.10gb@5,6 2g.20gb@0"
        } else {
            ""
        };
        assert_eq!(layout(&device), want, "{}", device.name);
    }
    let mut of_claims = wanted;
    of_claims.statics.clear();
    assert!(
        devices(&of_claims, View::FULL)
            .iter()
            .all(|device| layout(device).is_empty())
    );
}

#[test]
fn the_static_policy_never_creates_an_instance_and_never_switches_the_mode() {
    let node = TestNode::new("h100-80gb-8");
    let dynamic = node.hardware();
    let fixed = node.hardware_under(MigPolicy::Static);
    let mode = |inventory: &Inventory, index: usize| inventory.gpus[index].mig;
    let gpus = dynamic.inventory().unwrap().gpus;
    let profile = &gpus[0].profiles[0];
    let at = profile.placements[0];
    let error = fixed
        .create_instance(gpus[0].pci, profile.id, at)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("--mig-mode=static") && error.contains("-cgi"),
        "{error}"
    );
    fixed.disable_mig(gpus[0].pci).unwrap(); // It is off.
    let off = MigMode::Disabled { switchable: true };
    assert_eq!(mode(&fixed.inventory().unwrap(), 0), off);

    // An administrator turns it on: it stays on, and an instance of before is still destroyed.
    let made = dynamic
        .create_instance(gpus[0].pci, profile.id, at)
        .unwrap();
    let error = fixed.disable_mig(gpus[0].pci).unwrap_err().to_string();
    assert!(error.contains("--mig-mode=static"), "{error}");
    fixed
        .destroy_instance(gpus[0].pci, made.gpu_instance_id)
        .unwrap();
    assert_ne!(mode(&fixed.inventory().unwrap(), 0), off);
    assert_eq!(node.instances(), 0);
}

#[tokio::test]
async fn a_claim_of_an_administrators_instance_neither_repairs_nor_creates_what_is_not_its_own() {
    let node = TestNode::new("h100-80gb-8");
    let (pci, made) = node.make_instance("2g.20gb", 0);
    let plugin = node.plugin();
    let claim = node.claim("order", "uid-1", &[&node.device(0, "2g20gb-0")]);
    plugin.prepare(claim.clone()).await.unwrap();
    assert_eq!(node.instances(), 1);

    // The administrator takes it away under the claim, as a reboot would.
    node.hardware()
        .destroy_instance(pci, made.gpu_instance_id)
        .unwrap();
    let error = plugin.prepare(claim.clone()).await.unwrap_err().to_string();
    assert!(
        error.contains("no claim created") && error.contains("is gone"),
        "{error}"
    );
    assert_eq!(node.instances(), 0, "nobody would destroy it");

    // And puts it back.
    node.make_instance("2g.20gb", 0);
    plugin.prepare(claim.clone()).await.unwrap();
    plugin.unprepare(claim).await.unwrap();
    assert_eq!(node.instances(), 1);
    assert_eq!(
        plugin.inventory(node.hardware()).await.unwrap().1,
        BTreeSet::from([StaticInstance {
            pci,
            profile_id: made.profile_id,
            placement: made.placement
        }])
    );
}
