//! The device environment of DRA's CEL: quantities, versions, metering.
