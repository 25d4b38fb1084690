//! The pool's disk: one compressed file per cache, with the agent's label inside, in a folder that one process holds.
//!
//! A file is written beside its place, flushed and renamed, so it is whole or not there. At the start the newest version of every
//! agent counts; older ones and unfinished files are removed, one that was renamed gets its name back, and one that cannot be read is
//! set aside under another name. Files that are not spilled caches may lie in the folder and stay as they are.

use super::Archive;
use super::manifest::Manifest;
use crate::error::{Error, Result};
use crate::io::container::Container;
use crate::io::files::{self, Outlives};
use crate::io::folders::HeldFolder;
use crate::pool::{Label, Parcel, Spill};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Where the label is, among what the user stored beside the cache.
const LABEL: &str = "turbomoq.agent";

/// A folder of compressed files for a [`crate::pool::MemoryPool`].
#[derive(Debug)]
pub struct SpillFolder {
    folder: HeldFolder,
}

impl SpillFolder {
    /// Takes a folder, which is made if it is not there; one that is there must be this user's, and nobody else may write to it.
    ///
    /// # Errors
    /// [`Error::InUse`] if another process has it, [`Error::Io`].
    pub fn open(folder: impl AsRef<Path>) -> Result<SpillFolder> {
        Ok(SpillFolder { folder: HeldFolder::take(folder.as_ref())? })
    }

    fn path(&self, label: &Label) -> PathBuf {
        // Versions differ between all caches of a pool, so a name that two agents share does no harm.
        self.folder.path().join(format!(
            "{:016x}-{}.tmq",
            files::stable_hash(label.id.as_bytes()),
            label.version
        ))
    }

    /// Writes the file of a cache; on an error there is none.
    fn write(&self, label: &Label, write: impl FnOnce(&Path) -> Result<u64>) -> Result<u64> {
        self.folder.check()?;
        let path = self.path(label);
        let saved = write(&path);
        if saved.is_err() {
            // It may be in its place already, if only its folder could not be flushed.
            drop(fs::remove_file(&path));
        }
        saved
    }

    /// Metadata of a cache with the label among it.
    fn labelled(
        &self,
        label: &Label,
        metadata: &BTreeMap<String, String>,
    ) -> Result<BTreeMap<String, String>> {
        let text = serde_json::to_string(label)
            .map_err(|e| Error::Format { path: self.path(label), detail: e.to_string() })?;
        let mut metadata = metadata.clone();
        metadata.insert(LABEL.into(), text);
        Ok(metadata)
    }
}

/// Whether a name is one that [`SpillFolder::path`] gives. Other files in the folder are none of our business.
fn is_ours(name: &str) -> bool {
    let parts = name.strip_suffix(".tmq").and_then(|stem| stem.split_once('-'));
    parts.is_some_and(|(hash, version)| {
        let hex = |c: char| matches!(c, '0'..='9' | 'a'..='f');
        hash.len() == 16 && hash.chars().all(hex) && version.parse::<u64>().is_ok()
    })
}

fn label_of(path: &Path) -> Result<Label> {
    let mut file = Container::open(path)?;
    let metadata = match Manifest::read(&mut file, true) {
        Ok(manifest) => manifest.metadata,
        // What a later release has written is not for this one to set aside; whoever resumes it is told the version.
        Err(error) => Manifest::metadata_of_later(&file).ok_or(error)?,
    };
    let text = metadata.get(LABEL).ok_or_else(|| file.bad("no agent is named"))?;
    serde_json::from_str(text).map_err(|e| file.bad(format!("agent: {e}")))
}

impl Spill<Archive> for SpillFolder {
    fn save(&self, label: &Label, cache: &Archive) -> Result<u64> {
        let metadata = self.labelled(label, &cache.metadata)?;
        self.write(label, |path| Archive { metadata, ..cache.clone() }.write_as(path, Outlives::Answer))
    }

    fn save_parcel(&self, label: &Label, parcel: &Parcel<Archive>) -> Result<u64> {
        let metadata = self.labelled(label, &parcel.rest().metadata)?;
        self.write(label, |path| Archive::write_parcel(parcel, &metadata, path))
    }

    fn load(&self, label: &Label) -> Result<Archive> {
        let mut archive = Archive::read(self.path(label))?;
        archive.metadata.remove(LABEL);
        Ok(archive)
    }

    fn remove(&self, label: &Label) -> Result<()> {
        self.folder.check()?;
        let path = self.path(label);
        match fs::remove_file(&path) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(Error::Io { path, source }),
            _ => Ok(()),
        }
    }

    fn list(&self) -> Result<Vec<(Label, u64)>> {
        let io = |path: &Path| {
            let path = path.to_path_buf();
            move |source| Error::Io { path, source }
        };
        let remove = |path: &Path| fs::remove_file(path).map_err(io(path));
        let mut newest: BTreeMap<String, (Label, u64, PathBuf)> = BTreeMap::new();
        // All names first: a file that gets another one here would be met twice.
        let folder = self.folder.path();
        let entries: Vec<_> = fs::read_dir(folder).map_err(io(folder))?.collect();
        for entry in entries {
            let entry = entry.map_err(io(folder))?;
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if name.starts_with(files::UNFINISHED) {
                // A command that writes into this folder is none of our business; what a dead one left is.
                if fs::File::open(&path).is_ok_and(|file| file.try_lock().is_ok()) {
                    remove(&path)?;
                }
                continue;
            }
            if !name.ends_with(".tmq") {
                continue;
            }
            let label = match label_of(&path) {
                Ok(label) => label,
                Err(_) if !is_ours(&name) => continue,
                Err(error) => {
                    // Not `eprintln!`, which panics where standard error is closed.
                    let _ = writeln!(io::stderr(), "turbomoq: set aside: {error}");
                    fs::rename(&path, path.with_extension("damaged")).map_err(io(&path))?;
                    continue;
                }
            };
            // A cache is found by the name that its label gives.
            let place = self.path(&label);
            if path != place && place.exists() {
                let _ = writeln!(
                    io::stderr(),
                    "turbomoq: {}: not read, its cache is in {}",
                    path.display(),
                    place.display()
                );
                continue;
            }
            if path != place {
                fs::rename(&path, &place).map_err(io(&path))?;
            }
            let path = place;
            let bytes = fs::metadata(&path).map_err(io(&path))?.len();
            let other = match newest.get(&label.id) {
                Some(known) if known.0.version > label.version => Some(path),
                _ => newest.insert(label.id.clone(), (label, bytes, path)).map(|old| old.2),
            };
            other.as_deref().map_or(Ok(()), remove)?;
        }
        Ok(newest.into_values().map(|(label, bytes, _)| (label, bytes)).collect())
    }
}
