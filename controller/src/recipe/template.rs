//! Placeholders of recipes: whole words in braces, from a closed list.

use std::collections::BTreeMap;

macro_rules! placeholders {
    ($($variant:ident: $word:literal => $meaning:literal,)+) => {
        /// A value that an argument may hold.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Placeholder {
            $(#[doc = $meaning] $variant,)+
        }

        impl Placeholder {
            fn parse(word: &str) -> Option<Self> {
                match word {
                    $($word => Some(Self::$variant),)+
                    _ => None,
                }
            }

            const WORDS: &'static [&'static str] = &[$($word,)+];
        }
    };
}

placeholders! {
    ModelFolder: "modelFolder" => "Folder of the model's files.",
    ModelFile: "modelFile" => "The file that a GGUF runtime opens.",
    ServedName: "servedName" => "Name of the model in requests.",
    Port: "port" => "Port that the runtime listens on.",
    ContextLength: "contextLength" => "Tokens of one sequence.",
    TotalContext: "totalContext" => "Tokens of all sequences together.",
    Sequences: "sequences" => "Concurrent sequences.",
    BatchTokens: "batchTokens" => "Tokens computed at once.",
    Devices: "devices" => "Devices of one copy.",
    KvCacheBytes: "kvCacheBytes" => "Bytes of cache on each device.",
    MemoryFraction: "memoryFraction" => "Part of a device's memory that is granted, as 0.0001 to 1.",
}

/// The values of all placeholders.
pub type Values = BTreeMap<Placeholder, String>;

/// One argument of a recipe.
pub(super) enum Word<'a> {
    Literal(&'a str),
    Value(Placeholder),
}

pub(super) fn parse(argument: &str) -> Result<Word<'_>, String> {
    match argument.strip_prefix('{').and_then(|a| a.strip_suffix('}')) {
        Some(word) => Placeholder::parse(word).map(Word::Value).ok_or_else(|| {
            format!(
                "{argument} is no placeholder; there are {}",
                Placeholder::WORDS.join(", ")
            )
        }),
        None if argument.contains(['{', '}']) => Err(format!(
            "{argument:?}: a placeholder must be a whole argument"
        )),
        None => Ok(Word::Literal(argument)),
    }
}

/// The argument with its value; none where the placeholder has none (a folder
/// model has no file).
pub fn expand(argument: &str, values: &Values) -> Option<String> {
    match parse(argument).ok()? {
        Word::Literal(text) => Some(text.to_owned()),
        Word::Value(placeholder) => values.get(&placeholder).cloned(),
    }
}
