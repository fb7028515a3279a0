//! Content with a version and a checksum, by which a reader tells what was written from
//! what became of it.
//!
//! In: a payload and the version of its format, or the bytes of a file. Out: the bytes, or
//! the payload and whether it is as it was written. Never: a judgement about a version;
//! that is the reader's.
//!
//! The bytes are a header line (`{"version":1,"sha256":"…"}`) and the payload. The checksum
//! covers the payload's raw bytes and, from version 2 on, the version, so that a field added
//! by a later release can never turn an old file into a corrupt one.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

#[derive(Serialize, Deserialize)]
struct Header {
    version: u32,
    sha256: String,
}

/// What is in a file.
#[derive(Debug)]
pub(crate) struct Opened<'b> {
    /// The version of the payload's format.
    pub(crate) version: u32,
    /// Whether the checksum says that nothing became of it.
    pub(crate) intact: bool,
    /// The payload.
    pub(crate) payload: &'b [u8],
}

/// The bytes of a payload in this version of its format.
///
/// # Errors
/// When the header cannot be written as JSON.
pub(crate) fn seal(version: u32, payload: &[u8]) -> serde_json::Result<Vec<u8>> {
    let header = Header {
        version,
        sha256: digest(version, payload),
    };
    let mut bytes = serde_json::to_vec(&header)?;
    bytes.push(b'\n');
    bytes.extend(payload);
    Ok(bytes)
}

/// Reads the header and holds the payload against it.
///
/// # Errors
/// With what is wrong with the header.
pub(crate) fn open(bytes: &[u8]) -> Result<Opened<'_>, String> {
    let end = bytes
        .iter()
        .position(|byte| *byte == b'\n')
        .ok_or("no header")?;
    let (header, payload) = (&bytes[..end], &bytes[end + 1..]);
    let header: Header =
        serde_json::from_slice(header).map_err(|error| format!("bad header: {error}"))?;
    Ok(Opened {
        version: header.version,
        intact: header.sha256 == digest(header.version, payload),
        payload,
    })
}

/// The checksum of a payload. From version 2 on it covers the version, too, so that a
/// damaged digit does not make a file one of a later release; later ones keep to that.
fn digest(version: u32, payload: &[u8]) -> String {
    let mut digest = Sha256::new();
    if version > 1 {
        digest.update(format!("{version}\n"));
    }
    digest.update(payload);
    let digest = digest.finalize();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
