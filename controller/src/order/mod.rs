//! The order's reconciler: dereference → validate → build → apply → status.
//!
//! In: an InferenceService and what the cluster holds. Out: its workload and its
//! status. `validate`, `settle`, `build`, `copies`, `moves`, `rebuild`, `current` and
//! `status` are pure; `dereference` reads, `apply` and `publish` write. An unchanged reconcile writes nothing.
//! Never: an allocation, a Secret that is read unless its owner granted it, a
//! word about other namespaces in a status.

pub mod apply;
pub mod build;
pub mod context;
pub mod copies;
pub mod current;
pub mod dereference;
pub mod download;
pub mod events;
pub mod moves;
pub mod rebuild;
pub mod settle;
pub mod settled;
pub mod status;
pub mod validate;

pub use context::{Context, Settings};

use inference_api::{InferenceService, OrderCondition, OrderReason};
use kube::core::DeserializeGuard;
use kube::runtime::controller::Action;
use kube::{Resource, ResourceExt};
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};

/// While a model comes in, its progress is read so often.
const PROGRESS_EVERY: Duration = Duration::from_secs(3);
/// Most characters of a refusal: it may quote the API server, which may quote a whole object.
const LONGEST_MESSAGE: usize = 2_000;

/// Why an order cannot be served as it stands: one condition that is not met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The condition.
    pub condition: OrderCondition,
    /// Its reason.
    pub reason: OrderReason,
    /// What a person should know.
    pub message: String,
    /// Whether waiting alone may help.
    pub transient: bool,
}

impl Refusal {
    /// A refusal that only a change mends.
    pub fn new(condition: OrderCondition, reason: OrderReason, message: impl Into<String>) -> Self {
        Refusal {
            condition,
            reason,
            message: message.into().chars().take(LONGEST_MESSAGE).collect(),
            transient: false,
        }
    }

    /// The same, worth another try.
    pub fn transient(self) -> Self {
        Refusal {
            transient: true,
            ..self
        }
    }
}

/// A reconcile that could not be finished.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The order's own object cannot be read; only a change mends it.
    #[error("the order can't be read: {0}")]
    Malformed(String),
    /// A call to the API server failed.
    #[error("{verb} {object}: {source}")]
    Api {
        /// What was attempted.
        verb: &'static str,
        /// Kind and name.
        object: String,
        /// The API server's words.
        #[source]
        source: Box<kube::Error>,
    },
}

impl Error {
    pub(crate) fn api(
        verb: &'static str,
        object: impl Into<String>,
    ) -> impl FnOnce(kube::Error) -> Self {
        let object = object.into();
        move |source| Error::Api {
            verb,
            object,
            source: Box::new(source),
        }
    }

    /// For metrics and logs: a bounded set of words.
    pub fn label(&self) -> &'static str {
        match self {
            Error::Malformed(_) => "malformed",
            Error::Api { .. } => "api",
        }
    }
}

/// Reconciles one order.
///
/// # Errors
/// [`Error`]; [`error_policy`] decides when to try again.
pub async fn reconcile(
    order: Arc<DeserializeGuard<InferenceService>>,
    cx: Arc<Context>,
) -> Result<Action, Error> {
    let order = match &order.0 {
        Ok(order) => order,
        Err(invalid) => return Err(Error::Malformed(invalid.error.clone())),
    };
    cx.metrics.reconciles.inc();
    if order.meta().deletion_timestamp.is_some() {
        // Owner references take everything along; there is no finalizer of ours.
        let fresh = status::deleting(order, &dereference::copies(order, &cx));
        status::publish(order, fresh, &cx).await?;
        return Ok(Action::await_change());
    }
    let seen = dereference::dereference(order, &cx).await?;
    let now = jiff::Timestamp::now().as_second();
    let decision = build::decide(order, &seen, &cx, now);
    let applied = apply::apply(order, &seen, &decision, &cx).await?;
    let downloads = download::read(&applied.copies, &cx).await;
    let fresh = status::compute(order, &seen, &decision, &applied, &downloads);
    // What the API server refused may be mended by what no watch tells of.
    let obstacle = applied.refused.as_ref().or(decision.refusal());
    events::publish(order, &fresh, obstacle, &cx).await;
    status::publish(order, fresh, &cx).await?;
    cx.settle_backoff(order, obstacle);
    let next = [
        cx.pause(order, obstacle),
        (!downloads.is_empty()).then_some(PROGRESS_EVERY),
        decision.again(),
    ];
    Ok(next
        .into_iter()
        .flatten()
        .min()
        .map_or_else(Action::await_change, Action::requeue))
}

/// When a failed reconcile is tried again.
pub fn error_policy(
    order: Arc<DeserializeGuard<InferenceService>>,
    error: &Error,
    cx: Arc<Context>,
) -> Action {
    cx.metrics.failed(error.label());
    let name = order.name_any();
    let namespace = order.namespace().unwrap_or_default();
    match error {
        Error::Malformed(_) => {
            warn!(namespace, order = name, %error, "The order is not understood; waiting for its change.");
            Action::await_change()
        }
        Error::Api { .. } => {
            let pause = cx.next_pause(order.meta().uid.as_deref().unwrap_or_default());
            info!(namespace, order = name, %error, pause_s = pause.as_secs(), "The order will be tried again.");
            Action::requeue(pause)
        }
    }
}
