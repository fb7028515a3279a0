//! Waits for what the cluster does by itself, by watching, with a deadline.
//!
//! In: an object and what is expected of it. Out: the object that met it, or an error that shows
//! the object's last state. Nothing here polls.

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Context, bail};
use futures::{StreamExt, pin_mut};
use kube::runtime::watcher::watch_object;
use kube::{Api, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// For what a controller does at once.
pub const SHORT: Duration = Duration::from_secs(30);
/// For what starts a container or ends one.
pub const LONG: Duration = Duration::from_secs(120);
/// For what downloads and loads a model on two busy cores.
pub const MODEL: Duration = Duration::from_secs(300);

/// Waits until the object `name` meets `expectation`.
///
/// # Errors
/// When it does not within the time; the message holds the last state.
pub async fn until<K>(
    api: &Api<K>,
    name: &str,
    expectation: &str,
    within: Duration,
    mut met: impl FnMut(&K) -> bool,
) -> anyhow::Result<K>
where
    K: Resource + Clone + Debug + DeserializeOwned + Serialize + Send + 'static,
    K::DynamicType: Default,
{
    let found = until_state(api, name, expectation, within, |state| {
        state.is_some_and(&mut met)
    });
    found.await?.context("a state that was met is gone")
}

/// Waits until there is no object `name`.
///
/// # Errors
/// When it is still there after that time; the message holds the last state.
pub async fn gone<K>(api: &Api<K>, name: &str, within: Duration) -> anyhow::Result<()>
where
    K: Resource + Clone + Debug + DeserializeOwned + Serialize + Send + 'static,
    K::DynamicType: Default,
{
    until_state(api, name, "be gone", within, |state| state.is_none())
        .await
        .map(|_| ())
}

async fn until_state<K>(
    api: &Api<K>,
    name: &str,
    expectation: &str,
    within: Duration,
    mut met: impl FnMut(Option<&K>) -> bool,
) -> anyhow::Result<Option<K>>
where
    K: Resource + Clone + Debug + DeserializeOwned + Serialize + Send + 'static,
    K::DynamicType: Default,
{
    let states = watch_object(api.clone(), name);
    pin_mut!(states);
    let mut last: Option<K> = None;
    let mut error = None;
    let watching = async {
        while let Some(state) = states.next().await {
            match state {
                Ok(state) => {
                    last = state;
                    if met(last.as_ref()) {
                        return true;
                    }
                }
                // The watcher tries again by itself: an API server may be restarting.
                Err(failure) => error = Some(failure),
            }
        }
        false
    };
    if tokio::time::timeout(within, watching).await == Ok(true) {
        return Ok(last);
    }
    let kind = K::kind(&K::DynamicType::default()).into_owned();
    let seconds = within.as_secs();
    let trouble = error.map(|error| format!(" (last error of the watch: {error})"));
    bail!(
        "{kind} {name} did not {expectation} within {seconds} s{}; last state:\n{}",
        trouble.unwrap_or_default(),
        show(last)
    )
}

fn show<K: Resource + Serialize>(state: Option<K>) -> String {
    let Some(mut state) = state else {
        return "there is none".to_owned();
    };
    state.meta_mut().managed_fields = None;
    serde_json::to_string_pretty(&state).unwrap_or_else(|error| error.to_string())
}
