//! The conditions of an order and of a class, and how one is set.
//!
//! In: a condition, its value and a reason of the right kind. Out: the list of conditions with that
//! one set. The time is an argument: nothing here reads a clock.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::reasons::{ClassReason, OrderReason};
use crate::vocabulary::documented;

documented! {
    /// Conditions of an order, in the order in which they are decided.
    OrderCondition {
        ClassResolved: "The class that the order names exists and admits the order's namespace." => "Read the reason: name another class, or ask the administrator.",
        ModelResolved: "The model's source was reached, the model is known, and its contract is decided." => "Read the reason: it names the source and what was wrong with it.",
        Planned: "A placement was found that holds the model within the class's bounds." => "Read the message: it says what was searched and what is missing.",
        RuntimeCurrent: "All copies serve by the current description, on the shipped runtime release." => "Nothing, if the copies may stay as they are; edit the order to move them all.",
        WorkloadReady: "The copies that are wanted exist and answer for the model." => "Read the message: it names the copy and what it waits for.",
        Ready: "The order is served: its endpoint answers for the model." => "Read the reason: it is that of the first condition that is not met.",
    }
}

documented! {
    /// Conditions of a class.
    ClassCondition {
        Validated: "Everything that the class says can be judged." => "Read the message: it names the field; edit the class.",
        Ready: "Orders can be served under the class on this cluster." => "Read the message: it names what the cluster lacks.",
    }
}

/// Value of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConditionStatus {
    /// The condition is met.
    True,
    /// The condition is not met.
    False,
    /// It is not known yet.
    Unknown,
}

impl ConditionStatus {
    /// The value as written in status.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

/// A condition to set: made by [`OrderCondition`] and [`ClassCondition`], so that a reason of the
/// wrong kind does not compile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConditionUpdate {
    /// Type of the condition.
    pub type_: &'static str,
    /// Its value.
    pub status: ConditionStatus,
    /// Its reason.
    pub reason: &'static str,
    /// What a person should know: names objects, says what to do.
    pub message: String,
}

macro_rules! updates {
    ($condition:ty, $reason:ty) => {
        impl $condition {
            /// This condition with a value, a reason and a message.
            #[must_use]
            pub fn update(
                self,
                status: ConditionStatus,
                reason: $reason,
                message: impl Into<String>,
            ) -> ConditionUpdate {
                ConditionUpdate {
                    type_: self.as_str(),
                    status,
                    reason: reason.as_str(),
                    message: message.into(),
                }
            }

            /// This condition as met.
            #[must_use]
            pub fn met(self, reason: $reason, message: impl Into<String>) -> ConditionUpdate {
                self.update(ConditionStatus::True, reason, message)
            }

            /// This condition as not met.
            #[must_use]
            pub fn unmet(self, reason: $reason, message: impl Into<String>) -> ConditionUpdate {
                self.update(ConditionStatus::False, reason, message)
            }

            /// This condition as not known yet.
            #[must_use]
            pub fn unknown(self, reason: $reason, message: impl Into<String>) -> ConditionUpdate {
                self.update(ConditionStatus::Unknown, reason, message)
            }

            /// This condition in `conditions`, if it is there.
            #[must_use]
            pub fn find(self, conditions: &[Condition]) -> Option<&Condition> {
                conditions
                    .iter()
                    .find(|condition| condition.type_ == self.as_str())
            }

            /// Whether this condition is met in `conditions`.
            #[must_use]
            pub fn is_met(self, conditions: &[Condition]) -> bool {
                self.find(conditions)
                    .is_some_and(|condition| condition.status == ConditionStatus::True.as_str())
            }
        }
    };
}

updates!(OrderCondition, OrderReason);
updates!(ClassCondition, ClassReason);

/// Sets one condition in `conditions`; the others stay as they are.
///
/// `lastTransitionTime` becomes `now` only if the status changed; `generation` is the generation of
/// the object that the condition was judged on. Returns whether anything changed, `now` aside.
pub fn set_condition(
    conditions: &mut Vec<Condition>,
    update: ConditionUpdate,
    generation: Option<i64>,
    now: &Time,
) -> bool {
    let mut fresh = Condition {
        type_: update.type_.to_owned(),
        status: update.status.as_str().to_owned(),
        reason: update.reason.to_owned(),
        message: update.message,
        observed_generation: generation,
        last_transition_time: now.clone(),
    };
    let Some(standing) = conditions
        .iter_mut()
        .find(|condition| condition.type_ == fresh.type_)
    else {
        conditions.push(fresh);
        return true;
    };
    if standing.status == fresh.status {
        fresh.last_transition_time = standing.last_transition_time.clone();
    }
    if *standing == fresh {
        return false;
    }
    *standing = fresh;
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Time {
        Time(k8s_openapi::jiff::Timestamp::from_second(seconds).unwrap())
    }

    #[test]
    fn a_repeated_condition_changes_nothing_and_keeps_its_time() {
        let mut conditions = Vec::new();
        let planned = || OrderCondition::Planned.met(OrderReason::LaunchPlanCalculated, "fits");
        assert!(set_condition(&mut conditions, planned(), Some(1), &at(100)));
        assert!(!set_condition(
            &mut conditions,
            planned(),
            Some(1),
            &at(200)
        ));
        assert_eq!(conditions.len(), 1);
        assert_eq!(conditions[0].last_transition_time, at(100));
    }

    #[test]
    fn a_new_message_keeps_the_time_and_a_new_status_moves_it() {
        let mut conditions = Vec::new();
        let condition = OrderCondition::WorkloadReady;
        let starting = |text: &str| condition.unmet(OrderReason::ReplicasStarting, text);
        set_condition(&mut conditions, starting("0 of 1"), Some(1), &at(100));
        assert!(set_condition(
            &mut conditions,
            starting("1 of 2"),
            Some(2),
            &at(200)
        ));
        assert_eq!(conditions[0].message, "1 of 2");
        assert_eq!(conditions[0].observed_generation, Some(2));
        assert_eq!(conditions[0].last_transition_time, at(100));
        let ready = condition.met(OrderReason::WorkloadReady, "2 of 2");
        assert!(set_condition(&mut conditions, ready, Some(2), &at(300)));
        assert_eq!(conditions[0].last_transition_time, at(300));
        assert!(condition.is_met(&conditions));
    }

    #[test]
    fn setting_one_condition_leaves_the_others_alone() {
        let mut conditions = Vec::new();
        let validated = ClassCondition::Validated.met(ClassReason::Validated, "");
        let ready = ClassCondition::Ready.unmet(ClassReason::NoDeviceClass, "none");
        set_condition(&mut conditions, validated, Some(1), &at(1));
        set_condition(&mut conditions, ready, Some(1), &at(2));
        assert!(ClassCondition::Validated.is_met(&conditions));
        assert!(!ClassCondition::Ready.is_met(&conditions));
    }
}
