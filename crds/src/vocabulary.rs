//! How a documented word is declared: an enum whose every variant carries its meaning and its
//! remedy, so that the FAQ is generated from the code and can never miss a word.
//!
//! In: variant names with their texts. Out: the enum and its look-ups. Nothing here knows which
//! words there are.

/// A word that users meet in status or events, and its entry in the FAQ.
pub trait Documented: Copy + Sized + 'static {
    /// Every word, in the order of the source.
    const ALL: &'static [Self];

    /// The word as users read it.
    fn as_str(self) -> &'static str;

    /// What it means.
    fn meaning(self) -> &'static str;

    /// What a person who reads it does about it; empty where nothing is to be done.
    fn remedy(self) -> &'static str;
}

/// Declares a documented enum: `Variant: "meaning" => "remedy"`.
macro_rules! documented {
    ($(#[$attribute:meta])* $name:ident { $($variant:ident: $meaning:literal => $remedy:literal,)+ }) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name {
            $(#[doc = $meaning] $variant,)+
        }

        impl $name {
            /// The word as users read it.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => stringify!($variant),)+
                }
            }
        }

        impl $crate::vocabulary::Documented for $name {
            const ALL: &'static [Self] = &[$(Self::$variant,)+];

            fn as_str(self) -> &'static str {
                $name::as_str(self)
            }

            fn meaning(self) -> &'static str {
                match self {
                    $(Self::$variant => $meaning,)+
                }
            }

            fn remedy(self) -> &'static str {
                match self {
                    $(Self::$variant => $remedy,)+
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str(self.as_str())
            }
        }
    };
}

pub(crate) use documented;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::Documented;
    use crate::{ClassCondition, ClassEvent, ClassReason, OrderCondition, OrderEvent, OrderReason};

    /// Each word is CamelCase, as Kubernetes wants reasons to be, and there once; each text is made
    /// of sentences.
    fn check<W: Documented>() {
        let mut seen = BTreeSet::new();
        for word in W::ALL.iter().copied() {
            let name = word.as_str();
            assert!(seen.insert(name), "{name} is there twice");
            assert!(name.starts_with(char::is_uppercase), "{name}");
            assert!(name.chars().all(char::is_alphanumeric), "{name}");
            assert!(word.meaning().ends_with('.'), "{name}: {}", word.meaning());
            let remedy = word.remedy();
            assert!(
                remedy.is_empty() || remedy.ends_with('.'),
                "{name}: {remedy}"
            );
        }
    }

    #[test]
    fn a_130_every_word_in_status_and_events_is_documented() {
        check::<OrderCondition>();
        check::<ClassCondition>();
        check::<OrderReason>();
        check::<ClassReason>();
        check::<OrderEvent>();
        check::<ClassEvent>();
    }

    #[test]
    fn the_identifiers_of_the_guide_are_there_word_for_word() {
        for reason in [
            "ReplicasHeldOnPreviousRuntime",
            "WorkloadRebuilding",
            "ScaleUpBlocked",
            "PlacementUndecidable",
            "ResourceClaimExhausted",
        ] {
            assert!(OrderReason::parse(reason).is_some(), "{reason}");
        }
        let conditions = OrderCondition::ALL.iter().map(|word| word.as_str());
        assert_eq!(
            conditions.collect::<Vec<_>>(),
            [
                "ClassResolved",
                "ModelResolved",
                "Planned",
                "RuntimeCurrent",
                "WorkloadReady",
                "Ready"
            ]
        );
        let conditions = ClassCondition::ALL.iter().map(|word| word.as_str());
        assert_eq!(conditions.collect::<Vec<_>>(), ["Validated", "Ready"]);
        assert_eq!(OrderEvent::SettledRegionKept.as_str(), "SettledRegionKept");
    }
}
