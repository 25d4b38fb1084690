//! Folders that nobody else can write to, each held by one process at a time.
//!
//! The lock is on the folder itself, not on a file in it: nobody can remove the lock and leave the folder. Programs that clear old
//! files out of temporary folders (systemd-tmpfiles) leave a locked folder alone. A folder that was there before is not changed: one
//! that others own or may write to is refused.

use crate::error::{Error, Result};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Bits of a mode by which others may write to a folder: put files there, remove and replace the files of its owner.
pub(crate) const WRITE: u32 = 0o022;
/// Bits of a mode by which others may do anything with a folder.
pub(crate) const ANY: u32 = 0o077;

/// Makes a folder that only its owner may enter; one that is there must belong to this user, and nobody else may write to it.
///
/// # Errors
/// [`Error::Io`] names the folder: it cannot be made, or is not such a folder.
pub(crate) fn own(path: &Path) -> Result<()> {
    let io = |source| Error::Io { path: path.into(), source };
    if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
        fs::create_dir_all(parent).map_err(io)?;
    }
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => check(path, WRITE),
        made => made.map_err(io),
    }
}

/// Checks that a folder is a real one, no link to one, of this user, and that its mode has none of some bits.
///
/// # Errors
/// [`Error::Io`] names the folder and what is wrong.
pub(crate) fn check(path: &Path, bits: u32) -> Result<()> {
    let io = |source| Error::Io { path: path.into(), source };
    let found = fs::symlink_metadata(path).map_err(io)?;
    let user = nix::unistd::geteuid().as_raw();
    let denied = |text: String| Err(io(std::io::Error::new(ErrorKind::PermissionDenied, text)));
    if !found.is_dir() {
        return denied("not a folder, or a link to one".into());
    }
    if found.uid() != user {
        return denied(format!("a folder of user {}, not of user {user}", found.uid()));
    }
    if found.mode() & bits != 0 {
        let mode = found.mode() & 0o7777;
        let others = if bits == ANY { "others may enter" } else { "others may write to" };
        return denied(format!("{others} this folder (mode {mode:o}): chmod 700 it, or name a new one"));
    }
    Ok(())
}

/// A folder that this process holds until the value is dropped or the process ends, however it ends.
#[derive(Debug)]
pub(crate) struct HeldFolder {
    path: PathBuf,
    /// Open with the lock on it.
    folder: File,
}

impl HeldFolder {
    /// Makes the folder if it is not there, and takes it.
    ///
    /// # Errors
    /// [`Error::InUse`] if another process has it, and as [`own`].
    pub(crate) fn take(path: &Path) -> Result<HeldFolder> {
        let io = |source| Error::Io { path: path.into(), source };
        own(path)?;
        let folder = File::open(path).map_err(io)?;
        match folder.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(Error::InUse { path: path.into() }),
            Err(fs::TryLockError::Error(source)) => return Err(io(source)),
        }
        let path = path.canonicalize().map_err(io)?;
        let held = HeldFolder { path, folder };
        held.check()?;
        Ok(held)
    }

    /// The folder, as a path without links.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Device and inode: no other folder has the same pair as long as this one is held.
    pub(crate) fn identity(&self) -> Result<(u64, u64)> {
        let held = self.folder.metadata().map_err(|source| Error::Io { path: self.path.clone(), source })?;
        Ok((held.dev(), held.ino()))
    }

    /// Checks that the path still leads to the folder that is held: it may have been removed, or moved away and made anew.
    ///
    /// # Errors
    /// [`Error::Io`] if it does not.
    pub(crate) fn check(&self) -> Result<()> {
        let io = |source| Error::Io { path: self.path.clone(), source };
        let found = fs::symlink_metadata(&self.path).map_err(io)?;
        if (found.dev(), found.ino()) == self.identity()? {
            return Ok(());
        }
        Err(io(std::io::Error::new(ErrorKind::NotFound, "another folder has been put in its place")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_folder_that_was_there_is_refused_and_not_changed() {
        let root = tempfile::tempdir().unwrap();
        let open = root.path().join("open");
        fs::create_dir(&open).unwrap();
        for mode in [0o775, 0o1777, 0o757, 0o720] {
            fs::set_permissions(&open, fs::Permissions::from_mode(mode)).unwrap();
            let text = HeldFolder::take(&open).unwrap_err().to_string();
            assert!(text.contains(&format!("mode {mode:o}")), "{text}");
            assert_eq!(fs::metadata(&open).unwrap().mode() & 0o7777, mode);
        }
        fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(HeldFolder::take(&open).is_ok() && check(&open, ANY).is_err());
        assert_eq!(fs::metadata(&open).unwrap().mode() & 0o7777, 0o755);
        let link = root.path().join("link");
        std::os::unix::fs::symlink(root.path(), &link).unwrap();
        assert!(HeldFolder::take(&link).is_err());
        fs::write(root.path().join("file"), b"x").unwrap();
        assert!(HeldFolder::take(&root.path().join("file")).is_err());
        let new = root.path().join("some/new");
        assert!(HeldFolder::take(&new).is_ok());
        assert_eq!(fs::metadata(&new).unwrap().mode() & 0o7777, 0o700);
    }

    #[test]
    fn whatever_is_removed_in_a_folder_it_stays_held() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("spill");
        let held = HeldFolder::take(&path).unwrap();
        fs::read_dir(&path).unwrap().for_each(|e| fs::remove_file(e.unwrap().path()).unwrap());
        assert!(matches!(HeldFolder::take(&path), Err(Error::InUse { .. })));
        held.check().unwrap();
        fs::rename(&path, root.path().join("moved")).unwrap();
        assert!(held.check().is_err());
        let other = HeldFolder::take(&path).unwrap();
        assert!(held.check().is_err());
        other.check().unwrap();
        assert_ne!(held.identity().unwrap(), other.identity().unwrap());
    }
}
