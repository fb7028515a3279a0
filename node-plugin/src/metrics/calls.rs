//! The calls of NVML that have not returned.
//!
//! In: the begin and the end of each call. Out: metrics, and the call that waits longest.
//! Never: a call of NVML: asking whether it hangs must not hang.
//!
//! A driver that is busy answers late; one that hangs never does, and no timeout ends a
//! call into a library: only a new process gets a new session. See
//! [`crate::admin`] for when that is done.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Call, Metrics, Outcome, Phase, phase};

/// The calls of this process. Cloning shares them.
#[derive(Debug, Clone, Default)]
pub struct Calls {
    metrics: Metrics,
    running: Arc<Mutex<Running>>,
}

#[derive(Debug, Default)]
struct Running {
    last: u64,
    calls: BTreeMap<u64, (Call, Instant)>,
}

impl Calls {
    /// Calls that are counted in these metrics.
    #[must_use]
    pub fn new(metrics: Metrics) -> Self {
        Self {
            metrics,
            running: Arc::default(),
        }
    }

    /// Makes a call, and knows of it until it returns.
    ///
    /// # Errors
    /// The call's own.
    pub fn make<T, E>(&self, call: Call, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let start = Instant::now();
        let number = {
            let mut running = self.running();
            running.last += 1;
            let number = running.last;
            running.calls.insert(number, (call, start));
            number
        };
        let result = phase(Phase::Hardware, work);
        self.running().calls.remove(&number);
        self.metrics
            .call(call, Outcome::of(&result), start.elapsed());
        result
    }

    /// The call that waits longest, and for how long.
    #[must_use]
    pub fn oldest(&self) -> Option<(Call, Duration)> {
        let running = self.running();
        let (call, start) = running.calls.values().min_by_key(|(_, start)| *start)?;
        Some((*call, start.elapsed()))
    }

    fn running(&self) -> std::sync::MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_known_while_it_runs_and_measured_when_it_returns() {
        let calls = Calls::default();
        let result: Result<_, ()> = calls.make(Call::Inventory, || {
            let (call, _) = calls.oldest().ok_or(())?;
            calls.make(Call::Instances, || Ok::<_, ()>(()))?;
            Ok(call)
        });
        assert_eq!(result, Ok(Call::Inventory));
        assert_eq!(calls.oldest(), None);
        let text = calls.metrics.text();
        let count = "nvml_call_duration_seconds_count{call=\"inventory\",outcome=\"success\"} 1";
        assert!(text.contains(count), "{text}");
    }
}
