//! The selectors that keep a claim on devices of the planned kind.
//!
//! The scheduler takes the first device that fits. These make every device that
//! it can take an equal one, and never fail on a device of another driver. They
//! come before the class's own selectors, so that those are judged only on
//! devices that the plan counted with.

use dra_cel::Quantity;

use crate::kinds::KindKey;

/// How a claim holds its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Held {
    /// Alone, and the class has no device that is held otherwise: nothing is said,
    /// because the field is unknown to a cluster without consumable capacity.
    Unspoken,
    /// Alone.
    Alone,
    /// In shares.
    Shared,
}

/// Selectors for a claim that may have devices of these kinds, which share
/// device class, driver and placement type.
pub(crate) fn selectors(
    kinds: &[&KindKey],
    memory_domain: &str,
    needed_bytes: u64,
    held: Held,
    policy: &[String],
) -> Vec<String> {
    let mut terms = Vec::new();
    if let Some(first) = kinds.first() {
        terms.push(format!("device.driver == {}", quoted(&first.driver)));
        match held {
            Held::Unspoken => {}
            Held::Alone => terms.push("!device.allowMultipleAllocations".to_owned()),
            Held::Shared => terms.push("device.allowMultipleAllocations".to_owned()),
        }
        let mut profiles: Vec<&str> = kinds.iter().filter_map(|k| k.profile.as_deref()).collect();
        profiles.sort_unstable();
        profiles.dedup();
        let all_have_one = kinds.iter().all(|k| k.profile.is_some());
        if all_have_one || profiles.is_empty() {
            let attribute = format!(
                "device.attributes[{}].?profile.orValue(\"\")",
                quoted(&first.driver)
            );
            terms.push(match profiles.as_slice() {
                [] => format!("{attribute} == \"\""),
                [one] => format!("{attribute} == {}", quoted(one)),
                several => {
                    let list: Vec<String> = several.iter().map(|p| quoted(p)).collect();
                    format!("{attribute} in [{}]", list.join(", "))
                }
            });
        }
        let domain = format!("device.capacity[{}]", quoted(memory_domain));
        let largest = kinds.iter().map(|k| k.memory).max().unwrap_or(0);
        terms.push(format!("\"memory\" in {domain}"));
        // What the profile names, the profile decides; its memory differs a
        // little between products, and only the demand bounds it.
        terms.push(format!(
            "{domain}.memory.compareTo(quantity(\"{}\")) >= 0",
            Quantity::from_bytes(needed_bytes)
        ));
        if !all_have_one {
            terms.push(format!(
                "{domain}.memory.compareTo(quantity(\"{}\")) <= 0",
                Quantity::from_bytes(largest)
            ));
        }
    }
    let mut selectors = vec![terms.join(" && ")];
    selectors.extend(policy.iter().cloned());
    selectors
}

/// A CEL text literal.
fn quoted(text: &str) -> String {
    let mut literal = String::with_capacity(text.len() + 2);
    literal.push('"');
    for c in text.chars() {
        if matches!(c, '"' | '\\') {
            literal.push('\\');
        }
        literal.push(c);
    }
    literal.push('"');
    literal
}
