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
