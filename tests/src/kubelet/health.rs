//! The kubelet's watch of device health.
//!
//! In: a registered driver. Out: what a kubelet would then tell of each device in the status of pods.
//! Never: a device that the driver did not name.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kubelet_api::health::v1::dra_resource_health_client::DraResourceHealthClient;
use kubelet_api::health::{v1, v1alpha1};
use tonic::Streaming;

use super::Plugin;

/// The longest message that a kubelet takes as it is.
const MESSAGE_LIMIT: usize = 1024;
/// The most devices of one driver that a kubelet keeps.
const DEVICE_LIMIT: usize = 16_384;

/// Which service a kubelet watches: the newest that it and the driver know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthVersion {
    /// Kubelets 1.37 and later.
    V1,
    /// Kubelets up to 1.36.
    V1alpha1,
}

/// The health of one device as a driver told it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceHealth {
    /// `None` is unknown.
    pub healthy: Option<bool>,
    /// For people; always empty in the older version.
    pub message: String,
    /// After how long without a word it is unknown.
    pub timeout: Duration,
}

/// A watch that is open.
pub struct HealthWatch {
    stream: Stream,
    /// When the last word came.
    last: Instant,
    /// What was told of each device, by pool and name.
    pub devices: BTreeMap<(String, String), DeviceHealth>,
}

enum Stream {
    V1(Streaming<v1::NodeWatchResourcesResponse>),
    V1alpha1(Streaming<v1alpha1::NodeWatchResourcesResponse>),
}

impl Plugin {
    /// Watches the health of the driver's devices, as a kubelet does for as long as the driver is
    /// registered.
    ///
    /// # Errors
    /// When the driver has not named the service or does not serve it.
    pub async fn watch_health(&self, version: HealthVersion) -> Result<HealthWatch> {
        let service = match version {
            HealthVersion::V1 => v1::SERVICE,
            HealthVersion::V1alpha1 => v1alpha1::SERVICE,
        };
        let named = &self.info.supported_versions;
        ensure!(
            named.iter().any(|name| name == service),
            "the driver names {named:?} and not {service}"
        );
        let stream = match version {
            HealthVersion::V1 => {
                let mut client = DraResourceHealthClient::new(self.channel.clone());
                let request = v1::NodeWatchResourcesRequest {};
                Stream::V1(client.node_watch_resources(request).await?.into_inner())
            }
            HealthVersion::V1alpha1 => {
                use v1alpha1::dra_resource_health_client::DraResourceHealthClient;
                let mut client = DraResourceHealthClient::new(self.channel.clone());
                let request = v1alpha1::NodeWatchResourcesRequest {};
                Stream::V1alpha1(client.node_watch_resources(request).await?.into_inner())
            }
        };
        Ok(HealthWatch {
            stream,
            last: Instant::now(),
            devices: BTreeMap::new(),
        })
    }
}

impl HealthWatch {
    /// Takes the next word in; `false` when the driver has ended the stream.
    ///
    /// # Errors
    /// When none comes within `limit`, the stream fails, or a kubelet would not take what it says.
    pub async fn next(&mut self, limit: Duration) -> Result<bool> {
        let told = tokio::time::timeout(limit, self.stream.next())
            .await
            .with_context(|| format!("no word about health within {} s", limit.as_secs()))??;
        let Some(told) = told else {
            return Ok(false);
        };
        let late = self.last.elapsed();
        for (id, health) in told {
            ensure!(
                health.message.chars().count() <= MESSAGE_LIMIT,
                "the message about {id:?} is cut"
            );
            if let Some(known) = self.devices.get(&id) {
                ensure!(
                    late < known.timeout,
                    "{id:?} was unknown after {:?}",
                    known.timeout
                );
            }
            self.devices.insert(id, health);
        }
        ensure!(self.devices.len() <= DEVICE_LIMIT, "too many devices");
        self.last = Instant::now();
        Ok(true)
    }

    /// Takes words in until `reached` holds for what is known.
    ///
    /// # Errors
    /// When that is not so within `limit`, or the stream ends or fails.
    pub async fn until(
        &mut self,
        limit: Duration,
        reached: impl Fn(&BTreeMap<(String, String), DeviceHealth>) -> bool,
    ) -> Result<()> {
        let deadline = Instant::now() + limit;
        while !reached(&self.devices) {
            let left = deadline.saturating_duration_since(Instant::now());
            if !self.next(left).await? {
                bail!("the driver ended the stream");
            }
        }
        Ok(())
    }

    /// The health of a device, whatever its pool.
    #[must_use]
    pub fn device(&self, name: &str) -> Option<&DeviceHealth> {
        let found = self.devices.iter().find(|((_, device), _)| device == name);
        found.map(|(_, health)| health)
    }
}

type Told = Vec<((String, String), DeviceHealth)>;

impl Stream {
    async fn next(&mut self) -> Result<Option<Told>> {
        Ok(match self {
            Self::V1(stream) => stream.message().await?.map(|told| {
                let devices = told.devices.into_iter().map(|device| {
                    let id = device.device.clone().unwrap_or_default();
                    let health = device.health();
                    let known = DeviceHealth {
                        healthy: (health != v1::HealthStatus::Unknown)
                            .then_some(health == v1::HealthStatus::Healthy),
                        timeout: timeout(device.health_check_timeout_seconds),
                        message: device.message,
                    };
                    ((id.pool_name, id.device_name), known)
                });
                devices.collect()
            }),
            Self::V1alpha1(stream) => stream.message().await?.map(|told| {
                let devices = told.devices.into_iter().map(|device| {
                    let id = device.device.clone().unwrap_or_default();
                    let health = device.health();
                    let known = DeviceHealth {
                        healthy: (health != v1alpha1::HealthStatus::Unknown)
                            .then_some(health == v1alpha1::HealthStatus::Healthy),
                        timeout: timeout(device.health_check_timeout_seconds),
                        message: device.message,
                    };
                    ((id.pool_name, id.device_name), known)
                });
                devices.collect()
            }),
        })
    }
}

/// The driver's timeout, or the kubelet's own.
fn timeout(seconds: i64) -> Duration {
    match u64::try_from(seconds) {
        Ok(seconds) if seconds > 0 => Duration::from_secs(seconds),
        _ => Duration::from_secs(30),
    }
}
