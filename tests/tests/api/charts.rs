//! The two charts: what they say of their values, and what the API server says of what they make.

use anyhow::{Result, ensure};
use e2e::charts::{documents, render, repository, undocumented};
use e2e::control_plane::ControlPlane;

const CHARTS: [&str; 2] = ["controller/chart", "daemonset"];

#[test]
fn every_value_of_the_controllers_chart_is_documented_and_held_against_the_schema() -> Result<()> {
    // Deckhouse's, and a parent chart's.
    let others = ["global", "internal", "registry"];
    assert_eq!(undocumented("controller/chart", &others)?, [""; 0]);
    for wrong in ["adminPort=0", "catalog.mode=Some", "unknown=1"] {
        let error = render("controller/chart", "x", &["--set", wrong]).err();
        let named = wrong.split(['.', '=']).next().unwrap_or_default();
        ensure!(
            error.is_some_and(|error| error.to_string().contains(named)),
            "{wrong} is not refused"
        );
    }
    Ok(())
}

#[test]
fn a_011_the_charts_and_the_module_refuse_kubernetes_1_33() -> Result<()> {
    for chart in CHARTS.into_iter().chain(["module"]) {
        render(chart, "x", &["--kube-version", "1.34.0"])?;
        let error = render(chart, "x", &["--kube-version", "1.33.9"]).err();
        let error = error.map(|error| error.to_string()).unwrap_or_default();
        ensure!(error.contains(">=1.34.0-0"), "{chart}: {error:?}");
    }
    Ok(())
}

/// Options that leave nothing out which a chart can make.
fn everything(chart: &str) -> Vec<String> {
    let text = match chart {
        "controller/chart" => {
            "replicas=2,separateDeployments=true,imagePullSecrets[0].name=pull,recipes.configMap=recipes,\
             recipes.vllm.image=vllm:1,recipes.vllm.release=r1,recipes.llamaCpp.image=llama:1,\
             copies.imagePullPolicy=Always,copies.imagePullSecrets={pull},defaultClass=false,\
             extraEnv[0].name=HTTPS_PROXY,extraEnv[0].value=http://proxy,nodeSelector.a=b,\
             tolerations[0].operator=Exists,podAnnotations.a=b"
        }
        _ => {
            "imagePullSecrets[0].name=pull,health.ignoredXIDs={31},sharing.mode=mps,mig.mode=static"
        }
    };
    vec!["--set".to_owned(), text.to_owned()]
}

#[tokio::test]
async fn what_the_charts_make_is_accepted_by_the_api_server() -> Result<()> {
    let plane = ControlPlane::shared()?;
    let namespace = plane.namespace("charts").await?;
    for chart in CHARTS {
        for more in [vec![], everything(chart)] {
            let more: Vec<&str> = more.iter().map(String::as_str).collect();
            let rendered = render(chart, &namespace, &more)?;
            let tried = plane.try_yaml(&namespace, &rendered).await?;
            assert_eq!(tried.len(), documents(&rendered)?.len());
        }
    }
    let fake = repository().join("daemonset/values-fake.yaml");
    let fake = ["--values", &fake.to_string_lossy()];
    let rendered = render("daemonset", &namespace, &fake)?;
    plane.try_yaml(&namespace, &rendered).await?;
    // The trial is one: a field that there is not is refused.
    let wrong = rendered.replace("hostPath:", "hostpath:");
    let error = plane.try_yaml(&namespace, &wrong).await.err();
    ensure!(
        error.is_some_and(|error| format!("{error:#}").contains("hostpath")),
        "an unknown field is accepted"
    );
    Ok(())
}
