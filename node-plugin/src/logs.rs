//! The form of the log.
//!
//! In: a filter and where to write. Out: one JSON object for each event, its fields beside
//! the message, and the claim it belongs to under `span`. Never: a text that has to be
//! parsed to find out which claim it is about.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// A subscriber that writes the log.
pub fn subscriber<W>(filter: EnvFilter, writer: W) -> impl tracing::Subscriber + Send + Sync
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        // The innermost span is the claim's, and there is no other.
        .with_span_list(false)
        .with_env_filter(filter)
        .with_writer(writer)
        .finish()
}
