//! The device environment of DRA's CEL: quantities, versions, metering.
//!
//! In: a selector's expression and one device's facts. Out: whether the device
//! matches, or why that cannot be judged. Never talks to a cluster, and is the
//! only crate that may name a CEL implementation.

mod attribute;
mod check;
mod library;
mod meter;
mod quantity;
mod selector;
mod values;
mod version;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod texts;

pub use attribute::AttributeValue;
pub use quantity::{Quantity, QuantityError};
pub use selector::{CompileError, DeviceFacts, EvaluationError, MAX_EXPRESSION_BYTES, Selector};
pub use version::{Version, VersionError};
