//! Which test proves which requirement.
//!
//! In: the list of requirements (`tests/requirements.yaml`) and the sources of all tests. Out:
//! `docs/requirements.md`. It runs no test and knows nothing of their results: a name is a claim
//! that a review has to check.
//!
//! A test claims a number by its name: `a_031_the_sample…`, `…_a_059_a_070`, as a function, as a
//! rule of `rules!` or as a case of a table (`#[case::nothing_in_common_a_056(…)]`).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

/// The folders that hold tests.
const FOLDERS: [&str; 5] = ["controller", "crds", "node-plugin", "proto", "tests"];
/// The list of requirements.
const LIST: &str = "tests/requirements.yaml";
/// Which kinds a rule of `rules!` is about.
const KINDS: [&str; 2] = ["Class", "Order"];

/// Requirements that belong together.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Section {
    /// What they are about.
    pub title: String,
    /// The requirements, in the order of their numbers.
    pub requirements: Vec<Requirement>,
}

/// One statement.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Requirement {
    /// Its number: `A-031`.
    pub id: String,
    /// The statement, in one sentence or two.
    pub says: String,
    /// What no test here shows of it, and why.
    pub open: Option<String>,
}

/// A test that carries a number.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Test {
    /// Its file, from the repository's root.
    pub file: String,
    /// Its name; for a case of a table the case's name.
    pub name: String,
}

/// The tests of each number.
pub type Proofs = BTreeMap<String, Vec<Test>>;

/// The committed list.
///
/// # Errors
/// If it cannot be read.
pub fn list(root: &Path) -> Result<Vec<Section>> {
    let text = std::fs::read_to_string(root.join(LIST)).context(LIST)?;
    serde_saphyr::from_str(&text).context(LIST)
}

/// The tests of this repository that carry a number.
///
/// # Errors
/// If a source cannot be read.
pub fn proofs(root: &Path) -> Result<Proofs> {
    let mut proofs = Proofs::new();
    for folder in FOLDERS {
        for file in sources(&root.join(folder))? {
            let name = file.strip_prefix(root)?.to_string_lossy().into_owned();
            let text = std::fs::read_to_string(&file).with_context(|| name.clone())?;
            for test in tests(&text) {
                for number in numbers(test) {
                    proofs.entry(number).or_default().push(Test {
                        file: name.clone(),
                        name: test.to_owned(),
                    });
                }
            }
        }
    }
    for tests in proofs.values_mut() {
        tests.sort();
    }
    Ok(proofs)
}

/// Every Rust source below a folder.
fn sources(folder: &Path) -> Result<Vec<std::path::PathBuf>> {
    let mut found = Vec::new();
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(sources(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(found)
}

/// The names of the tests in a source, of the rules and of the named cases.
fn tests(source: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut is_test = false;
    for line in source.lines().map(str::trim) {
        if let Some(case) = line.strip_prefix("#[case::") {
            found.push(identifier(case));
        } else if line.starts_with("#[") {
            let attribute = line.trim_start_matches("#[");
            is_test |= ["test]", "tokio::test", "rstest"]
                .iter()
                .any(|name| attribute.starts_with(name));
        } else if let Some(name) = function(line) {
            if is_test {
                found.push(name);
            }
            is_test = false;
        } else if let Some((name, kind)) = line.split_once(": ")
            && identifier(name) == name
            && KINDS.contains(&kind)
        {
            found.push(name);
        }
    }
    found
}

/// The name of the function that a line begins.
fn function(line: &str) -> Option<&str> {
    let line = line.strip_prefix("pub ").unwrap_or(line);
    let line = line.strip_prefix("async ").unwrap_or(line);
    line.strip_prefix("fn ").map(identifier)
}

/// The identifier at the start of a text.
fn identifier(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    &text[..end.unwrap_or(text.len())]
}

/// The numbers in a name: each `a` that three digits follow.
fn numbers(name: &str) -> Vec<String> {
    let words: Vec<&str> = name.split('_').collect();
    let pairs = words.windows(2).filter(|pair| {
        pair[0] == "a" && pair[1].len() == 3 && pair[1].bytes().all(|byte| byte.is_ascii_digit())
    });
    pairs.map(|pair| format!("A-{}", pair[1])).collect()
}

/// What is wrong with a list and its proofs, a sentence each.
pub fn faults(list: &[Section], proofs: &Proofs) -> Vec<String> {
    let mut faults = Vec::new();
    let mut previous = "";
    for requirement in list.iter().flat_map(|section| &section.requirements) {
        let id = requirement.id.as_str();
        if id <= previous {
            faults.push(format!("{LIST}: {id} follows {previous}"));
        }
        previous = id;
        if !proofs.contains_key(id) && requirement.open.is_none() {
            faults.push(format!(
                "{id} has neither a test that carries its number nor a reason in {LIST} why there is none"
            ));
        }
    }
    let known = |id: &String| {
        list.iter()
            .flat_map(|section| &section.requirements)
            .any(|requirement| requirement.id == *id)
    };
    for (id, tests) in proofs.iter().filter(|(id, _)| !known(id)) {
        for Test { file, name } in tests {
            faults.push(format!("{file}: {name} names {id}, which is not in {LIST}"));
        }
    }
    faults
}

/// The page, for `docs/`.
pub fn page(list: &[Section], proofs: &Proofs) -> String {
    let all = || list.iter().flat_map(|section| &section.requirements);
    let shown = all().filter(|one| proofs.contains_key(&one.id)).count();
    let open = all().filter(|one| one.open.is_some()).count();
    let mut page = format!(
        "# Requirements

What the platform promises, and the tests that show it. Made by `hack/regenerate` from \
         `tests/requirements.yaml` and the names of the tests; where something is shown in part \
         or not at all, the last column says why.

{} statements; {shown} have a test, {open} have something open.
",
        all().count()
    );
    for section in list {
        let _ = write!(
            page,
            "\n## {}\n\n| | statement | shown by | open |\n|---|---|---|---|\n",
            section.title
        );
        for requirement in &section.requirements {
            let tests = proofs.get(&requirement.id).map_or(&[][..], Vec::as_slice);
            let tests: Vec<String> = tests.iter().map(link).collect();
            let _ = writeln!(
                page,
                "| {} | {} | {} | {} |",
                requirement.id,
                requirement.says,
                tests.join("<br>"),
                requirement.open.as_deref().unwrap_or_default()
            );
        }
    }
    page
}

/// A test with a link to its file, from `docs/`.
fn link(test: &Test) -> String {
    format!("[`{}`](../{})", test.name, test.file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> &'static Path {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
    }

    /// `UPDATE_GOLDEN=1` writes the page.
    #[test]
    fn every_requirement_has_a_test_or_a_reason_and_the_table_is_current() {
        let (list, proofs) = (list(root()).unwrap(), proofs(root()).unwrap());
        assert_eq!(faults(&list, &proofs), [""; 0]);
        let (path, page) = (root().join("docs/requirements.md"), page(&list, &proofs));
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&path, &page).unwrap();
        }
        assert!(
            std::fs::read_to_string(&path).unwrap_or_default() == page,
            "docs/requirements.md is stale: run hack/regenerate and commit it"
        );
    }

    #[test]
    fn a_name_carries_its_numbers_at_either_end() {
        assert_eq!(numbers("a_031_the_sample_is_accepted"), ["A-031"]);
        assert_eq!(numbers("the_first_a_059_a_070"), ["A-059", "A-070"]);
        assert_eq!(numbers("a_hugging_face_link_of_a_8b_model_a_1234"), [""; 0]);
    }

    #[test]
    fn functions_rules_and_cases_are_found_and_helpers_are_not() {
        let source = "#[test]\n/// Why.\nfn one_a_001() {}\nfn helper_a_002() {}\n\
            rules! {\n    a_003_rule: Class\n        accepts []\n}\n\
            #[rstest]\n#[case::four_a_004(1)]\nfn table_a_005(#[case] x: u8) {}\n\
            #[tokio::test(flavor = \"multi_thread\")]\n#[ignore]\nasync fn six_a_006() {}\n\
            let seven_a_007: Order = order();\n";
        assert_eq!(
            tests(source),
            [
                "one_a_001",
                "a_003_rule",
                "four_a_004",
                "table_a_005",
                "six_a_006"
            ]
        );
    }

    #[test]
    fn a_number_without_test_and_reason_and_an_unknown_one_are_faults() {
        let list: Vec<Section> = serde_saphyr::from_str(
            "[{title: T, requirements: [{id: A-001, says: one}, {id: A-002, says: two, open: later}, {id: A-003, says: three}]}]",
        )
        .unwrap();
        let test = |name: &str| Test {
            file: "f.rs".into(),
            name: name.into(),
        };
        let proofs = Proofs::from([
            ("A-001".into(), vec![test("one_a_001")]),
            ("A-009".into(), vec![test("nine_a_009")]),
        ]);
        let faults = faults(&list, &proofs);
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(faults[0].starts_with("A-003 has neither"), "{faults:?}");
        assert!(faults[1].contains("nine_a_009 names A-009"), "{faults:?}");
        let page = page(&list, &proofs);
        assert!(
            page.contains(
                "| A-001 | one | [`one_a_001`](../f.rs) |  |\n| A-002 | two |  | later |"
            ),
            "{page}"
        );
    }
}
