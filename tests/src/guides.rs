//! The commands of the guides, run as they stand.
//!
//! In: a guide in Markdown. Each of its shell blocks has a mark in the line before it, which says
//! where the block can run:
//!
//! ```text
//! <!-- run: api -->        wherever an API server answers, with or without the platform
//! <!-- run: api only -->   where nothing is installed yet, since it installs or removes everything
//! <!-- run: cluster -->    where the platform runs
//! <!-- not run: why -->    nowhere, for this reason
//! ```
//!
//! Out: each block, run by bash in a copy of the repository's front (charts and examples); a block
//! that fails is shown with what it printed. Never a block without a mark: then the guide is refused.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::charts::repository;

/// The guides whose commands are run, in an order that works.
pub const GUIDES: [&str; 3] = [
    "docs/administrator-guide.md",
    "docs/user-guide.md",
    "docs/models.md",
];

/// Where a block can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runs {
    /// Where an API server answers.
    Api,
    /// Where an API server answers and nothing is installed.
    ApiOnly,
    /// Where the platform runs.
    Cluster,
    /// Nowhere.
    Nowhere,
}

/// A shell block of a guide.
#[derive(Debug, PartialEq, Eq)]
pub struct Block {
    /// The line that it begins in.
    pub line: usize,
    /// Where it can run.
    pub runs: Runs,
    /// Its commands.
    pub commands: String,
}

/// The shell blocks of a guide.
///
/// # Errors
/// If one has no mark, a mark that there is not, or no end.
pub fn blocks(markdown: &str) -> Result<Vec<Block>> {
    let mut found = Vec::new();
    let mut before = "";
    let mut lines = markdown.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        if matches!(
            line,
            "```sh" | "```bash" | "```console" | "```shell" | "```"
        ) {
            let line = number + 1;
            let runs = mark(before).with_context(|| format!("the block in line {line}"))?;
            let mut commands = String::new();
            loop {
                let (_, text) = lines
                    .next()
                    .with_context(|| format!("the block in line {line} has no end"))?;
                if text == "```" {
                    break;
                }
                commands.push_str(text);
                commands.push('\n');
            }
            found.push(Block {
                line,
                runs,
                commands,
            });
        } else if line.starts_with("```") {
            // Of another language: passed over as a whole.
            for (_, text) in lines.by_ref() {
                if text == "```" {
                    break;
                }
            }
        }
        before = line;
    }
    Ok(found)
}

fn mark(line: &str) -> Result<Runs> {
    let text = line
        .strip_prefix("<!-- ")
        .and_then(|line| line.strip_suffix(" -->"))
        .context("has no mark in the line before it, such as <!-- run: api -->")?;
    match text {
        "run: api" => Ok(Runs::Api),
        "run: api only" => Ok(Runs::ApiOnly),
        "run: cluster" => Ok(Runs::Cluster),
        _ if text.starts_with("not run: ") => Ok(Runs::Nowhere),
        _ => bail!("there is no mark {text:?}"),
    }
}

/// Where commands run.
pub struct Shell {
    kubeconfig: PathBuf,
    tools: PathBuf,
    folder: tempfile::TempDir,
}

impl Shell {
    /// A shell for the cluster of `kubeconfig`, with `kubectl` and `helm` from the folder `tools`.
    /// `replace` is put in the place of words of the examples: a test's hub has other models.
    ///
    /// # Errors
    /// If the front of the repository cannot be copied.
    pub fn new(kubeconfig: &Path, tools: &Path, replace: &[(&str, &str)]) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let root = repository().canonicalize()?;
        for name in ["daemonset", "controller"] {
            std::os::unix::fs::symlink(root.join(name), folder.path().join(name))?;
        }
        for group in ["classes", "orders"] {
            let (from, to) = (
                root.join("examples").join(group),
                folder.path().join("examples").join(group),
            );
            std::fs::create_dir_all(&to)?;
            for entry in std::fs::read_dir(&from)? {
                let entry = entry?;
                let mut text = std::fs::read_to_string(entry.path())?;
                for (word, other) in replace {
                    text = text.replace(word, other);
                }
                std::fs::write(to.join(entry.file_name()), text)?;
            }
        }
        Ok(Self {
            kubeconfig: kubeconfig.to_owned(),
            tools: tools.to_owned(),
            folder,
        })
    }

    /// Runs some commands; gives what they printed.
    ///
    /// # Errors
    /// If one of them fails: with what it printed.
    pub fn run(&self, commands: &str) -> Result<String> {
        let home = self.folder.path().join("home");
        let path = std::env::var("PATH").unwrap_or_default();
        let output = Command::new("timeout")
            .args(["900", "bash", "-euo", "pipefail", "-c", commands])
            .current_dir(self.folder.path())
            .env("KUBECONFIG", &self.kubeconfig)
            .env("HOME", &home)
            .env("KUBECACHEDIR", home.join("kubectl"))
            .env("PATH", format!("{}:{path}", self.tools.display()))
            .stdin(Stdio::null())
            .output()
            .context("running bash")?;
        let printed = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        ensure!(
            output.status.success(),
            "{} of\n{commands}it printed\n{printed}",
            output.status
        );
        Ok(printed)
    }

    /// Runs the blocks of a guide that can run in one of these places, in order; gives how many.
    ///
    /// # Errors
    /// If a block fails, or the guide cannot be read.
    pub fn run_guide(&self, guide: &str, places: &[Runs]) -> Result<usize> {
        let text = std::fs::read_to_string(repository().join(guide)).context(guide.to_owned())?;
        let mut count = 0;
        for block in blocks(&text).with_context(|| guide.to_owned())? {
            if places.contains(&block.runs) {
                self.run(&block.commands)
                    .with_context(|| format!("{guide}, line {}", block.line))?;
                count += 1;
            }
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_by_their_marks_and_none_goes_unmarked() {
        let guide = "# G\n\n<!-- run: api -->\n```sh\na\nb\n```\n\n```yaml\nx: |\n  ```\n```\n<!-- not run: it hurts -->\n```sh\nc\n```\n";
        let found = blocks(guide).unwrap();
        assert_eq!(
            found,
            [
                Block {
                    line: 4,
                    runs: Runs::Api,
                    commands: "a\nb\n".into()
                },
                Block {
                    line: 14,
                    runs: Runs::Nowhere,
                    commands: "c\n".into()
                }
            ]
        );
        assert!(blocks("text\n```sh\na\n```\n").is_err(), "no mark");
        assert!(blocks("<!-- run: moon -->\n```sh\na\n```\n").is_err());
        assert!(blocks("<!-- run: api -->\n```sh\na\n").is_err(), "no end");
    }

    #[test]
    fn a_command_that_fails_is_shown_with_what_it_printed() {
        let shell = Shell::new(Path::new("/nowhere"), Path::new("/nowhere"), &[]).unwrap();
        assert_eq!(
            shell.run("ls examples/orders/small.yaml").unwrap().trim(),
            "examples/orders/small.yaml"
        );
        let error = shell
            .run("echo before; false; echo after")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("before") && !error.contains("\nafter"),
            "{error}"
        );
        let replaced =
            Shell::new(Path::new("/n"), Path::new("/n"), &[("SmolLM2", "Other")]).unwrap();
        assert!(
            replaced
                .run("cat examples/orders/small.yaml")
                .unwrap()
                .contains("Other-135M")
        );
    }
}
