//! Texts of a topology file that name something.
//!
//! In: a text. Out: a value. Never: a default.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;

/// Two numbers with a point between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct MajorMinor {
    /// Before the point.
    pub major: u32,
    /// After the point.
    pub minor: u32,
}

impl TryFrom<String> for MajorMinor {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.split_once('.')
            .and_then(|(major, minor)| {
                Some(Self {
                    major: major.parse().ok()?,
                    minor: minor.parse().ok()?,
                })
            })
            .ok_or_else(|| format!("{text:?} is not of the form major.minor, such as \"9.0\""))
    }
}

/// A PCI address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct Pci {
    /// The PCI domain.
    pub domain: u32,
    /// The bus.
    pub bus: u8,
    /// The device.
    pub device: u8,
    /// The function.
    pub function: u8,
}

impl FromStr for Pci {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (rest, function) = text.rsplit_once('.')?;
            let mut parts = rest.rsplit(':');
            let device = u8::from_str_radix(parts.next()?, 16).ok()?;
            let bus = u8::from_str_radix(parts.next()?, 16).ok()?;
            // NVML also takes an address without a domain.
            let domain = match parts.next() {
                Some(domain) => u32::from_str_radix(domain, 16).ok()?,
                None => 0,
            };
            let function = u8::from_str_radix(function, 16).ok()?;
            parts.next().is_none().then_some(Self {
                domain,
                bus,
                device,
                function,
            })
        };
        parse().ok_or_else(|| {
            format!("{text:?} is not a PCI address; write domain:bus:device.function, such as 0000:65:00.0")
        })
    }
}

impl TryFrom<String> for Pci {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl fmt::Display for Pci {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:04x}:{:02x}:{:02x}.{:x}",
            self.domain, self.bus, self.device, self.function
        )
    }
}
