//! MIG instances: list, create, destroy.
//!
//! In: a GPU by PCI address. Out: [`MigInstance`]s on the hardware. Never: a half-made
//! instance left behind without an error that says so.

use crate::error::{Error, NvmlCode};
use crate::profile::{self, spanning_compute_profile};
use crate::raw::{self, ComputeInstanceHandle, DeviceHandle, Failed, GpuInstanceHandle};
use crate::{ComputeInstance, Gpus, MigInstance, PciAddress, Placement};

/// Values of the compute profile enum of `nvml.h`.
const COMPUTE_ENUM_VALUES: std::ops::Range<u32> = 0..16;

/// How often a list of instances is read that changes meanwhile.
const LIST_ATTEMPTS: u32 = 8;

impl Gpus {
    /// Creates a GPU instance at a placement, and a compute instance that spans it. Turns
    /// MIG on first where it is off and can be turned on without a reset.
    ///
    /// # Errors
    /// When NVML refuses; then nothing is left behind unless the error is
    /// [`Error::HalfMade`]. Its code is [`NvmlCode::InsufficientResources`] when the
    /// memory slices are taken.
    pub fn create_instance(
        &self,
        pci: PciAddress,
        profile_id: u32,
        placement: Placement,
    ) -> Result<MigInstance, Error> {
        let device = self.handle(pci)?;
        self.enable_mig(pci, device)?;
        let instance = raw::create_gpu_instance(&self.nvml, device, profile_id, placement)
            .map_err(|failed| {
                let Placement { start, size } = placement;
                on(
                    format!("{pci}: profile {profile_id} at {start}:{size}"),
                    failed,
                )
            })?;
        self.span(pci, profile_id, instance).map_err(|cause| {
            // Read before the destroy: the handle is void after it.
            let id = raw::gpu_instance_info(&self.nvml, instance).map_or(u32::MAX, |(id, ..)| id);
            match self.destroy_with_computes(pci, id, instance) {
                Ok(()) => cause,
                Err(undo) => Error::HalfMade {
                    cause: Box::new(cause),
                    undo: Box::new(undo),
                    gpu_instance_id: id,
                },
            }
        })
    }

    /// Destroys a GPU instance and its compute instances. An unknown one is no error: it
    /// is gone already, as after a reboot.
    ///
    /// # Errors
    /// When NVML refuses, with [`NvmlCode::InUse`] while a process still runs in it.
    pub fn destroy_instance(&self, pci: PciAddress, gpu_instance_id: u32) -> Result<(), Error> {
        let device = self.handle(pci)?;
        match raw::gpu_instance_by_id(&self.nvml, device, gpu_instance_id) {
            Ok(instance) => self.destroy_with_computes(pci, gpu_instance_id, instance),
            // With MIG off, or without it, there are no instances.
            Err(Failed {
                code: NvmlCode::NotFound | NvmlCode::NotSupported,
                ..
            }) => Ok(()),
            Err(failed) => Err(on(format!("{pci}: GPU instance {gpu_instance_id}"), failed)),
        }
    }

    /// The instances of a GPU by id, half-made ones included.
    ///
    /// # Errors
    /// When NVML refuses.
    pub fn instances(&self, pci: PciAddress) -> Result<Vec<MigInstance>, Error> {
        let device = self.handle(pci)?;
        self.list(device)
            .map_err(|failed| on(pci.to_string(), failed))
    }

    /// Turns MIG off on a GPU that has no instances, so that the whole GPU can be used.
    /// Does nothing where MIG is off, absent, or takes a reset to change.
    ///
    /// # Errors
    /// When NVML refuses, with [`NvmlCode::InUse`] while there are instances or clients.
    pub fn disable_mig(&self, pci: PciAddress) -> Result<(), Error> {
        let device = self.handle(pci)?;
        match raw::mig_mode(&self.nvml, device) {
            Ok((true, _)) if self.is_mig_switchable(device) => {
                raw::set_mig_mode(&self.nvml, device, false)
                    .map_err(|failed| on(pci.to_string(), failed))
            }
            Ok(_)
            | Err(Failed {
                code: NvmlCode::NotSupported,
                ..
            }) => Ok(()),
            Err(failed) => Err(on(pci.to_string(), failed)),
        }
    }

    fn enable_mig(&self, pci: PciAddress, device: DeviceHandle) -> Result<(), Error> {
        let refused = |failed: Failed| Error::MigModeNotSwitchable {
            pci,
            code: failed.code,
        };
        let (on_now, _) = raw::mig_mode(&self.nvml, device).map_err(refused)?;
        if on_now {
            return Ok(());
        }
        if !self.is_mig_switchable(device) {
            // Not even tried: it would leave a pending change for the next reset.
            return Err(Error::MigModeNotSwitchable {
                pci,
                code: NvmlCode::ResetRequired,
            });
        }
        raw::set_mig_mode(&self.nvml, device, true).map_err(refused)?;
        tracing::info!(gpu = %pci, "MIG was turned on.");
        Ok(())
    }

    /// Adds the compute instance that spans a new GPU instance.
    fn span(
        &self,
        pci: PciAddress,
        profile_id: u32,
        instance: GpuInstanceHandle,
    ) -> Result<MigInstance, Error> {
        let failed = |failed| {
            on(
                format!("{pci}: GPU instance of profile {profile_id}"),
                failed,
            )
        };
        let (id, profile_id, placement) =
            raw::gpu_instance_info(&self.nvml, instance).map_err(failed)?;
        let nothing_spans = Error::NoSpanningComputeInstance { pci, profile_id };
        let device = self.handle(pci)?;
        let slices = profile::slices(&self.nvml, device, profile_id).map_err(failed)?;
        let Some((slices, value)) = slices.and_then(|s| Some((s, spanning_compute_profile(s)?)))
        else {
            return Err(nothing_spans);
        };
        let compute_profile = match raw::compute_profile(&self.nvml, instance, value) {
            Ok((compute_profile, spanned)) if spanned == slices => compute_profile,
            Ok(_)
            | Err(Failed {
                code: NvmlCode::NotSupported,
                ..
            }) => return Err(nothing_spans),
            Err(error) => return Err(failed(error)),
        };
        let compute =
            raw::create_compute_instance(&self.nvml, instance, compute_profile).map_err(failed)?;
        let compute = self.compute_instance(compute).map_err(failed)?;
        Ok(MigInstance {
            gpu_instance_id: id,
            profile_id,
            placement,
            compute_instances: vec![compute],
        })
    }

    fn destroy_with_computes(
        &self,
        pci: PciAddress,
        id: u32,
        instance: GpuInstanceHandle,
    ) -> Result<(), Error> {
        let failed = |failed| on(format!("{pci}: GPU instance {id}"), failed);
        for compute in self.compute_handles(instance).map_err(failed)? {
            raw::destroy_compute_instance(&self.nvml, compute).map_err(failed)?;
        }
        raw::destroy_gpu_instance(&self.nvml, instance).map_err(failed)
    }

    /// All instances; none where MIG is off. The list is read in several calls, and one
    /// that is destroyed between two of them, by a claim that ends, is no broken GPU: the
    /// list is then read again.
    pub(crate) fn list(&self, device: DeviceHandle) -> raw::Result<Vec<MigInstance>> {
        for _ in 1..LIST_ATTEMPTS {
            match self.list_once(device) {
                Err(Failed {
                    code: NvmlCode::NotFound | NvmlCode::InvalidArgument,
                    ..
                }) => {}
                listed => return listed,
            }
        }
        self.list_once(device)
    }

    fn list_once(&self, device: DeviceHandle) -> raw::Result<Vec<MigInstance>> {
        let mut instances = Vec::new();
        for (_, info) in profile::infos(&self.nvml, device)? {
            let handles = match raw::gpu_instances(&self.nvml, device, info.id) {
                Ok(handles) => handles,
                Err(Failed {
                    code: NvmlCode::NotSupported,
                    ..
                }) => Vec::new(),
                Err(failed) => return Err(failed),
            };
            for handle in handles {
                let (gpu_instance_id, profile_id, placement) =
                    raw::gpu_instance_info(&self.nvml, handle)?;
                let compute_instances = self
                    .compute_handles(handle)?
                    .into_iter()
                    .map(|compute| self.compute_instance(compute))
                    .collect::<raw::Result<Vec<_>>>()?;
                instances.push(MigInstance {
                    gpu_instance_id,
                    profile_id,
                    placement,
                    compute_instances,
                });
            }
        }
        instances.sort_by_key(|instance| instance.gpu_instance_id);
        Ok(instances)
    }

    fn compute_handles(
        &self,
        instance: GpuInstanceHandle,
    ) -> raw::Result<Vec<ComputeInstanceHandle>> {
        let mut profiles = Vec::new();
        for value in COMPUTE_ENUM_VALUES {
            match raw::compute_profile(&self.nvml, instance, value) {
                Ok((id, _)) if !profiles.contains(&id) => profiles.push(id),
                Ok(_) => {}
                Err(Failed {
                    code: NvmlCode::NotSupported | NvmlCode::InvalidArgument,
                    ..
                }) => {}
                Err(failed) => return Err(failed),
            }
        }
        let mut handles = Vec::new();
        for profile in profiles {
            handles.extend(raw::compute_instances(&self.nvml, instance, profile)?);
        }
        Ok(handles)
    }

    fn compute_instance(&self, compute: ComputeInstanceHandle) -> raw::Result<ComputeInstance> {
        let (id, profile_id, device) = raw::compute_instance_info(&self.nvml, compute)?;
        Ok(ComputeInstance {
            id,
            profile_id,
            uuid: raw::uuid(&self.nvml, device)?,
        })
    }
}

/// A failed call, with what it was called on.
pub(crate) fn on(object: String, failed: Failed) -> Error {
    Error::Call {
        call: failed.call,
        on: object,
        code: failed.code,
    }
}
