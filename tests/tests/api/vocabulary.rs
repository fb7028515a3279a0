//! The words of status and events: what the code can write and what the FAQ explains are the same.
//!
//! The FAQ is made from the enums, so a word that nothing writes any more would stay in it. Here the
//! sources are read: a word counts as written where it is handed on as a value, and not where it is
//! only compared or matched.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use e2e::charts::repository;

/// Section of the FAQ, and the enum of its words.
const KINDS: [(&str, &str); 6] = [
    ("Reasons on an order", "OrderReason"),
    ("Events on an order", "OrderEvent"),
    ("Conditions of an order", "OrderCondition"),
    ("Reasons on a class", "ClassReason"),
    ("Events on a class", "ClassEvent"),
    ("Conditions of a class", "ClassCondition"),
];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if path.is_dir() {
            sources(&path, found)?;
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") && name != "test_hub.rs" {
            found.push(path);
        }
    }
    Ok(())
}

/// A source without comments and without its tests.
fn code(text: &str) -> String {
    let end = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
    let lines = text.get(..end).unwrap_or(text).lines();
    lines
        .filter(|line| !line.trim_start().starts_with("//"))
        .map(|line| format!("{line}\n"))
        .collect()
}

/// The words of an enum that a source hands on.
fn written(code: &str, kind: &str) -> BTreeSet<String> {
    let mut names = vec![kind.to_owned()];
    for part in code.split(&format!("{kind} as ")).skip(1) {
        let end = part
            .find(|c: char| !c.is_alphanumeric())
            .unwrap_or(part.len());
        names.extend(part.get(..end).map(str::to_owned));
    }
    let mut found = BTreeSet::new();
    for name in names {
        let path = format!("{name}::");
        for (at, _) in code.match_indices(&path) {
            let (before, after) = code.split_at(at);
            let rest = after.strip_prefix(&path).unwrap_or_default();
            let end = rest
                .find(|c: char| !c.is_alphanumeric())
                .unwrap_or(rest.len());
            let (word, next) = rest.split_at(end);
            // `R::X` of `OtherR::X` is another name.
            let whole = !before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
            if whole && is_value(before, next) {
                found.insert(word.to_owned());
            }
        }
    }
    found
}

/// Whether what stands between the two is handed on: not a pattern, not a comparison.
fn is_value(before: &str, after: &str) -> bool {
    let (before, after) = (before.trim_end(), after.trim_start());
    let pattern = before.ends_with('|')
        || after.starts_with('|')
        || after.starts_with("=>")
        || after.starts_with(", _")
        || before.ends_with("==")
        || before.ends_with("!=")
        || before.ends_with("Some(")
        || before.ends_with("Some((")
        || in_matches(before);
    !pattern
}

/// Whether the text ends inside `matches!(`.
fn in_matches(before: &str) -> bool {
    let Some(at) = before.rfind("matches!(") else {
        return false;
    };
    let mut depth = 0i32;
    for c in before.get(at..).unwrap_or_default().chars() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 && c == ')' {
            return false;
        }
    }
    depth > 0
}

/// The headlines of a section of the FAQ.
fn explained(faq: &str, section: &str) -> Result<BTreeSet<String>> {
    let (_, rest) = faq
        .split_once(&format!("\n## {section}\n"))
        .with_context(|| format!("the FAQ has no section {section}"))?;
    let section = rest.split("\n## ").next().unwrap_or_default();
    let lines = section.lines().filter_map(|line| line.strip_prefix("### "));
    Ok(lines.map(str::to_owned).collect())
}

#[test]
fn the_words_that_the_code_writes_are_those_of_the_faq_a_130() -> Result<()> {
    let faq = std::fs::read_to_string(repository().join("docs/faq.md"))?;
    let mut files = Vec::new();
    sources(&repository().join("controller/src"), &mut files)?;
    let mut wrong = Vec::new();
    for (section, kind) in KINDS {
        let mut words = BTreeSet::new();
        for file in &files {
            words.extend(written(&code(&std::fs::read_to_string(file)?), kind));
        }
        let explained = explained(&faq, section)?;
        for word in explained.difference(&words) {
            wrong.push(format!(
                "{word} of {kind} is explained, and nothing writes it"
            ));
        }
        for word in words.difference(&explained) {
            let is_word = word.starts_with(char::is_uppercase) && word.len() > 3 && word != "ALL";
            if is_word {
                wrong.push(format!(
                    "{word} of {kind} is written, and the FAQ does not explain it"
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

#[test]
fn a_word_that_is_only_compared_is_not_written() {
    let source = "use x::OrderReason as R;\nfn f(r: R) -> R { if r == R::A { return g(R::B, 1); } match r { R::C | R::D => R::E, R::F => h(), _ if matches!(r, R::G) => Some(R::H) } }\n";
    let found = written(source, "OrderReason");
    assert_eq!(found.into_iter().collect::<Vec<_>>(), ["B", "E"]);
}
