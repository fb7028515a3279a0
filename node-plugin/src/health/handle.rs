//! The monitor, for those who use it.
//!
//! In: what discovery found and what an administrator said. Out: commands to the monitor,
//! and the faults that there are. Never: a wait longer than was asked for.

use std::sync::Arc;
use std::time::Duration;

use gpu::PciAddress;
use tokio::sync::{mpsc, oneshot, watch};

use super::Fault;
use crate::claims::hardware::Hardware;

/// What discovery tells the monitor.
pub(super) enum Command {
    Watch {
        hardware: Arc<dyn Hardware>,
        gpus: Vec<PciAddress>,
    },
    Unavailable {
        gpus: Vec<PciAddress>,
        reason: String,
    },
    Check(oneshot::Sender<()>),
    DriverReplaced,
    Repaired(Vec<(PciAddress, i64)>),
}

/// The monitor, for those who use it. Cloning shares it.
#[derive(Clone)]
pub struct Health {
    pub(super) commands: mpsc::UnboundedSender<Command>,
    pub(super) faults: watch::Receiver<Arc<Vec<Fault>>>,
    pub(super) answered: watch::Receiver<bool>,
}

impl Health {
    /// These GPUs are watched from now on, with these calls.
    pub fn watch(&self, hardware: Arc<dyn Hardware>, gpus: Vec<PciAddress>) {
        self.send(Command::Watch { hardware, gpus });
    }

    /// NVML cannot be used, so nothing is known of these GPUs.
    pub fn unavailable(&self, gpus: Vec<PciAddress>, reason: &str) {
        let reason = reason.to_owned();
        self.send(Command::Unavailable { gpus, reason });
    }

    /// The driver was loaded anew since the GPUs were last seen.
    pub fn driver_replaced(&self) {
        self.send(Command::DriverReplaced);
    }

    /// Reads all GPUs now, and waits for those that answer, at most so long.
    pub async fn check(&self, at_most: Duration) {
        let (done, checked) = oneshot::channel();
        self.send(Command::Check(done));
        tokio::time::timeout(at_most, checked).await.ok();
    }

    /// The faults that there are.
    #[must_use]
    pub fn faults(&self) -> Arc<Vec<Fault>> {
        self.faults.borrow().clone()
    }

    /// Whether NVML answers in time about at least one GPU, which tells a hung NVML from
    /// a busy one and from one broken card.
    #[must_use]
    pub fn answered(&self) -> watch::Receiver<bool> {
        self.answered.clone()
    }

    fn send(&self, command: Command) {
        self.commands.send(command).ok(); // The monitor has stopped, and so does its caller.
    }
}
