//! Deletion of one object that was seen.
//!
//! In: its name and UID. Out: nothing. Never: another object that has the name by now.

use kube::api::{DeleteParams, Preconditions};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use std::fmt::Debug;

/// Deletes the object, where it is there and still the one of this UID.
///
/// # Errors
/// What the API server answers instead.
pub(crate) async fn delete_one<K>(
    api: &Api<K>,
    name: &str,
    uid: Option<String>,
) -> Result<(), kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let params = DeleteParams {
        preconditions: uid.map(|uid| Preconditions {
            uid: Some(uid),
            resource_version: None,
        }),
        ..DeleteParams::background()
    };
    match api.delete(name, &params).await {
        Ok(_) => Ok(()),
        // Gone, or already another one.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(error),
    }
}
