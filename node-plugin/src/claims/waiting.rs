//! A claim whose device another one holds.
//!
//! In: a refused attempt. Out: whether what is in the way will pass, and the next attempt
//! once it has. Never: a claim ended while its containers may run: that is waited for.

use std::time::Duration;

use tokio::time::Instant;

use super::checkpoint::{ClaimRef, PreparedDevice, Stage};
use super::core::CoreError;
use super::{ClaimError, Claims, Wanted};
use crate::metrics::Stopwatch;

/// How long a claim waits for another one that has ended and still holds its device, until
/// the kubelet unprepares that: it does so once the containers are gone. The kubelet gives a
/// call 45 s, and calls again only after twice as long.
const PATIENCE: Duration = Duration::from_secs(25);
/// How soon a waiting claim looks again: what another instance of the plugin does is not
/// told to this one.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// What keeps a claim from its device.
enum Obstacle {
    /// It stays.
    Lasting,
    /// It has ended and is about to be unprepared.
    Leaving,
    /// It is gone by now.
    Removed,
}

impl Claims {
    /// Attempts to prepare a claim, and waits for what is about to leave its device.
    pub(super) async fn attempt_patiently(
        &self,
        claim: &ClaimRef,
        wanted: &Wanted,
        watch: &Stopwatch,
    ) -> Result<Vec<PreparedDevice>, ClaimError> {
        let deadline = Instant::now() + PATIENCE;
        let mut removed = false;
        loop {
            let mut ended = self.ended.subscribe();
            let error = match self.attempt(claim, wanted, watch).await {
                Ok(devices) => return Ok(devices),
                Err(error) => error,
            };
            match self.in_the_way(claim, &error).await {
                Obstacle::Removed if !removed => removed = true,
                Obstacle::Leaving if Instant::now() < deadline => {
                    tracing::info!(reason = %error, "Waiting for a claim that has ended.");
                    let told = ended.changed();
                    drop(tokio::time::timeout(LOOK_AGAIN, told).await);
                }
                Obstacle::Lasting | Obstacle::Leaving | Obstacle::Removed => return Err(error),
            }
        }
    }

    /// What keeps a claim from its device, and whether that will pass.
    async fn in_the_way(&self, claim: &ClaimRef, error: &ClaimError) -> Obstacle {
        let ClaimError::Core { source, .. } = error else {
            return Obstacle::Lasting;
        };
        match &**source {
            CoreError::Held { holder, .. } if holder.uid != claim.uid => {
                self.holder_in_the_way(holder).await
            }
            CoreError::OverCommitted(error) => {
                for holder in error
                    .holders
                    .iter()
                    .filter(|holder| holder.uid != claim.uid)
                {
                    match self.holder_in_the_way(holder).await {
                        Obstacle::Lasting => {}
                        passing => return passing,
                    }
                }
                Obstacle::Lasting
            }
            CoreError::Doubtful { uid, .. } => match self.mend_damaged(uid).await {
                Ok(()) => Obstacle::Removed,
                Err(reason) => {
                    tracing::warn!(uid, reason, "A damaged checkpoint cannot be made anew yet.");
                    Obstacle::Lasting
                }
            },
            _ => Obstacle::Lasting,
        }
    }

    async fn holder_in_the_way(&self, holder: &ClaimRef) -> Obstacle {
        let record = self.core.checkpoints.read(&holder.uid).ok().flatten();
        match record.map(|record| record.stage) {
            None => Obstacle::Removed,
            Some(Stage::Unprepared) => match self.end_unprepared(holder).await {
                Ok(()) => Obstacle::Removed,
                Err(_) => Obstacle::Lasting,
            },
            Some(Stage::PrepareStarted | Stage::PrepareCompleted) => {
                match self.why_unused(holder).await {
                    Some(_) => Obstacle::Leaving,
                    None => Obstacle::Lasting,
                }
            }
        }
    }
}
