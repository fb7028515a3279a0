//! What the hub serves: repositories of files, read from a folder or given at run time.
//!
//! In: `ROOT/OWNER/NAME/**` on disk, or a [`RepositoryUpload`]. Out: [`Repository`] values with the
//! sizes, digests and commit that clients of a Hugging Face hub expect. It never answers a request.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Deserialize;
use sha1::Sha1;
use sha2::{Digest, Sha256};

/// Files of at least this many bytes are "large": they have a sha256 identity, as Git LFS gives them.
const LARGE_FILE_BYTES: u64 = 1 << 20;
/// Weight files are large whatever their size, as in the `.gitattributes` of every hub repository.
const LARGE_FILE_ENDINGS: [&str; 3] = [".gguf", ".safetensors", ".bin"];

/// One repository at its only revision.
#[derive(Debug, Clone)]
pub struct Repository {
    /// `owner/name`.
    pub id: String,
    /// The commit, 40 hexadecimal digits, derived from names and contents.
    pub commit: String,
    /// Path within the repository → file.
    pub files: BTreeMap<String, RepositoryFile>,
    /// Bearer token that readers must present; `None` for a public repository.
    pub token: Option<String>,
}

/// One file of a repository.
#[derive(Debug, Clone)]
pub struct RepositoryFile {
    /// Where the bytes are.
    pub content: Content,
    /// Length in bytes.
    pub size: u64,
    /// Lower-case hexadecimal sha256 of the content. Made up for [`Content::Sparse`].
    pub sha256: String,
    /// Git's identity of the file: of a small one that of its content, which downloads are checked
    /// against; of a large one made up, since it would be that of its pointer.
    pub blob_id: String,
    /// Whether the file has a Git LFS identity.
    pub large: bool,
}

/// Where a file's bytes come from.
#[derive(Debug, Clone)]
pub enum Content {
    /// A file on disk.
    Disk(PathBuf),
    /// Bytes held in memory.
    Memory(Vec<u8>),
    /// `head`, then zeros up to `size`: a weight file of any size that nobody has to store.
    Sparse {
        /// The first bytes, such as a safetensors header.
        head: Vec<u8>,
        /// Length in bytes.
        size: u64,
    },
}

/// A repository that a test describes over the admin route.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RepositoryUpload {
    /// Path → content.
    pub files: BTreeMap<String, FileUpload>,
    /// Bearer token that readers must present.
    #[serde(default)]
    pub token: Option<String>,
}

/// One file of a [`RepositoryUpload`].
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FileUpload {
    /// The text, or the first bytes when `size` is larger.
    #[serde(default)]
    pub text: String,
    /// A JSON safetensors header to put first, after its eight-byte length.
    #[serde(default)]
    pub safetensors_header: Option<serde_json::Value>,
    /// Length in bytes; the rest is zeros. Absent: as long as what is given.
    #[serde(default)]
    pub size: Option<u64>,
}

impl FileUpload {
    fn into_content(self) -> Content {
        let mut head = Vec::new();
        if let Some(header) = self.safetensors_header {
            let json = header.to_string().into_bytes();
            head.extend((json.len() as u64).to_le_bytes());
            head.extend(json);
        }
        head.extend(self.text.into_bytes());
        match self.size {
            Some(size) if size > head.len() as u64 => Content::Sparse { head, size },
            _ => Content::Memory(head),
        }
    }
}

impl Content {
    fn size(&self) -> io::Result<u64> {
        Ok(match self {
            Content::Disk(path) => fs::metadata(path)?.len(),
            Content::Memory(bytes) => bytes.len() as u64,
            Content::Sparse { size, .. } => *size,
        })
    }

    /// The sha256 of the content; of a sparse file only of its head and size, since nobody has
    /// hours to hash zeros. Such a file fails a checksum, so it serves planning, not download.
    fn sha256(&self) -> io::Result<String> {
        let mut hash = Sha256::new();
        match self {
            Content::Disk(path) => {
                io::copy(&mut File::open(path)?, &mut hash)?;
            }
            Content::Memory(bytes) => hash.update(bytes),
            Content::Sparse { head, size } => {
                hash.update(head);
                hash.update(size.to_le_bytes());
            }
        }
        Ok(hex(&hash.finalize()))
    }

    /// Git's identity of a small file of `size` bytes.
    fn git_blob(&self, size: u64) -> io::Result<String> {
        let mut hash = Sha1::new();
        hash.update(format!("blob {size}\0"));
        hash.update(self.read(0, usize::try_from(size).unwrap_or(usize::MAX))?);
        Ok(hex(&hash.finalize()))
    }

    /// Up to `limit` bytes from `offset`; empty at the end.
    pub fn read(&self, offset: u64, limit: usize) -> io::Result<Vec<u8>> {
        match self {
            Content::Disk(path) => {
                let mut file = File::open(path)?;
                file.seek(SeekFrom::Start(offset))?;
                let mut bytes = Vec::with_capacity(limit);
                file.take(limit as u64).read_to_end(&mut bytes)?;
                Ok(bytes)
            }
            Content::Memory(bytes) => Ok(slice(bytes, offset, limit).to_vec()),
            Content::Sparse { head, size } => {
                let length = size.saturating_sub(offset).min(limit as u64) as usize;
                let mut bytes = slice(head, offset, length).to_vec();
                bytes.resize(length, 0);
                Ok(bytes)
            }
        }
    }
}

fn slice(bytes: &[u8], offset: u64, limit: usize) -> &[u8] {
    let start = bytes
        .len()
        .min(usize::try_from(offset).unwrap_or(usize::MAX));
    let end = bytes.len().min(start.saturating_add(limit));
    &bytes[start..end]
}

impl RepositoryFile {
    /// The value of `ETag`, with its quotes.
    pub fn etag(&self) -> String {
        // Small files carry their Git blob identity, which is shorter than a sha256.
        let identity = if self.large {
            &self.sha256
        } else {
            &self.blob_id
        };
        format!("\"{identity}\"")
    }
}

impl Repository {
    /// The repository of these contents.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn new(
        id: &str,
        contents: BTreeMap<String, Content>,
        token: Option<String>,
    ) -> anyhow::Result<Self> {
        let mut files = BTreeMap::new();
        let mut commit = Sha256::new();
        for (path, content) in contents {
            let describe = || format!("read {path} of repository {id}");
            let size = content.size().with_context(describe)?;
            let sha256 = content.sha256().with_context(describe)?;
            let large = size >= LARGE_FILE_BYTES
                || LARGE_FILE_ENDINGS
                    .iter()
                    .any(|ending| path.ends_with(ending));
            let blob_id = if large {
                sha256[..40].to_owned()
            } else {
                content.git_blob(size).with_context(describe)?
            };
            commit.update(format!("{path} {sha256}\n"));
            files.insert(
                path,
                RepositoryFile {
                    content,
                    size,
                    sha256,
                    blob_id,
                    large,
                },
            );
        }
        let commit = hex(&commit.finalize())[..40].to_owned();
        Ok(Self {
            id: id.to_owned(),
            commit,
            files,
            token,
        })
    }

    /// The repository that a test described.
    ///
    /// # Errors
    /// When a content cannot be hashed.
    pub fn from_upload(id: &str, upload: RepositoryUpload) -> anyhow::Result<Self> {
        let contents = upload
            .files
            .into_iter()
            .map(|(path, file)| (path, file.into_content()))
            .collect();
        Self::new(id, contents, upload.token)
    }

    /// Whether `revision` names this repository's only commit.
    pub fn has_revision(&self, revision: &str) -> bool {
        revision == "main" || revision == self.commit
    }
}

/// Every repository below `root`, by id.
///
/// # Errors
/// When `root` or a file below it cannot be read.
pub fn read_repositories(root: &Path) -> anyhow::Result<BTreeMap<String, Repository>> {
    let mut repositories = BTreeMap::new();
    for owner in folders(root)? {
        for name in folders(&root.join(&owner))? {
            let id = format!("{owner}/{name}");
            let folder = root.join(&id);
            let mut contents = BTreeMap::new();
            collect(&folder, "", &mut contents)?;
            repositories.insert(id.clone(), Repository::new(&id, contents, None)?);
        }
    }
    Ok(repositories)
}

fn folders(path: &Path) -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path).with_context(|| format!("list {}", path.display()))? {
        let entry = entry?;
        if entry.path().is_dir() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

fn collect(
    folder: &Path,
    prefix: &str,
    contents: &mut BTreeMap<String, Content>,
) -> anyhow::Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let path = entry?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if path.is_dir() {
            collect(&path, &format!("{prefix}{name}/"), contents)?;
        } else {
            contents.insert(format!("{prefix}{name}"), Content::Disk(path));
        }
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sparse_file_is_its_head_and_then_zeros_up_to_its_size() {
        let content = Content::Sparse {
            head: b"abc".to_vec(),
            size: 6,
        };
        assert_eq!(content.read(0, 100).unwrap(), b"abc\0\0\0");
        assert_eq!(content.read(2, 2).unwrap(), b"c\0");
        assert_eq!(content.read(6, 2).unwrap(), b"");
    }

    #[test]
    fn a_folder_of_repositories_is_read_with_digests_and_nested_paths() {
        let root = tempfile::tempdir().unwrap();
        let repository = root.path().join("acme/small");
        fs::create_dir_all(repository.join("onnx")).unwrap();
        fs::write(repository.join("config.json"), "{}").unwrap();
        fs::write(repository.join("onnx/model.bin"), "x").unwrap();
        let read = read_repositories(root.path()).unwrap();
        let small = &read["acme/small"];
        assert_eq!(
            small.files.keys().collect::<Vec<_>>(),
            ["config.json", "onnx/model.bin"]
        );
        assert!(!small.files["config.json"].large);
        assert!(small.files["onnx/model.bin"].large);
        assert_eq!(
            small.files["config.json"].sha256,
            "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
        );
        // As `printf '{}' | git hash-object --stdin` says.
        assert_eq!(
            small.files["config.json"].blob_id,
            "9e26dfeeb6e641a33dae4961196235bdb965b21b"
        );
        assert!(small.has_revision("main") && small.has_revision(&small.commit));
        assert!(!small.has_revision("v2"));
    }

    #[test]
    fn an_uploaded_safetensors_file_starts_with_the_length_of_its_header() {
        let file = FileUpload {
            safetensors_header: Some(serde_json::json!({})),
            size: Some(1 << 40),
            ..FileUpload::default()
        };
        let content = file.into_content();
        assert_eq!(content.size().unwrap(), 1 << 40);
        assert_eq!(content.read(0, 11).unwrap(), b"\x02\0\0\0\0\0\0\0{}\0");
    }
}
