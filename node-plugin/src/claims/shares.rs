//! Claims that share devices: what comes between their records and their end.
//!
//! In: a claim that [`super::core`] recorded, or is about to forget. Out: daemons that have
//! what the claims need, and the claim completed or forgotten. Never: a GPU's lock, while a
//! daemon starts or ends: that takes seconds, and other claims want the GPU's other devices.

use std::collections::{BTreeMap, BTreeSet};

use gpu::{Inventory, PciAddress};

use super::checkpoint::{ClaimRef, PreparedDevice};
use super::core::{Step, Waiting};
use super::locks::Held;
use super::sharing::SharedDevice;
use super::{ClaimError, Claims, Loaded, blocking, failed};
use crate::metrics::{Phase, Stopwatch};
use crate::slices::SharingKind;

impl Claims {
    /// The rest of a prepare that needs daemons. They are waited for with the claim's
    /// lock and without those of its GPUs: the claim is recorded, so nobody else is given
    /// what it has.
    pub(super) async fn share(
        &self,
        claim: &ClaimRef,
        mut held: Vec<Held>,
        waiting: Waiting,
        loaded: Loaded,
        watch: &Stopwatch,
    ) -> Result<Vec<PreparedDevice>, ClaimError> {
        held.truncate(1); // The claim's comes first.
        let (fresh, daemons) = (waiting.fresh, waiting.daemons.clone());
        let prepared = async {
            let ready = watch.wait(Phase::Daemon, self.daemons_ready(claim, daemons));
            ready.await?;
            let (core, watched) = (self.core.clone(), watch.clone());
            blocking(claim, &mut held, move || {
                (core.after)(Step::DaemonsReady);
                let (hardware, version) = (&*loaded.hardware, &loaded.driver_version);
                watched.run(|| core.complete(hardware, version, waiting))
            })
            .await
        };
        let prepared = prepared.await;
        // What has died is undone by the next attempt, as after a crash.
        let died = matches!(prepared, Err(ClaimError::Died { .. }));
        if prepared.is_err() && fresh && !died {
            drop(held);
            let held = self.lock(claim, BTreeSet::new()).await?;
            if let Err(undo) = self.give_back(claim.clone(), held, None).await {
                tracing::error!(error = %undo,
                    "A failed prepare could not be undone; the next attempt starts with it.");
            }
        }
        prepared
    }

    async fn daemons_ready(
        &self,
        claim: &ClaimRef,
        devices: BTreeSet<SharedDevice>,
    ) -> Result<(), ClaimError> {
        for device in devices {
            let ready = self.daemons.converge(device).await;
            ready.map_err(|error| failed(claim, Box::new(error).into()))?;
        }
        Ok(())
    }

    /// The rest of an unprepare of a claim that has daemons. Its record keeps others off
    /// the devices until those are what the remaining claims need, and the turns keep a
    /// watch from starting a daemon again before the record is gone.
    pub(super) async fn leave(
        &self,
        claim: &ClaimRef,
        mut held: Vec<Held>,
        devices: BTreeSet<SharedDevice>,
    ) -> Result<(), ClaimError> {
        held.truncate(1); // The claim's comes first.
        let mut turns = Vec::new();
        for device in devices {
            let left = self.daemons.leave(device, &claim.uid).await;
            turns.push(left.map_err(|error| failed(claim, Box::new(error).into()))?);
        }
        let (core, uid) = (self.core.clone(), claim.uid.clone());
        let forgotten = blocking(claim, &mut held, move || {
            (core.after)(Step::DaemonsLeft);
            core.forget(&uid)
        });
        let forgotten = forgotten.await;
        drop(turns);
        forgotten
    }

    /// Brings the daemons of shared devices to what the claims need: those that live are
    /// adopted, those that are missing started, and those that no claim needs stopped.
    pub async fn converge_daemons(&self) {
        self.daemons.converge_all().await;
    }

    /// How each GPU of an inventory is shared.
    #[must_use]
    pub fn sharing(&self, inventory: &Inventory) -> BTreeMap<PciAddress, SharingKind> {
        let driver = &self.core.driver.roots().driver;
        self.core.sharing.kinds(inventory, driver)
    }
}
