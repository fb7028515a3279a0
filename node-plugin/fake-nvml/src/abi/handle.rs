//! Handles: what the opaque pointers of NVML hold here.
//!
//! A handle is a number in the form of a pointer and is never followed, so that a
//! stale or an invented one can be told apart and does no harm.

use nvml_wrapper_sys::bindings as sys;

use crate::call::Call;
use crate::session::Code;
use crate::state::{ComputeInstance, Instance};
use crate::topology::{Gpu, Mig, Profile};

const MAGIC: usize = 0x4e56;
const DEVICE: usize = 1;
const MIG_DEVICE: usize = 2;
const GPU_INSTANCE: usize = 3;
const COMPUTE_INSTANCE: usize = 4;

/// A handle, opened. Which fields count depends on the kind.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Handle {
    kind: usize,
    gpu: u32,
    gi: u32,
    ci: u32,
}

impl Handle {
    fn encode<T>(self) -> *mut T {
        let (gpu, gi, ci) = (self.gpu as usize, self.gi as usize, self.ci as usize);
        std::ptr::without_provenance_mut(
            MAGIC << 48 | self.kind << 40 | gpu << 24 | gi << 12 | ci << 2,
        )
    }

    fn decode<T>(pointer: *mut T) -> Result<Self, Code> {
        let bits = pointer.addr();
        if bits >> 48 != MAGIC {
            return Err(Code::INVALID_ARGUMENT);
        }
        Ok(Self {
            kind: bits >> 40 & 0xff,
            gpu: (bits >> 24 & 0xffff) as u32,
            gi: (bits >> 12 & 0xfff) as u32,
            ci: (bits >> 2 & 0x3ff) as u32,
        })
    }
}

/// What a device handle stands for.
pub(super) enum Device<'a> {
    /// A physical GPU and its index.
    Whole(u32, &'a Gpu),
    /// A MIG device.
    Mig(MigDevice<'a>),
}

/// A MIG device that exists.
pub(super) struct MigDevice<'a> {
    /// The GPU's index.
    pub(super) index: u32,
    /// The GPU.
    pub(super) gpu: &'a Gpu,
    /// The profile of its GPU instance.
    pub(super) profile: &'a Profile,
    /// The GPU instance's id.
    pub(super) gi: u32,
    /// The compute instance's id.
    pub(super) ci: u32,
    /// The compute instance.
    pub(super) compute: ComputeInstance,
}

/// A GPU instance that exists.
pub(super) struct GpuInstance<'a> {
    /// The GPU's index.
    pub(super) index: u32,
    /// The GPU.
    pub(super) gpu: &'a Gpu,
    /// The GPU's MIG tables.
    pub(super) mig: &'a Mig,
    /// The instance's id.
    pub(super) gi: u32,
    /// The instance.
    pub(super) instance: Instance,
}

impl Call {
    /// The GPU of a device handle, which for a MIG device is its parent.
    pub(super) fn device(&self, handle: sys::nvmlDevice_t) -> Result<Device<'_>, Code> {
        let handle = Handle::decode(handle)?;
        let gpu = self.present(handle.gpu)?;
        match handle.kind {
            DEVICE => Ok(Device::Whole(handle.gpu, gpu)),
            MIG_DEVICE => {
                let parent = self.instance(handle)?;
                let compute = parent.instance.compute_instances.get(&handle.ci).cloned();
                Ok(Device::Mig(MigDevice {
                    index: handle.gpu,
                    gpu,
                    profile: parent
                        .mig
                        .profile(parent.instance.profile)
                        .ok_or(Code::UNKNOWN)?,
                    gi: handle.gi,
                    ci: handle.ci,
                    compute: compute.ok_or(Code::INVALID_ARGUMENT)?,
                }))
            }
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    /// A physical GPU; a MIG device is refused.
    pub(super) fn whole(&self, handle: sys::nvmlDevice_t) -> Result<(u32, &Gpu), Code> {
        match self.device(handle)? {
            Device::Whole(index, gpu) => Ok((index, gpu)),
            Device::Mig(_) => Err(Code::INVALID_ARGUMENT),
        }
    }

    /// A physical GPU and its MIG tables.
    pub(super) fn with_mig(&self, handle: sys::nvmlDevice_t) -> Result<(u32, &Gpu, &Mig), Code> {
        let (index, _) = self.whole(handle)?;
        self.mig(index).map(|(gpu, mig)| (index, gpu, mig))
    }

    /// The GPU instance of a handle.
    pub(super) fn gpu_instance(
        &self,
        handle: sys::nvmlGpuInstance_t,
    ) -> Result<GpuInstance<'_>, Code> {
        let handle = Handle::decode(handle)?;
        if handle.kind != GPU_INSTANCE {
            return Err(Code::INVALID_ARGUMENT);
        }
        self.instance(handle)
    }

    /// The compute instance of a handle: its GPU instance, its id and itself.
    pub(super) fn compute_instance(
        &self,
        handle: sys::nvmlComputeInstance_t,
    ) -> Result<(GpuInstance<'_>, u32, ComputeInstance), Code> {
        let handle = Handle::decode(handle)?;
        if handle.kind != COMPUTE_INSTANCE {
            return Err(Code::INVALID_ARGUMENT);
        }
        let parent = self.instance(handle)?;
        let compute = parent.instance.compute_instances.get(&handle.ci).cloned();
        Ok((parent, handle.ci, compute.ok_or(Code::INVALID_ARGUMENT)?))
    }

    fn instance(&self, handle: Handle) -> Result<GpuInstance<'_>, Code> {
        self.present(handle.gpu)?;
        let (gpu, mig) = self.mig(handle.gpu)?;
        let instance = self.state(gpu)?.instances.remove(&handle.gi);
        Ok(GpuInstance {
            index: handle.gpu,
            gpu,
            mig,
            gi: handle.gi,
            instance: instance.ok_or(Code::INVALID_ARGUMENT)?,
        })
    }
}

/// The handle of a physical GPU.
pub(super) fn device(gpu: u32) -> sys::nvmlDevice_t {
    Handle {
        kind: DEVICE,
        gpu,
        gi: 0,
        ci: 0,
    }
    .encode()
}

/// The handle of a MIG device.
pub(super) fn mig_device(gpu: u32, gi: u32, ci: u32) -> sys::nvmlDevice_t {
    Handle {
        kind: MIG_DEVICE,
        gpu,
        gi,
        ci,
    }
    .encode()
}

/// The handle of a GPU instance.
pub(super) fn gpu_instance(gpu: u32, gi: u32) -> sys::nvmlGpuInstance_t {
    Handle {
        kind: GPU_INSTANCE,
        gpu,
        gi,
        ci: 0,
    }
    .encode()
}

/// The handle of a compute instance.
pub(super) fn compute_instance(gpu: u32, gi: u32, ci: u32) -> sys::nvmlComputeInstance_t {
    Handle {
        kind: COMPUTE_INSTANCE,
        gpu,
        gi,
        ci,
    }
    .encode()
}
