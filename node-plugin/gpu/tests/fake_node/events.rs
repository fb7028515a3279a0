//! Events.

use std::time::{Duration, Instant};

use gpu::{EventInstance, EventKind, Events, GpuEvent, Gpus, NvmlCode, PciAddress};

use super::{FakeNode, at, h100};

const SOON: Duration = Duration::from_millis(20);
const LONG: Duration = Duration::from_secs(30);

fn all(gpus: &Gpus, node: &FakeNode) -> Vec<PciAddress> {
    let inventory = gpus.inventory(&node.roots()).unwrap();
    inventory.gpus.iter().map(|gpu| gpu.pci).collect()
}

/// Every event that is there.
fn drain(events: &Events) -> Vec<GpuEvent> {
    std::iter::from_fn(|| events.wait(SOON).unwrap()).collect()
}

#[test]
fn an_xid_reaches_one_that_waits_once_and_at_once() {
    let (node, gpus, pci) = h100();
    let events = gpus.events(&all(&gpus, &node)).unwrap();
    let hardware = node.hardware();
    let (event, took) = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let event = events.wait(LONG).unwrap();
            (event, Instant::now())
        });
        std::thread::sleep(Duration::from_millis(200));
        let start = Instant::now();
        hardware.xid("0", 79, None).unwrap();
        let (event, got) = waiter.join().unwrap();
        (event, got.saturating_duration_since(start))
    });
    let want = GpuEvent {
        pci,
        kind: EventKind::Xid(79),
        instance: None,
    };
    assert_eq!(event, Some(want));
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert_eq!(drain(&events), []);
}

#[test]
fn an_event_names_the_mig_instance_that_it_happened_to() {
    let (node, gpus, pci) = h100();
    let made = gpus.create_instance(pci, 19, at(6, 1)).unwrap();
    let events = gpus.events(&[pci]).unwrap();
    let hardware = node.hardware();
    hardware
        .xid("0", 31, Some((made.gpu_instance_id, Some(0))))
        .unwrap();
    hardware
        .xid("0", 43, Some((made.gpu_instance_id, None)))
        .unwrap();
    let instances: Vec<_> = drain(&events).iter().map(|event| event.instance).collect();
    let instance = |compute_instance| {
        Some(EventInstance {
            gpu_instance: made.gpu_instance_id,
            compute_instance,
        })
    };
    assert_eq!(instances, [instance(Some(0)), instance(None)]);
}

#[test]
fn events_come_in_order_from_all_gpus_and_with_their_kind() {
    let (node, gpus, _) = h100();
    let events = gpus.events(&all(&gpus, &node)).unwrap();
    let hardware = node.hardware();
    hardware.xid("3", 13, None).unwrap();
    hardware.ecc("0", true, 1).unwrap();
    hardware.ecc("3", false, 1).unwrap();
    let (third, first): (PciAddress, PciAddress) = (
        "0000:61:00.0".parse().unwrap(),
        "0000:1b:00.0".parse().unwrap(),
    );
    let seen: Vec<_> = drain(&events).iter().map(|e| (e.pci, e.kind)).collect();
    let want = [
        (third, EventKind::Xid(13)),
        (first, EventKind::DoubleBitEcc),
        (third, EventKind::SingleBitEcc),
    ];
    assert_eq!(seen, want);
}

#[test]
fn an_event_from_before_the_registration_is_lost_as_on_hardware() {
    let (node, gpus, pci) = h100();
    let hardware = node.hardware();
    hardware.xid("0", 48, None).unwrap();
    let events = gpus.events(&[pci]).unwrap();
    assert_eq!(drain(&events), []);
    // Nor does one come of a GPU that was not registered.
    hardware.xid("1", 48, None).unwrap();
    assert_eq!(drain(&events), []);
}

#[test]
fn each_registration_is_given_every_event() {
    let (node, gpus, pci) = h100();
    let (one, other) = (gpus.events(&[pci]).unwrap(), gpus.events(&[pci]).unwrap());
    node.hardware().xid("0", 94, None).unwrap();
    assert_eq!(drain(&one).len(), 1);
    assert_eq!(drain(&other).len(), 1);
}

#[test]
fn a_wait_without_an_event_ends_at_its_time() {
    let (_node, gpus, pci) = h100();
    let events = gpus.events(&[pci]).unwrap();
    let start = Instant::now();
    assert_eq!(events.wait(Duration::from_millis(300)).unwrap(), None);
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(300), "{took:?}");
}

#[test]
fn a_gpu_that_is_lost_meanwhile_is_left_out_and_the_others_are_heard() {
    let (node, gpus, pci) = h100();
    let watched = all(&gpus, &node);
    let events = gpus.events(&watched).unwrap();
    assert_eq!(events.watched(), watched);
    let hardware = node.hardware();
    // The driver tells of it before, if it can.
    hardware.xid("0", 79, None).unwrap();
    hardware.lose("0").unwrap();
    let first = events.wait(LONG).unwrap().unwrap();
    assert_eq!((first.pci, first.kind), (pci, EventKind::Xid(79)));
    assert_eq!(events.wait(LONG).unwrap(), None);
    assert_eq!(events.watched(), watched[1..]);
    hardware.xid("1", 48, None).unwrap();
    assert_eq!(events.wait(LONG).unwrap().unwrap().pci, watched[1]);
    // When it is back, a new registration has it.
    hardware.reset("0").unwrap();
    let anew = gpus.events(&watched).unwrap();
    assert_eq!(anew.watched(), watched);
}

#[test]
fn a_gpu_that_is_lost_from_the_start_keeps_no_other_from_being_watched() {
    let (node, gpus, pci) = h100();
    node.hardware().lose("0").unwrap();
    let neighbour = "0000:43:00.0".parse().unwrap();
    let events = gpus.events(&[pci, neighbour]).unwrap();
    assert_eq!(events.watched(), [neighbour]);
}

#[test]
fn a_wait_outlives_the_gpus_it_came_from_and_stops_cleanly() {
    let (node, gpus, pci) = h100();
    let events = gpus.events(&[pci]).unwrap();
    drop(gpus);
    node.hardware().xid("0", 31, None).unwrap();
    assert!(events.wait(LONG).unwrap().is_some());
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                events.wait(Duration::from_millis(50)).unwrap();
            }
        });
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        waiter.join().unwrap();
    });
    drop(events);
    // The library was shut down with the last user, and can be used again.
    assert!(node.open().health(pci).is_ok());
}

#[test]
fn other_calls_go_on_while_one_thread_waits_for_events() {
    let (_node, gpus, pci) = h100();
    let events = gpus.events(&[pci]).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let start = Instant::now();
            events.wait(Duration::from_secs(3)).unwrap();
            start.elapsed()
        });
        let start = Instant::now();
        let made = gpus.create_instance(pci, 19, at(0, 1)).unwrap();
        gpus.destroy_instance(pci, made.gpu_instance_id).unwrap();
        gpus.health(pci).unwrap();
        let calls = start.elapsed();
        assert!(calls < waiter.join().unwrap(), "{calls:?}");
    });
}

#[test]
fn a_driver_without_events_or_whose_wait_fails_says_so() {
    let (node, gpus, pci) = h100();
    let events = gpus.events(&[pci]).unwrap();
    let hardware = node.hardware();
    hardware
        .fail(None, "nvmlEventSetWait_v2", Some(999))
        .unwrap();
    let error = events.wait(SOON).unwrap_err();
    assert_eq!(error.code(), Some(NvmlCode::Other(999)));
    hardware.clear(None).unwrap();
    assert_eq!(events.wait(SOON).unwrap(), None);
    // Not one GPU has events, as on some virtual ones.
    hardware
        .fail(None, "nvmlDeviceGetSupportedEventTypes", Some(3))
        .unwrap();
    let none = gpus.events(&[pci]).unwrap();
    assert_eq!(none.watched(), []);
    assert_eq!(none.wait(SOON).unwrap(), None);
    let old = FakeNode::new("h100-80gb-8");
    old.without(&["nvmlEventSetCreate"]);
    let error = old.open().events(&[pci]).unwrap_err();
    assert_eq!(error.code(), Some(NvmlCode::MissingSymbol));
}
