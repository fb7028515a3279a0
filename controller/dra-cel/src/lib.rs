//! The device environment of DRA's CEL: quantities, versions, metering.
//!
//! In: a selector's expression and one device's facts. Out: whether the device
//! matches, or why that cannot be judged. Never talks to a cluster, and is the
//! only crate that may name a CEL implementation.

mod attribute;
mod quantity;
mod version;

pub use attribute::AttributeValue;
pub use quantity::{Quantity, QuantityError};
pub use version::{Version, VersionError};
