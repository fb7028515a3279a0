//! The built-in class: made if absent, never changed again.

use super::record;
use crate::component::{Component, PLANNER_LOG};
use inference_api::names::{DEFAULT_CLASS, SHIPPED_VERSION_ANNOTATION};
use inference_api::{ClassEvent, InferenceServiceClass, default_class};
use kube::api::PostParams;
use kube::runtime::events::Recorder;
use kube::{Api, Client, ResourceExt};
use tracing::{info, warn};

/// Makes `default-llm` if there is none; tells of a difference if there is.
///
/// # Errors
/// Where the API server does not answer, or the shipped manifest cannot be read.
pub async fn ensure_default_class(client: Client, recorder: &Recorder) -> anyhow::Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    let mut shipped = default_class()?;
    shipped
        .annotations_mut()
        .insert(SHIPPED_VERSION_ANNOTATION.to_owned(), version.to_owned());
    let api: Api<InferenceServiceClass> = Api::all(client);
    let params = PostParams {
        field_manager: Some(Component::Planner.name().to_owned()),
        ..PostParams::default()
    };
    match api.create(&params, &shipped).await {
        Ok(_) => {
            info!(target: PLANNER_LOG, class = DEFAULT_CLASS, version, "Made the built-in class.");
            Ok(())
        }
        Err(kube::Error::Api(status)) if status.code == 409 => {
            let standing = api.get(DEFAULT_CLASS).await?;
            if standing.spec != shipped.spec {
                let of = standing
                    .annotations()
                    .get(SHIPPED_VERSION_ANNOTATION)
                    .map_or("an unknown version", String::as_str);
                let note = format!(
                    "the class, made by {of}, differs from the one that {version} ships; the edits stay"
                );
                record(recorder, &standing, ClassEvent::ShippedClassDiffers, note).await;
            }
            Ok(())
        }
        // A policy against the class, or a missing right: orders under other classes are
        // served all the same.
        Err(kube::Error::Api(status)) if matches!(status.code, 400 | 403 | 422) => {
            warn!(
                target: PLANNER_LOG, class = DEFAULT_CLASS,
                words = status.message,
                "The built-in class was refused; make it yourself, or start with --no-default-class."
            );
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::StatusCode;
    use kube::runtime::events::Reporter;
    use serde_json::json;

    /// What becomes of the class on an API server that always answers so.
    async fn made(code: u16) -> anyhow::Result<()> {
        crate::test_hub::install_crypto();
        let status = json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "message": "no", "reason": "R", "code": code});
        let app = axum::Router::new().fallback(move || async move {
            (StatusCode::from_u16(code).unwrap(), axum::Json(status))
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let address = format!("http://{}", listener.local_addr()?);
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        let client = Client::try_from(kube::Config::new(address.parse()?))?;
        let reporter = Reporter {
            controller: "test".into(),
            instance: None,
        };
        let recorder = Recorder::new(client.clone(), reporter);
        ensure_default_class(client, &recorder).await
    }

    #[tokio::test]
    async fn a_policy_against_the_built_in_class_keeps_no_controller_from_its_work() {
        made(403).await.unwrap();
        made(422).await.unwrap();
        assert!(made(404).await.is_err(), "without its definition it waits");
    }
}
