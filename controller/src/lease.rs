//! Leader election: one Lease, one holder, a pure decision.
//!
//! In: the Lease as it stands, who we are, the time. Out: acquire, renew, or
//! wait. The holder that cannot renew in time steps down before another may
//! take over, so that two never lead at once (clocks may differ by the margin
//! between the two deadlines).

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

/// How long a Lease holds without renewal.
const DURATION: Duration = Duration::from_secs(15);
/// The holder steps down when it could not renew for so long.
const DEADLINE: Duration = Duration::from_secs(10);
/// Pause between attempts.
const PERIOD: Duration = Duration::from_secs(2);

/// What to do with a Lease now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is nobody's, or its holder is gone: take it.
    Acquire,
    /// It is ours: renew it.
    Renew,
    /// It is another's.
    Wait,
}

/// Decides on a Lease. `seen_unchanged` is how long, by our own clock, the Lease
/// has stood unchanged: another machine's clock is not believed.
pub fn evaluate(lease: Option<&LeaseSpec>, me: &str, seen_unchanged: Duration) -> Verdict {
    let Some(lease) = lease else {
        return Verdict::Acquire;
    };
    match lease.holder_identity.as_deref() {
        None | Some("") => Verdict::Acquire,
        Some(holder) if holder == me => Verdict::Renew,
        Some(_) => {
            let seconds = lease.lease_duration_seconds.unwrap_or(15).max(1);
            let valid = Duration::from_secs(u64::from(seconds.unsigned_abs()));
            if seen_unchanged > valid {
                Verdict::Acquire
            } else {
                Verdict::Wait
            }
        }
    }
}

fn next(lease: Option<&LeaseSpec>, me: &str, now: Timestamp) -> LeaseSpec {
    let held = lease.filter(|l| l.holder_identity.as_deref() == Some(me));
    let transitions = lease.and_then(|l| l.lease_transitions).unwrap_or(0);
    LeaseSpec {
        holder_identity: Some(me.to_owned()),
        lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
        renew_time: Some(MicroTime(now)),
        acquire_time: held
            .and_then(|l| l.acquire_time.clone())
            .or(Some(MicroTime(now))),
        lease_transitions: Some(if held.is_some() || lease.is_none() {
            transitions
        } else {
            transitions.saturating_add(1)
        }),
        ..LeaseSpec::default()
    }
}

/// Why a Lease is not renewed any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// Another process took it, or may soon.
    Lost,
    /// This process was asked to end.
    Stopped,
}

/// A Lease that this process wants.
pub struct Election {
    api: Api<Lease>,
    name: String,
    me: String,
    seen: Option<(LeaseSpec, tokio::time::Instant)>,
}

impl Election {
    /// The Lease `name` in `namespace`, for the process `me`.
    pub fn new(client: Client, namespace: &str, name: &str, me: &str) -> Self {
        Election {
            api: Api::namespaced(client, namespace),
            name: name.to_owned(),
            me: me.to_owned(),
            seen: None,
        }
    }

    /// One attempt; whether the Lease is ours now.
    async fn attempt(&mut self) -> Result<bool, kube::Error> {
        let standing = self.api.get_opt(&self.name).await?;
        let spec = standing.as_ref().and_then(|l| l.spec.clone());
        let now = tokio::time::Instant::now();
        let since = match (&self.seen, &spec) {
            (Some((seen, since)), Some(spec)) if seen == spec => *since,
            _ => now,
        };
        self.seen = spec.clone().map(|s| (s, since));
        if evaluate(spec.as_ref(), &self.me, now - since) == Verdict::Wait {
            return Ok(false);
        }
        let fresh = next(spec.as_ref(), &self.me, Timestamp::now());
        let written = match standing {
            // The resource version makes two that take it at once one winner.
            Some(mut lease) => {
                lease.spec = Some(fresh.clone());
                self.api
                    .replace(&self.name, &PostParams::default(), &lease)
                    .await
            }
            None => {
                let lease = Lease {
                    metadata: ObjectMeta {
                        name: Some(self.name.clone()),
                        ..ObjectMeta::default()
                    },
                    spec: Some(fresh.clone()),
                };
                self.api.create(&PostParams::default(), &lease).await
            }
        };
        match written {
            Ok(_) => {
                self.seen = Some((fresh, tokio::time::Instant::now()));
                Ok(true)
            }
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until the Lease is ours, or until stopped: false.
    pub async fn acquire(&mut self, stop: &CancellationToken) -> bool {
        loop {
            match tokio::time::timeout(PERIOD * 2, self.attempt()).await {
                Ok(Ok(true)) => {
                    info!(lease = self.name, identity = self.me, "Leading.");
                    return true;
                }
                Ok(Ok(false)) => debug!(lease = self.name, "Another process leads."),
                Ok(Err(error)) => {
                    warn!(lease = self.name, %error, "The lease can't be read or written.")
                }
                Err(_) => warn!(lease = self.name, "The lease's reading took too long."),
            }
            tokio::select! {
                () = stop.cancelled() => return false,
                () = tokio::time::sleep(PERIOD) => {}
            }
        }
    }

    /// Renews until the Lease is lost or the process is asked to end; then the Lease is still
    /// this process's, which [`Self::release`]s it after its last write.
    pub async fn hold(&mut self, stop: &CancellationToken) -> Held {
        let mut renewed = tokio::time::Instant::now();
        loop {
            tokio::select! {
                () = stop.cancelled() => return Held::Stopped,
                () = tokio::time::sleep(PERIOD) => {}
            }
            // The Lease counts from the write, which may be as early as its attempt; and
            // no attempt may outlast the deadline.
            let begun = tokio::time::Instant::now();
            let until = (begun + PERIOD * 2).min(renewed + DEADLINE);
            match tokio::time::timeout_at(until, self.attempt()).await {
                Ok(Ok(true)) => renewed = begun,
                Ok(Ok(false)) => {
                    warn!(lease = self.name, "Another process took the lease.");
                    return Held::Lost;
                }
                Ok(Err(error)) => {
                    warn!(lease = self.name, %error, "The lease could not be renewed.")
                }
                Err(_) => warn!(lease = self.name, "The lease's renewal took too long."),
            }
            if renewed.elapsed() >= DEADLINE {
                warn!(
                    lease = self.name,
                    "The lease was not renewed in time; stepping down."
                );
                return Held::Lost;
            }
        }
    }

    /// Gives the Lease up, so that another need not wait for its end.
    pub async fn release(&mut self) {
        let Ok(Some(mut lease)) = self.api.get_opt(&self.name).await else {
            return;
        };
        if let Some(spec) = lease
            .spec
            .as_mut()
            .filter(|s| s.holder_identity.as_deref() == Some(&self.me))
        {
            spec.holder_identity = None;
            // Whoever sees no holder takes it at once; nothing depends on success.
            let _ = self
                .api
                .replace(&self.name, &PostParams::default(), &lease)
                .await;
        }
    }
}

/// The holder steps down at the latest a pause after its deadline; another waits longer.
const _: () = assert!(DEADLINE.as_secs() + PERIOD.as_secs() < DURATION.as_secs());

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::jiff::SignedDuration;

    fn held_by(who: &str) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(who.into()),
            lease_duration_seconds: Some(15),
            ..LeaseSpec::default()
        }
    }

    #[test]
    fn a_lease_is_taken_when_nobodys_renewed_when_ours_and_waited_for_otherwise() {
        let fresh = Duration::from_secs(1);
        assert_eq!(evaluate(None, "me", fresh), Verdict::Acquire);
        assert_eq!(evaluate(Some(&held_by("")), "me", fresh), Verdict::Acquire);
        assert_eq!(
            evaluate(Some(&held_by("me")), "me", Duration::from_secs(99)),
            Verdict::Renew
        );
        assert_eq!(
            evaluate(Some(&held_by("other")), "me", fresh),
            Verdict::Wait
        );
        assert_eq!(
            evaluate(Some(&held_by("other")), "me", Duration::from_secs(15)),
            Verdict::Wait
        );
        assert_eq!(
            evaluate(Some(&held_by("other")), "me", Duration::from_secs(16)),
            Verdict::Acquire
        );
    }

    #[test]
    fn a_change_of_holder_is_counted_and_a_renewal_is_not() {
        let now = Timestamp::from_second(100).unwrap();
        let mut lease = held_by("other");
        lease.lease_transitions = Some(3);
        let taken = next(Some(&lease), "me", now);
        assert_eq!(
            (taken.lease_transitions, taken.acquire_time.clone()),
            (Some(4), Some(MicroTime(now)))
        );
        let later = now + SignedDuration::from_secs(5);
        let renewed = next(Some(&taken), "me", later);
        assert_eq!(
            (renewed.lease_transitions, renewed.acquire_time),
            (Some(4), Some(MicroTime(now)))
        );
        assert_eq!(renewed.renew_time, Some(MicroTime(later)));
    }
}
