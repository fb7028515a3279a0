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
use super::Stored;
use super::layout::{resource_slice, slice_name};

/// The writes that a pool needs: obsolete slices go first, then updates and creations by
/// index. The slices themselves are made one by one, when they are written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Slices that no longer belong to the pool.
    pub obsolete: Vec<String>,
    /// Which of the wanted slices are to be created or updated.
    pub apply: Vec<usize>,
    generation: i64,
}

impl Plan {
    /// How many writes there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.obsolete.len() + self.apply.len()
    }

    /// Whether nothing differs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One of the slices, as it is to be written over the one that exists.
    #[must_use]
    pub fn slice(
        &self,
        wanted: &[SliceContent],
        index: usize,
        node: &str,
        owner: Option<&OwnerReference>,
        existing: Option<&ResourceSlice>,
    ) -> ResourceSlice {
        let (content, count) = (&wanted[index], wanted.len());
        let slice = resource_slice(content, node, owner, index, count, self.generation);
        keep_time_added(slice, existing)
    }
}

/// What has to happen to one slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Difference {
    Nothing,
    Missing,
    /// Only taints or the owner.
    Taints,
    Reshaped,
}

/// Plans the writes.
#[must_use]
pub fn plan_writes(
    wanted: &[SliceContent],
    observed: &BTreeMap<String, Stored>,
    node: &str,
    owner: Option<&OwnerReference>,
    last_generation: i64,
) -> Plan {
    let names: Vec<String> = (0..wanted.len())
        .map(|index| slice_name(node, index))
        .collect();
    let obsolete: Vec<String> = observed
        .keys()
        .filter(|name| !names.contains(name))
        .cloned()
        .collect();
    let seen = observed.values().map(Stored::generation).max().unwrap_or(0);
    let mut plan = Plan {
        obsolete,
        apply: Vec::new(),
        generation: seen.max(last_generation).max(1),
    };
    let differences: Vec<Difference> = (0..wanted.len())
        .map(|index| {
            let Some(existing) = observed.get(&names[index]).map(Stored::slice) else {
                return Difference::Missing;
            };
            let slice = plan.slice(wanted, index, node, owner, Some(&existing));
            if same(&slice, &existing) {
                Difference::Nothing
            } else if same_but_taints(&slice, &existing) {
                Difference::Taints
            } else {
                Difference::Reshaped
            }
        })
        .collect();
    let differing = |wanted: &[Difference]| {
        let found = differences.iter().filter(|found| wanted.contains(found));
        found.count()
    };
    if differing(&[Difference::Nothing]) == wanted.len() && plan.obsolete.is_empty() {
        return plan;
    }

    let first_publication = observed.is_empty() && last_generation == 0;
    let reshaped = differing(&[Difference::Reshaped]);
    let few = reshaped == 0 || reshaped + differing(&[Difference::Missing]) <= 1;
    let keeps_generation = plan.obsolete.is_empty() && few || first_publication;
    if !keeps_generation {
        plan.generation += 1;
    }
    plan.apply = (0..wanted.len())
        .filter(|index| !keeps_generation || differences[*index] != Difference::Nothing)
        .collect();
    plan
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

    #[derive(Debug, Clone, PartialEq)]
    enum Write {
        Delete(String),
        Apply(Box<ResourceSlice>),
    }

    /// The writes of a plan with what is written.
    fn plan_writes(
        wanted: &[SliceContent],
        observed: &BTreeMap<String, ResourceSlice>,
        node: &str,
        owner: Option<&OwnerReference>,
        last_generation: i64,
    ) -> Vec<Write> {
        let stored = observed
            .iter()
            .map(|(name, slice)| (name.clone(), slice.clone().into()))
            .collect();
        let plan = super::plan_writes(wanted, &stored, node, owner, last_generation);
        let applies = plan.apply.iter().map(|index| {
            let existing = observed.get(&slice_name(node, *index));
            Write::Apply(Box::new(plan.slice(wanted, *index, node, owner, existing)))
        });
        let deletes = plan.obsolete.iter().cloned().map(Write::Delete);
        deletes.chain(applies).collect()
    }

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
