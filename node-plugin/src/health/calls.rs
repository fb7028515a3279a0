//! Calls into NVML that may never come back.
//!
//! In: a GPU to read, or GPUs whose events to wait for. Out: answers over a channel.
//! Never: more than one thread for each GPU: a call that hangs cannot be ended, so the
//! next is made only when it came back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gpu::{EventInstance, EventKind, HealthReading, PciAddress, Placement};
use tokio::sync::mpsc::UnboundedSender;

use crate::claims::hardware::{Hardware, HardwareError};

/// How long one wait for an event takes at most; after that the thread looks whether it
/// is still wanted.
const WAIT: Duration = Duration::from_secs(2);

/// What the threads tell.
#[derive(Debug)]
pub(super) enum Answer {
    /// A GPU was read, or could not be.
    Reading {
        pci: PciAddress,
        result: Result<Box<HealthReading>, HardwareError>,
    },
    /// The driver reported something.
    Event {
        pci: PciAddress,
        kind: EventKind,
        placement: Option<Placement>,
    },
    /// Events are waited for from now on.
    Listening,
    /// Nobody waits for events any more.
    Deaf {
        /// Which thread, as it was numbered.
        watch: u64,
        reason: String,
    },
}

/// Reads a GPU on a thread of its own.
pub(super) fn read(
    hardware: &Arc<dyn Hardware>,
    pci: PciAddress,
    answers: &UnboundedSender<Answer>,
) -> std::io::Result<()> {
    let (hardware, answers) = (Arc::clone(hardware), answers.clone());
    let thread = std::thread::Builder::new().name(format!("health {pci}"));
    thread.spawn(move || {
        let result = hardware.health(pci).map(Box::new);
        answers.send(Answer::Reading { pci, result }).ok(); // Nobody asks while stopping.
    })?;
    Ok(())
}

/// Waits for the events of some GPUs on a thread of its own until `unwanted` is set.
pub(super) fn watch(
    hardware: &Arc<dyn Hardware>,
    gpus: Vec<PciAddress>,
    watch: u64,
    unwanted: Arc<AtomicBool>,
    answers: &UnboundedSender<Answer>,
) -> std::io::Result<()> {
    let (hardware, answers) = (Arc::clone(hardware), answers.clone());
    let thread = std::thread::Builder::new().name(format!("events {watch}"));
    thread.spawn(move || {
        let ended = follow(&*hardware, &gpus, &unwanted, &answers);
        if let Err(error) = ended {
            let reason = error.to_string();
            answers.send(Answer::Deaf { watch, reason }).ok();
        }
    })?;
    Ok(())
}

fn follow(
    hardware: &dyn Hardware,
    gpus: &[PciAddress],
    unwanted: &AtomicBool,
    answers: &UnboundedSender<Answer>,
) -> Result<(), HardwareError> {
    let events = hardware.events(gpus)?;
    answers.send(Answer::Listening).ok();
    while !unwanted.load(Ordering::Relaxed) && !answers.is_closed() {
        let Some(event) = events.wait(WAIT)? else {
            continue;
        };
        let placement = event
            .instance
            .and_then(|instance| place(hardware, event.pci, instance));
        let event = Answer::Event {
            pci: event.pci,
            kind: event.kind,
            placement,
        };
        if answers.send(event).is_err() {
            break;
        }
    }
    Ok(())
}

/// Where an instance sits. One that is gone already is none, and its event the GPU's.
fn place(hardware: &dyn Hardware, pci: PciAddress, instance: EventInstance) -> Option<Placement> {
    let gpu = hardware.gpu(pci).ok()?;
    let found = gpu
        .instances
        .iter()
        .find(|known| known.gpu_instance_id == instance.gpu_instance);
    found.map(|known| known.placement)
}
