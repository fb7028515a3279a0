//! Semantic versions, as device attributes of type `version` hold them.
//!
//! In: text such as `9.0.0` or `1.2.3-rc.1+build`. Out: an ordered value.
//! Never lenient unless asked: `9.0` is no version, `normalized` makes it one.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Why a text is not a semantic version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a semantic version: {reason}")]
pub struct VersionError {
    text: String,
    reason: &'static str,
}

/// A semantic version 2.0.0: three numbers, an optional pre-release, optional
/// build metadata. Build metadata counts neither for equality nor for order.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Version {
    major: u64,
    minor: u64,
    patch: u64,
    pre: Vec<Identifier>,
    build: Vec<String>,
}

/// One dot-separated part of a pre-release: numbers sort below words.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Identifier {
    Number(u64),
    Word(String),
}

impl Version {
    /// The first number.
    pub const fn major(&self) -> u64 {
        self.major
    }

    /// The second number.
    pub const fn minor(&self) -> u64 {
        self.minor
    }

    /// The third number.
    pub const fn patch(&self) -> u64 {
        self.patch
    }

    /// Parses leniently, as CEL's `semver(text, true)`: a leading `v` and
    /// leading zeros are dropped, missing minor and patch numbers are zero.
    ///
    /// # Errors
    /// When the text is no version even so.
    pub fn normalized(text: &str) -> Result<Self, VersionError> {
        let error = |reason| VersionError {
            text: text.to_owned(),
            reason,
        };
        // Suffixes may hold dots, so that only the first two split.
        let bare = text.strip_prefix('v').unwrap_or(text);
        let mut parts: Vec<String> = bare.splitn(3, '.').map(without_leading_zeros).collect();
        if parts.len() < 3 {
            // As the reference does, a short version takes no suffix.
            if bare.contains(['+', '-']) {
                return Err(error(
                    "a version of fewer than three numbers takes no suffix",
                ));
            }
            parts.resize(3, "0".to_owned());
        }
        parts
            .join(".")
            .parse()
            .map_err(|failure: VersionError| error(failure.reason))
    }
}

impl FromStr for Version {
    type Err = VersionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = |reason| VersionError {
            text: text.to_owned(),
            reason,
        };
        let (rest, build) = match text.split_once('+') {
            Some((rest, build)) => (rest, Some(build)),
            None => (text, None),
        };
        let (core, pre) = match rest.split_once('-') {
            Some((core, pre)) => (core, Some(pre)),
            None => (rest, None),
        };
        let mut numbers = core.split('.');
        let mut number = || -> Result<u64, VersionError> {
            let part = numbers
                .next()
                .ok_or_else(|| error("it needs three numbers"))?;
            numeric(part).ok_or_else(|| error("its numbers must be decimal, without leading zeros"))
        };
        let (major, minor, patch) = (number()?, number()?, number()?);
        if numbers.next().is_some() {
            return Err(error("it has more than three numbers"));
        }
        let pre = match pre {
            Some(pre) => pre
                .split('.')
                .map(|part| identifier(part).ok_or_else(|| error("its pre-release is malformed")))
                .collect::<Result<_, _>>()?,
            None => Vec::new(),
        };
        let build = match build {
            Some(build) => build
                .split('.')
                .map(|part| word(part).ok_or_else(|| error("its build metadata is malformed")))
                .collect::<Result<_, _>>()?,
            None => Vec::new(),
        };
        Ok(Self {
            major,
            minor,
            patch,
            pre,
            build,
        })
    }
}

fn without_leading_zeros(part: &str) -> String {
    if part.len() < 2 {
        return part.to_owned();
    }
    let trimmed = part.trim_start_matches('0');
    if trimmed.starts_with(|c: char| c.is_ascii_digit()) {
        trimmed.to_owned()
    } else {
        format!("0{trimmed}")
    }
}

fn numeric(part: &str) -> Option<u64> {
    let canonical = part == "0" || !part.starts_with('0');
    (canonical && part.bytes().all(|b| b.is_ascii_digit()))
        .then(|| part.parse().ok())
        .flatten()
}

fn word(part: &str) -> Option<String> {
    let legal = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
    (!part.is_empty() && part.bytes().all(legal)).then(|| part.to_owned())
}

fn identifier(part: &str) -> Option<Identifier> {
    if part.bytes().all(|b| b.is_ascii_digit()) {
        return numeric(part).map(Identifier::Number);
    }
    word(part).map(Identifier::Word)
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)?;
        for (index, part) in self.pre.iter().enumerate() {
            f.write_str(if index == 0 { "-" } else { "." })?;
            match part {
                Identifier::Number(number) => write!(f, "{number}")?,
                Identifier::Word(word) => f.write_str(word)?,
            }
        }
        for (index, part) in self.build.iter().enumerate() {
            f.write_str(if index == 0 { "+" } else { "." })?;
            f.write_str(part)?;
        }
        Ok(())
    }
}

impl TryFrom<String> for Version {
    type Error = VersionError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Version> for String {
    fn from(version: Version) -> Self {
        version.to_string()
    }
}

impl Ord for Version {
    fn cmp(&self, other: &Self) -> Ordering {
        let numbers = |v: &Self| (v.major, v.minor, v.patch);
        numbers(self).cmp(&numbers(other)).then_with(|| {
            match (self.pre.is_empty(), other.pre.is_empty()) {
                (true, true) => Ordering::Equal,
                // A release is above its own pre-releases.
                (true, false) => Ordering::Greater,
                (false, true) => Ordering::Less,
                (false, false) => self.pre.cmp(&other.pre),
            }
        })
    }
}

impl PartialOrd for Version {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Version {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Version {}
