//! Moves step by step, and random histories of a small world.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

fn copy(ordinal: i32, generation: i64, ready: bool) -> Copy {
    Copy {
        name: format!("o-{ordinal}"),
        uid: format!("uid-{ordinal}"),
        ordinal,
        ready,
        scheduled: true,
        generation,
        claim_template: Some("t".into()),
        ..Copy::default()
    }
}

fn roomless(ordinal: i32, generation: i64) -> Copy {
    Copy {
        scheduled: false,
        problem: Some((R::ReplicasUnschedulable, "no".into())),
        ..copy(ordinal, generation, false)
    }
}

fn wanted(replicas: i32, strategy: UpdateStrategy) -> Wanted<'static> {
    Wanted {
        generation: 2,
        class_terms: "c",
        claim_template: "t",
        strategy,
        replicas,
    }
}

fn rolling(copies: &[Copy], replicas: i32, roll: Option<&Roll>, fit: i32) -> Step {
    let wanted = wanted(replicas, UpdateStrategy::RollingUpdate);
    step(copies, &wanted, roll, || fit, 1000)
}

fn without_surge() -> Roll {
    Roll {
        generation: 2,
        surge_since: None,
    }
}

fn surge(since: i64) -> Roll {
    Roll {
        generation: 2,
        surge_since: Some(since),
    }
}

#[test]
fn without_an_edit_no_copy_is_moved_whatever_its_release_a_110() {
    let mut held = copy(0, 2, true);
    held.release = "older".into();
    let step = rolling(&[held], 1, None, 9);
    assert_eq!((step.replicas, step.moved.len(), step.roll), (1, 0, None));
}

#[test]
fn an_edit_moves_one_copy_at_a_time_without_a_spare_device_a_037_a_113() {
    let both_old = [copy(0, 1, true), copy(1, 1, true)];
    let first = rolling(&both_old, 2, None, 2);
    assert_eq!(first.moved, ["o-1"]);
    assert_eq!(
        (first.replicas, first.roll.clone()),
        (2, Some(without_surge()))
    );
    let roll = first.roll.as_ref();
    let mut ending = both_old.clone();
    ending[1].ending = true;
    assert!(
        rolling(&ending, 2, roll, 2).moved.is_empty(),
        "one is on its way"
    );
    let gone = [copy(0, 1, true)];
    assert!(
        rolling(&gone, 2, roll, 2).moved.is_empty(),
        "it is not made anew yet"
    );
    let loading = [copy(0, 1, true), copy(1, 2, false)];
    let waits = rolling(&loading, 2, roll, 2);
    assert_eq!(
        (waits.moved.len(), waits.waits_for),
        (0, vec!["o-1".to_owned()])
    );
    let answers = [copy(0, 1, true), copy(1, 2, true)];
    assert_eq!(rolling(&answers, 2, roll, 2).moved, ["o-0"]);
    let last = [copy(0, 2, false), copy(1, 2, true)];
    let step = rolling(&last, 2, roll, 2);
    assert_eq!(
        (step.roll.as_ref(), step.waits_for),
        (roll, vec!["o-0".to_owned()])
    );
    assert_eq!(
        rolling(&last[1..], 2, roll, 2).roll.as_ref(),
        roll,
        "one is missing"
    );
    let done = [copy(0, 2, true), copy(1, 2, true)];
    let end = rolling(&done, 2, roll, 2);
    assert_eq!((end.moved.len(), end.roll), (0, None));
}

#[test]
fn an_old_copy_that_does_not_answer_goes_first_but_not_beside_a_new_one_a_118() {
    let copies = [copy(0, 1, false), copy(1, 1, true)];
    assert_eq!(rolling(&copies, 2, None, 2).moved, ["o-0"]);
    // The first new copy is not ready: an old one that fell silent for a moment stays.
    let copies = [copy(0, 1, true), copy(1, 1, false), copy(2, 2, false)];
    let step = rolling(&copies, 3, Some(&without_surge()), 3);
    assert_eq!(
        (step.moved.len(), step.waits_for),
        (0, vec!["o-2".to_owned()])
    );
}

#[test]
fn with_a_spare_device_one_copy_more_is_raised_first_and_goes_last_a_113() {
    let old = [copy(0, 1, true)];
    let begun = rolling(&old, 1, None, 2);
    assert_eq!(
        (begun.replicas, begun.moved.len()),
        (2, 0),
        "nothing is taken yet"
    );
    assert_eq!(begun.roll, Some(surge(1000)));
    assert_eq!(begun.again, Some(SURGE_WITHIN));
    let roll = begun.roll.as_ref();
    let loading = [copy(0, 1, true), copy(1, 2, false)];
    let step = rolling(&loading, 1, roll, 2);
    assert_eq!((step.replicas, step.moved.len(), step.again), (2, 0, None));
    let ready = [copy(0, 1, true), copy(1, 2, true)];
    assert_eq!(rolling(&ready, 1, roll, 2).moved, ["o-0"]);
    let replaced = [copy(0, 2, false), copy(1, 2, true)];
    let covered = rolling(&replaced, 1, roll, 2);
    assert_eq!(
        (covered.replicas, covered.roll.as_ref()),
        (2, roll),
        "it covers until then"
    );
    let whole = [copy(0, 2, true), copy(1, 2, true)];
    let end = rolling(&whole, 1, roll, 2);
    assert_eq!((end.replicas, end.roll, end.moved.len()), (1, None, 0));
}

#[test]
fn where_nobody_is_served_nothing_more_is_raised() {
    let step = rolling(&[copy(0, 1, false)], 1, None, 9);
    assert_eq!((step.replicas, step.moved), (1, vec!["o-0".to_owned()]));
}

#[test]
fn a_copy_more_that_finds_no_node_in_time_is_withdrawn_a_037() {
    let copies = [copy(0, 1, true), roomless(1, 2)];
    let waits = rolling(&copies, 1, Some(&surge(1000 - SURGE_WITHIN + 1)), 2);
    assert_eq!(
        (waits.replicas, waits.moved.len(), waits.again),
        (2, 0, Some(1))
    );
    let late = rolling(&copies, 1, Some(&surge(1000 - SURGE_WITHIN)), 2);
    assert_eq!(late.replicas, 1);
    assert_eq!(late.roll, Some(without_surge()), "and is not tried again");
    assert_eq!(late.moved, ["o-0"], "one out, one in");
    // A quota may refuse its pod altogether.
    let refused = rolling(&[copy(0, 1, true)], 1, Some(&surge(0)), 2);
    assert_eq!(
        (refused.replicas, refused.moved),
        (1, vec!["o-0".to_owned()])
    );
}

#[test]
fn an_edit_in_the_middle_of_a_move_keeps_the_copy_more_and_moves_it_first() {
    let copies = [copy(0, 0, true), copy(1, 1, true)];
    let roll = Roll {
        generation: 1,
        surge_since: Some(1),
    };
    let step = rolling(&copies, 1, Some(&roll), 2);
    assert_eq!((step.replicas, step.moved), (2, vec!["o-1".to_owned()]));
    assert_eq!(step.roll, Some(surge(1000)));
}

#[test]
fn where_fewer_copies_fit_than_are_wanted_an_edit_still_reaches_all_a_037() {
    // Two wanted, one device: the second copy has waited all along.
    let copies = [copy(0, 1, true), roomless(1, 2)];
    let step = rolling(&copies, 2, Some(&without_surge()), 1);
    assert_eq!(step.moved, ["o-0"], "it makes the room");
    let none_fits = rolling(&copies, 2, Some(&without_surge()), 0);
    assert!(none_fits.moved.is_empty(), "nothing would come after it");
    let reached = [copy(0, 2, true), roomless(1, 2)];
    assert_eq!(
        rolling(&reached, 2, Some(&without_surge()), 1).roll,
        None,
        "and is over"
    );
    let all_fit = rolling(&copies, 2, Some(&without_surge()), 2);
    assert_eq!(all_fit.waits_for, ["o-1"], "it may still find its node");
}

#[test]
fn recreate_takes_all_outdated_copies_at_once_a_037() {
    let wanted = wanted(3, UpdateStrategy::Recreate);
    let recreate = |copies: &[Copy], roll| step(copies, &wanted, roll, || 9, 0);
    let copies = [copy(0, 1, true), copy(1, 1, true), copy(2, 2, true)];
    let begun = recreate(&copies, None);
    assert_eq!(
        (begun.replicas, begun.moved),
        (3, vec!["o-0".to_owned(), "o-1".to_owned()])
    );
    assert_eq!(begun.roll, Some(without_surge()));
    let loading = [copy(0, 2, true), copy(1, 2, false), copy(2, 2, true)];
    let waits = recreate(&loading, begun.roll.as_ref());
    assert_eq!((waits.moved.len(), waits.roll), (0, begun.roll.clone()));
    let done = [copy(0, 2, true), copy(1, 2, true), copy(2, 2, true)];
    assert_eq!(recreate(&done, begun.roll.as_ref()).roll, None);
    // The class asks for another way in the middle of a move.
    let turned = recreate(&[copy(0, 1, true), copy(3, 2, true)], Some(&surge(0)));
    assert_eq!((turned.replicas, turned.roll), (3, Some(without_surge())));
}

#[test]
fn a_copy_stranded_on_an_outdated_claim_template_goes_at_once() {
    let mut stranded = copy(0, 2, false);
    stranded.scheduled = false;
    stranded.claim_template = Some("older".into());
    assert_eq!(
        rolling(&[stranded, copy(1, 2, true)], 2, None, 2).moved,
        ["o-0"]
    );
}

#[test]
fn a_copy_raised_under_other_terms_of_the_class_is_outdated_a_117() {
    let mut other = copy(0, 2, false);
    other.class_terms = Some("before".into());
    assert_eq!(rolling(&[other.clone()], 1, None, 1).moved, ["o-0"]);
    assert!(
        !is_outdated(&other, 2, None),
        "with the class out of reach nothing is known"
    );
    assert!(
        !is_outdated(&copy(0, 2, true), 2, Some("c")),
        "raised by an earlier version"
    );
}

#[test]
fn the_tenth_copy_is_not_taken_for_the_second() {
    let copies: Vec<Copy> = (0..11).map(|i| copy(i, 1, true)).collect();
    assert_eq!(rolling(&copies, 11, None, 11).moved, ["o-10"]);
}

/// A pod of the small world.
#[derive(Clone, Debug)]
struct Pod {
    generation: i64,
    node: bool,
    ready: bool,
    ending: bool,
}

/// A cluster of one kind of device with one order, and what all but the controller do.
#[derive(Debug)]
struct World {
    now: i64,
    devices: i32,
    taken: i32,
    wanted: i32,
    generation: i64,
    works: bool,
    // What the StatefulSet holds.
    replicas: i32,
    template: i64,
    roll: Option<Roll>,
    pods: BTreeMap<i32, Pod>,
}

#[derive(Clone, Debug)]
enum Happens {
    Edit(bool),
    Scale(i32),
    Reconcile,
    Sets,
    Schedules,
    Runs(i32),
    Ends,
    FallsSilent(i32),
    LosesItsNode(i32),
    OthersTake,
    OthersFree,
    TimePasses,
}

impl World {
    fn new(devices: i32, wanted: i32) -> Self {
        World {
            now: 0,
            devices,
            taken: 0,
            wanted,
            generation: 1,
            works: true,
            replicas: wanted,
            template: 1,
            roll: None,
            pods: BTreeMap::new(),
        }
    }

    fn held(&self) -> i32 {
        i32::try_from(self.pods.values().filter(|p| p.node).count()).unwrap()
    }

    fn free(&self) -> i32 {
        self.devices - self.taken - self.held()
    }

    fn copies(&self) -> Vec<Copy> {
        let each = self.pods.iter().map(|(i, p)| Copy {
            ready: p.ready && !p.ending,
            ending: p.ending,
            scheduled: p.node,
            problem: (!p.node).then(|| (R::ReplicasUnschedulable, "no".into())),
            ..copy(*i, p.generation, false)
        });
        each.collect()
    }

    fn answering(&self) -> i32 {
        let answer = |p: &&Pod| p.ready && !p.ending;
        i32::try_from(self.pods.values().filter(answer).count()).unwrap()
    }

    /// One step of the controller, which remembers nothing; each step is judged.
    fn reconcile(&mut self) {
        let fit = (self.devices - self.taken).min(self.wanted + 1);
        let copies = self.copies();
        let wanted = Wanted {
            generation: self.generation,
            ..wanted(self.wanted, UpdateStrategy::RollingUpdate)
        };
        let step = step(&copies, &wanted, self.roll.as_ref(), || fit, self.now);
        assert!(
            step.replicas == self.wanted || step.replicas == self.wanted + 1,
            "one more at most: {step:?}"
        );
        let surge = step.roll.as_ref().is_some_and(|r| r.surge_since.is_some());
        assert_eq!(step.replicas > self.wanted, surge);
        let placed = |c: &&Copy| c.scheduled && step.moved.contains(&c.name);
        let placed = copies.iter().filter(placed).count();
        assert!(placed <= 1, "one at a time: {step:?}");
        for name in &step.moved {
            let taken = copies.iter().find(|c| c.name == *name).unwrap();
            assert!(
                wanted.is_outdated(taken),
                "a current copy is taken: {step:?}"
            );
            let unready = copies.iter().filter(|c| {
                c.ordinal < step.replicas && !wanted.is_outdated(c) && !c.ready && c.scheduled
            });
            assert_eq!(
                unready.count(),
                0,
                "an old copy goes beside a new one that starts"
            );
            if taken.ready {
                let left = self.answering() - 1;
                let least = if surge && fit > self.wanted {
                    self.wanted
                } else {
                    self.wanted.min(fit) - 1
                };
                assert!(
                    left >= least,
                    "{left} of {least} answer after {step:?} in {self:?}"
                );
            }
        }
        self.replicas = step.replicas;
        self.template = self.generation;
        self.roll = step.roll;
        for copy in copies.iter().filter(|c| step.moved.contains(&c.name)) {
            self.pods.get_mut(&copy.ordinal).unwrap().ending = true;
        }
    }

    fn happens(&mut self, what: &Happens) {
        match what {
            Happens::Edit(works) => {
                self.generation += 1;
                self.works = *works;
            }
            Happens::Scale(n) => self.wanted = *n,
            Happens::Reconcile => self.reconcile(),
            Happens::Sets => {
                for i in 0..self.replicas {
                    self.pods.entry(i).or_insert(Pod {
                        generation: self.template,
                        node: false,
                        ready: false,
                        ending: false,
                    });
                }
                for (_, pod) in self.pods.range_mut(self.replicas..) {
                    pod.ending = true;
                }
            }
            Happens::Schedules => {
                let mut free = self.free();
                for pod in self.pods.values_mut() {
                    if !pod.node && !pod.ending && free > 0 {
                        pod.node = true;
                        free -= 1;
                    }
                }
            }
            Happens::Runs(i) => {
                let (works, generation) = (self.works, self.generation);
                if let Some(pod) = self.pods.get_mut(i) {
                    pod.ready = pod.node && (works || pod.generation < generation);
                }
            }
            Happens::Ends => self.pods.retain(|_, p| !p.ending),
            Happens::FallsSilent(i) => {
                if let Some(pod) = self.pods.get_mut(i) {
                    pod.ready = false;
                }
            }
            Happens::LosesItsNode(i) => {
                self.pods.remove(i);
            }
            Happens::OthersTake => self.taken += i32::from(self.free() > 0),
            Happens::OthersFree => self.taken -= i32::from(self.taken > 0),
            Happens::TimePasses => self.now += 20,
        }
    }

    /// All that goes by itself, once.
    fn goes_on(&mut self) {
        self.happens(&Happens::TimePasses);
        self.reconcile();
        for what in [Happens::Ends, Happens::Sets, Happens::Schedules] {
            self.happens(&what);
        }
        for i in 0..8 {
            self.happens(&Happens::Runs(i));
        }
    }
}

fn history() -> impl Strategy<Value = Vec<Happens>> {
    let ordinal = 0..4i32;
    let one = prop_oneof![
        1 => any::<bool>().prop_map(Happens::Edit),
        1 => (1..4i32).prop_map(Happens::Scale),
        6 => Just(Happens::Reconcile),
        4 => Just(Happens::Sets),
        4 => Just(Happens::Schedules),
        6 => ordinal.clone().prop_map(Happens::Runs),
        4 => Just(Happens::Ends),
        1 => ordinal.clone().prop_map(Happens::FallsSilent),
        1 => ordinal.prop_map(Happens::LosesItsNode),
        1 => Just(Happens::OthersTake),
        1 => Just(Happens::OthersFree),
        2 => Just(Happens::TimePasses),
    ];
    proptest::collection::vec(one, 0..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever happened: each step keeps its promises ([`World::reconcile`]), and when
    /// nothing happens any more, an edit that works reaches as many copies as there is
    /// room for.
    #[test]
    fn a_move_ends_after_any_history_a_037_a_118(
        devices in 1..5i32,
        wanted in 1..4i32,
        history in history(),
    ) {
        let mut world = World::new(devices, wanted);
        for what in &history {
            world.happens(what);
        }
        world.happens(&Happens::Edit(true));
        for _ in 0..40 {
            world.goes_on();
        }
        let room = world.devices - world.taken;
        let reached = world
            .pods
            .values()
            .filter(|p| p.ready && !p.ending && p.generation == world.generation)
            .count();
        let reached = i32::try_from(reached).unwrap();
        prop_assert!(reached >= world.wanted.min(room), "{reached} in {world:?}");
        let outdated = world.pods.values().filter(|p| p.generation < world.generation);
        prop_assert_eq!(outdated.count(), 0, "{:?}", &world);
        if room > world.wanted {
            prop_assert_eq!((world.replicas, &world.roll), (world.wanted, &None));
        }
    }

    /// With a spare device that nobody else takes, an edit never leaves fewer copies
    /// answering than are wanted, at whatever pace things go.
    #[test]
    fn with_a_spare_device_no_edit_falls_below_the_minimum_a_113(
        wanted in 1..4i32,
        works in any::<bool>(),
        history in history(),
    ) {
        let mut world = World::new(wanted + 1, wanted);
        for _ in 0..4 {
            world.goes_on();
        }
        prop_assert_eq!(world.answering(), wanted);
        world.happens(&Happens::Edit(works));
        for what in &history {
            let harmless = matches!(
                what,
                Happens::Reconcile | Happens::Sets | Happens::Schedules | Happens::Runs(_) | Happens::Ends
            );
            if harmless {
                world.happens(what);
            }
            prop_assert!(world.answering() >= wanted, "{:?} after {:?}", &world, what);
        }
    }

    /// An edit that never gets ready costs one copy at most where there is no spare
    /// device, and the copies of the earlier description go on.
    #[test]
    fn an_edit_that_never_gets_ready_costs_one_copy_at_most_a_118(
        wanted in 1..4i32,
        history in history(),
    ) {
        let mut world = World::new(wanted, wanted);
        for _ in 0..4 {
            world.goes_on();
        }
        world.happens(&Happens::Edit(false));
        for what in &history {
            if matches!(what, Happens::Reconcile | Happens::Sets | Happens::Schedules | Happens::Runs(_) | Happens::Ends | Happens::TimePasses) {
                world.happens(what);
            }
            prop_assert!(world.answering() >= wanted - 1, "{:?} after {:?}", &world, what);
        }
    }
}
