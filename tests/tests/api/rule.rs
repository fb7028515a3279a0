//! How one rule is checked: objects that keep it are accepted, objects that break it are refused with
//! a message that names the field and the remedy.
//!
//! In: changes (JSON merge patches) to an object that is right. Out: a test failure that shows the
//! object and the server's answer. Objects are only tried (dry run), so the cases share nothing.

use anyhow::{Context, Result, bail, ensure};
use axum::http::Request;
use axum::http::header::CONTENT_TYPE;
use e2e::control_plane::ControlPlane;
use kube::Error;
use serde_json::{Value, json};

/// Which of the two kinds a rule belongs to.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Class,
    Order,
}

/// A change to the object, and words of the answer to it.
pub(crate) type Refused<'a> = (Value, &'a str);

impl Kind {
    /// An object that every rule accepts.
    fn valid(self) -> Value {
        match self {
            Self::Class => json!({
                "apiVersion": "ai.deckhouse.io/v1alpha1",
                "kind": "InferenceServiceClass",
                "metadata": { "name": "night-shift" },
                "spec": { "modelPolicy": { "allowedEndpointTypes": ["Chat"] } },
            }),
            Self::Order => json!({
                "apiVersion": "ai.deckhouse.io/v1alpha1",
                "kind": "InferenceService",
                "metadata": { "name": "support-llm" },
                "spec": {
                    "inferenceServiceClassName": "default-llm",
                    "model": {
                        "src": "HuggingFace",
                        "huggingFace": { "repository": "Qwen/Qwen3-8B" },
                    },
                },
            }),
        }
    }

    /// Where such objects are created; the server judges all and stores nothing.
    const fn path(self) -> &'static str {
        match self {
            Self::Class => {
                "/apis/ai.deckhouse.io/v1alpha1/inferenceserviceclasses?dryRun=All&fieldValidation=Strict"
            }
            Self::Order => {
                "/apis/ai.deckhouse.io/v1alpha1/namespaces/default/inferenceservices?dryRun=All&fieldValidation=Strict"
            }
        }
    }

    /// The server's answer to `object`.
    async fn create(self, object: &Value) -> Result<Result<Value, Error>> {
        let request = Request::post(self.path())
            .header(CONTENT_TYPE, "application/json")
            .body(serde_json::to_vec(object)?)?;
        Ok(ControlPlane::shared()?.client()?.request(request).await)
    }
}

/// The object as the server would store it.
pub(crate) async fn stored(kind: Kind, change: &Value) -> Result<Value> {
    let object = changed(kind.valid(), change);
    kind.create(&object)
        .await?
        .with_context(|| format!("this is refused:\n{object:#}"))
}

/// The manifest as the server would store it, in another namespace than it names.
pub(crate) async fn stored_manifest(manifest: &Value) -> Result<Value> {
    let kind = match manifest["kind"].as_str() {
        Some("InferenceService") => Kind::Order,
        Some("InferenceServiceClass") => Kind::Class,
        other => bail!("a manifest of kind {other:?}"),
    };
    let object = changed(
        manifest.clone(),
        &json!({ "metadata": { "namespace": null } }),
    );
    kind.create(&object)
        .await?
        .with_context(|| format!("this is refused:\n{object:#}"))
}

/// Checks one rule: each of `accepted` is accepted, each of `refused` is refused with its words.
pub(crate) async fn check(kind: Kind, accepted: &[Value], refused: &[Refused<'_>]) -> Result<()> {
    for change in accepted {
        stored(kind, change).await?;
    }
    for (change, words) in refused {
        let object = changed(kind.valid(), change);
        match kind.create(&object).await? {
            Ok(_) => bail!("this is accepted:\n{object:#}"),
            Err(Error::Api(status)) => ensure!(
                matches!(status.code, 400 | 422) && status.message.contains(words),
                "refused ({}) without the words\n  {words}\nbut with\n  {}\nthis object:\n{object:#}",
                status.code,
                status.message
            ),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// `object` after the JSON merge patch `change`: a null removes, an object goes deeper, all else replaces.
fn changed(mut object: Value, change: &Value) -> Value {
    let Value::Object(changes) = change else {
        return change.clone();
    };
    if !object.is_object() {
        object = json!({});
    }
    for (key, value) in changes {
        if value.is_null() {
            if let Some(fields) = object.as_object_mut() {
                fields.remove(key);
            }
        } else {
            object[key] = changed(object[key].take(), value);
        }
    }
    object
}

/// Declares tests of rules: `name: Kind accepts [change, …] refuses [change => "words", …]`.
macro_rules! rules {
    ($($(#[$doc:meta])* $name:ident: $kind:ident
        accepts [$($accepted:tt),* $(,)?]
        refuses [$($refused:tt => $words:expr),* $(,)?];)+) => {
        $(
            $(#[$doc])*
            #[tokio::test]
            async fn $name() -> anyhow::Result<()> {
                crate::rule::check(
                    crate::rule::Kind::$kind,
                    &[$(serde_json::json!($accepted)),*],
                    &[$((serde_json::json!($refused), $words)),*],
                )
                .await
            }
        )+
    };
}

pub(crate) use rules;
