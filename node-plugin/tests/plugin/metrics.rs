//! The metrics as a monitoring system reads them, and as the documentation lists them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Duration;

use node_plugin::claims::ClaimError;
use node_plugin::claims::checkpoint::ClaimRef;
use node_plugin::health::{Kind, Severity};
use node_plugin::metrics::{
    Call, Cause, DaemonEvent, DeviceKind, Metrics, Operation, Outcome, Phase, Stopwatch, Usage,
};

use crate::node::{TestNode, repository};

const PREFIX: &str = "ai_inference_node_plugin_";

/// One metric as the text format describes it.
#[derive(Debug, Default)]
struct Described {
    help: String,
    kind: String,
    unit: String,
    /// Label → values.
    labels: BTreeMap<String, BTreeSet<String>>,
    /// Series with its labels → value.
    samples: BTreeMap<String, f64>,
}

/// Reads OpenMetrics text; whatever the format forbids fails.
fn parse(text: &str) -> BTreeMap<String, Described> {
    let mut metrics: BTreeMap<String, Described> = BTreeMap::new();
    let mut current = String::new();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.last(), Some(&"# EOF"), "the text does not end");
    for line in &lines[..lines.len() - 1] {
        if let Some(comment) = line.strip_prefix("# ") {
            let mut words = comment.splitn(3, ' ');
            let (what, name) = (words.next().unwrap(), words.next().unwrap());
            let rest = words.next().unwrap_or_default().to_owned();
            let metric = metrics.entry(name.to_owned()).or_default();
            current = name.to_owned();
            let place = match what {
                "HELP" => &mut metric.help,
                "TYPE" => &mut metric.kind,
                "UNIT" => &mut metric.unit,
                _ => panic!("{line}"),
            };
            assert!(place.is_empty(), "{what} of {name} comes twice");
            *place = rest;
            continue;
        }
        let (series, value) = line.rsplit_once(' ').unwrap();
        let value: f64 = value.parse().unwrap_or_else(|_| panic!("{line}"));
        assert!(series.starts_with(&current), "{line} is not of {current}");
        let metric = metrics.get_mut(&current).unwrap();
        let name = series.split('{').next().unwrap();
        let suffix = &name[current.len()..];
        let allowed: &[&str] = match metric.kind.as_str() {
            "counter" => &["_total"],
            "gauge" => &[""],
            "histogram" => &["_bucket", "_count", "_sum"],
            "info" => &["_info"],
            other => panic!("{current} is a {other}"),
        };
        assert!(allowed.contains(&suffix), "{line}");
        if let Some((_, labels)) = series.split_once('{') {
            for pair in labels.trim_end_matches('}').split("\",") {
                let (label, value) = pair.split_once("=\"").unwrap();
                let value = value.trim_end_matches('"').to_owned();
                if label != "le" {
                    let values = metric.labels.entry(label.to_owned()).or_default();
                    values.insert(value);
                }
            }
        }
        assert!(metric.samples.insert(series.to_owned(), value).is_none());
    }
    metrics
}

/// What Prometheus' own linter asks of names, and that every label is one of a list.
fn check(metrics: &BTreeMap<String, Described>) {
    let words = |all: &[&'static str]| -> BTreeSet<&'static str> { all.iter().copied().collect() };
    let values = BTreeMap::from([
        (
            "operation",
            words(&names(Operation::ALL, Operation::as_str)),
        ),
        ("outcome", words(&names(Outcome::ALL, Outcome::as_str))),
        ("kind", words(&names(DeviceKind::ALL, DeviceKind::as_str))),
        ("phase", words(&names(Phase::ALL, Phase::as_str))),
        ("cause", words(&names(Cause::ALL, Cause::as_str))),
        ("call", words(&names(Call::ALL, Call::as_str))),
        (
            "event",
            words(&names(DaemonEvent::ALL, DaemonEvent::as_str)),
        ),
        ("fault", words(&names(&Kind::ALL, Kind::name))),
        ("severity", words(&names(&Severity::ALL, Severity::name))),
        ("version", words(&[env!("CARGO_PKG_VERSION")])),
    ]);
    for (name, metric) in metrics {
        let short = name.strip_prefix(PREFIX);
        let short = short.unwrap_or_else(|| panic!("{name} lacks the prefix"));
        let plain = |c: char| c.is_ascii_lowercase() || c == '_';
        assert!(short.chars().all(plain), "{name}");
        assert!(metric.help.len() > 10, "{name} has no help");
        assert!(metric.help.ends_with('.'), "the format ends it: {name}");
        if metric.kind == "histogram" {
            assert_eq!(metric.unit, "seconds", "{name}");
        }
        if !metric.unit.is_empty() {
            assert!(name.ends_with(&format!("_{}", metric.unit)), "{name}");
        }
        for (label, seen) in &metric.labels {
            if label == "gpu" {
                let address = |value: &String| value.parse::<gpu::PciAddress>().is_ok();
                assert!(seen.iter().all(address), "{name}: {seen:?}");
                continue;
            }
            if label == "xid" {
                let number = |value: &String| value.parse::<u64>().is_ok();
                assert!(seen.iter().all(number), "{name}: {seen:?}");
                continue;
            }
            let known = values.get(label.as_str());
            let known = known.unwrap_or_else(|| panic!("{name} has the label {label}"));
            let unknown = seen.iter().find(|value| !known.contains(value.as_str()));
            assert_eq!(unknown, None, "{name} has an unknown {label}");
        }
        if metric.kind == "histogram" {
            check_histogram(name, &metric.samples);
        }
    }
}

/// Buckets grow, and the last holds everything.
fn check_histogram(name: &str, samples: &BTreeMap<String, f64>) {
    for (series, count) in samples {
        let Some(labels) = series.strip_prefix(&format!("{name}_count{{")) else {
            continue;
        };
        let labels = labels.trim_end_matches('}');
        let buckets: BTreeMap<u64, f64> = samples
            .iter()
            .filter(|(series, _)| series.starts_with(&format!("{name}_bucket{{")))
            .filter(|(series, _)| series.contains(labels))
            .map(|(series, value)| {
                let bound = series.split("le=\"").nth(1).unwrap();
                let bound: f64 = bound.split('"').next().unwrap().parse().unwrap();
                (bound.to_bits(), *value)
            })
            .collect();
        let counts: Vec<f64> = buckets.values().copied().collect();
        assert!(counts.is_sorted(), "{series}: {counts:?}");
        assert_eq!(counts.last(), Some(count), "{series}");
    }
}

fn names<T: Copy>(all: &[T], text: impl Fn(T) -> &'static str) -> Vec<&'static str> {
    all.iter().map(|value| text(*value)).collect()
}

/// Every metric with every label that it can have.
fn everything() -> Metrics {
    let metrics = Metrics::default();
    let pairs = Operation::ALL
        .iter()
        .flat_map(|o| DeviceKind::ALL.iter().map(move |k| (*o, *k)));
    for (operation, kind) in pairs {
        let watch = Stopwatch::start(operation);
        match kind {
            DeviceKind::None => {}
            DeviceKind::Mixed => DeviceKind::OF_DEVICES.iter().for_each(|k| watch.saw(*k)),
            kind => watch.saw(kind),
        }
        assert_eq!(watch.kind(), kind);
        watch.run(|| {
            for phase in Phase::ALL {
                node_plugin::metrics::phase(*phase, || ());
            }
        });
        metrics.operation::<()>(&watch, &Ok(()));
        let claim = ClaimRef {
            namespace: "team".to_owned(),
            name: "order-0".to_owned(),
            uid: "uid-1".to_owned(),
        };
        metrics.operation::<()>(&watch, &Err(ClaimError::Gone { claim }));
    }
    for outcome in Outcome::ALL {
        metrics.publish(*outcome, Duration::from_millis(1));
        for call in Call::ALL {
            metrics.call(*call, *outcome, Duration::from_millis(1));
        }
    }
    metrics.health().faults(&[]);
    metrics.health().xid(48);
    metrics.health().changed(std::time::Instant::now());
    metrics.health().published();
    metrics.usage(&Usage::default());
    metrics.placeable(&BTreeMap::from([("0000:65:00.0".to_owned(), 1)]));
    metrics
}

#[test]
fn every_metric_has_a_name_a_help_a_unit_and_labels_from_a_list() {
    let metrics = parse(&everything().text());
    check(&metrics);
    let types = metrics.values().filter(|m| m.kind.is_empty()).count();
    assert_eq!((metrics.len(), types), (18, 0));
}

#[tokio::test]
async fn a_claim_leaves_its_phases_its_cause_of_failure_and_its_devices_in_the_metrics() {
    let node = TestNode::new("h100-80gb-8");
    let metrics = Metrics::default();
    let plugin = node.plugin().with_metrics(metrics.clone());
    let part = node.device(0, "1g10gb-6");
    let claim = node.claim("order-0", "uid-1", &[&part]);
    plugin.prepare(claim.clone()).await.unwrap();
    let same = node.claim("order-1", "uid-2", &[&part]);
    plugin.prepare(same).await.unwrap_err();
    let whole = node.claim("order-2", "uid-3", &[&node.device(1, "")]);
    plugin.prepare(whole).await.unwrap();
    let usage = plugin.usage().await;
    metrics.usage(&usage);
    let text = metrics.text();
    let parsed = parse(&text);
    check(&parsed);
    let sample = |series: &str| {
        let series = format!("{PREFIX}{series}");
        let all = parsed.values().find_map(|m| m.samples.get(&series));
        *all.unwrap_or_else(|| panic!("no {series} in\n{text}"))
    };
    let operation = r#"{operation="prepare",kind="mig",outcome="success"}"#;
    let total = sample(&format!("claim_operation_duration_seconds_sum{operation}"));
    let mut parts = 0.0;
    // The one that was refused came as far as the comparison with other claims.
    for (phase, times) in [
        ("read_claim", 2.0),
        ("lock", 2.0),
        ("hardware", 2.0),
        ("checkpoint", 2.0),
        ("cdi", 1.0),
    ] {
        let labels = format!(r#"{{operation="prepare",kind="mig",phase="{phase}"}}"#);
        let count = sample(&format!("claim_phase_duration_seconds_count{labels}"));
        assert_eq!(count, times, "{phase}");
        parts += sample(&format!("claim_phase_duration_seconds_sum{labels}"));
    }
    assert!(
        parts > total * 0.5,
        "{parts} of {total} s are accounted for"
    );
    assert_eq!(
        sample(r#"claim_errors_total{operation="prepare",cause="held"}"#),
        1.0
    );
    assert_eq!(
        sample(r#"claim_errors_total{operation="prepare",cause="cdi"}"#),
        0.0
    );
    assert_eq!(sample(r#"prepared_devices{kind="mig"}"#), 1.0);
    assert_eq!(sample(r#"prepared_devices{kind="gpu"}"#), 1.0);
    assert_eq!(sample("checkpoints"), 2.0);
    let files = std::fs::read_dir(node.path("plugin/claims")).unwrap();
    let bytes: u64 = files.map(|f| f.unwrap().metadata().unwrap().len()).sum();
    assert_eq!(
        (sample("checkpoints_size_bytes"), usage.bytes),
        (bytes as f64, bytes)
    );

    plugin.unprepare(claim).await.unwrap();
    metrics.usage(&plugin.usage().await);
    let text = metrics.text();
    assert!(text.contains(r#"prepared_devices{kind="mig"} 0"#), "{text}");
}

/// The documentation of the metrics, as it follows from them.
fn documentation() -> String {
    let mut text = String::from(
        "# Metrics of the node plugin\n\n\
         <!-- Made by a test from the metrics themselves: \
         `UPDATE_GOLDEN=1 cargo test -p node-plugin --test plugin documentation`. -->\n\n\
         `GET /metrics` on the pods' port `admin`, in the OpenMetrics text format. Every label's \
         values are listed here, so the number of series of a node does not grow with its claims; \
         `gpu` is a PCI address, `xid` a number of NVIDIA's catalogue.\n\n\
         | Metric | Type | What | Labels |\n|---|---|---|---|\n",
    );
    for (name, metric) in parse(&everything().text()) {
        let name = match metric.kind.as_str() {
            "counter" => format!("{name}_total"),
            "info" => format!("{name}_info"),
            _ => name,
        };
        let labels: Vec<String> = metric.labels.keys().map(|l| format!("`{l}`")).collect();
        let help = metric.help.trim_end_matches('.');
        let labels = labels.join(", ");
        writeln!(text, "| `{name}` | {} | {help} | {labels} |", metric.kind).unwrap();
    }
    text.push_str("\n## Labels\n\n| Label | Values |\n|---|---|\n");
    for (label, values) in [
        ("operation", names(Operation::ALL, Operation::as_str)),
        ("outcome", names(Outcome::ALL, Outcome::as_str)),
        ("kind", names(DeviceKind::ALL, DeviceKind::as_str)),
        ("phase", names(Phase::ALL, Phase::as_str)),
        ("cause", names(Cause::ALL, Cause::as_str)),
        ("call", names(Call::ALL, Call::as_str)),
        ("event", names(DaemonEvent::ALL, DaemonEvent::as_str)),
        ("fault", names(&Kind::ALL, Kind::name)),
        ("severity", names(&Severity::ALL, Severity::name)),
    ] {
        let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
        writeln!(text, "| `{label}` | {} |", values.join(", ")).unwrap();
    }
    text
}

#[test]
fn the_documentation_lists_every_metric_as_it_is() {
    let path = repository().join("docs/metrics.md");
    let made = documentation();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let kept = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        made == kept,
        "docs/metrics.md is stale; UPDATE_GOLDEN=1 makes it:\n{made}"
    );
}
