//! The chart as Helm renders it.

use serde_json::Value;

use crate::node::repository;

/// The chart's manifests, and why there are none.
fn template(namespace: &str, more: &[&str]) -> Result<String, String> {
    e2e::charts::render("daemonset", namespace, more).map_err(|error| error.to_string())
}

/// The chart's manifests.
pub(crate) fn render(namespace: &str, more: &[&str]) -> String {
    template(namespace, more).unwrap()
}

fn fake_values() -> String {
    let path = repository().join("daemonset/values-fake.yaml");
    path.to_str().unwrap().to_owned()
}

fn pod_spec(rendered: &str) -> Value {
    let documents: Vec<Value> = serde_saphyr::from_multiple(rendered).unwrap();
    let daemons = documents.into_iter().find(|d| d["kind"] == "DaemonSet");
    daemons.unwrap()["spec"]["template"]["spec"].clone()
}

#[test]
fn a_fake_gpu_node_needs_no_privilege_and_hardware_gets_it() {
    let fake = pod_spec(&render("x", &["--values", &fake_values()]));
    let context = &fake["containers"][0]["securityContext"];
    assert_eq!(context["privileged"], false);
    assert_eq!(context["allowPrivilegeEscalation"], false);
    assert_eq!(context["capabilities"]["drop"][0], "ALL");
    assert_eq!(context["capabilities"]["add"], Value::Null);
    assert_eq!(context["seccompProfile"]["type"], "RuntimeDefault");
    let real = pod_spec(&render("x", &[]));
    assert_eq!(real["containers"][0]["securityContext"]["privileged"], true);
    for spec in [fake, real] {
        let context = &spec["containers"][0]["securityContext"];
        assert_eq!(context["readOnlyRootFilesystem"], true);
    }
}

#[test]
fn nothing_in_a_pod_keeps_a_second_one_off_its_node() {
    let rendered = render("x", &[]);
    let documents: Vec<Value> = serde_saphyr::from_multiple(&rendered).unwrap();
    let daemons = documents.iter().find(|d| d["kind"] == "DaemonSet").unwrap();
    let update = &daemons["spec"]["updateStrategy"]["rollingUpdate"];
    assert_eq!(
        (&update["maxSurge"], &update["maxUnavailable"]),
        (&1.into(), &0.into())
    );
    let spec = pod_spec(&rendered);
    for shared in [
        "hostNetwork",
        "hostIPC",
        "affinity",
        "topologySpreadConstraints",
    ] {
        assert_eq!(spec[shared], Value::Null, "{shared}");
    }
    let container = &spec["containers"][0];
    for port in container["ports"].as_array().unwrap() {
        assert_eq!(port["hostPort"], Value::Null);
    }
    // The sockets' names.
    let env = container["env"].as_array().unwrap();
    let uid = env.iter().find(|e| e["name"] == "POD_UID").unwrap();
    assert_eq!(uid["valueFrom"]["fieldRef"]["fieldPath"], "metadata.uid");
}

#[test]
fn the_probes_give_a_hung_driver_time_and_an_end() {
    let spec = pod_spec(&render("x", &[]));
    let container = &spec["containers"][0];
    let probe = |name: &str| {
        let probe = &container[name];
        let number = |field: &str, default| probe[field].as_u64().unwrap_or(default);
        let path = probe["httpGet"]["path"].as_str().unwrap().to_owned();
        let (period, failures) = (number("periodSeconds", 10), number("failureThreshold", 3));
        (path, period * failures, number("timeoutSeconds", 1))
    };
    let (path, window, timeout) = probe("livenessProbe");
    // Both servers have a second each, one after the other.
    assert!(
        path == "/livez" && window >= 30 && timeout >= 3,
        "{window} {timeout}"
    );
    let (path, window, timeout) = probe("startupProbe");
    assert!(path == "/livez" && window >= 60 && timeout >= 3);
    let (path, window, _) = probe("readinessProbe");
    assert!(path == "/readyz" && window <= 10);
    // Work on claims gets 15 s, connections 5 s, the process 5 s.
    assert!(spec["terminationGracePeriodSeconds"].as_u64().unwrap() >= 30);
}

#[test]
fn every_value_has_a_comment_a_description_and_a_default_that_the_schema_takes() {
    let missing = e2e::charts::undocumented("daemonset", &["global"]).unwrap();
    assert_eq!(missing, [""; 0]);
    // Helm holds the values against the schema.
    let error = template("x", &["--set", "adminPort=0"]).unwrap_err();
    assert!(error.contains("adminPort"), "{error}");
    let error = template("x", &["--set", "unknown=1"]).unwrap_err();
    assert!(error.contains("unknown"), "{error}");
}

#[test]
fn every_option_of_the_program_is_set_by_the_chart() {
    use clap::CommandFactory;

    // With those that are left out where they are empty.
    let spec = pod_spec(&render("x", &["--set", "health.ignoredXIDs={31}"]));
    let env = spec["containers"][0]["env"].as_array().unwrap();
    let set: Vec<&str> = env.iter().map(|e| e["name"].as_str().unwrap()).collect();
    let command = node_plugin::options::Options::command();
    for argument in command.get_arguments() {
        let Some(name) = argument.get_env() else {
            continue;
        };
        let name = name.to_str().unwrap();
        // Found below the driver root, unless somebody names another by `extraEnv`.
        if name != "NVML_LIBRARY" {
            assert!(set.contains(&name), "{name} is not set by the chart");
        }
    }
}

#[test]
fn only_where_mps_daemons_may_be_started_does_the_pod_reach_into_the_host() {
    for (mode, reaches) in [
        ("auto", true),
        ("mps", true),
        ("time-slicing", false),
        ("off", false),
    ] {
        let set = format!("sharing.mode={mode}");
        let spec = pod_spec(&render("x", &["--set-string", &set]));
        assert_eq!(spec["hostPID"] == true, reaches, "{mode}");
        let volumes = spec["volumes"].as_array().unwrap().iter();
        let names: Vec<&str> = volumes.filter_map(|v| v["name"].as_str()).collect();
        for volume in ["mps", "cgroup"] {
            assert_eq!(names.contains(&volume), reaches, "{mode}: {volume}");
        }
        let environment = spec["containers"][0]["env"].as_array().unwrap();
        let sharing = environment.iter().find(|e| e["name"] == "SHARING").unwrap();
        assert_eq!(sharing["value"], mode);
    }
    assert!(template("x", &["--set", "sharing.mode=sometimes"]).is_err());
}
