//! What can still be read of a record that cannot be trusted.
//!
//! In: the bytes of a checkpoint that is damaged, or that a later release wrote. Out:
//! hints: which claim it may be, which devices it may name. Never: a fact: a hint keeps
//! others off a device, or says what to ask the API server for.

use super::record::ClaimRef;

/// Hints.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Salvaged {
    /// The claim's namespace and name beside the UID that is the file's name.
    pub(super) claim: Option<ClaimRef>,
    /// Names of devices.
    pub(super) devices: Vec<SalvagedDevice>,
}

/// A device that the record may name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SalvagedDevice {
    /// Its name.
    pub(super) device: String,
    /// Whether its partition was an administrator's, where that can still be read.
    pub(super) adopted: Option<bool>,
}

/// Reads what is left.
pub(super) fn salvage(bytes: &[u8], uid: &str) -> Salvaged {
    let payload = bytes
        .iter()
        .position(|byte| *byte == b'\n')
        .map_or(bytes, |end| &bytes[end + 1..]);
    serde_json::from_slice::<serde_json::Value>(payload)
        .ok()
        .and_then(|value| of_json(&value, uid))
        .unwrap_or_else(|| of_text(&String::from_utf8_lossy(bytes), uid))
}

/// The fields that every version of a record has had.
fn of_json(value: &serde_json::Value, uid: &str) -> Option<Salvaged> {
    let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
    let claim = value.get("claim")?;
    let namespace = text(claim.get("namespace")?)?;
    let name = text(claim.get("name")?)?;
    if claim.get("uid")?.as_str()? != uid {
        return None;
    }
    let devices = value.get("devices")?.as_array()?.iter();
    Some(Salvaged {
        claim: Some(ClaimRef {
            namespace,
            name,
            uid: uid.to_owned(),
        }),
        devices: devices
            .filter_map(|device| {
                Some(SalvagedDevice {
                    device: text(device.get("device")?)?,
                    adopted: device
                        .pointer("/target/adopted")
                        .and_then(serde_json::Value::as_bool),
                })
            })
            .collect(),
    })
}

/// The same from text that is no JSON any more.
fn of_text(text: &str, uid: &str) -> Salvaged {
    let claim = text
        .split_once(&format!("\",\"uid\":\"{uid}\""))
        .and_then(|(before, _)| {
            let (before, name) = before.rsplit_once("\",\"name\":\"")?;
            let (_, namespace) = before.rsplit_once("\"namespace\":\"")?;
            let plain = |text: &str| !text.is_empty() && !text.contains('"');
            (plain(name) && plain(namespace)).then(|| ClaimRef {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                uid: uid.to_owned(),
            })
        });
    let devices = text
        .split("\"device\":\"")
        .skip(1)
        .filter_map(|rest| Some(rest.split_once('"')?.0))
        .map(|device| SalvagedDevice {
            device: device.to_owned(),
            adopted: None,
        })
        .collect();
    Salvaged { claim, devices }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: &str = concat!(
        "{\"version\":1,\"sha256\":\"00\"}\n",
        r#"{"claim":{"namespace":"team","name":"order-0","uid":"uid-1"},"bootId":"b","#,
        r#""stage":"PrepareCompleted","devices":[{"request":"gpu","pool":"n","#,
        r#""device":"gpu-0000-65-00-0-mig-1g10gb-6","target":{"type":"partition","adopted":true}}]}"#,
    );

    #[test]
    fn a_record_of_an_unknown_version_names_its_claim_and_devices() {
        let found = salvage(RECORD.as_bytes(), "uid-1");
        assert_eq!(found.claim.unwrap().name, "order-0");
        assert_eq!(
            found.devices,
            [SalvagedDevice {
                device: "gpu-0000-65-00-0-mig-1g10gb-6".to_owned(),
                adopted: Some(true)
            }]
        );
    }

    #[test]
    fn a_record_cut_at_any_length_gives_what_is_before_the_cut_and_nothing_wrong() {
        let end = RECORD.find("\"uid-1\"").unwrap() + "\"uid-1\"".len();
        for length in 0..RECORD.len() {
            let found = salvage(&RECORD.as_bytes()[..length], "uid-1");
            if let Some(claim) = &found.claim {
                assert_eq!(
                    (claim.namespace.as_str(), claim.name.as_str()),
                    ("team", "order-0")
                );
            }
            for device in &found.devices {
                assert_eq!(device.device, "gpu-0000-65-00-0-mig-1g10gb-6", "{length}");
            }
            assert_eq!(found.claim.is_some(), length >= end, "{length}");
        }
    }

    #[test]
    fn another_claims_record_under_this_name_names_no_claim() {
        assert_eq!(salvage(RECORD.as_bytes(), "uid-2").claim, None);
        assert_eq!(salvage(b"", "uid-1"), Salvaged::default());
    }
}
