//! Which writes turn the slices that exist into the slices that should.
//!
//! In: the wanted pool, the node's slices as the API server has them, and the highest
//! generation ever seen. Out: writes in order. Never: a write when nothing differs.
//!
//! A consumer uses only the highest generation of a pool and only when all its
//! slices are there, so a change of several slices, or of their number, bumps the
//! generation and is invisible until it is complete. A change of one slice is atomic
//! by itself and keeps it, as does putting back slices that vanished. So does a change of
//! taints in any number of slices: each is right whether the others are written yet or not,
//! nothing is allocated from the pool while a new generation is written, and a fault
//! should reach the scheduler with as few writes as there are slices that it concerns.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{DeviceTaint, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::SliceContent;
use super::layout::{resource_slice, slice_name};

/// One write to the API server.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// Delete a slice that no longer belongs to the pool.
    Delete(String),
    /// Create or update a slice.
    Apply(Box<ResourceSlice>),
}

/// Plans the writes: obsolete slices go first, then updates and creations by index.
#[must_use]
pub fn plan_writes(
    wanted: &[SliceContent],
    observed: &BTreeMap<String, ResourceSlice>,
    node: &str,
    owner: Option<&OwnerReference>,
    last_generation: i64,
) -> Vec<Write> {
    let names: Vec<String> = (0..wanted.len())
        .map(|index| slice_name(node, index))
        .collect();
    let obsolete: Vec<&String> = observed
        .keys()
        .filter(|name| !names.contains(name))
        .collect();
    let seen = observed
        .values()
        .map(|s| s.spec.pool.generation)
        .max()
        .unwrap_or(0);
    let generation = seen.max(last_generation).max(1);

    let at = |generation: i64| -> Vec<(ResourceSlice, Option<&ResourceSlice>)> {
        wanted
            .iter()
            .enumerate()
            .map(|(index, content)| {
                let slice = resource_slice(content, node, owner, index, wanted.len(), generation);
                let existing = observed.get(&names[index]);
                (keep_time_added(slice, existing), existing)
            })
            .collect()
    };
    let current = at(generation);
    let changed = current
        .iter()
        .filter(|(slice, existing)| existing.is_some_and(|e| !same(slice, e)));
    let changed = changed.count();
    let missing = current
        .iter()
        .filter(|(_, existing)| existing.is_none())
        .count();
    if changed == 0 && missing == 0 && obsolete.is_empty() {
        return Vec::new();
    }

    let first_publication = observed.is_empty();
    let reshaped = current
        .iter()
        .filter(|(slice, existing)| existing.is_some_and(|e| !same_but_taints(slice, e)));
    let reshaped = reshaped.count();
    let keeps_generation = obsolete.is_empty() && (reshaped + missing <= 1 || reshaped == 0)
        || first_publication && last_generation == 0;
    let slices = if keeps_generation {
        current
    } else {
        at(generation + 1)
    };
    let applies = slices
        .into_iter()
        .filter(|(slice, existing)| !existing.is_some_and(|e| same(slice, e)))
        .map(|(slice, _)| Write::Apply(Box::new(slice)));
    obsolete
        .into_iter()
        .map(|name| Write::Delete(name.clone()))
        .chain(applies)
        .collect()
}

/// Whether the API server already has a slice as it is wanted.
fn same(wanted: &ResourceSlice, existing: &ResourceSlice) -> bool {
    let owners = |slice: &ResourceSlice| slice.metadata.owner_references.clone();
    wanted.spec == existing.spec && owners(wanted) == owners(existing)
}

/// The same but for the taints of the devices and who owns the slice.
fn same_but_taints(wanted: &ResourceSlice, existing: &ResourceSlice) -> bool {
    let bare = |slice: &ResourceSlice| {
        let mut spec = slice.spec.clone();
        for device in spec.devices.iter_mut().flatten() {
            device.taints = None;
        }
        spec
    };
    bare(wanted) == bare(existing)
}

/// Carries `timeAdded` of taints over, where a taint that is there already has another
/// one: a time that moves starts the eviction timer anew.
fn keep_time_added(mut wanted: ResourceSlice, existing: Option<&ResourceSlice>) -> ResourceSlice {
    let Some(known) = existing.and_then(|slice| slice.spec.devices.as_ref()) else {
        return wanted;
    };
    let same_taint = |a: &DeviceTaint, b: &DeviceTaint| {
        a.key == b.key && a.value == b.value && a.effect == b.effect
    };
    for device in wanted.spec.devices.iter_mut().flatten() {
        let before = known
            .iter()
            .find(|d| d.name == device.name)
            .and_then(|d| d.taints.as_ref());
        for taint in device.taints.iter_mut().flatten() {
            let before = before.and_then(|taints| taints.iter().find(|t| same_taint(t, taint)));
            if let Some(before) = before {
                taint.time_added.clone_from(&before.time_added);
            }
        }
    }
    wanted
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::resource::v1::Device;

    use super::*;

    fn devices(names: &[&str]) -> SliceContent {
        SliceContent::Devices(
            names
                .iter()
                .map(|n| Device {
                    name: (*n).to_owned(),
                    ..Device::default()
                })
                .collect(),
        )
    }

    fn apply(writes: &[Write], observed: &mut BTreeMap<String, ResourceSlice>) {
        for write in writes {
            match write {
                Write::Delete(name) => drop(observed.remove(name)),
                Write::Apply(slice) => {
                    let name = slice.metadata.name.clone().unwrap_or_default();
                    observed.insert(name, (**slice).clone());
                }
            }
        }
    }

    fn generations(observed: &BTreeMap<String, ResourceSlice>) -> Vec<i64> {
        observed.values().map(|s| s.spec.pool.generation).collect()
    }

    #[test]
    fn an_unchanged_world_is_not_written() {
        let wanted = [devices(&["a"]), devices(&["b"])];
        let mut observed = BTreeMap::new();
        let first = plan_writes(&wanted, &observed, "node", None, 0);
        assert_eq!(first.len(), 2);
        apply(&first, &mut observed);
        assert_eq!(plan_writes(&wanted, &observed, "node", None, 1), Vec::new());
        assert_eq!(generations(&observed), [1, 1]);
    }

    #[test]
    fn one_changed_slice_keeps_the_generation_and_two_bump_it() {
        let mut observed = BTreeMap::new();
        apply(
            &plan_writes(
                &[devices(&["a"]), devices(&["b"])],
                &observed,
                "node",
                None,
                0,
            ),
            &mut observed,
        );
        let one = plan_writes(
            &[devices(&["a"]), devices(&["c"])],
            &observed,
            "node",
            None,
            1,
        );
        assert_eq!(one.len(), 1);
        apply(&one, &mut observed);
        assert_eq!(generations(&observed), [1, 1]);
        let two = plan_writes(
            &[devices(&["d"]), devices(&["e"])],
            &observed,
            "node",
            None,
            1,
        );
        apply(&two, &mut observed);
        assert_eq!(generations(&observed), [2, 2]);
    }

    #[test]
    fn taints_in_several_slices_are_one_write_each_in_the_same_generation() {
        let tainted = |name: &str| {
            let SliceContent::Devices(mut all) = devices(&[name]) else {
                unreachable!()
            };
            all[0].taints = Some(vec![DeviceTaint {
                key: "gpu.ai.deckhouse.io/lost".to_owned(),
                effect: "NoExecute".to_owned(),
                ..DeviceTaint::default()
            }]);
            SliceContent::Devices(all)
        };
        let mut observed = BTreeMap::new();
        let well = ["a", "b", "c"].map(|name| devices(&[name]));
        let first = plan_writes(&well, &observed, "node", None, 0);
        apply(&first, &mut observed);
        let ill = [tainted("a"), tainted("b"), devices(&["c"])];
        let writes = plan_writes(&ill, &observed, "node", None, 1);
        assert_eq!(writes.len(), 2);
        apply(&writes, &mut observed);
        assert_eq!(generations(&observed), [1, 1, 1]);
        // Together with another name in one slice too; with two it is a new generation.
        let other = [devices(&["a"]), devices(&["b"]), devices(&["d"])];
        let writes = plan_writes(&other, &observed, "node", None, 1);
        apply(&writes, &mut observed);
        assert_eq!((writes.len(), generations(&observed)), (3, vec![1, 1, 1]));
        let more = [tainted("a"), devices(&["e"]), devices(&["f"])];
        let writes = plan_writes(&more, &observed, "node", None, 1);
        apply(&writes, &mut observed);
        assert_eq!((writes.len(), generations(&observed)), (3, vec![2, 2, 2]));
    }

    #[test]
    fn a_pool_that_a_crash_left_between_two_generations_is_finished_in_a_new_one() {
        let mut observed = BTreeMap::new();
        let before = [devices(&["a"]), devices(&["b"])];
        apply(
            &plan_writes(&before, &observed, "node", None, 0),
            &mut observed,
        );
        let after = [devices(&["c"]), devices(&["d"])];
        let writes = plan_writes(&after, &observed, "node", None, 1);
        apply(&writes[..1], &mut observed);
        assert_eq!(generations(&observed), [2, 1]);
        let writes = plan_writes(&after, &observed, "node", None, 0);
        apply(&writes, &mut observed);
        let generations = generations(&observed);
        assert_eq!(generations[0], generations[1]);
        assert_eq!(plan_writes(&after, &observed, "node", None, 0), Vec::new());
    }

    #[test]
    fn obsolete_slices_are_deleted_first_and_the_rest_moves_to_a_new_generation() {
        let mut observed = BTreeMap::new();
        apply(
            &plan_writes(
                &[devices(&["a"]), devices(&["b"])],
                &observed,
                "node",
                None,
                0,
            ),
            &mut observed,
        );
        let writes = plan_writes(&[devices(&["a"])], &observed, "node", None, 1);
        assert!(matches!(&writes[0], Write::Delete(name) if name.starts_with("00001-")));
        apply(&writes, &mut observed);
        assert_eq!(generations(&observed), [2]);
    }

    #[test]
    fn slices_that_the_kubelet_wiped_come_back_in_the_same_generation() {
        let wanted = [devices(&["a"]), devices(&["b"])];
        let writes = plan_writes(&wanted, &BTreeMap::new(), "node", None, 7);
        assert_eq!(writes.len(), 2);
        let mut observed = BTreeMap::new();
        apply(&writes, &mut observed);
        assert_eq!(generations(&observed), [7, 7]);
        observed.pop_first();
        assert_eq!(plan_writes(&wanted, &observed, "node", None, 7).len(), 1);
    }

    #[test]
    fn a_taint_keeps_the_time_it_was_added() {
        let tainted = |time| {
            let taint = DeviceTaint {
                key: "gpu.ai.deckhouse.io/xid".to_owned(),
                value: Some("79".to_owned()),
                effect: "NoExecute".to_owned(),
                time_added: time,
            };
            SliceContent::Devices(vec![Device {
                name: "a".to_owned(),
                taints: Some(vec![taint]),
                ..Device::default()
            }])
        };
        let time = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
            jiff::Timestamp::from_second(1_700_000_000).unwrap(),
        );
        let mut observed = BTreeMap::new();
        apply(
            &plan_writes(&[tainted(Some(time))], &observed, "node", None, 0),
            &mut observed,
        );
        // The first write carried it, as the server's default would have.
        for slice in observed.values_mut() {
            for device in slice.spec.devices.iter_mut().flatten() {
                for taint in device.taints.iter_mut().flatten() {
                    taint.time_added = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
                        jiff::Timestamp::from_second(1_700_000_000).unwrap(),
                    ));
                }
            }
        }
        assert_eq!(
            plan_writes(&[tainted(None)], &observed, "node", None, 1),
            Vec::new()
        );
    }
}
