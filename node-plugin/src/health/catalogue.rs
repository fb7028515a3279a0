//! What each fault means: the one table, from which `docs/health.md` is made.
//!
//! In: a kind and a value. Out: how bad it is, what ends it and a sentence for people.
//! Never: a second opinion elsewhere.
//!
//! The meaning and the severity of XIDs follow the column "Immediate Action" of NVIDIA's
//! catalogue for Ampere and later
//! (<https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>): what asks for
//! nothing or for a new start of the application is information; what asks for a reset
//! of the GPU is fatal where work that goes on can fail or compute wrong results, and
//! degraded where it need not. The words are ours.

use super::{Kind, Severity};

/// What ends a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cure {
    /// Time: it is over when it was not seen for ten minutes.
    Quiet,
    /// A reset: NVML's recovery action says that nothing is left to do, or what stands
    /// for that where the driver does not know the field.
    Recovery,
    /// The first reading that does not show it.
    Reading,
}

impl Cure {
    /// What the documents say.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Quiet => "ten quiet minutes",
            Self::Recovery => "recovery",
            Self::Reading => "the next good reading",
        }
    }
}

/// How far an XID reaches on a GPU with MIG instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// The instance that NVML names, or the GPU where it names none.
    Instance,
    /// The whole GPU, whatever instance it was seen on.
    Gpu,
}

/// What is known of one fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// How bad it is.
    pub severity: Severity,
    /// What ends it.
    pub cure: Cure,
    /// How far it reaches.
    pub reach: Reach,
    /// What has happened, as the rest of a sentence.
    pub meaning: &'static str,
}

const fn entry(severity: Severity, cure: Cure, reach: Reach, meaning: &'static str) -> Entry {
    Entry {
        severity,
        cure,
        reach,
        meaning,
    }
}

/// An application's error, or nothing that needs care.
const fn note(meaning: &'static str) -> Entry {
    entry(Severity::Information, Cure::Quiet, Reach::Instance, meaning)
}

const fn degraded(reach: Reach, meaning: &'static str) -> Entry {
    entry(Severity::Degraded, Cure::Recovery, reach, meaning)
}

const fn fatal(reach: Reach, meaning: &'static str) -> Entry {
    entry(Severity::Fatal, Cure::Recovery, reach, meaning)
}

const fn shown(severity: Severity, meaning: &'static str) -> Entry {
    entry(severity, Cure::Reading, Reach::Gpu, meaning)
}

const COPY_ENGINE: &str = "a copy engine raised an exception, mostly an application's error";
const VIDEO: &str = "a video engine raised an exception, mostly an application's error";
const NVLINK: &str = "an NVLink error; work that spans GPUs may fail";

/// The XIDs by number, as (first, last, entry), in ascending order.
#[rustfmt::skip] // A table: a row is a line.
pub const XIDS: &[(u64, u64, Entry)] = &[
    (8, 8, note("the GPU stopped working on a channel; the application has to start anew")),
    (11, 11, note("an invalid command stream, mostly an application's error")),
    (13, 13, note("a graphics or compute exception, mostly an application's error")),
    (14, 14, note("a test message of the driver")),
    (25, 25, note("an illegal notification, mostly an application's error")),
    (31, 31, note("a memory access to an invalid address, mostly an application's error")),
    (32, 32, note("an invalid command buffer, mostly an application's error")),
    (37, 37, note("an unknown method of the front end, mostly an application's error")),
    (38, 38, note("the driver's watchdog for a context ran out")),
    (39, 41, note(COPY_ENGINE)),
    (43, 43, note("the GPU stopped working on an application's channel, mostly the application's error")),
    (44, 44, note("a fault while contexts were switched")),
    (45, 45, note("a channel was removed because its application ended or an earlier error hit it")),
    (46, 46, fatal(Reach::Gpu, "the GPU stopped answering the driver and has to be reset")),
    (48, 48, fatal(Reach::Instance, "a memory error that ECC could not correct")),
    (54, 54, degraded(Reach::Gpu, "the GPU lacks auxiliary power and runs with reduced clocks; check its power cable")),
    (60, 60, note("the security processor raised an exception for an application")),
    (62, 62, fatal(Reach::Gpu, "the power management unit halted; the GPU has to be reset")),
    (63, 63, note("a faulty row of memory was recorded for replacement at the next reset")),
    (64, 64, fatal(Reach::Gpu, "a faulty row of memory could not be recorded for replacement")),
    (66, 67, note("an access that the front end refused")),
    (68, 68, note(VIDEO)),
    (69, 69, note("an invalid class of the graphics engine, mostly an application's error")),
    (70, 72, note(COPY_ENGINE)),
    (74, 74, degraded(Reach::Gpu, NVLINK)),
    (75, 77, note(COPY_ENGINE)),
    (79, 79, fatal(Reach::Gpu, "the GPU has fallen off the bus; the node has to be rebooted")),
    (80, 80, note("a command buffer was damaged on its way, mostly an application's error")),
    (82, 84, note(VIDEO)),
    (85, 85, note(COPY_ENGINE)),
    (86, 86, note("the optical flow engine raised an exception, mostly an application's error")),
    (88, 89, note(VIDEO)),
    (92, 92, note("many single-bit memory errors, all corrected")),
    (93, 93, note("the configuration memory was written often")),
    (94, 94, entry(Severity::Degraded, Cure::Quiet, Reach::Instance, "a memory error that was contained to one application, which has to start anew")),
    (95, 95, fatal(Reach::Gpu, "a memory error that was not contained; no result of the GPU can be trusted")),
    (96, 105, note(VIDEO)),
    (106, 107, note("a test message of the management bus")),
    (108, 108, note("an address of another GPU could not be translated")),
    (109, 109, degraded(Reach::Instance, "a context could not be switched in time; NVIDIA advises a reset")),
    (110, 110, fatal(Reach::Gpu, "a security fault; the GPU has to be reset")),
    (119, 119, fatal(Reach::Gpu, "the GPU's system processor (GSP) did not answer the driver")),
    (120, 120, fatal(Reach::Gpu, "the GPU's system processor (GSP) failed")),
    (121, 121, note("an error on the link to the processor, corrected")),
    (126, 135, note(COPY_ENGINE)),
    (136, 136, degraded(Reach::Gpu, "an NVLink could not be trained; work that spans GPUs may fail")),
    (137, 137, note("an NVLink access was refused, mostly the echo of another GPU's error")),
    (139, 139, note("the optical flow engine raised an exception, mostly an application's error")),
    (140, 140, fatal(Reach::Gpu, "a memory error that ECC could not correct and that may have spread")),
    (141, 141, note("an error on the fast path of a channel")),
    (143, 143, fatal(Reach::Gpu, "the GPU could not be initialised")),
    (144, 150, degraded(Reach::Gpu, NVLINK)),
    (151, 151, degraded(Reach::Gpu, "a key of confidential computing could not be rotated; its virtual machine has to start anew")),
    (154, 154, note("the driver changed its advice for recovery, which is read at once")),
    (155, 155, degraded(Reach::Gpu, NVLINK)),
    (156, 156, degraded(Reach::Gpu, "a part of the GPU was retired; a reset makes that complete")),
    (157, 157, note("a part of the GPU could not be retired")),
    (158, 158, fatal(Reach::Gpu, "the GPU ran into a fatal timeout and has to be reset")),
    (160, 161, note("a memory channel was retired, or could not be")),
    (167, 167, fatal(Reach::Gpu, "a fatal timeout on PCI Express")),
    (171, 172, degraded(Reach::Instance, "a memory error that ECC could not correct")),
];

/// An XID that this release does not know: new claims stay off until NVML says that
/// there is nothing to do.
pub const UNKNOWN_XID: Entry = degraded(
    Reach::Instance,
    "an error that this release does not know; NVIDIA's catalogue may",
);

/// What readings show, as (kind, value, entry).
#[rustfmt::skip] // A table: a row is a line.
pub const READINGS: &[(Kind, &str, Entry)] = &[
    (Kind::Ecc, "", entry(Severity::Degraded, Cure::Recovery, Reach::Gpu, "memory errors that ECC could not correct since the driver was loaded")),
    (Kind::RowRemap, "pending", shown(Severity::Degraded, "a faulty row of memory is replaced at the next reset; until then it can hit again")),
    (Kind::RowRemap, "failed", shown(Severity::Fatal, "a faulty row of memory cannot be replaced; the card has to be")),
    (Kind::Recovery, "gpu-reset", shown(Severity::Degraded, "NVML says that the GPU has to be reset")),
    (Kind::Recovery, "drain-and-reset", shown(Severity::Degraded, "NVML says that the GPU has to be drained and reset")),
    (Kind::Recovery, "drain-p2p", shown(Severity::Degraded, "NVML says that work which spans GPUs has to leave this one")),
    (Kind::Recovery, "node-reboot", shown(Severity::Degraded, "NVML says that the node has to be rebooted")),
    (Kind::Recovery, "other", shown(Severity::Degraded, "NVML asks for something that this release does not know")),
    (Kind::Lost, "", shown(Severity::Fatal, "the GPU is lost: it has fallen off the bus or is not found any more")),
    (Kind::Thermal, "hw-thermal", shown(Severity::Degraded, "the hardware slows the GPU down because it is too hot")),
    (Kind::Thermal, "power-brake", shown(Severity::Degraded, "an external power brake slows the GPU down")),
    (Kind::Thermal, "sw-thermal", shown(Severity::Information, "the driver lowers the clocks to keep the GPU cool")),
    (Kind::Unreadable, "", shown(Severity::Degraded, "NVML cannot read the GPU, or does not answer")),
];

/// What is known of an XID.
#[must_use]
pub fn xid(number: u64) -> &'static Entry {
    XIDS.iter()
        .find(|(first, last, _)| (*first..=*last).contains(&number))
        .map_or(&UNKNOWN_XID, |(_, _, entry)| entry)
}

/// What is known of a fault.
#[must_use]
pub fn lookup(kind: Kind, value: &str) -> &'static Entry {
    if kind == Kind::Xid {
        return value.parse().map_or(&UNKNOWN_XID, xid);
    }
    READINGS
        .iter()
        .find(|(of, which, _)| *of == kind && *which == value)
        .map_or(&UNKNOWN_XID, |(_, _, entry)| entry)
}

/// The tables of `docs/health.md`.
#[must_use]
pub fn markdown() -> String {
    let mut text = String::from(
        "| taint key | value | severity | ends with | what it means |\n|---|---|---|---|---|\n",
    );
    for (kind, value, entry) in READINGS {
        text.push_str(&format!(
            "| `{}` | {} | {} | {} | {} |\n",
            kind.key(),
            if value.is_empty() { "" } else { value },
            entry.severity.name(),
            entry.cure.name(),
            entry.meaning
        ));
    }
    text.push_str(
        "\n| XID | severity | reaches | ends with | what it means |\n|---|---|---|---|---|\n",
    );
    let rows = XIDS.iter().map(|(first, last, entry)| {
        let codes = if first == last {
            first.to_string()
        } else {
            format!("{first} to {last}")
        };
        (codes, entry)
    });
    let other = std::iter::once(("any other".to_owned(), &UNKNOWN_XID));
    for (codes, entry) in rows.chain(other) {
        let reach = match entry.reach {
            Reach::Instance => "the instance",
            Reach::Gpu => "the GPU",
        };
        text.push_str(&format!(
            "| {codes} | {} | {reach} | {} | {} |\n",
            entry.severity.name(),
            entry.cure.name(),
            entry.meaning
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_the_tables_of_this_release() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/health.md");
        let document = std::fs::read_to_string(path).unwrap();
        let mark = "health::catalogue`. -->\n";
        let (prose, tables) = document.split_once(mark).unwrap();
        let wanted = format!("\n{}", markdown());
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(path, format!("{prose}{mark}{wanted}")).unwrap();
        } else {
            assert!(
                tables == wanted,
                "docs/health.md is stale: run with UPDATE_GOLDEN=1"
            );
        }
    }

    #[test]
    fn the_table_is_in_order_and_no_number_stands_twice() {
        for pair in XIDS.windows(2) {
            assert!(pair[0].1 < pair[1].0, "{} and {}", pair[0].1, pair[1].0);
        }
        assert!(XIDS.iter().all(|(first, last, _)| first <= last));
    }

    #[test]
    fn an_applications_error_is_no_taint_and_a_device_that_is_gone_is_fatal() {
        for application in [13, 31, 43, 45, 68] {
            assert_eq!(xid(application).severity, Severity::Information);
        }
        for gone in [48, 64, 79, 95, 119, 120] {
            assert_eq!(xid(gone).severity, Severity::Fatal, "{gone}");
        }
        assert_eq!(xid(100_000), &UNKNOWN_XID);
    }

    #[test]
    fn every_value_of_a_reading_is_a_label_value_and_every_kind_is_known() {
        for (_, value, _) in READINGS {
            let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            assert!(value.len() <= 63 && value.chars().all(plain));
        }
        let known =
            |kind: &Kind| *kind == Kind::Xid || READINGS.iter().any(|(of, _, _)| of == kind);
        assert!(Kind::ALL.iter().all(known));
    }
}
