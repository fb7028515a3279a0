//! How images are packed, and what is told of their contents.
//!
//! Nothing is built here: the packer gets folders of the test's own, and the list of contents is made of
//! cargo's own answers.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use e2e::charts::repository;
use serde_json::Value;

fn python(script: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new("python3")
        .arg(repository().join("hack/lib").join(script))
        .args(arguments)
        .output()?;
    ensure!(
        output.status.success(),
        "{script}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// A root folder with these files, made in this order, as old as said, with a link and a second name
/// of the first file.
fn root(folder: &Path, files: &[(&str, &str)], age: u64) -> Result<()> {
    std::fs::create_dir_all(folder.join("etc"))?;
    for (name, content) in files {
        let path = folder.join(name);
        std::fs::write(&path, content)?;
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(age);
        std::fs::File::options()
            .write(true)
            .open(&path)?
            .set_modified(time)?;
    }
    symlink("etc/b", folder.join("link"))?;
    std::fs::hard_link(folder.join("etc/b"), folder.join("again"))?;
    Ok(())
}

/// The archive's bytes and the digest that the packer tells.
fn pack(root: &Path) -> Result<(Vec<u8>, String)> {
    let archive = root.with_extension("tar");
    let digest = python(
        "oci_image.py",
        &[
            "--output",
            &archive.to_string_lossy(),
            "--root",
            &root.to_string_lossy(),
            "--name",
            "ai-inference/test:dev",
            "--entrypoint",
            r#"["/etc/b"]"#,
        ],
    )?;
    Ok((std::fs::read(&archive)?, digest))
}

#[test]
fn an_image_of_the_same_content_is_the_same_image() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let [one, two, other] = ["one", "two", "other"].map(|name| folder.path().join(name));
    root(&one, &[("etc/a", "1"), ("etc/b", "2")], 1_000)?;
    root(&two, &[("etc/b", "2"), ("etc/a", "1")], 2_000_000)?;
    root(&other, &[("etc/a", "1"), ("etc/b", "3")], 1_000)?;
    let (one, two, other) = (pack(&one)?, pack(&two)?, pack(&other)?);
    ensure!(one == two, "{} and {} hold the same", one.1, two.1);
    ensure!(one.1 != other.1, "another content has the same digest");
    Ok(())
}

#[test]
fn the_list_of_an_images_contents_names_its_crates_and_libraries_and_no_more() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let licence = repository().join("LICENSE");
    let file = format!("usr/share/licenses/LICENSE={}", licence.display());
    let make = |name: &str| -> Result<String> {
        let path = folder.path().join(name);
        let path = path.to_string_lossy();
        let arguments = [
            "--output",
            &path,
            "--name",
            "ai-inference/controller",
            "--version",
            "dev",
            "--package",
            "controller",
            &file,
        ];
        python("sbom.py", &arguments)?;
        Ok(std::fs::read_to_string(&*path)?)
    };
    let text = make("one.json")?;
    ensure!(text == make("two.json")?, "two runs differ");
    let document: Value = serde_json::from_str(&text)?;
    assert_eq!(document["spdxVersion"], "SPDX-2.3");
    let packages = document["packages"].as_array().context("no packages")?;
    let find = |name: &str| packages.iter().find(|one| one["name"] == name);
    let lock = std::fs::read_to_string(repository().join("Cargo.lock"))?;
    let kube = find("kube").context("kube is not listed")?;
    let (version, checksum) = (&kube["versionInfo"], &kube["checksums"][0]["checksumValue"]);
    let (version, checksum) = (
        version.as_str().context("no version")?,
        checksum.as_str().context("no checksum")?,
    );
    let locked = format!("name = \"kube\"\nversion = \"{version}\"\n");
    let locked = lock.split(&locked).nth(1).context("not in Cargo.lock")?;
    ensure!(locked.lines().nth(1) == Some(format!("checksum = \"{checksum}\"").as_str()));
    assert_eq!(kube["licenseDeclared"], "Apache-2.0");
    ensure!(find("planner").is_some(), "our own crates are parts too");
    // Of tests alone.
    ensure!(find("rstest").is_none() && find("insta").is_none());
    assert_eq!(
        document["files"][0]["fileName"],
        "./usr/share/licenses/LICENSE"
    );
    // Every part is said to be in the image.
    let relations = document["relationships"]
        .as_array()
        .context("no relations")?;
    for part in packages
        .iter()
        .chain(document["files"].as_array().into_iter().flatten())
    {
        ensure!(
            relations
                .iter()
                .any(|one| one["relatedSpdxElement"] == part["SPDXID"]),
            "{part} hangs in the air"
        );
    }
    Ok(())
}
