//! What the log says, and of whom.

use std::io::Write;
use std::process::Command;
use std::sync::{Arc, Mutex};

use serde_json::Value;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::node::TestNode;

/// A log in memory.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// A process has one log, and other tests write to this one's: so the test is run in a
/// process of its own.
#[test]
fn every_line_of_the_work_on_a_claim_names_the_claim() {
    let alone = "logs::the_work_on_a_claim_alone_in_its_process";
    let output = Command::new(std::env::current_exe().unwrap())
        .args([alone, "--exact", "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{errors}");
    assert!(text.contains("1 passed"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by the test above"]
async fn the_work_on_a_claim_alone_in_its_process() {
    let log = Log::default();
    let subscriber = node_plugin::logs::subscriber(EnvFilter::new("info"), log.clone());
    tracing::subscriber::set_global_default(subscriber).unwrap();
    let node = TestNode::new("h100-80gb-8");
    {
        let plugin = node.plugin();
        let device = node.device(0, "1g10gb-6");
        let good = node.claim("good", "uid-good", &[&device]);
        let bad = node.claim("bad", "uid-bad", &[&device]);
        plugin.prepare(good.clone()).await.unwrap();
        plugin.prepare(bad).await.unwrap_err();
        plugin.unprepare(good).await.unwrap();
        let forgotten = node.claim("forgotten", "uid-forgotten", &[&device]);
        plugin.prepare(forgotten).await.unwrap();
        node.delete_claim("forgotten");
        assert_eq!(plugin.collect_garbage().await, 1);
    }
    let lines: Vec<Value> = {
        let bytes = log.0.lock().unwrap();
        let lines = bytes.split(|byte| *byte == b'\n').filter(|l| !l.is_empty());
        lines
            .map(|line| serde_json::from_slice(line).unwrap())
            .collect()
    };
    let of = |uid: &str| -> Vec<&str> {
        let own = lines.iter().filter(|l| l["span"]["claim_uid"] == uid);
        own.map(|line| line["message"].as_str().unwrap()).collect()
    };
    // The first is the GPU crate's, several calls down and on another thread.
    assert_eq!(
        of("uid-good"),
        ["MIG was turned on.", "Prepared.", "Unprepared."]
    );
    assert_eq!(of("uid-bad"), ["A claim could not be prepared."]);
    assert_eq!(
        of("uid-forgotten"),
        [
            "Prepared.",
            "A claim that the kubelet forgot was unprepared."
        ]
    );
    for line in &lines {
        let span = &line["span"];
        assert_eq!(span["name"], "claim", "{line}");
        assert_eq!(span["claim_namespace"], "team", "{line}");
        assert!(span["claim_name"].is_string(), "{line}");
        let message = line["message"].as_str().unwrap();
        assert!(message.ends_with('.'), "no sentence: {message}");
    }
}
