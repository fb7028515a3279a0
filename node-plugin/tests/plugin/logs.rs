//! What the log says, and of whom.

use std::io::Write;
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

impl Log {
    /// Runs work whose log, on whichever thread it is written, comes here.
    fn of(&self, work: impl Future<Output = ()>) -> Vec<Value> {
        let subscriber = node_plugin::logs::subscriber(EnvFilter::new("info"), self.clone());
        let dispatch = tracing::Dispatch::new(subscriber);
        let for_threads = dispatch.clone();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            // The thread belongs to this runtime alone, so nobody misses the former log.
            .on_thread_start(move || {
                std::mem::forget(tracing::dispatcher::set_default(&for_threads));
            })
            .build()
            .unwrap();
        tracing::dispatcher::with_default(&dispatch, || runtime.block_on(work));
        drop(runtime);
        let bytes = self.0.lock().unwrap().clone();
        let lines = bytes.split(|byte| *byte == b'\n').filter(|l| !l.is_empty());
        lines
            .map(|line| serde_json::from_slice(line).unwrap())
            .collect()
    }
}

#[test]
fn every_line_of_the_work_on_a_claim_names_the_claim() {
    let node = TestNode::new("h100-80gb-8");
    let lines = Log::default().of(async {
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
    });
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
