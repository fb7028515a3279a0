//! Why a plan is what it is, in data and in sentences.
//!
//! The short form is for a condition that tenants read: it names no other
//! tenant's order. The long form is for the cluster's administrator.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::demand::PlacementType;

/// Most characters of the short form.
pub const SHORT_FORM_LIMIT: usize = 300;

/// The reasons behind an [`Outcome`](crate::Outcome).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// One sentence that says what decided.
    pub summary: String,
    /// One for each candidate that was considered and not chosen.
    pub rejections: Vec<Rejection>,
    /// Selectors that could not be judged.
    pub broken_selectors: Vec<BrokenSelector>,
}

/// A candidate that was not chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rejection {
    /// DeviceClass and kind of device, such as `mig.example.com 1g.10gb`.
    pub candidate: String,
    /// Its DeviceClass; empty where no one class was rejected.
    #[serde(default)]
    pub device_class_name: String,
    /// Its placement type; none where the whole class was rejected.
    #[serde(default)]
    pub placement_type: Option<PlacementType>,
    /// Its partition profile, where it has one.
    #[serde(default)]
    pub profile: Option<String>,
    /// What decided, for programs.
    pub reason: RejectionReason,
    /// The same with figures, for people; it names no other tenant's order.
    pub message: String,
    /// The same for the administrator, where it names more than tenants may read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// What ruled a candidate out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RejectionReason {
    /// The class's device classes do not include it.
    DeviceClassNotAllowed,
    /// No published device belongs to the device class.
    NoDevices,
    /// The class's placement types do not include it.
    PlacementTypeNotAllowed,
    /// The class's sharing modes do not include it.
    SharingModeNotAllowed,
    /// The share would be larger than the class or the device allows.
    ShareTooLarge,
    /// The class's selectors match none of its devices.
    SelectorMismatch,
    /// A selector could not be judged on its devices.
    SelectorUndecidable,
    /// Its devices publish no memory capacity.
    MemoryUnknown,
    /// Its devices have too little memory, used or not.
    TooSmall,
    /// Partitions are never combined for one replica.
    PartitionsNotCombined,
    /// No node has that many of them.
    TooFewPerNode,
    /// Its devices have taints that are not tolerated.
    Tainted,
    /// Its devices are on no node that the order may use.
    NodeNotUsable,
    /// Its pools are incomplete or invalid.
    PoolUnusable,
    /// It would hold the demand but is taken.
    Taken,
    /// It fits too, but wastes more than the one chosen.
    LargerThanNeeded,
    /// It fits, but for fewer replicas than the order needs.
    FewerReplicas,
}

/// A selector that could not be judged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BrokenSelector {
    /// Which object holds it.
    pub holder: SelectorHolder,
    /// The expression.
    pub expression: String,
    /// What went wrong.
    pub error: String,
    /// A device on which it failed; `None` when it does not even compile.
    pub device: Option<String>,
}

/// The object that holds a selector.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SelectorHolder {
    /// A DeviceClass, by name.
    DeviceClass(String),
    /// The order's own class.
    ServiceClass,
}

impl fmt::Display for SelectorHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DeviceClass(name) => write!(f, "DeviceClass {name}"),
            Self::ServiceClass => f.write_str("the InferenceServiceClass"),
        }
    }
}

impl Explanation {
    /// A reason without details.
    pub(crate) fn summary(summary: String) -> Self {
        Self {
            summary,
            ..Self::default()
        }
    }

    /// Everything, one reason a line.
    pub fn long(&self) -> String {
        let mut text = self.summary.clone();
        for broken in &self.broken_selectors {
            let device = broken
                .device
                .as_deref()
                .map(|d| format!(" on {d}"))
                .unwrap_or_default();
            text += &format!(
                "\n- selector {:?} of {} cannot be judged{device}: {}",
                broken.expression, broken.holder, broken.error
            );
        }
        for rejection in &self.rejections {
            let words = rejection.detail.as_ref().unwrap_or(&rejection.message);
            text += &format!("\n- {}: {words}", rejection.candidate);
        }
        text
    }
}

impl fmt::Display for Explanation {
    /// The short form, at most [`SHORT_FORM_LIMIT`] characters.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shorten(&self.summary, SHORT_FORM_LIMIT))
    }
}

/// Cuts at a word, with an ellipsis, to at most `limit` characters.
pub(crate) fn shorten(text: &str, limit: usize) -> String {
    if text.chars().count() <= limit {
        return text.to_owned();
    }
    let cut: String = text.chars().take(limit.saturating_sub(1)).collect();
    let end = cut.rfind(' ').unwrap_or(cut.len());
    format!("{}…", &cut[..end])
}
