//! One call of a client: what tests have set for its function comes first.
//!
//! In: the function's name. Out: the session to answer from, or the answer that was set.
//! Never: a lock held while a call is delayed; other threads' calls go on, as the real
//! driver's mostly do.

use std::cell::Cell;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};

use crate::session::{Code, Session};
use crate::state::{Faults, State};
use crate::topology::Gpu;

/// A call in progress.
pub(crate) struct Call {
    session: Arc<Session>,
    function: &'static str,
    /// A call opens its handles several times, and is delayed once for its GPU.
    delayed: Cell<bool>,
}

impl Deref for Call {
    type Target = Session;

    fn deref(&self) -> &Session {
        &self.session
    }
}

impl Call {
    /// Begins a call: kills the process, waits, or refuses, as tests have set for the node.
    pub(crate) fn begin(session: Arc<Session>, function: &'static str) -> Result<Self, Code> {
        let state = session.store.read(&session.node)?;
        if state.kill.contains_key(function) {
            count_down(&session, |state| state.kill.count_down(function));
        }
        let call = Self {
            session,
            function,
            delayed: Cell::new(false),
        };
        call.heed(&state.faults, &Cell::new(false))?;
        Ok(call)
    }

    /// Ends a call: kills the process where that was set for after it.
    pub(crate) fn end(self) {
        let session = &self.session;
        let wanted = session
            .store
            .read(&session.node)
            .is_ok_and(|state| state.kill_after.contains_key(self.function));
        if wanted {
            count_down(session, |state| state.kill_after.count_down(self.function));
        }
    }

    /// A GPU that answers. One that has fallen off the bus says so to every call, and tests
    /// can set delays and answers for one GPU.
    pub(crate) fn present(&self, index: u32) -> Result<&Gpu, Code> {
        let gpu = self.gpu(index)?;
        let state = self.state(gpu)?;
        if state.lost {
            return Err(Code::GPU_IS_LOST);
        }
        let waited = self.delayed.get();
        self.heed(&state.faults, &self.delayed)?;
        // What happened while the call hung counts too.
        if !waited && self.delayed.get() && self.state(gpu)?.lost {
            return Err(Code::GPU_IS_LOST);
        }
        Ok(gpu)
    }

    fn heed(&self, faults: &Faults, delayed: &Cell<bool>) -> Result<(), Code> {
        if let Some(milliseconds) = faults.delays_ms.get(self.function)
            && !delayed.replace(true)
        {
            std::thread::sleep(Duration::from_millis(*milliseconds));
        }
        match faults.codes.get(self.function) {
            Some(code) => Err(Code(*code)),
            None => Ok(()),
        }
    }
}

/// Counts a call down, and kills this process when it was the one that is meant. The count is
/// kept before, so that the next process lives.
fn count_down(session: &Session, count: impl FnOnce(&mut State) -> bool) {
    let meant = session
        .store
        .update(&session.node, |state| Ok(count(state)))
        .unwrap_or(false);
    if meant {
        let killed = kill_process(getpid(), Signal::KILL);
        // Only a jail that forbids it comes here.
        crate::session::complain(&format!("the process could not be killed: {killed:?}"));
    }
}
