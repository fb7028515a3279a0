//! Which files of a repository make up the model.
//!
//! The rule (documented in docs/memory.md): one set of weights only. With a
//! `config.json` and safetensors, that set is what the index names, or else
//! `model.safetensors`, or else the only other top-level set; pickled weights,
//! `consolidated.*` duplicates and Python code are never taken. GGUF is taken
//! where the order names a GGUF file, or where there are no safetensors and the
//! repository holds exactly one GGUF model.

use super::endpoint::check_path;
use super::error::{FilesError, Rejection};
use super::{Checksum, Format, ModelFile};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// Files beside the weights that are larger are not configuration.
const MAX_SIDE_FILE: u64 = 256 << 20;
/// More files than any model of today has; the list travels in the pod's specification.
pub(crate) const MAX_FILES: usize = 400;
/// The list's own length as JSON: a variable of a process holds 128 KiB at most.
const MAX_LIST_BYTES: usize = 100 << 10;

/// One entry of a hub's file list.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Entry {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) path: String,
    #[serde(default)]
    pub(crate) size: u64,
    #[serde(default)]
    pub(crate) oid: String,
    pub(crate) lfs: Option<Lfs>,
}

/// A large file's own identity.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Lfs {
    /// SHA-256, in some answers with the prefix `sha256:`.
    pub(crate) oid: String,
    pub(crate) size: u64,
}

/// The files chosen.
#[derive(Clone, Debug)]
pub(crate) struct Chosen {
    pub(crate) format: Format,
    /// One set of weights, in order.
    pub(crate) weights: Vec<ModelFile>,
    /// The safetensors index, where there is one.
    pub(crate) index: Option<String>,
    /// Configuration and tokenizer.
    pub(crate) side: Vec<ModelFile>,
}

impl Chosen {
    /// Narrows the weights to those that an index names.
    pub(crate) fn keep_weights(&mut self, names: &BTreeSet<String>) -> Result<(), FilesError> {
        self.weights.retain(|f| names.contains(&f.path));
        match names
            .iter()
            .find(|n| !self.weights.iter().any(|f| f.path == **n))
        {
            Some(missing) => Err(invalid(format!(
                "its index names {missing}, which is not in the repository"
            ))),
            None => Ok(()),
        }
    }

    /// All files, weights last.
    pub(crate) fn into_files(self) -> Vec<ModelFile> {
        self.side.into_iter().chain(self.weights).collect()
    }
}

fn file(entry: &Entry) -> Result<ModelFile, FilesError> {
    check_path(&entry.path).map_err(invalid)?;
    let hex = |s: &str, n: usize| s.len() == n && s.chars().all(|c| c.is_ascii_hexdigit());
    let (checksum, size) = match &entry.lfs {
        Some(lfs) => {
            let oid = lfs.oid.trim_start_matches("sha256:").to_ascii_lowercase();
            if !hex(&oid, 64) {
                return Err(invalid(format!(
                    "the hub gives no SHA-256 of {}",
                    entry.path
                )));
            }
            (Checksum::Sha256(oid), lfs.size)
        }
        None => {
            let oid = entry.oid.to_ascii_lowercase();
            if !hex(&oid, 40) {
                return Err(invalid(format!(
                    "the hub gives no blob id of {}",
                    entry.path
                )));
            }
            (Checksum::GitBlob(oid), entry.size)
        }
    };
    Ok(ModelFile {
        path: entry.path.clone(),
        size,
        checksum,
    })
}

/// Chooses one set of weights and what belongs to it.
///
/// # Errors
/// Why the repository holds no single model, naming what it does hold.
pub(crate) fn choose(entries: &[Entry], wanted: Option<&str>) -> Result<Chosen, FilesError> {
    let files: Vec<&Entry> = entries.iter().filter(|e| e.kind == "file").collect();
    let gguf: Vec<&&Entry> = files
        .iter()
        .filter(|e| e.path.ends_with(".gguf") && !name(&e.path).starts_with("mmproj"))
        .collect();
    let has = |path: &str| files.iter().any(|e| e.path == path);
    let safetensors = files.iter().any(|e| e.path.ends_with(".safetensors"));
    let chosen = match wanted {
        Some(path) if !path.ends_with(".gguf") => Err(missing(format!(
            "spec.model names the file {path:?}, but only a GGUF file can be chosen by name"
        ))),
        Some(path) => choose_gguf(&gguf, Some(path)),
        None if has("config.json") && safetensors => choose_safetensors(&files),
        None if !gguf.is_empty() => choose_gguf(&gguf, None),
        None if safetensors => Err(unsupported(
            "it has safetensors but no config.json at its top level",
        )),
        None => Err(unsupported(format!(
            "it has no config.json with safetensors and no GGUF file (it holds {})",
            listing(files.iter().map(|e| e.path.as_str()))
        ))),
    }?;
    if chosen.weights.len() + chosen.side.len() > MAX_FILES {
        return Err(unsupported(format!(
            "the model consists of more than {MAX_FILES} files"
        )));
    }
    let list: Vec<&ModelFile> = chosen.side.iter().chain(&chosen.weights).collect();
    if serde_json::to_vec(&list).map_or(usize::MAX, |l| l.len()) > MAX_LIST_BYTES {
        return Err(unsupported(format!(
            "the list of its files is longer than {MAX_LIST_BYTES} bytes"
        )));
    }
    Ok(chosen)
}

fn unsupported(detail: impl Into<String>) -> FilesError {
    FilesError::new(Rejection::NotSupported, detail)
}

fn invalid(detail: impl Into<String>) -> FilesError {
    FilesError::new(Rejection::FilesInvalid, detail)
}

fn missing(detail: impl Into<String>) -> FilesError {
    FilesError::new(Rejection::FileNotFound, detail)
}

fn ambiguous(detail: impl Into<String>) -> FilesError {
    FilesError::new(Rejection::FileAmbiguous, detail)
}

fn name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Whether `path` matches `pattern`, in which `*` stands for any characters.
fn matches(pattern: &str, path: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| path.strip_prefix(first)) else {
        return false;
    };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else {
        return rest.is_empty();
    };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = rest.get(at + part.len()..).unwrap_or_default(),
            None => return false,
        }
    }
    rest.ends_with(last)
}

fn listing<'a>(paths: impl Iterator<Item = &'a str>) -> String {
    let paths: Vec<&str> = paths.collect();
    let mut shown: Vec<String> = paths
        .iter()
        .take(8)
        .map(|p| p.chars().filter(|c| !c.is_control()).take(80).collect())
        .collect();
    match paths.len() {
        0 => return "nothing".into(),
        n if n > 8 => shown.push(format!("{} more", n - 8)),
        _ => {}
    }
    shown.join(", ")
}

fn choose_safetensors(files: &[&Entry]) -> Result<Chosen, FilesError> {
    const INDEX: &str = "model.safetensors.index.json";
    let top: Vec<&&Entry> = files.iter().filter(|e| !e.path.contains('/')).collect();
    let weights_named = |keep: &dyn Fn(&str) -> bool| -> Result<Vec<ModelFile>, FilesError> {
        let mut weights = top
            .iter()
            .filter(|e| e.path.ends_with(".safetensors") && keep(&e.path))
            .map(|e| file(e))
            .collect::<Result<Vec<_>, _>>()?;
        weights.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(weights)
    };
    let index = top
        .iter()
        .any(|e| e.path == INDEX)
        .then(|| INDEX.to_owned());
    let single = top.iter().any(|e| e.path == "model.safetensors");
    let weights = if index.is_some() {
        weights_named(&|_| true)?
    } else if single {
        weights_named(&|p| p == "model.safetensors")?
    } else {
        weights_named(&|p| !p.starts_with("consolidated") && !p.starts_with("adapter_"))?
    };
    if weights.is_empty() {
        return Err(unsupported(
            "its safetensors are not a model's own weights (they lie in folders, or are an adapter or a consolidated duplicate)",
        ));
    }
    let side = files
        .iter()
        .filter(|e| is_side_file(&e.path) && e.size <= MAX_SIDE_FILE)
        .map(|e| file(e))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(Chosen {
        format: Format::Safetensors,
        weights,
        index,
        side,
    })
}

/// Configuration and tokenizer files: at the top, or in the folders that
/// sentence-transformers models keep theirs in.
fn is_side_file(path: &str) -> bool {
    let place = match path.split_once('/') {
        None => true,
        Some((folder, rest)) => {
            !rest.contains('/')
                && folder.starts_with(|c: char| c.is_ascii_digit())
                && folder.contains('_')
        }
    };
    let kind = [".json", ".txt", ".model", ".jinja", ".tiktoken"]
        .iter()
        .any(|e| path.ends_with(e));
    let other_weights = [".bin.index.json", ".h5.index.json", ".msgpack.index.json"]
        .iter()
        .any(|e| path.ends_with(e));
    // A name of that kind is the download's own.
    let hidden = path.starts_with('.');
    place && kind && !hidden && !other_weights && !path.starts_with("consolidated")
}

/// Parts of one split file: `NAME-00001-of-00003.gguf`.
fn split_of(path: &str) -> Option<(&str, u32, u32)> {
    let stem = path.strip_suffix(".gguf")?;
    let (head, total) = stem.rsplit_once("-of-")?;
    let (base, part) = head.rsplit_once('-')?;
    if part.len() != 5 || total.len() != 5 {
        return None;
    }
    Some((base, part.parse().ok()?, total.parse().ok()?))
}

fn choose_gguf(gguf: &[&&Entry], wanted: Option<&str>) -> Result<Chosen, FilesError> {
    // One model per entry: all parts of a split file, or a file by itself.
    let mut models: BTreeMap<String, Vec<&Entry>> = BTreeMap::new();
    for entry in gguf {
        let key = split_of(&entry.path).map_or(entry.path.clone(), |(base, _, total)| {
            format!("{base}-of-{total}")
        });
        models.entry(key).or_default().push(entry);
    }
    let names = || listing(gguf.iter().map(|e| e.path.as_str()));
    let mut parts = match wanted {
        Some(wanted) => {
            let mut matching: Vec<Vec<&Entry>> = models
                .into_values()
                .filter(|m| m.iter().any(|e| matches(wanted, &e.path)))
                .collect();
            match (matching.pop(), matching.len()) {
                (Some(one), 0) => one,
                (Some(_), _) => {
                    return Err(ambiguous(format!(
                        "{wanted:?} matches several of its GGUF models: {}",
                        names()
                    )));
                }
                (None, _) => {
                    return Err(missing(format!(
                        "it has no file {wanted:?}; its GGUF files are {}",
                        names()
                    )));
                }
            }
        }
        None if models.len() > 1 => {
            return Err(ambiguous(format!(
                "it holds several GGUF models; name one in the order's spec.model (file): {}",
                names()
            )));
        }
        None => models
            .into_values()
            .next()
            .ok_or_else(|| unsupported("it holds no GGUF file"))?,
    };
    parts.sort_by(|a, b| a.path.cmp(&b.path));
    if let Some((base, _, total)) = parts.first().and_then(|e| split_of(&e.path)) {
        let numbers: Vec<u32> = parts
            .iter()
            .filter_map(|e| split_of(&e.path))
            .map(|(_, n, _)| n)
            .collect();
        if numbers != (1..=total).collect::<Vec<_>>() {
            return Err(invalid(format!(
                "of the {total} parts of {base} it has {}",
                numbers.len()
            )));
        }
    }
    let weights = parts.into_iter().map(file).collect::<Result<Vec<_>, _>>()?;
    Ok(Chosen {
        format: Format::Gguf,
        weights,
        index: None,
        side: vec![],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn entries(paths: &[&str]) -> Vec<Entry> {
        let mut all: Vec<Entry> = paths
            .iter()
            .map(|p| Entry {
                kind: "file".into(),
                path: (*p).into(),
                size: 10,
                oid: "a".repeat(40),
                lfs: None,
            })
            .collect();
        all.push(Entry {
            kind: "directory".into(),
            path: "onnx".into(),
            size: 0,
            oid: "b".repeat(40),
            lfs: None,
        });
        all
    }

    fn paths(files: &[ModelFile]) -> Vec<&str> {
        files.iter().map(|f| f.path.as_str()).collect()
    }

    #[test]
    fn one_set_of_weights_is_taken_and_no_code() {
        let all = entries(&[
            "config.json",
            "model.safetensors",
            "pytorch_model.bin",
            "consolidated.safetensors",
            "tokenizer.json",
            "modeling_x.py",
            "onnx/model.onnx",
            "original/consolidated.00.pth",
            "1_Pooling/config.json",
            ".complete.json",
            "README.md",
            "pytorch_model.bin.index.json",
        ]);
        let chosen = choose(&all, None).unwrap();
        assert_eq!(paths(&chosen.weights), ["model.safetensors"]);
        assert_eq!(
            paths(&chosen.side),
            ["config.json", "tokenizer.json", "1_Pooling/config.json"]
        );
    }

    #[test]
    fn an_index_that_names_a_missing_file_is_refused() {
        let all = entries(&[
            "config.json",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
        ]);
        let mut chosen = choose(&all, None).unwrap();
        let named = [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ]
        .map(String::from);
        let error = chosen.keep_weights(&named.into()).unwrap_err().to_string();
        assert!(
            error.contains("model-00002-of-00002.safetensors"),
            "{error}"
        );
    }

    #[test]
    fn several_gguf_models_are_refused_by_name_and_one_can_be_chosen() {
        let all = entries(&["a-Q4.gguf", "a-Q8.gguf", "config.json", "mmproj-a.gguf"]);
        let error = choose(&all, None).unwrap_err().to_string();
        assert!(
            error.contains("a-Q4.gguf, a-Q8.gguf") && !error.contains("mmproj"),
            "{error}"
        );
        assert_eq!(
            paths(&choose(&all, Some("a-Q8.gguf")).unwrap().weights),
            ["a-Q8.gguf"]
        );
        assert_eq!(
            paths(&choose(&all, Some("*Q8*.gguf")).unwrap().weights),
            ["a-Q8.gguf"]
        );
        assert!(
            choose(&all, Some("a-*.gguf"))
                .unwrap_err()
                .to_string()
                .contains("matches several")
        );
        assert!(
            choose(&all, Some("b.gguf"))
                .unwrap_err()
                .to_string()
                .contains("no file \"b.gguf\"")
        );
    }

    #[test]
    fn a_split_gguf_is_one_model_and_must_be_whole() {
        let all = entries(&["q/b-00002-of-00002.gguf", "q/b-00001-of-00002.gguf"]);
        let chosen = choose(&all, None).unwrap();
        assert_eq!(
            paths(&chosen.weights),
            ["q/b-00001-of-00002.gguf", "q/b-00002-of-00002.gguf"]
        );
        let error = choose(&entries(&["b-00002-of-00003.gguf"]), None)
            .unwrap_err()
            .to_string();
        assert!(error.contains("of the 3 parts"), "{error}");
    }

    #[rstest]
    #[case::nothing(&["README.md"], "no GGUF file (it holds README.md)")]
    #[case::pickles_only(&["config.json", "pytorch_model.bin"], "no config.json with safetensors")]
    #[case::no_config(&["model.safetensors"], "no config.json")]
    #[case::adapter(&["config.json", "adapter_model.safetensors"], "adapter")]
    fn what_is_no_model_is_refused_with_what_it_holds(#[case] held: &[&str], #[case] says: &str) {
        let error = choose(&entries(held), None).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }

    #[test]
    fn a_list_that_no_pod_could_be_told_is_refused() {
        let long = |n: usize| format!("{}-{n:05}-of-00300.gguf", "x".repeat(200));
        let paths: Vec<String> = (1..=300)
            .map(|n| format!("{}/{}", "d".repeat(200), long(n)))
            .collect();
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        let error = choose(&entries(&paths), None).unwrap_err().to_string();
        assert!(error.contains("longer than"), "{error}");
    }

    #[test]
    fn a_path_that_leaves_the_volume_is_refused() {
        for path in [
            "../x.gguf",
            "/x.gguf",
            "a//x.gguf",
            "a/./x.gguf",
            "a\\x.gguf",
            "a\n.gguf",
        ] {
            assert!(choose(&entries(&[path]), None).is_err(), "{path:?}");
        }
    }
}
