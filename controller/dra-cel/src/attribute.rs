//! Values of device attributes, as ResourceSlices publish them.

use serde::{Deserialize, Serialize};

use crate::Version;

/// One attribute of a device. Its JSON form is that of `resource.k8s.io/v1`
/// (`{"string": "gpu"}`, `{"version": "9.0.0"}`, …).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum AttributeValue {
    /// A 64-bit integer.
    Int(i64),
    /// A truth value.
    Bool(bool),
    /// Text of at most 64 characters.
    String(String),
    /// A semantic version.
    Version(Version),
    /// Several integers.
    Ints(Vec<i64>),
    /// Several truth values.
    Bools(Vec<bool>),
    /// Several texts.
    Strings(Vec<String>),
    /// Several versions.
    Versions(Vec<Version>),
}

impl AttributeValue {
    /// The text of a string attribute.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// The number of an integer attribute.
    pub const fn as_int(&self) -> Option<i64> {
        match self {
            Self::Int(number) => Some(*number),
            _ => None,
        }
    }
}

impl From<&str> for AttributeValue {
    fn from(text: &str) -> Self {
        Self::String(text.to_owned())
    }
}

impl From<i64> for AttributeValue {
    fn from(number: i64) -> Self {
        Self::Int(number)
    }
}

impl From<bool> for AttributeValue {
    fn from(truth: bool) -> Self {
        Self::Bool(truth)
    }
}

impl From<Version> for AttributeValue {
    fn from(version: Version) -> Self {
        Self::Version(version)
    }
}
