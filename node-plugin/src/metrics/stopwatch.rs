//! How long each part of the work on a claim takes.
//!
//! In: the parts, as they happen. Out: a sum for each. Never: a part counted twice: what
//! is measured inside another measurement belongs to the outer one.
//!
//! Like a log span, a stopwatch goes with the work and not through every function on the
//! way: [`Stopwatch::run`] puts it on the thread, and [`phase`] finds it there.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::labels::{DeviceKind, Operation, Phase};

thread_local! {
    static CURRENT: RefCell<Option<Stopwatch>> = const { RefCell::new(None) };
    static MEASURING: Cell<bool> = const { Cell::new(false) };
}

/// Measures one operation on one claim. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Stopwatch {
    pub(super) operation: Operation,
    started: Instant,
    sums: Arc<Sums>,
}

#[derive(Debug, Default)]
struct Sums {
    /// Nanoseconds by phase; a phase that did not happen is none.
    phases: [AtomicU64; Phase::ALL.len()],
    happened: [AtomicU8; Phase::ALL.len()],
    /// One bit for each kind of device.
    kinds: AtomicU8,
}

impl Stopwatch {
    /// Starts one.
    #[must_use]
    pub fn start(operation: Operation) -> Self {
        Self {
            operation,
            started: Instant::now(),
            sums: Arc::default(),
        }
    }

    /// A device of the claim is of this kind.
    pub fn saw(&self, kind: DeviceKind) {
        self.sums
            .kinds
            .fetch_or(1 << (kind as u8), Ordering::Relaxed);
    }

    /// What the devices of the claim are, as far as it was told.
    #[must_use]
    pub fn kind(&self) -> DeviceKind {
        let bits = self.sums.kinds.load(Ordering::Relaxed);
        let mut seen = DeviceKind::ALL
            .iter()
            .filter(|kind| bits & (1 << (**kind as u8)) != 0);
        match (seen.next(), seen.next()) {
            (None, _) => DeviceKind::None,
            (Some(kind), None) => *kind,
            (Some(_), Some(_)) => DeviceKind::Mixed,
        }
    }

    /// Since the start.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.started.elapsed()
    }

    /// Measures something that waits.
    pub async fn wait<T>(&self, phase: Phase, work: impl Future<Output = T>) -> T {
        let start = Instant::now();
        let result = work.await;
        self.add(phase, start.elapsed());
        result
    }

    /// Runs work on this thread, so that its parts find this stopwatch.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = CURRENT.with_borrow_mut(|current| current.replace(self.clone()));
        let result = work();
        CURRENT.set(before);
        result
    }

    /// The phases that happened, and how long each took.
    pub fn phases(&self) -> impl Iterator<Item = (Phase, Duration)> {
        Phase::ALL.iter().filter_map(|phase| {
            let index = *phase as usize;
            let happened = self.sums.happened.get(index)?.load(Ordering::Relaxed) > 0;
            let nanoseconds = self.sums.phases.get(index)?.load(Ordering::Relaxed);
            happened.then(|| (*phase, Duration::from_nanos(nanoseconds)))
        })
    }

    fn add(&self, phase: Phase, took: Duration) {
        let index = phase as usize;
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        if let (Some(sum), Some(happened)) =
            (self.sums.phases.get(index), self.sums.happened.get(index))
        {
            sum.fetch_add(nanoseconds, Ordering::Relaxed);
            happened.store(1, Ordering::Relaxed);
        }
    }
}

/// Measures a part of the work on a claim; outside of one, it only does the work.
pub fn phase<T>(phase: Phase, work: impl FnOnce() -> T) -> T {
    let current = CURRENT.with_borrow(Clone::clone);
    let Some(stopwatch) = current.filter(|_| !MEASURING.get()) else {
        return work();
    };
    MEASURING.set(true);
    let start = Instant::now();
    let result = work();
    stopwatch.add(phase, start.elapsed());
    MEASURING.set(false);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_inside_another_is_counted_once_and_work_outside_is_not_counted() {
        let watch = Stopwatch::start(Operation::Prepare);
        phase(Phase::Cdi, || ());
        watch.run(|| {
            phase(Phase::Checkpoint, || phase(Phase::Hardware, || ()));
            phase(Phase::Checkpoint, || ());
        });
        phase(Phase::Cdi, || ());
        let phases: Vec<Phase> = watch.phases().map(|(phase, _)| phase).collect();
        assert_eq!(phases, [Phase::Checkpoint]);
    }

    #[test]
    fn the_kind_of_a_claim_is_that_of_its_devices_or_mixed_or_none() {
        let watch = Stopwatch::start(Operation::Prepare);
        assert_eq!(watch.kind(), DeviceKind::None);
        watch.saw(DeviceKind::Mig);
        watch.saw(DeviceKind::Mig);
        assert_eq!(watch.kind(), DeviceKind::Mig);
        watch.saw(DeviceKind::Share);
        assert_eq!(watch.kind(), DeviceKind::Mixed);
    }
}
