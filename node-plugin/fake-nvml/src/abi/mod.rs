//! The C entry points of `nvml.h`, by group.
//!
//! In: C calls. Out: NVML's return codes and the caller's memory, filled as the
//! real library fills it. Never: a decision; those are in `mig` and `session`.
//!
//! The functions bear the names of `nvml.h`, which documents them. A symbol of the
//! real library that is not here is simply missing, as in an older driver.

#![allow(non_snake_case)]
#![allow(unsafe_code)]

mod compute_instance;
mod device;
mod events;
mod gpu_instance;
mod handle;
mod links;
mod mig_device;
mod ptr;
mod readings;
mod system;

pub(crate) use system::library_path;

use std::panic::{AssertUnwindSafe, catch_unwind};

use nvml_wrapper_sys::bindings as sys;

use crate::call::Call;
use crate::session::{self, Code};

/// Runs a function of `nvml.h` that needs an initialised library.
fn call(function: &'static str, body: impl FnOnce(&Call) -> Result<(), Code>) -> sys::nvmlReturn_t {
    bare_call(|| {
        let call = Call::begin(session::current()?, function)?;
        let answer = body(&call);
        call.end();
        answer
    })
}

/// Runs a function that works without `nvmlInit`. No panic may cross into C.
fn bare_call(body: impl FnOnce() -> Result<(), Code>) -> sys::nvmlReturn_t {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => sys::nvmlReturn_enum_NVML_SUCCESS,
        Ok(Err(code)) => code.0,
        Err(_) => Code::UNKNOWN.0,
    }
}
