//! Files written whole or not at all: a temporary sibling, flushed to the disk, renamed.

use crate::error::{Error, Result};
use std::io::Write;
use std::path::Path;

/// How the name of a temporary sibling begins. Its writer holds a lock on it, so one without a lock was left by a dead process.
pub(crate) const UNFINISHED: &str = ".turbomoq-";

/// Replaces `path` by the joined parts in one step and gives the bytes written. On an error `path` is as it was.
///
/// # Errors
/// [`Error::Io`] names the file.
pub fn replace(path: &Path, parts: &[&[u8]]) -> Result<u64> {
    replace_with(path, |out| parts.iter().try_for_each(|part| out.write_all(part)))?;
    Ok(parts.iter().map(|part| part.len() as u64).sum())
}

/// As [`replace`], with the contents written by a function.
///
/// # Errors
/// [`Error::Io`] names the file.
pub fn replace_with(path: &Path, fill: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<()> {
    let io = |source| Error::Io { path: path.into(), source };
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    builder.prefix(UNFINISHED);
    #[cfg(unix)]
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o666); // less the umask, as for any new file
    #[cfg(unix)]
    builder.permissions(mode);
    let temporary = builder.tempfile_in(parent).map_err(io)?;
    // A file system without locks is no reason not to write.
    let _ = temporary.as_file().try_lock();
    let mut out = std::io::BufWriter::with_capacity(1 << 20, temporary.as_file());
    fill(&mut out).and_then(|()| out.flush()).map_err(io)?;
    drop(out);
    temporary.as_file().sync_all().map_err(io)?;
    temporary.persist(path).map_err(|e| io(e.error))?;
    #[cfg(unix)] // the rename is on the disk when the directory is
    std::fs::File::open(parent).and_then(|dir| dir.sync_all()).map_err(io)?;
    Ok(())
}

/// Refuses an output that is the input itself.
///
/// # Errors
/// [`Error::SameFile`] if both paths lead to one file.
pub fn distinct(input: &Path, output: &Path) -> Result<()> {
    match (input.canonicalize(), output.canonicalize()) {
        (Ok(a), Ok(b)) if a == b => Err(Error::SameFile { path: output.into() }),
        _ => Ok(()),
    }
}

/// FNV-1a: the same for equal bytes in every release, for names of files.
pub fn stable_hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}
