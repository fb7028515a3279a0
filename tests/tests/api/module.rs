//! The platform as a module of Deckhouse: the two charts, wrapped.
//!
//! There is no Deckhouse here. What it reads is checked for what the module promises, and Helm
//! renders the module with such values as Deckhouse gives.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use e2e::charts::{documents, render, repository};
use e2e::control_plane::ControlPlane;
use serde_json::Value;

const NAMESPACE: &str = "d8-ai-inference";
/// Deckhouse installs every module's release there.
const DECKHOUSE: &str = "d8-system";
/// What Deckhouse adds to the settings.
const ADDED: &str = "aiInference.internal.ready=true,aiInference.registry.base=registry.example.com/m,\
    aiInference.registry.dockercfg=e30K";

fn read(file: &str) -> Result<Value> {
    let text = std::fs::read_to_string(repository().join("module").join(file))?;
    serde_saphyr::from_str(&text).with_context(|| file.to_owned())
}

fn rendered(mode: &str) -> Result<String> {
    let mode = format!("aiInference.catalog.mode={mode}");
    render("module", DECKHOUSE, &["--set", &mode, "--set", ADDED])
}

/// Kind and name of every object.
fn objects(rendered: &str) -> Result<BTreeSet<String>> {
    let objects = documents(rendered)?;
    let names = objects.iter().map(|object| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        format!(
            "{} {}",
            text(&object["kind"]),
            text(&object["metadata"]["name"])
        )
    });
    Ok(names.collect())
}

#[test]
fn a_010_a_011_a_012_the_module_names_what_it_needs_and_its_editions() -> Result<()> {
    let module = read("module.yaml")?;
    assert_eq!(module["name"], "ai-inference");
    assert_eq!(module["namespace"], NAMESPACE);
    assert_eq!(module["requirements"]["deckhouse"], ">= 1.75.0");
    assert_eq!(module["requirements"]["kubernetes"], ">= 1.34.0");
    let editions = module["accessibility"]["editions"].as_object();
    let available = editions
        .into_iter()
        .flatten()
        .filter(|(_, edition)| edition["available"] == true);
    let available: Vec<&str> = available.map(|(name, _)| name.as_str()).collect();
    assert_eq!(available, ["ee", "fe"]);
    assert_eq!(
        module["accessibility"]["editions"]["_default"]["available"],
        false
    );
    Ok(())
}

#[test]
fn switching_the_module_off_asks_and_says_what_to_delete_first_a_120_a_121_a_124() -> Result<()> {
    let disable = &read("module.yaml")?["disable"];
    assert_eq!(disable["confirmation"], true);
    let message = disable["message"].as_str().context("no message")?;
    let orders = message.find("delete inferenceservices --all --all-namespaces");
    let classes = message.find("delete inferenceserviceclasses --all");
    ensure!(orders.is_some() && orders < classes, "{message}");
    Ok(())
}

#[test]
fn a_020_a_021_the_module_has_one_setting_and_it_reaches_the_controller() -> Result<()> {
    let settings = read("openapi/config-values.yaml")?;
    assert_eq!(settings["x-config-version"], 1);
    assert_eq!(settings["additionalProperties"], false);
    let keys = |value: &Value| {
        value
            .as_object()
            .map(|all| all.keys().cloned().collect::<Vec<_>>())
    };
    assert_eq!(
        keys(&settings["properties"]),
        Some(vec!["catalog".to_owned()])
    );
    let catalog = &settings["properties"]["catalog"];
    assert_eq!(catalog["additionalProperties"], false);
    assert_eq!(keys(&catalog["properties"]), Some(vec!["mode".to_owned()]));
    let mode = &catalog["properties"]["mode"];
    assert_eq!(mode["enum"], serde_json::json!(["Enabled", "None"]));
    assert_eq!(mode["default"], "Enabled");
    assert_eq!(
        read("openapi/values.yaml")?["x-extend"]["schema"],
        "config-values.yaml"
    );

    for (mode, argument) in [("Enabled", "enabled"), ("None", "none")] {
        let objects = documents(&rendered(mode)?)?;
        let deployment = objects.iter().find(|one| one["kind"] == "Deployment");
        let deployment = deployment.context("no Deployment")?;
        let containers = &deployment["spec"]["template"]["spec"]["containers"];
        let environment = containers[0]["env"].as_array().context("no environment")?;
        let set = environment
            .iter()
            .find(|one| one["name"] == "AI_INFERENCE_CATALOG_MODE");
        assert_eq!(set.map(|one| &one["value"]), Some(&argument.into()));
    }
    Ok(())
}

#[test]
fn deckhouse_finds_what_the_module_sets_of_itself_in_its_schema() -> Result<()> {
    // It refuses a value that the schema of the templates' values does not know.
    let schema = read("openapi/values.yaml")?;
    let values = read("values.yaml")?;
    for (name, _) in values["aiInference"].as_object().context("no values")? {
        ensure!(
            schema["properties"][name].is_object(),
            "{name} is in no schema"
        );
    }
    Ok(())
}

#[test]
fn a_026_the_module_makes_what_the_charts_make_in_its_own_namespace() -> Result<()> {
    let module = rendered("Enabled")?;
    let mut expected = objects(&render("controller/chart", NAMESPACE, &[])?)?;
    expected.extend(objects(&render("daemonset", NAMESPACE, &[])?)?);
    expected.insert(format!("Namespace {NAMESPACE}"));
    expected.insert("Secret ai-inference-registry".to_owned());
    assert_eq!(objects(&module)?, expected);
    ensure!(
        !module.contains(DECKHOUSE),
        "something of the module lies in Deckhouse's own namespace"
    );
    for object in documents(&module)? {
        let namespace = &object["metadata"]["namespace"];
        ensure!(namespace.is_null() || namespace == NAMESPACE, "{object:#}");
    }
    Ok(())
}

#[tokio::test]
async fn what_the_module_makes_is_accepted_by_the_api_server() -> Result<()> {
    let plane = ControlPlane::shared()?;
    let namespace = plane.namespace("module").await?;
    let own = format!("aiInference.namespace={namespace},nodePlugin.namespace={namespace}");
    let rendered = render("module", DECKHOUSE, &["--set", ADDED, "--set", &own])?;
    plane.try_yaml(&namespace, &rendered).await?;
    Ok(())
}

#[test]
fn the_packed_module_renders_as_the_links_do_and_packs_the_same_twice() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut packed = Vec::new();
    for name in ["one.tar", "two.tar"] {
        let archive = folder.path().join(name);
        let status = Command::new(repository().join("hack/module"))
            .arg(&archive)
            .status()?;
        ensure!(status.success(), "hack/module failed");
        packed.push(std::fs::read(&archive)?);
    }
    ensure!(packed[0] == packed[1], "two runs of hack/module differ");
    let unpacked = folder.path().join("module");
    std::fs::create_dir(&unpacked)?;
    let status = Command::new("tar")
        .arg("-xf")
        .arg(folder.path().join("one.tar"))
        .arg("-C")
        .arg(&unpacked)
        .status()?;
    ensure!(status.success(), "tar failed");
    ensure!(
        !unpacked.join("charts/controller").is_symlink(),
        "a link was packed"
    );
    assert_eq!(
        render(&unpacked, DECKHOUSE, &[])?,
        render("module", DECKHOUSE, &[])?
    );
    Ok(())
}
