//! What people copy: the examples and the commands of the guides.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use e2e::charts::repository;
use e2e::control_plane::{ControlPlane, assets};
use e2e::guides::{GUIDES, Runs, Shell, blocks};

fn text(file: &str) -> Result<String> {
    std::fs::read_to_string(repository().join(file)).context(file.to_owned())
}

#[tokio::test]
async fn the_examples_are_accepted_a_130() -> Result<()> {
    let plane = ControlPlane::shared()?;
    let made = "apiVersion: v1\nkind: Namespace\nmetadata: { name: my-namespace }\n";
    plane.apply_yaml("", made).await?;
    let mut kinds = BTreeSet::new();
    for group in ["classes", "orders"] {
        for entry in std::fs::read_dir(repository().join("examples").join(group))? {
            let path = entry?.path();
            let yaml = std::fs::read_to_string(&path)?;
            let tried = plane.try_yaml("my-namespace", &yaml).await;
            let objects = tried.with_context(|| format!("{} is refused", path.display()))?;
            ensure!(!objects.is_empty(), "{} is empty", path.display());
            kinds.extend(objects.into_iter().filter_map(|o| o.types.map(|t| t.kind)));
        }
    }
    assert_eq!(
        kinds.iter().map(String::as_str).collect::<Vec<_>>(),
        ["InferenceService", "InferenceServiceClass", "Secret"]
    );
    Ok(())
}

#[test]
fn every_example_is_in_the_list_of_examples() -> Result<()> {
    let list = text("examples/README.md")?;
    for group in ["classes", "orders"] {
        for entry in std::fs::read_dir(repository().join("examples").join(group))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            ensure!(
                list.contains(&format!("({group}/{name})")),
                "{group}/{name} is not listed"
            );
        }
    }
    Ok(())
}

#[test]
fn the_commands_of_the_guides_run_as_they_stand() -> Result<()> {
    let plane = ControlPlane::start()?;
    let shell = Shell::new(plane.kubeconfig(), assets()?, &[])?;
    // The guides begin where nothing is installed.
    shell.run("kubectl delete crd --all; kubectl create namespace my-namespace")?;
    let mut count = 0;
    for guide in GUIDES {
        count += shell.run_guide(guide, &[Runs::Api, Runs::ApiOnly])?;
    }
    ensure!(count >= 12, "only {count} blocks were run");
    Ok(())
}

#[test]
fn the_guides_show_the_examples_as_they_are() -> Result<()> {
    for (guide, example) in [
        ("docs/user-guide.md", "examples/orders/small.yaml"),
        (
            "docs/administrator-guide.md",
            "examples/classes/external-chat.yaml",
        ),
    ] {
        let manifest: String = text(example)?
            .lines()
            .filter(|line| !line.starts_with('#'))
            .map(|line| format!("{line}\n"))
            .collect();
        ensure!(
            text(guide)?.contains(&manifest),
            "{guide} shows another {example}"
        );
    }
    Ok(())
}

#[test]
fn both_languages_have_the_same_commands_and_headlines() -> Result<()> {
    let level = |line: &str| line.split_once(' ').map(|(marks, _)| marks.to_owned());
    let headlines = |text: &str| -> Vec<String> {
        let mut inside = false;
        let lines = text.lines().filter(|line| {
            inside ^= line.starts_with("```");
            !inside && line.starts_with('#')
        });
        lines.filter_map(level).collect()
    };
    for guide in GUIDES.iter().filter(|guide| guide.contains("guide")) {
        let english = text(guide)?;
        let russian = text(&guide.replace("docs/", "docs/ru/"))?;
        let commands = |text: &str| -> Result<Vec<(Runs, String)>> {
            let blocks = blocks(text)?;
            Ok(blocks.into_iter().map(|b| (b.runs, b.commands)).collect())
        };
        assert_eq!(commands(&english)?, commands(&russian)?, "{guide}");
        assert_eq!(headlines(&english), headlines(&russian), "{guide}");
    }
    Ok(())
}

/// Relative links of a page: where they point, from the page's own folder.
fn links(page: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for part in page.split("](").skip(1) {
        let Some((target, _)) = part.split_once(')') else {
            continue;
        };
        if !target.contains("://") {
            found.push(target);
        }
    }
    found
}

#[test]
fn links_of_the_pages_lead_somewhere() -> Result<()> {
    let mut pages: Vec<PathBuf> = vec!["README.md".into(), "examples/README.md".into()];
    for folder in ["docs", "docs/ru"] {
        for entry in std::fs::read_dir(repository().join(folder))? {
            let name = entry?.file_name();
            if Path::new(&name).extension().is_some_and(|e| e == "md") {
                pages.push(Path::new(folder).join(name));
            }
        }
    }
    let mut broken = Vec::new();
    for page in &pages {
        let text = text(&page.to_string_lossy())?;
        for link in links(&text) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let folder = repository().join(page.parent().unwrap_or(Path::new("")));
            let target = if file.is_empty() {
                repository().join(page)
            } else {
                folder.join(file)
            };
            let there = target.exists();
            let named = anchor.is_empty()
                || std::fs::read_to_string(&target).is_ok_and(|text| {
                    text.lines()
                        .filter(|line| line.starts_with('#'))
                        .any(|line| slug(line) == anchor)
                });
            if !there || !named {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
    Ok(())
}

/// The anchor that a headline gets.
fn slug(headline: &str) -> String {
    let text = headline.trim_start_matches('#').trim().to_lowercase();
    text.chars()
        .filter_map(|c| match c {
            ' ' => Some('-'),
            c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
            _ => None,
        })
        .collect()
}
