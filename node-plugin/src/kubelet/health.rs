//! The health service, in both versions that kubelets speak.
//!
//! In: what is wanted, with its faults. Out: streams that tell the health of every device
//! of the pool, at once when it changes and again before the kubelet takes it for stale.
//! Never: a question to the hardware: a stream goes on when NVML hangs.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt, stream};
use kubelet_api::health::{v1, v1alpha1};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::health::report::{self, DeviceReport};
use crate::slices::Wanted;

/// How often everything is told again.
const AGAIN: Duration = Duration::from_secs(10);
/// After how long without a word the kubelet may take a device's health for unknown; three
/// words may be late.
const TIMEOUT_SECONDS: i64 = 30;

type Updates<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The health of a pool's devices. Cloning shares it.
#[derive(Clone)]
pub struct HealthService {
    pool: String,
    wanted: watch::Receiver<Option<Arc<Wanted>>>,
    stop: CancellationToken,
}

/// What a stream said last.
struct Told {
    of: Arc<Wanted>,
    reports: Vec<DeviceReport>,
}

impl HealthService {
    /// The health of what is wanted in a pool, until it is stopped.
    #[must_use]
    pub fn new(
        pool: String,
        wanted: watch::Receiver<Option<Arc<Wanted>>>,
        stop: CancellationToken,
    ) -> Self {
        Self { pool, wanted, stop }
    }

    /// The reports, each with the time it was made; the first comes as soon as there is one.
    fn reports(&self) -> impl Stream<Item = (i64, Vec<DeviceReport>)> + Send + use<> {
        let start = (self.wanted.clone(), self.stop.clone(), false, None::<Told>);
        stream::unfold(
            start,
            |(mut wanted, stop, mut waits, mut told)| async move {
                loop {
                    if waits {
                        tokio::select! {
                            () = stop.cancelled() => return None,
                            changed = wanted.changed() => changed.ok()?,
                            () = tokio::time::sleep(AGAIN) => {}
                        }
                    }
                    waits = true;
                    let Some(now) = wanted.borrow_and_update().clone() else {
                        continue; // The GPUs have not been looked at yet.
                    };
                    let clock = jiff::Timestamp::now().as_second();
                    // A pool is not laid out anew to say again what was said.
                    let reports = match told.take() {
                        Some(told) if Arc::ptr_eq(&told.of, &now) => told.reports,
                        _ => report::devices(&now),
                    };
                    told = Some(Told {
                        of: now,
                        reports: reports.clone(),
                    });
                    return Some(((clock, reports), (wanted, stop, waits, told)));
                }
            },
        )
    }
}

#[tonic::async_trait]
impl v1::dra_resource_health_server::DraResourceHealth for HealthService {
    type NodeWatchResourcesStream = Updates<v1::NodeWatchResourcesResponse>;

    async fn node_watch_resources(
        &self,
        _: Request<v1::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let pool = self.pool.clone();
        let updates = self.reports().map(move |(clock, reports)| {
            let device = |report: DeviceReport| v1::DeviceHealth {
                device: Some(v1::DeviceIdentifier {
                    pool_name: pool.clone(),
                    device_name: report.device,
                }),
                health: match report.healthy {
                    true => v1::HealthStatus::Healthy.into(),
                    false => v1::HealthStatus::Unhealthy.into(),
                },
                last_updated_time: clock,
                health_check_timeout_seconds: TIMEOUT_SECONDS,
                message: report.message,
            };
            Ok(v1::NodeWatchResourcesResponse {
                devices: reports.into_iter().map(device).collect(),
            })
        });
        Ok(Response::new(Box::pin(updates)))
    }
}

/// The older version is the same contract; kubelets that speak it show no message.
#[tonic::async_trait]
impl v1alpha1::dra_resource_health_server::DraResourceHealth for HealthService {
    type NodeWatchResourcesStream = Updates<v1alpha1::NodeWatchResourcesResponse>;

    async fn node_watch_resources(
        &self,
        _: Request<v1alpha1::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let pool = self.pool.clone();
        let updates = self.reports().map(move |(clock, reports)| {
            let device = |report: DeviceReport| v1alpha1::DeviceHealth {
                device: Some(v1alpha1::DeviceIdentifier {
                    pool_name: pool.clone(),
                    device_name: report.device,
                }),
                health: match report.healthy {
                    true => v1alpha1::HealthStatus::Healthy.into(),
                    false => v1alpha1::HealthStatus::Unhealthy.into(),
                },
                last_updated_time: clock,
                health_check_timeout_seconds: TIMEOUT_SECONDS,
                message: String::new(),
            };
            Ok(v1alpha1::NodeWatchResourcesResponse {
                devices: reports.into_iter().map(device).collect(),
            })
        });
        Ok(Response::new(Box::pin(updates)))
    }
}
