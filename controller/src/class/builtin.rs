//! The built-in class: made if absent, never changed again.

use super::record;
use crate::FIELD_MANAGER;
use inference_api::names::{DEFAULT_CLASS, SHIPPED_VERSION_ANNOTATION};
use inference_api::{ClassEvent, InferenceServiceClass, default_class};
use kube::api::PostParams;
use kube::runtime::events::Recorder;
use kube::{Api, Client, ResourceExt};
use tracing::info;

/// Makes `default-llm` if there is none; tells of a difference if there is.
///
/// # Errors
/// Where the API server does not answer or the shipped manifest cannot be read.
pub async fn ensure_default_class(client: Client, recorder: &Recorder) -> anyhow::Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    let mut shipped = default_class()?;
    shipped
        .annotations_mut()
        .insert(SHIPPED_VERSION_ANNOTATION.to_owned(), version.to_owned());
    let api: Api<InferenceServiceClass> = Api::all(client);
    let params = PostParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PostParams::default()
    };
    match api.create(&params, &shipped).await {
        Ok(_) => {
            info!(class = DEFAULT_CLASS, version, "Made the built-in class.");
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
        Err(error) => Err(error.into()),
    }
}
