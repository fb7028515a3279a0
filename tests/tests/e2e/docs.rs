//! The commands of the guides on the cluster.

use anyhow::ensure;
use e2e::cluster::Cluster;
use e2e::cluster::hub::SMOLLM;
use e2e::guides::{GUIDES, Runs, Shell};

use crate::scene::*;

/// Namespace of the guides.
const NAMESPACE: &str = "my-namespace";
/// The model of the guides; the test's hub has it under a name of its own.
const MODEL: &str = "HuggingFaceTB/SmolLM2-135M-Instruct-GGUF";

#[tokio::test]
async fn the_commands_of_the_guides_do_on_the_cluster_what_they_say_a_130() -> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    cluster.delete_namespace(NAMESPACE).await?;
    cluster.create_named_namespace(NAMESPACE).await?;
    let (kubeconfig, tools) = cluster.tools()?;
    let shell = Shell::new(&kubeconfig, &tools, &[(MODEL, SMOLLM)])?;
    let mut count = 0;
    for guide in GUIDES {
        count += shell.run_guide(guide, &[Runs::Api, Runs::Cluster])?;
    }
    ensure!(count >= 18, "only {count} blocks were run");
    shell.run("kubectl delete infclass external-chat internal-chat")?;
    cluster.delete_namespace(NAMESPACE).await
}
