//! A crash after any step leaves a state from which the next call succeeds.

use std::sync::Arc;

use node_plugin::claims::core::{Step, StepHook};

use crate::node::TestNode;

/// Dies at a step, as a killed process would: nothing after it runs, locks are freed.
pub(crate) fn dies_at(step: Step) -> StepHook {
    Arc::new(move |reached| assert!(reached != step, "the process dies here"))
}

#[tokio::test]
async fn a_crash_in_prepare_is_rolled_forward_or_back_and_the_retry_succeeds() {
    for step in [
        Step::Started,
        Step::Acted,
        Step::CdiWritten,
        Step::Completed,
    ] {
        for reconciled in [false, true] {
            let node = TestNode::new("h100-80gb-8");
            let (part, whole) = (node.device(0, "1g10gb-6"), node.device(1, ""));
            let claim = node.claim("order-0", "uid-1", &[&part, &whole]);
            node.plugin_stopping(dies_at(step))
                .prepare(claim.clone())
                .await
                .unwrap_err();

            let plugin = node.plugin();
            if reconciled {
                plugin.reconcile(Some(node.loaded())).await;
                let completed = usize::from(step == Step::Completed);
                assert_eq!(node.instances(), completed, "{step:?}");
                assert_eq!(node.cdi_files().len(), completed, "{step:?}");
            }
            let devices = plugin.prepare(claim.clone()).await.unwrap();
            assert_eq!(devices.len(), 2);
            assert_eq!(node.instances(), 1, "{step:?}");
            assert!(node.cdi("uid-1").is_some());
            plugin.unprepare(claim).await.unwrap();
            assert_eq!(node.instances(), 0, "{step:?}");
        }
    }
}

#[tokio::test]
async fn a_crash_in_prepare_leaves_nothing_to_the_next_claim_of_the_device() {
    for step in [Step::Started, Step::Acted, Step::CdiWritten] {
        let node = TestNode::new("h100-80gb-8");
        let device = node.device(0, "1g10gb-6");
        let first = node.claim("first", "uid-1", &[&device]);
        node.plugin_stopping(dies_at(step))
            .prepare(first)
            .await
            .unwrap_err();

        let plugin = node.plugin();
        plugin.reconcile(Some(node.loaded())).await;
        let second = node.claim("second", "uid-2", &[&device]);
        plugin.prepare(second).await.unwrap();
        assert_eq!(node.instances(), 1, "{step:?}");
        assert_eq!(node.cdi_files(), ["gpu.ai.deckhouse.io-claim_uid-2.json"]);
    }
}

#[tokio::test]
async fn a_crash_in_unprepare_is_finished_by_the_retry_and_prepare_still_works() {
    for step in [Step::CdiRemoved, Step::Released, Step::Forgotten] {
        for prepares_again in [false, true] {
            let node = TestNode::new("h100-80gb-8");
            let claim = node.claim("order-0", "uid-1", &[&node.device(0, "1g10gb-6")]);
            node.plugin().prepare(claim.clone()).await.unwrap();
            node.plugin_stopping(dies_at(step))
                .unprepare(claim.clone())
                .await
                .unwrap_err();

            let plugin = node.plugin();
            if prepares_again {
                plugin.prepare(claim.clone()).await.unwrap();
                assert_eq!(node.instances(), 1, "{step:?}");
                assert!(node.cdi("uid-1").is_some());
            }
            plugin.unprepare(claim).await.unwrap();
            assert_eq!(node.instances(), 0, "{step:?}");
            assert_eq!(node.cdi_files(), Vec::<String>::new());
        }
    }
}
