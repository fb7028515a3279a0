//! Event sets. No event ever comes; a wait ends at its timeout.

use std::ffi::{c_uint, c_ulonglong};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nvml_wrapper_sys::bindings as sys;

use super::call;
use super::ptr::Out;
use crate::session::Code;

/// The sets in use, by number. A set's handle is its number, never followed.
static SETS: Mutex<(usize, Vec<usize>)> = Mutex::new((0, Vec::new()));

const MAGIC: usize = 0x4576 << 48;

fn known(set: sys::nvmlEventSet_t) -> Result<usize, Code> {
    let number = set.addr() ^ MAGIC;
    let sets = SETS.lock().unwrap_or_else(PoisonError::into_inner);
    sets.1
        .contains(&number)
        .then_some(number)
        .ok_or(Code::INVALID_ARGUMENT)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetCreate(set: Out<sys::nvmlEventSet_t>) -> sys::nvmlReturn_t {
    call(|_| {
        let mut sets = SETS.lock().unwrap_or_else(PoisonError::into_inner);
        sets.0 += 1;
        let number = sets.0;
        set.set(std::ptr::without_provenance_mut(number ^ MAGIC))?;
        sets.1.push(number);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetFree(set: sys::nvmlEventSet_t) -> sys::nvmlReturn_t {
    call(|_| {
        let number = known(set)?;
        let mut sets = SETS.lock().unwrap_or_else(PoisonError::into_inner);
        sets.1.retain(|other| *other != number);
        Ok(())
    })
}

const SUPPORTED: c_ulonglong = (sys::nvmlEventTypeSingleBitEccError
    | sys::nvmlEventTypeDoubleBitEccError
    | sys::nvmlEventTypeXidCriticalError) as c_ulonglong;

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetSupportedEventTypes(
    device: sys::nvmlDevice_t,
    types: Out<c_ulonglong>,
) -> sys::nvmlReturn_t {
    call(|session| {
        session.whole(device)?;
        types.set(SUPPORTED)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceRegisterEvents(
    device: sys::nvmlDevice_t,
    types: c_ulonglong,
    set: sys::nvmlEventSet_t,
) -> sys::nvmlReturn_t {
    call(|session| {
        session.whole(device)?;
        known(set)?;
        if types & !SUPPORTED != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetWait_v2(
    set: sys::nvmlEventSet_t,
    data: Out<sys::nvmlEventData_t>,
    timeout_ms: c_uint,
) -> sys::nvmlReturn_t {
    call(|_| {
        known(set)?;
        let _ = &data;
        std::thread::sleep(Duration::from_millis(timeout_ms.into()));
        Err(Code::TIMEOUT)
    })
}
