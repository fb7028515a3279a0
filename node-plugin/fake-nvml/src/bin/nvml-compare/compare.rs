//! Two records side by side.
//!
//! In: what a real NVML and what the fake one answered. Out: a line for each difference
//! that a client could notice. Never: a difference that two cards of one kind have too.

use serde_json::Value;

use crate::walk::{Answer, Record};

/// Fields whose values differ from card to card, or from moment to moment.
const FREE: [&str; 22] = [
    "bus",
    "busId",
    "busIdLegacy",
    "computeInstance",
    "count",
    "device",
    "domain",
    "events",
    "free",
    "instance",
    "milliwatts",
    "minor",
    "pid",
    "pids",
    "pstate",
    "reasons",
    "reserved",
    "serial",
    "temperature",
    "used",
    "uuid",
    "version",
];

/// The lines, in the order of the calls. Only GPUs that both have are compared.
pub(crate) fn differences(real: &Record, fake: &Record) -> Vec<String> {
    let mut lines = Vec::new();
    if real.changed != fake.changed {
        lines.push("one record is with --change, the other without".to_owned());
    }
    let gpus = real.gpus.min(fake.gpus);
    let compared = |key: &str| {
        let gpu = key
            .strip_prefix("gpu")
            .and_then(|rest| rest.split_once('/'));
        gpu.and_then(|(number, _)| number.parse::<u32>().ok())
            .is_none_or(|number| number < gpus)
    };
    for (key, was) in real.answers.iter().filter(|(key, _)| compared(key)) {
        match fake.answers.get(key) {
            None => lines.push(format!(
                "{key}: the fake was not asked, the real says {was}"
            )),
            Some(is) => lines.extend(difference(key, was, is)),
        }
    }
    for (key, is) in fake.answers.iter().filter(|(key, _)| compared(key)) {
        if !real.answers.contains_key(key) {
            lines.push(format!("{key}: the real was not asked, the fake says {is}"));
        }
    }
    lines
}

fn difference(key: &str, real: &Answer, fake: &Answer) -> Vec<String> {
    if real.code != fake.code {
        return vec![format!("{key}: the real says {real}, the fake {fake}")];
    }
    let mut lines = Vec::new();
    compare(key, &real.value, &fake.value, &mut lines);
    lines
}

fn compare(at: &str, real: &Value, fake: &Value, lines: &mut Vec<String>) {
    match (real, fake) {
        (Value::Object(real), Value::Object(fake)) => {
            for (field, was) in real
                .iter()
                .filter(|(field, _)| !FREE.contains(&field.as_str()))
            {
                let is = fake.get(field).unwrap_or(&Value::Null);
                compare(&format!("{at}.{field}"), was, is, lines);
            }
        }
        (real, fake) if real == fake => {}
        (real, fake) => lines.push(format!("{at}: the real says {real}, the fake {fake}")),
    }
}
