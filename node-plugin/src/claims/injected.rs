//! What the containers of a claim get: its CDI file, and the files which that mounts.
//!
//! In: a claim's record. Out: both as they should be, or gone. Never: a CDI file while
//! something that it mounts is missing; so it is written last and removed first.

use std::collections::{BTreeMap, BTreeSet};

use super::cdi;
use super::checkpoint::{Record, Target};
use super::core::{Core, CoreError};
use super::driver::{DriverFile, MetadataMount, NodeFiles};
use super::metadata;
use super::sharing::SharedDevice;
use crate::metrics::{Phase, phase};
use crate::slices::{Described, SharingKind};

impl Core {
    /// Writes what is missing or says something else.
    pub(super) fn write_files(
        &self,
        record: &Record,
        described: &Described,
        driver_version: &str,
    ) -> Result<(), CoreError> {
        let uid = &record.claim.uid;
        let mut files = self.node_files(record, driver_version)?;
        files.metadata = self.write_metadata(record, described)?;
        let spec = cdi::spec(&record.claim, &record.devices, &files);
        self.cdi.write(uid, &spec).map_err(|source| CoreError::Cdi {
            path: self.cdi.path(uid),
            source,
        })
    }

    /// Removes what there is of a claim, known or not.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn remove_files(&self, uid: &str) -> Result<(), CoreError> {
        phase(Phase::Cdi, || {
            self.cdi.remove(uid).map_err(|source| CoreError::Cdi {
                path: self.cdi.path(uid),
                source,
            })?;
            self.metadata
                .remove(uid)
                .map_err(|source| CoreError::Metadata {
                    path: self.metadata.folder(uid),
                    source,
                })
        })
    }

    /// The UIDs of the claims that have files, known or not.
    ///
    /// # Errors
    /// When a folder cannot be listed.
    pub fn uids_with_files(&self) -> std::io::Result<BTreeSet<String>> {
        let mut uids: BTreeSet<String> = self.cdi.uids()?.into_iter().collect();
        uids.extend(self.metadata.uids()?);
        Ok(uids)
    }

    fn write_metadata(
        &self,
        record: &Record,
        described: &Described,
    ) -> Result<Vec<MetadataMount>, CoreError> {
        let uid = &record.claim.uid;
        let files = metadata::files(record, described);
        self.metadata
            .write(uid, &files)
            .map_err(|source| CoreError::Metadata {
                path: self.metadata.folder(uid),
                source,
            })?;
        let mounts = files.into_iter().map(|file| MetadataMount {
            mount: DriverFile {
                host: self.metadata.path(uid, &file.request),
                container: file.container,
            },
            request: file.request,
        });
        Ok(mounts.collect())
    }

    fn node_files(&self, record: &Record, driver_version: &str) -> Result<NodeFiles, CoreError> {
        let missing = |device: &str| {
            let device = device.to_owned();
            move |source| CoreError::Driver { device, source }
        };
        let Some(first) = record.devices.first() else {
            return Ok(NodeFiles::default());
        };
        let mut files = NodeFiles {
            common: self.driver.common_nodes().map_err(missing(&first.device))?,
            of_device: BTreeMap::new(),
            driver: self.driver.driver_files(driver_version),
            metadata: Vec::new(),
            mps: BTreeMap::new(),
        };
        for device in &record.devices {
            let nodes = self
                .driver
                .nodes_of(&device.target)
                .map_err(missing(&device.device))?;
            files.of_device.insert(device.device.clone(), nodes);
            if let Target::Share {
                of,
                kind: SharingKind::Mps,
                ..
            } = &device.target
            {
                let places = self.sharing.places(SharedDevice::shared_out(of));
                files.mps.insert(device.device.clone(), places);
            }
        }
        Ok(files)
    }
}
