//! Faults that a test asks the hub to show, and the journal of what it answered.
//!
//! In: [`Fault`]s of the admin route. Out: the fault that the next matching request meets. Pure
//! state behind one lock, which is never held across an await.

use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

/// Requests kept in the journal; older ones are dropped.
const JOURNAL_LENGTH: usize = 10_000;

/// One way in which requests for a path fail.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Fault {
    /// Requests whose path contains this text meet the fault.
    pub path_contains: String,
    /// Only requests of this method; absent: all.
    #[serde(default)]
    pub method: Option<String>,
    /// How many requests meet it. 0: every one.
    #[serde(default)]
    pub times: u32,
    /// Break the connection after this many bytes of the body.
    #[serde(default)]
    pub cut_after_bytes: Option<u64>,
    /// Answer with this status instead.
    #[serde(default)]
    pub status: Option<u16>,
    /// Send the body no faster than this.
    #[serde(default)]
    pub bytes_per_second: Option<u64>,
    /// Flip the first byte of the body, so that a checksum must notice.
    #[serde(default)]
    pub corrupt: bool,
}

/// One answered request.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JournalEntry {
    /// `GET`, `HEAD`.
    pub method: String,
    /// Path with its query.
    pub path: String,
    /// The `Range` header, where there was one.
    pub range: Option<String>,
    /// Whether an `Authorization` header was there.
    pub authorized: bool,
    /// The status answered.
    pub status: u16,
}

/// The faults that are armed and the journal.
#[derive(Debug, Default)]
pub struct FaultBook {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    armed: Vec<(Fault, u32)>,
    journal: Vec<JournalEntry>,
}

impl FaultBook {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Arms a fault, after those already armed.
    pub fn arm(&self, fault: Fault) {
        let times = fault.times;
        self.lock().armed.push((fault, times));
    }

    /// Disarms every fault.
    pub fn disarm_all(&self) {
        self.lock().armed.clear();
    }

    /// The fault that this request meets: the first armed one that matches. Counts it.
    pub fn meet(&self, method: &str, path: &str) -> Option<Fault> {
        let mut state = self.lock();
        let position = state.armed.iter().position(|(fault, _)| {
            path.contains(&fault.path_contains)
                && fault
                    .method
                    .as_deref()
                    .is_none_or(|wanted| wanted == method)
        })?;
        let (fault, left) = &mut state.armed[position];
        let fault = fault.clone();
        if fault.times > 0 {
            *left -= 1;
            if *left == 0 {
                state.armed.remove(position);
            }
        }
        Some(fault)
    }

    /// Adds an answered request to the journal.
    pub fn record(&self, entry: JournalEntry) {
        let mut state = self.lock();
        if state.journal.len() == JOURNAL_LENGTH {
            state.journal.remove(0);
        }
        state.journal.push(entry);
    }

    /// The journal, oldest first.
    pub fn journal(&self) -> Vec<JournalEntry> {
        self.lock().journal.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_met_as_often_as_it_says_and_only_by_what_it_names() {
        let book = FaultBook::default();
        book.arm(Fault {
            path_contains: "model".into(),
            times: 1,
            ..Fault::default()
        });
        assert_eq!(book.meet("GET", "/a/b/resolve/main/config.json"), None);
        assert!(book.meet("GET", "/a/b/resolve/main/model.gguf").is_some());
        assert_eq!(book.meet("GET", "/a/b/resolve/main/model.gguf"), None);
    }

    #[test]
    fn a_fault_without_a_count_stays_until_disarmed() {
        let book = FaultBook::default();
        book.arm(Fault {
            method: Some("GET".into()),
            ..Fault::default()
        });
        assert_eq!(book.meet("HEAD", "/x"), None);
        assert!(book.meet("GET", "/x").is_some() && book.meet("GET", "/x").is_some());
        book.disarm_all();
        assert_eq!(book.meet("GET", "/x"), None);
    }
}
