//! The state machine: what begins, what ends, what outlives a restart and what a reboot.

use gpu::{RemappedRows, Slowdown};

use super::*;

fn pci() -> PciAddress {
    "0000:65:00.0".parse().unwrap()
}

fn other() -> PciAddress {
    "0000:66:00.0".parse().unwrap()
}

fn reading(recovery_action: Option<RecoveryAction>) -> HealthReading {
    HealthReading {
        pci: pci(),
        uuid: "GPU-1".to_owned(),
        ecc_uncorrected_volatile: Some(0),
        remapped_rows: None,
        slowdown: Slowdown::default(),
        temperature_celsius: Some(60),
        recovery_action,
    }
}

fn fine() -> HealthReading {
    reading(Some(RecoveryAction::None))
}

/// A driver that does not know the recovery action.
fn silent() -> HealthReading {
    reading(None)
}

fn xid(number: u64) -> Observation<'static> {
    Observation::Event {
        pci: pci(),
        kind: EventKind::Xid(number),
        placement: None,
    }
}

struct World {
    state: State,
    policy: Policy,
}

impl World {
    fn new() -> Self {
        Self {
            state: State::new("boot-1"),
            policy: Policy::default(),
        }
    }

    fn see(&mut self, now: i64, seen: Observation<'_>) -> Change {
        self.state.observe(&self.policy, now, seen)
    }

    fn read(&mut self, now: i64, reading: &HealthReading) -> Change {
        self.see(now, Observation::Reading(reading))
    }

    fn names(&self) -> Vec<String> {
        let faults = self.state.faults(&self.policy);
        let name = |f: &Fault| format!("{} {}", f.kind.name(), f.value);
        faults
            .iter()
            .map(name)
            .map(|name| name.trim().to_owned())
            .collect()
    }
}

#[test]
fn a_fatal_xid_taints_at_once_and_its_repetition_keeps_the_time_it_began() {
    let mut world = World::new();
    let change = world.see(1000, xid(48));
    assert_eq!(change.begun.len(), 1);
    assert!(change.durable);
    let again = world.see(1010, xid(48));
    assert_eq!((again.begun.len(), again.durable), (0, false));
    let faults = world.state.faults(&world.policy);
    assert_eq!(faults.len(), 1);
    assert_eq!(faults[0].effect, Some(Effect::NoExecute));
    assert_eq!(faults[0].since, 1000);
    assert!(
        faults[0].message.contains("XID 48 on GPU 0000:65:00.0"),
        "{}",
        faults[0].message
    );
    world.policy.fatal = Effect::NoSchedule;
    let faults = world.state.faults(&world.policy);
    assert_eq!(faults[0].effect, Some(Effect::NoSchedule));
}

#[test]
fn an_applications_xid_is_no_taint_is_not_kept_and_is_over_after_ten_quiet_minutes() {
    let mut world = World::new();
    let change = world.see(1000, xid(31));
    assert_eq!(change.begun[0].effect, None);
    assert!(!change.durable);
    assert!(world.state.durable().records.is_empty());
    world.read(1599, &fine());
    assert_eq!(world.names(), ["xid 31"]);
    let change = world.read(1600, &fine());
    assert_eq!((change.ended.len(), change.durable), (1, false));
}

#[test]
fn an_xid_ends_when_nvml_says_that_nothing_is_left_to_do_but_not_at_once() {
    let mut world = World::new();
    world.see(1000, xid(119));
    let reset = reading(Some(RecoveryAction::GpuReset));
    world.read(1001, &reset);
    assert_eq!(world.names(), ["xid 119", "recovery gpu-reset"]);
    world.read(2000, &reset);
    assert_eq!(world.names().len(), 2, "NVML still wants a reset");
    let change = world.read(2001, &fine());
    assert_eq!(change.ended.len(), 2);
    assert_eq!(world.names(), Vec::<String>::new());

    // The driver may need a moment until it says what has to be done.
    world.see(3000, xid(119));
    world.read(3059, &fine());
    assert_eq!(world.names(), ["xid 119"]);
    world.read(3060, &fine());
    assert_eq!(world.names(), Vec::<String>::new());
}

#[test]
fn where_the_driver_does_not_know_the_recovery_action_an_xid_stays_until_a_reset_shows() {
    let mut world = World::new();
    world.see(1000, xid(119));
    world.read(100_000, &silent());
    assert_eq!(world.names(), ["xid 119"]);

    // The count of errors starts anew.
    let mut counted = silent();
    counted.ecc_uncorrected_volatile = Some(2);
    world.read(100_001, &counted);
    assert_eq!(world.names(), ["xid 119", "ecc"]);
    world.read(100_100, &silent());
    assert_eq!(world.names(), Vec::<String>::new());

    // The GPU was away and is back.
    world.see(200_000, xid(79));
    let gone = Observation::Failed {
        pci: pci(),
        lost: true,
        reason: "GPU_IS_LOST",
    };
    world.see(200_001, gone);
    assert_eq!(world.names(), ["xid 79", "lost"]);
    world.read(200_002, &silent());
    assert_eq!(world.names(), Vec::<String>::new());

    // The driver was loaded anew.
    world.see(300_000, xid(62));
    world.see(300_001, Observation::DriverReplaced);
    assert_eq!(world.names(), Vec::<String>::new());
}

#[test]
fn an_administrators_word_ends_what_began_before_it_on_that_gpu_only() {
    let mut world = World::new();
    world.see(1000, xid(119));
    let elsewhere = Observation::Event {
        pci: other(),
        kind: EventKind::Xid(119),
        placement: None,
    };
    world.see(1000, elsewhere);
    let repaired = Observation::Repaired {
        pci: pci(),
        at: 2000,
    };
    world.see(2001, repaired);
    assert_eq!(world.state.faults(&world.policy).len(), 1);
    assert!(world.state.is_latched(other()) && !world.state.is_latched(pci()));
    // The same word again, later: it does not reach what began since.
    world.see(3000, xid(119));
    world.see(3001, repaired);
    assert!(world.state.is_latched(pci()));
}

#[test]
fn a_restart_keeps_a_fault_with_its_time_and_a_reboot_does_not() {
    let mut world = World::new();
    world.see(1000, xid(95));
    let text = serde_json::to_string(&world.state.durable()).unwrap();
    let read = || serde_json::from_str::<State>(&text).unwrap();
    let restarted = read().restore("boot-1");
    assert_eq!(
        restarted.faults(&world.policy),
        world.state.faults(&world.policy)
    );
    assert!(read().restore("boot-2").faults(&world.policy).is_empty());
}

#[test]
fn what_another_instance_saw_is_taken_over_once() {
    let mut old = World::new();
    old.see(1000, xid(95));
    let mut new = World::new();
    new.see(1005, xid(119));
    new.state.merge(old.state.durable());
    new.state.merge(old.state.durable());
    assert_eq!(new.names(), ["xid 119", "xid 95"]);
    new.state.merge(State::new("boot-2"));
    assert_eq!(new.names().len(), 2);
}

#[test]
fn an_xid_on_a_mig_instance_is_its_own_unless_it_reaches_the_whole_gpu() {
    let mut world = World::new();
    let placement = Placement { start: 4, size: 2 };
    for number in [94, 79] {
        let event = Observation::Event {
            pci: pci(),
            kind: EventKind::Xid(number),
            placement: Some(placement),
        };
        world.see(1000, event);
    }
    let faults = world.state.faults(&world.policy);
    assert_eq!(faults[0].scope, Scope::Gpu(pci()));
    assert_eq!(
        faults[1].scope,
        Scope::Instance {
            pci: pci(),
            placement
        }
    );
    let on = |start, size| {
        faults[1]
            .scope
            .overlaps(pci(), Some(Placement { start, size }))
    };
    assert!(on(5, 1) && on(4, 4) && faults[1].scope.overlaps(pci(), None));
    assert!(!on(6, 1) && !on(0, 4) && !faults[1].scope.overlaps(other(), None));
    assert!(
        faults[0]
            .scope
            .overlaps(pci(), Some(Placement { start: 6, size: 1 }))
    );
}

#[test]
fn uncorrected_errors_are_a_fault_when_their_count_grows_and_no_second_time_after_recovery() {
    let mut world = World::new();
    let counted = |count, action| HealthReading {
        ecc_uncorrected_volatile: Some(count),
        ..reading(action)
    };
    let (none, reset) = (Some(RecoveryAction::None), Some(RecoveryAction::GpuReset));
    // Old errors, and nothing to do about them.
    world.read(1000, &counted(3, none));
    assert_eq!(world.names(), Vec::<String>::new());
    world.read(1010, &counted(4, reset));
    assert_eq!(world.names(), ["ecc", "recovery gpu-reset"]);
    world.read(1100, &counted(4, none));
    assert_eq!(world.names(), Vec::<String>::new());
    let change = world.read(1200, &counted(4, none));
    assert_eq!(change, Change::default());

    // Also after a restart.
    let text = serde_json::to_string(&world.state.durable()).unwrap();
    world.state = serde_json::from_str::<State>(&text)
        .unwrap()
        .restore("boot-1");
    world.read(1300, &counted(4, Some(RecoveryAction::GpuReset)));
    assert_eq!(world.names(), ["recovery gpu-reset"]);
}

#[test]
fn a_row_that_waits_for_its_replacement_is_shown_as_long_as_nvml_shows_it() {
    let mut world = World::new();
    let rows = |pending, failed| HealthReading {
        remapped_rows: Some(RemappedRows {
            correctable: 0,
            uncorrectable: 2,
            pending,
            failed,
        }),
        ..fine()
    };
    world.read(1000, &rows(true, false));
    assert_eq!(world.names(), ["row-remap pending"]);
    let change = world.read(1010, &rows(true, false));
    assert_eq!(change, Change::default(), "the same again is no change");
    world.read(1020, &rows(false, true));
    assert_eq!(world.names(), ["row-remap failed"]);
    assert_eq!(
        world.state.faults(&world.policy)[0].effect,
        Some(Effect::NoExecute)
    );
    world.read(1030, &rows(false, false));
    assert_eq!(world.names(), Vec::<String>::new());
}

#[test]
fn a_slowdown_is_a_fault_when_it_lasts_and_over_when_it_stays_away() {
    let mut world = World::new();
    let hot = HealthReading {
        slowdown: Slowdown {
            hw_thermal: true,
            ..Slowdown::default()
        },
        ..fine()
    };
    world.read(1000, &hot);
    world.read(1029, &hot);
    assert_eq!(world.names(), Vec::<String>::new());
    world.read(1035, &fine());
    world.read(1040, &hot);
    world.read(1069, &hot);
    assert_eq!(world.names(), Vec::<String>::new(), "it was away meanwhile");
    world.read(1070, &hot);
    assert_eq!(world.names(), ["thermal hw-thermal"]);
    world.read(1080, &fine());
    world.read(1090, &hot);
    world.read(1149, &fine());
    assert_eq!(world.names(), ["thermal hw-thermal"]);
    let change = world.read(1150, &fine());
    assert_eq!(change.ended[0].fault.since, 1070);
}

#[test]
fn a_gpu_that_does_not_answer_is_unreadable_and_a_lost_one_is_lost_until_it_is_read() {
    let mut world = World::new();
    let failed = |lost| Observation::Failed {
        pci: pci(),
        lost,
        reason: "it does not answer since 10:00",
    };
    world.see(1000, failed(false));
    assert_eq!(world.names(), ["unreadable"]);
    let faults = world.state.faults(&world.policy);
    assert_eq!(faults[0].effect, Some(Effect::NoSchedule));
    assert!(faults[0].message.contains("since 10:00"));
    world.see(1010, failed(true));
    world.see(1020, failed(false));
    assert_eq!(world.names(), ["lost"]);
    assert_eq!(
        world.state.faults(&world.policy)[0].effect,
        Some(Effect::NoExecute)
    );
    world.read(1030, &fine());
    assert_eq!(world.names(), Vec::<String>::new());
}

#[test]
fn an_ignored_xid_is_left_aside_also_when_it_was_kept_before() {
    let mut world = World::new();
    world.see(1000, xid(74));
    world.policy.ignored.insert(74);
    assert_eq!(world.names(), Vec::<String>::new());
    assert_eq!(world.see(1001, xid(74)), Change::default());
}
