use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use kubelet_api::dra::v1::dra_plugin_server::{DraPlugin, DraPluginServer};
use kubelet_api::registration::v1::registration_server::{Registration, RegistrationServer};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

use super::*;

const SOON: Duration = Duration::from_secs(10);
const AT_ONCE: Duration = Duration::from_millis(200);
const SOCKET: &str = "gpu.example.com@1-reg.sock";

/// A driver that prepares every claim but those named `bad`, and forgets those named `lost`.
#[derive(Clone)]
struct Driver {
    info: registration::PluginInfo,
    told: Arc<Mutex<Vec<registration::RegistrationStatus>>>,
}

#[tonic::async_trait]
impl Registration for Driver {
    async fn get_info(
        &self,
        _: Request<registration::InfoRequest>,
    ) -> Result<Response<registration::PluginInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        status: Request<registration::RegistrationStatus>,
    ) -> Result<Response<registration::RegistrationStatusResponse>, Status> {
        self.told.lock().unwrap().push(status.into_inner());
        Ok(Response::new(registration::RegistrationStatusResponse {}))
    }
}

#[tonic::async_trait]
impl DraPlugin for Driver {
    async fn node_prepare_resources(
        &self,
        request: Request<dra::NodePrepareResourcesRequest>,
    ) -> Result<Response<dra::NodePrepareResourcesResponse>, Status> {
        let mut claims = HashMap::new();
        for claim in request.into_inner().claims {
            let error = if claim.name == "bad" {
                "no such device"
            } else {
                ""
            }
            .to_owned();
            if claim.name != "lost" {
                let devices = vec![Device {
                    device_name: "gpu-0".into(),
                    ..Device::default()
                }];
                claims.insert(
                    claim.uid,
                    dra::NodePrepareResourceResponse { devices, error },
                );
            }
        }
        Ok(Response::new(dra::NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<dra::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<dra::NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims.into_iter();
        let claims = claims
            .map(|claim| (claim.uid, Default::default()))
            .collect();
        Ok(Response::new(dra::NodeUnprepareResourcesResponse {
            claims,
        }))
    }
}

struct Served {
    driver: Driver,
    folder: tempfile::TempDir,
}

impl Served {
    /// Serves a driver on both sockets; the runtime of the test ends it.
    fn new(socket: &str, change: impl FnOnce(&mut registration::PluginInfo)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let endpoint = folder.path().join("dra.sock");
        let registry = folder.path().join("registry");
        std::fs::create_dir(&registry).unwrap();
        let mut info = registration::PluginInfo {
            r#type: registration::DRA_PLUGIN.into(),
            name: "gpu.example.com".into(),
            endpoint: endpoint.to_str().unwrap().into(),
            supported_versions: vec![dra::SERVICE.into()],
        };
        change(&mut info);
        let driver = Driver {
            info,
            told: Arc::default(),
        };
        for path in [endpoint, registry.join(socket)] {
            let incoming = UnixListenerStream::new(UnixListener::bind(path).unwrap());
            let server = tonic::transport::Server::builder()
                .add_service(RegistrationServer::new(driver.clone()))
                .add_service(DraPluginServer::new(driver.clone()))
                .serve_with_incoming(incoming);
            tokio::spawn(server);
        }
        Self { driver, folder }
    }

    fn kubelet(&self) -> Kubelet {
        Kubelet::new(self.folder.path().join("registry"))
    }
}

fn claim(name: &str) -> Claim {
    Claim {
        namespace: "team".into(),
        uid: format!("uid-{name}"),
        name: name.into(),
    }
}

#[tokio::test]
async fn a_driver_whose_socket_has_an_at_sign_registers_and_prepares() {
    let served = Served::new(SOCKET, |_| {});
    let plugin = served
        .kubelet()
        .register("gpu.example.com", SOON)
        .await
        .unwrap();
    assert!(served.driver.told.lock().unwrap()[0].plugin_registered);
    let devices = plugin.prepare_claim(&claim("a")).await.unwrap();
    assert_eq!(devices[0].device_name, "gpu-0");
    plugin
        .reconnect()
        .await
        .unwrap()
        .unprepare_claim(&claim("a"))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_socket_name_that_a_rust_server_would_refuse_is_refused_here_too() {
    let served = Served::new("gpu.example.com-reg.sock", |_| {});
    let error = served
        .kubelet()
        .register("gpu.example.com", AT_ONCE)
        .await
        .unwrap_err();
    assert!(
        format!("{error:#}").contains("put an @ into the socket's name"),
        "{error:#}"
    );
}

#[tokio::test]
async fn a_driver_without_a_service_the_kubelet_knows_is_told_why() {
    let served = Served::new(SOCKET, |info| {
        info.supported_versions = vec!["v9.DRAPlugin".into()]
    });
    let socket = &served.kubelet().sockets().unwrap()[0];
    let error = served.kubelet().register_socket(socket).await.unwrap_err();
    assert!(format!("{error:#}").contains("v9.DRAPlugin"), "{error:#}");
    let told = served.driver.told.lock().unwrap();
    assert!(!told[0].plugin_registered);
    assert!(told[0].error.contains("v9.DRAPlugin"), "{told:?}");
}

#[tokio::test]
async fn one_bad_claim_does_not_fail_the_others_but_a_missing_answer_does() {
    let served = Served::new(SOCKET, |_| {});
    let plugin = served
        .kubelet()
        .register("gpu.example.com", SOON)
        .await
        .unwrap();
    let answers = plugin
        .prepare(&[claim("good"), claim("bad")])
        .await
        .unwrap();
    assert!(answers["uid-good"].is_ok());
    assert_eq!(answers["uid-bad"], Err("no such device".to_owned()));
    let error = plugin
        .prepare(&[claim("good"), claim("lost")])
        .await
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("skipped the claims [\"uid-lost\"]"),
        "{error:#}"
    );
}

#[tokio::test]
async fn a_registry_without_a_driver_names_the_driver_and_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let error = Kubelet::new(folder.path())
        .register("gpu.example.com", AT_ONCE)
        .await
        .unwrap_err();
    let message = format!("{error:#}");
    assert!(
        message.contains("gpu.example.com did not register in"),
        "{message}"
    );
    assert!(message.contains("there is no socket"), "{message}");
}
