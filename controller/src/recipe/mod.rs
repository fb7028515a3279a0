//! Runtime releases as data: which models they serve, how they are started, what
//! they need.
//!
//! In: the data files of controller/recipes (embedded, or a folder), images that
//! the installation overrides. Out: a [`RecipeBook`] that chooses a recipe with
//! its reason, and each recipe's memory formula ([`memory`]). Never: a template
//! engine, a shell, or `--trust-remote-code`.

pub mod memory;
mod template;

pub use template::{Placeholder, Values, expand};

use crate::model::{Format, ModelFacts};
use inference_api::EndpointType;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// One runtime release.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Recipe {
    /// Name, as in status and in image overrides.
    pub name: String,
    /// Release that copies are labelled with; changes with the image.
    pub release: String,
    /// Image reference.
    pub image: String,
    /// Formats that it reads.
    pub formats: Vec<Format>,
    /// Contracts that it serves.
    pub contracts: Vec<EndpointType>,
    /// Whether a copy needs a device. A recipe without one is not rendered by this version.
    pub needs_accelerator: bool,
    /// Which numbers of devices it can spread a model over.
    pub device_counts: DeviceCounts,
    /// The most devices of one copy.
    pub max_devices: u32,
    /// Command; empty runs the image's own.
    #[serde(default)]
    pub command: Vec<String>,
    /// Arguments, in order.
    pub arguments: Vec<Arguments>,
    /// Environment.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// Variable that the endpoint's token is given to the runtime in.
    pub api_key_variable: String,
    /// Paths of the probes.
    pub probes: Probes,
    /// Context length.
    pub context: Context,
    /// Concurrent sequences that one copy accepts.
    pub sequences: u32,
    /// Sequences of full length whose cache must fit at once.
    pub full_context_sequences: u32,
    /// Tokens that are computed at once.
    pub batch_tokens: u64,
    /// Terms of the memory formula.
    pub memory: MemoryTerms,
    /// Requests of the container.
    pub resources: Resources,
    /// Room on the volume beside the model.
    pub storage_extra: Bytes,
    /// Seconds from the request to end until the runtime is killed.
    pub grace_period_seconds: i64,
}

/// Numbers of devices that a runtime can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum DeviceCounts {
    /// 1, 2, 4, 8, …
    PowersOfTwo,
    /// Every number.
    Any,
}

/// Some arguments, and when they are given.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Arguments {
    /// The arguments; a placeholder is a whole word in braces.
    pub args: Vec<String>,
    /// Only for these contracts; absent: for all.
    #[serde(default)]
    pub contracts: Option<Vec<EndpointType>>,
    /// Only for such models or placements.
    #[serde(default)]
    pub only_with: Option<OnlyWith>,
}

/// What arguments depend on besides the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum OnlyWith {
    /// The model keeps a cache of keys and values.
    KvCache,
    /// The copy has a share of its device, beside others.
    Share,
}

/// Paths that answer 200 when.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Probes {
    /// … the model is loaded.
    pub startup: String,
    /// … the runtime takes requests; it is asked without a token.
    pub readiness: String,
    /// Lists the models that are served (OpenAI's form); it is asked with the token.
    pub models: String,
    /// … the process is alive.
    pub liveness: String,
}

/// Context length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Context {
    /// The longest that copies are started with; a model's own limit may be shorter.
    pub limit: u64,
}

/// What a copy accepts, by the recipe that it was raised with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Limits {
    /// Longest context, in tokens.
    pub context: u64,
    /// Concurrent sequences.
    pub sequences: u32,
}

impl Limits {
    /// What a copy of this model accepts that is raised with this recipe.
    pub fn of(recipe: &Recipe, facts: &ModelFacts) -> Self {
        Limits {
            context: memory::context_length(recipe, facts),
            sequences: recipe.sequences,
        }
    }
}

impl std::fmt::Display for Limits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (context, sequences) = (self.context, self.sequences);
        write!(
            f,
            "contexts of {context} tokens and {sequences} requests at once"
        )
    }
}

/// Terms of the memory formula (docs/memory.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MemoryTerms {
    /// Weights in memory, in percent of their bytes on disk.
    pub weights_percent: u64,
    /// Each process's own (CUDA context).
    pub process: Bytes,
    /// What does not depend on the model (CUDA graphs, buffers).
    pub fixed: Bytes,
    /// Activations: batch tokens × hidden size × 2 bytes × this.
    pub activation_factor: u64,
    /// Bytes of one cached element.
    pub cache_element_bytes: u64,
}

/// Requests of the runtime container.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Resources {
    /// CPU request, as a Kubernetes quantity.
    pub cpu: String,
    /// Memory that does not depend on the model.
    pub memory_base: Bytes,
    /// And of its weights, in percent.
    pub memory_weights_percent: u64,
    /// `/dev/shm`; counted within the memory.
    pub shared_memory: Bytes,
}

/// A number of bytes, written as a Kubernetes quantity (`512Mi`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let quantity: dra_cel::Quantity = text.parse().map_err(serde::de::Error::custom)?;
        quantity
            .to_bytes()
            .map(Bytes)
            .ok_or_else(|| serde::de::Error::custom(format!("{text} is no number of bytes")))
    }
}

/// Why recipes cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// A data file is wrong.
    #[error("recipe {file}: {detail}")]
    Invalid {
        /// File.
        file: String,
        /// What is wrong.
        detail: String,
    },
    /// A folder cannot be read.
    #[error("the recipes' folder {folder}: {source}")]
    Folder {
        /// Folder.
        folder: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// An image is overridden for a recipe that there is not.
    #[error("no recipe is named {name:?}; there are {known}")]
    Unknown {
        /// Name given.
        name: String,
        /// Names there are.
        known: String,
    },
}

/// A recipe that was chosen, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice<'a> {
    /// The recipe.
    pub recipe: &'a Recipe,
    /// Why this one, and why not the others.
    pub reason: String,
}

/// All recipes of a release, in order of preference.
#[derive(Clone, Debug, Default)]
pub struct RecipeBook(Vec<Recipe>);

const EMBEDDED: &[(&str, &str)] = &[
    ("vllm.yaml", include_str!("../../recipes/vllm.yaml")),
    (
        "llama-cpp.yaml",
        include_str!("../../recipes/llama-cpp.yaml"),
    ),
];

impl RecipeBook {
    /// The recipes that this build ships.
    ///
    /// # Errors
    /// A test rules out that a shipped file is wrong.
    pub fn shipped() -> Result<Self, RecipeError> {
        Self::parse(
            EMBEDDED
                .iter()
                .map(|(n, t)| ((*n).to_owned(), (*t).to_owned())),
        )
    }

    /// The recipes of a folder's `*.yaml`, in order of their names.
    ///
    /// # Errors
    /// [`RecipeError`] with the file.
    pub fn from_folder(folder: &Path) -> Result<Self, RecipeError> {
        let failed = |source| RecipeError::Folder {
            folder: folder.display().to_string(),
            source,
        };
        let mut files = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.extension().is_some_and(|e| e == "yaml") {
                let text = std::fs::read_to_string(&path).map_err(failed)?;
                files.push((path.display().to_string(), text));
            }
        }
        files.sort();
        Self::parse(files)
    }

    fn parse(files: impl IntoIterator<Item = (String, String)>) -> Result<Self, RecipeError> {
        let mut recipes: Vec<Recipe> = Vec::new();
        for (file, text) in files {
            let invalid = |detail: String| RecipeError::Invalid {
                file: file.clone(),
                detail,
            };
            let recipe: Recipe =
                serde_saphyr::from_str(&text).map_err(|e| invalid(e.to_string()))?;
            check(&recipe).map_err(invalid)?;
            if recipes.iter().any(|r| r.name == recipe.name) {
                return Err(invalid(format!(
                    "there is another recipe named {}",
                    recipe.name
                )));
            }
            recipes.push(recipe);
        }
        Ok(RecipeBook(recipes))
    }

    /// Uses other images, and other names of their releases, for some recipes. A
    /// copy is told apart by its release, so an image that is another release
    /// should bring that release's name.
    ///
    /// # Errors
    /// [`RecipeError::Unknown`] with the names there are.
    pub fn with_overrides(
        mut self,
        images: &BTreeMap<String, String>,
        releases: &BTreeMap<String, String>,
    ) -> Result<Self, RecipeError> {
        for (name, image) in images {
            self.named(name)?.image.clone_from(image);
        }
        for (name, release) in releases {
            let recipe = self.named(name)?;
            recipe.release.clone_from(release);
            check(recipe).map_err(|detail| RecipeError::Invalid {
                file: name.clone(),
                detail,
            })?;
        }
        Ok(self)
    }

    fn named(&mut self, name: &str) -> Result<&mut Recipe, RecipeError> {
        let known = self
            .0
            .iter()
            .map(|r| r.name.as_str())
            .collect::<Vec<_>>()
            .join(", ");
        self.0
            .iter_mut()
            .find(|r| r.name == name)
            .ok_or_else(|| RecipeError::Unknown {
                name: name.to_owned(),
                known,
            })
    }

    /// All recipes.
    pub fn iter(&self) -> impl Iterator<Item = &Recipe> {
        self.0.iter()
    }

    /// The first recipe that serves this format with this contract.
    ///
    /// # Errors
    /// Why each recipe does not.
    pub fn choose(&self, format: Format, contract: EndpointType) -> Result<Choice<'_>, String> {
        let mut rejected = Vec::new();
        for recipe in &self.0 {
            let why = if !recipe.formats.contains(&format) {
                format!("{} does not read {format}", recipe.name)
            } else if !recipe.contracts.contains(&contract) {
                format!("{} does not serve {}", recipe.name, contract.as_str())
            } else {
                let mut reason = format!(
                    "{} reads {format} and serves {}",
                    recipe.name,
                    contract.as_str()
                );
                if !rejected.is_empty() {
                    reason = format!("{reason}; {}", rejected.join("; "));
                }
                return Ok(Choice { recipe, reason });
            };
            rejected.push(why);
        }
        Err(if rejected.is_empty() {
            "there are no recipes".into()
        } else {
            rejected.join("; ")
        })
    }
}

fn check(recipe: &Recipe) -> Result<(), String> {
    let label = |s: &str| {
        !s.is_empty()
            && s.len() <= 63
            && s.chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    if !label(&recipe.name) || !label(&recipe.release) {
        return Err("name and release must fit a label's value".into());
    }
    if !recipe.needs_accelerator {
        return Err("needsAccelerator false is not supported by this version".into());
    }
    if recipe.max_devices == 0
        || recipe.sequences == 0
        || recipe.full_context_sequences == 0
        || recipe.context.limit == 0
    {
        return Err(
            "maxDevices, sequences, fullContextSequences and context.limit must be above 0".into(),
        );
    }
    if recipe.formats.is_empty() || recipe.contracts.is_empty() {
        return Err("formats and contracts must not be empty".into());
    }
    for arg in recipe
        .command
        .iter()
        .chain(recipe.arguments.iter().flat_map(|a| &a.args))
    {
        template::parse(arg)?;
        if arg.contains("trust-remote-code") {
            return Err(
                "--trust-remote-code runs code of the model's repository and is not allowed".into(),
            );
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
