//! Event sets.
//!
//! In: device handles. Out: events as NVML gives them. Never: a set that is used after
//! it was freed; it lives as long as its [`EventSet`].

use std::sync::Arc;

use nvml_wrapper::Nvml;
use nvml_wrapper_sys::bindings as sys;

use super::{DeviceHandle, Failed, Result};
use crate::error::NvmlCode;

/// `nvmlEventTypeXidCriticalError`.
pub(crate) const XID: u64 = sys::nvmlEventTypeXidCriticalError as u64;
/// `nvmlEventTypeDoubleBitEccError`.
pub(crate) const DOUBLE_BIT_ECC: u64 = sys::nvmlEventTypeDoubleBitEccError as u64;
/// `nvmlEventTypeSingleBitEccError`.
pub(crate) const SINGLE_BIT_ECC: u64 = sys::nvmlEventTypeSingleBitEccError as u64;

/// An event as NVML gives it (`nvmlEventData_t`).
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawEvent {
    /// The GPU.
    pub(crate) device: DeviceHandle,
    /// One of the constants above, or another of `nvml.h`.
    pub(crate) kind: u64,
    /// The XID of an XID event.
    pub(crate) data: u64,
    /// All ones where it is none's.
    pub(crate) gpu_instance: u32,
    /// All ones where it is none's.
    pub(crate) compute_instance: u32,
}

/// An event set, freed when dropped.
#[derive(Debug)]
pub(crate) struct EventSet {
    nvml: Arc<Nvml>,
    set: sys::nvmlEventSet_t,
}

// SAFETY: the set is an opaque name that only NVML follows, and NVML may be called from any
// thread. It is not Sync: two threads must not wait on one set.
unsafe impl Send for EventSet {}

impl EventSet {
    /// `nvmlEventSetCreate`.
    pub(crate) fn create(nvml: &Arc<Nvml>) -> Result<Self> {
        let mut set = std::ptr::null_mut();
        nvml!(nvml, nvmlEventSetCreate(&mut set))?;
        Ok(Self {
            nvml: Arc::clone(nvml),
            set,
        })
    }

    /// `nvmlDeviceRegisterEvents`.
    pub(crate) fn register(&self, device: DeviceHandle, kinds: u64) -> Result<()> {
        if kinds == 0 {
            return Err(Failed {
                call: "nvmlDeviceRegisterEvents",
                code: NvmlCode::NotSupported,
            });
        }
        nvml!(
            self.nvml,
            nvmlDeviceRegisterEvents(device.0, kinds, self.set)
        )
    }

    /// `nvmlEventSetWait_v2`; `&mut`, because one thread at a time may wait.
    pub(crate) fn wait(&mut self, timeout_ms: u32) -> Result<RawEvent> {
        let mut data = zeroed!(sys::nvmlEventData_t);
        nvml!(
            self.nvml,
            nvmlEventSetWait_v2(self.set, &mut data, timeout_ms)
        )?;
        Ok(RawEvent {
            device: DeviceHandle(data.device),
            kind: data.eventType,
            data: data.eventData,
            gpu_instance: data.gpuInstanceId,
            compute_instance: data.computeInstanceId,
        })
    }
}

impl Drop for EventSet {
    fn drop(&mut self) {
        let freed = nvml!(self.nvml, nvmlEventSetFree(self.set));
        if let Err(failed) = freed {
            tracing::debug!(code = %failed.code, "An event set could not be freed.");
        }
    }
}

/// `nvmlDeviceGetSupportedEventTypes`.
pub(crate) fn supported_events(nvml: &Nvml, device: DeviceHandle) -> Result<u64> {
    let mut kinds = 0;
    nvml!(nvml, nvmlDeviceGetSupportedEventTypes(device.0, &mut kinds))?;
    Ok(kinds)
}
