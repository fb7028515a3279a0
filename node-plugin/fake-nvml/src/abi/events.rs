//! Event sets.
//!
//! As on hardware, a set is given the events that happen after a GPU was registered with
//! it, each once, and every set has its own; an event that nobody is registered for is lost.

use std::collections::BTreeMap;
use std::ffi::{c_uint, c_ulonglong};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nvml_wrapper_sys::bindings as sys;

use super::call;
use super::handle;
use super::ptr::Out;
use crate::call::Call;
use crate::session::Code;
use crate::state::{Event, State};

/// A GPU in a set.
struct Registration {
    /// The GPU's index.
    gpu: u32,
    /// The kinds that are wanted.
    kinds: u64,
    /// The number of the last event that was there already, or was given.
    seen: u64,
}

/// The sets in use.
struct Sets {
    /// How many there ever were.
    made: usize,
    /// By number. A set's handle is its number, never followed.
    open: BTreeMap<usize, Vec<Registration>>,
}

static SETS: Mutex<Sets> = Mutex::new(Sets {
    made: 0,
    open: BTreeMap::new(),
});

const MAGIC: usize = 0x4576 << 48;

fn locked() -> MutexGuard<'static, Sets> {
    SETS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sets {
    fn of(&mut self, set: sys::nvmlEventSet_t) -> Result<&mut Vec<Registration>, Code> {
        let number = set.addr() ^ MAGIC;
        self.open.get_mut(&number).ok_or(Code::INVALID_ARGUMENT)
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetCreate(set: Out<sys::nvmlEventSet_t>) -> sys::nvmlReturn_t {
    call("nvmlEventSetCreate", |_| {
        let mut sets = locked();
        sets.made += 1;
        let number = sets.made;
        set.set(std::ptr::without_provenance_mut(number ^ MAGIC))?;
        sets.open.insert(number, Vec::new());
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetFree(set: sys::nvmlEventSet_t) -> sys::nvmlReturn_t {
    call("nvmlEventSetFree", |_| {
        let freed = locked().open.remove(&(set.addr() ^ MAGIC));
        freed.map(|_| ()).ok_or(Code::INVALID_ARGUMENT)
    })
}

const XID: u64 = sys::nvmlEventTypeXidCriticalError as u64;
const ECC: u64 = (sys::nvmlEventTypeSingleBitEccError | sys::nvmlEventTypeDoubleBitEccError) as u64;

fn supported(session: &Call, device: sys::nvmlDevice_t) -> Result<(u32, u64), Code> {
    let (index, gpu) = session.whole(device)?;
    Ok((index, if gpu.model.ecc { XID | ECC } else { XID }))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetSupportedEventTypes(
    device: sys::nvmlDevice_t,
    types: Out<c_ulonglong>,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceGetSupportedEventTypes", |session| {
        types.set(supported(session, device)?.1)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceRegisterEvents(
    device: sys::nvmlDevice_t,
    types: c_ulonglong,
    set: sys::nvmlEventSet_t,
) -> sys::nvmlReturn_t {
    call("nvmlDeviceRegisterEvents", |session| {
        let (gpu, supported) = supported(session, device)?;
        let seen = session.store.read(&session.node)?.last_event;
        let mut sets = locked();
        let set = sets.of(set)?;
        if types & !supported != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        set.push(Registration {
            gpu,
            kinds: types,
            seen,
        });
        Ok(())
    })
}

/// The oldest event that a set has not been given yet, which is then given.
fn take(set: &mut [Registration], session: &Call, state: &State) -> Option<(u32, Event)> {
    let next = state.events.iter().find_map(|event| {
        let position = set.iter().position(|registration| {
            let registered = session
                .gpu(registration.gpu)
                .is_ok_and(|gpu| gpu.uuid == event.gpu);
            registered && event.number > registration.seen && registration.kinds & event.kind != 0
        })?;
        Some((position, event.clone()))
    });
    let (position, event) = next?;
    let registration = set.get_mut(position)?;
    registration.seen = event.number;
    Some((registration.gpu, event))
}

fn any_is_lost(set: &[Registration], session: &Call, state: &State) -> bool {
    set.iter().any(|registration| {
        let gpu = session.gpu(registration.gpu).ok();
        gpu.and_then(|gpu| state.gpus.get(&gpu.uuid))
            .is_some_and(|gpu| gpu.lost)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetWait_v2(
    set: sys::nvmlEventSet_t,
    data: Out<sys::nvmlEventData_t>,
    timeout_ms: c_uint,
) -> sys::nvmlReturn_t {
    call("nvmlEventSetWait_v2", |session| {
        let end = Instant::now() + Duration::from_millis(timeout_ms.into());
        let watch = session.store.watch();
        loop {
            let state = session.store.read(&session.node)?;
            {
                let mut sets = locked();
                let set = sets.of(set)?;
                if let Some((gpu, event)) = take(set, session, &state) {
                    return data.set(sys::nvmlEventData_t {
                        device: handle::device(gpu),
                        eventType: event.kind,
                        eventData: event.data,
                        gpuInstanceId: event.gi.unwrap_or(u32::MAX),
                        computeInstanceId: event.ci.unwrap_or(u32::MAX),
                    });
                }
                if any_is_lost(set, session, &state) {
                    return Err(Code::GPU_IS_LOST);
                }
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Code::TIMEOUT);
            }
            watch.wait(left);
        }
    })
}
