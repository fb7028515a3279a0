//! A caller's pointers, with the one contract under which they may be used.
//!
//! The types are transparent over the C pointer, so they stand in the signatures
//! of the entry points and can be made by no Rust code. NVML's contract, which
//! every `SAFETY` line here rests on: a pointer is null or points to memory of its
//! type that is valid for the length of the call and that nobody else touches.

use std::ffi::{CStr, c_char, c_uint};

use crate::session::Code;

/// Where one value goes.
#[repr(transparent)]
pub(super) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes the value.
    pub(super) fn set(&self, value: T) -> Result<(), Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: NVML's contract above; not null. Unaligned, because C does not promise more.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// The version word that a versioned struct begins with.
    pub(super) fn version(&self) -> Result<u32, Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: NVML's contract above; each struct this is called for begins with a u32
        // that the caller has set.
        Ok(unsafe { self.0.cast::<u32>().read_unaligned() })
    }

    /// The same place as another version of the struct, which `version` has named.
    pub(super) fn as_version<U>(&self) -> Out<U> {
        Out(self.0.cast())
    }

    /// The struct that the caller has filled in.
    pub(super) fn get(&self) -> Result<T, Code>
    where
        T: Copy,
    {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: NVML's contract above; T is a struct of integers, for which any bytes do.
        Ok(unsafe { self.0.read_unaligned() })
    }
}

/// A value that the caller gives.
#[repr(transparent)]
pub(super) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Reads the value.
    pub(super) fn get(&self) -> Result<T, Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: NVML's contract above; not null.
        Ok(unsafe { self.0.read_unaligned() })
    }
}

/// An array that is filled, or null to ask for the count only. Its length is the
/// caller's promise: NVML reads no length, it tells one.
#[repr(transparent)]
pub(super) struct Fill<T>(*mut T);

impl<T: Copy> Fill<T> {
    /// Writes the values where there is an array, and their number in any case.
    pub(super) fn set(&self, count: &Out<c_uint>, values: &[T]) -> Result<(), Code> {
        count.set(values.len() as c_uint)?;
        if !self.0.is_null() {
            for (index, value) in values.iter().enumerate() {
                // SAFETY: NVML's contract: the array holds as many as the call reports
                // when asked with null, which is this many.
                unsafe { self.0.add(index).write_unaligned(*value) };
            }
        }
        Ok(())
    }
}

/// An array of so many structs that the caller has begun to fill in; its length is another
/// argument.
#[repr(transparent)]
pub(super) struct InOut<T>(*mut T);

impl<T: Copy> InOut<T> {
    /// Changes each of them.
    pub(super) fn change(&self, count: usize, change: impl Fn(&mut T)) -> Result<(), Code> {
        if self.0.is_null() || count == 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        for index in 0..count {
            // SAFETY: NVML's contract: the array has `count` structs of integers.
            let place = unsafe { self.0.add(index) };
            // SAFETY: as above.
            let mut value = unsafe { place.read_unaligned() };
            change(&mut value);
            // SAFETY: as above.
            unsafe { place.write_unaligned(value) };
        }
        Ok(())
    }
}

/// A C string that the caller gives.
#[repr(transparent)]
pub(super) struct InText(*const c_char);

impl InText {
    /// The text.
    pub(super) fn get(&self) -> Result<&str, Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: NVML's contract: a C string that outlives the call, and `self` is of the call.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| Code::INVALID_ARGUMENT)
    }
}

/// A buffer for a C string; its length is the next argument.
#[repr(transparent)]
pub(super) struct OutText(*mut c_char);

impl OutText {
    /// Writes the text and its end, or says that they do not fit.
    pub(super) fn set(&self, length: c_uint, text: &str) -> Result<(), Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        if text.len() >= length as usize {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        // SAFETY: NVML's contract: the buffer has `length` bytes, more than the text.
        unsafe {
            self.0
                .copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
            self.0.add(text.len()).write(0);
        }
        Ok(())
    }
}

/// A text in a fixed array of a struct, cut to fit.
pub(super) fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    for (to, from) in array.iter_mut().take(N - 1).zip(text.bytes()) {
        *to = from as c_char;
    }
    array
}

/// The version word of a struct: its size and its version (`NVML_STRUCT_VERSION`).
pub(super) const fn struct_version<T>(version: u32) -> u32 {
    size_of::<T>() as u32 | (version << 24)
}
