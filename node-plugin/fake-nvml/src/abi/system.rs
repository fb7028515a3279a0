//! Start, end, versions and error texts.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use nvml_wrapper_sys::bindings as sys;

use super::ptr::{Out, OutText};
use super::{bare_call, call};
use crate::session;

/// The path of this library as the loader knows it.
pub(crate) fn library_path() -> Option<PathBuf> {
    // SAFETY: all zero is a value of this struct of pointers.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let inside = nvmlInit_v2 as *const c_void;
    // SAFETY: `inside` is an address in this library and `info` is writable.
    let found = unsafe { libc::dladdr(inside, &mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader keeps the name as long as the library is loaded, which it is.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    PathBuf::from(OsStr::from_bytes(name.to_bytes()))
        .canonicalize()
        .ok()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> sys::nvmlReturn_t {
    bare_call(|| session::init("nvmlInit"))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> sys::nvmlReturn_t {
    bare_call(|| session::init("nvmlInit_v2"))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> sys::nvmlReturn_t {
    bare_call(|| session::init("nvmlInitWithFlags"))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> sys::nvmlReturn_t {
    bare_call(session::shutdown)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: sys::nvmlReturn_t) -> *const c_char {
    // The texts of the real library.
    let text = match result {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        5 => c"Already Initialized",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        8 => c"Insufficient External Power",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        11 => c"Interrupt Request Issue",
        12 => c"NVML Shared Library Not Found",
        13 => c"Function Not Found",
        14 => c"Corrupted infoROM",
        15 => c"GPU is lost",
        16 => c"GPU requires restart",
        17 => c"The operating system has blocked the request.",
        18 => c"RM has detected an NVML/RM version mismatch.",
        19 => c"In use by another client",
        20 => c"Insufficient Memory",
        21 => c"No data",
        22 => c"The requested vgpu operation is not available on target device, becasue ECC is enabled",
        23 => c"Insufficient Resources",
        25 => c"Argument version mismatch",
        26 => c"Deprecated",
        27 => c"Not Ready",
        28 => c"No GPUs were found",
        29 => c"Resource not in correct state to perform requested operation",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetDriverVersion(version: OutText, length: c_uint) -> sys::nvmlReturn_t {
    call("nvmlSystemGetDriverVersion", |session| {
        version.set(length, &session.node.driver.version)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetNVMLVersion(version: OutText, length: c_uint) -> sys::nvmlReturn_t {
    call("nvmlSystemGetNVMLVersion", |session| {
        version.set(length, &session.node.driver.nvml)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetCudaDriverVersion(version: Out<c_int>) -> sys::nvmlReturn_t {
    call("nvmlSystemGetCudaDriverVersion", |session| {
        let cuda = session.node.driver.cuda;
        version.set((cuda.major * 1000 + cuda.minor * 10) as c_int)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) -> sys::nvmlReturn_t {
    nvmlSystemGetCudaDriverVersion(version)
}
