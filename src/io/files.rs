//! Files written whole or not at all: a temporary sibling, flushed to the disk, renamed.
//!
//! A symbolic link is followed: the file that it leads to is replaced, beside which the temporary one is made, and the link stays.
//! What is no regular file (a device, a FIFO, standard output) cannot be replaced and is written to as it is.

use crate::error::{Error, Result};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// How the name of a temporary sibling begins. Its writer holds a lock on it, so one without a lock was left by a dead process.
pub(crate) const UNFINISHED: &str = ".turbomoq-";
/// Links that lead to links are followed so far, as systems do.
const LINKS: usize = 40;

/// Replaces `path` by the joined parts in one step and gives the bytes written. On an error `path` is as it was.
///
/// # Errors
/// [`Error::Io`] names the file.
pub fn replace(path: &Path, parts: &[&[u8]]) -> Result<u64> {
    replace_with(path, Outlives::Power, |out| parts.iter().try_for_each(|part| out.write_all(part)))?;
    Ok(parts.iter().map(|part| part.len() as u64).sum())
}

/// What a file that was written has to outlive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outlives {
    /// Its reader, who removes it a moment later: nothing is flushed.
    Reader,
    /// The machine's power: flushed. A folder that cannot be flushed (some file systems refuse) is no error, since the file is in place.
    Power,
    /// The machine's power, and somebody is told so: a folder that cannot be flushed is an error, though the file may be in place.
    Answer,
}

/// As [`replace`], with the contents written by a function. A file that is replaced hands its permissions on.
///
/// # Errors
/// [`Error::Io`] names the file.
pub fn replace_with(
    path: &Path,
    outlives: Outlives,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<()> {
    let io = |source| Error::Io { path: path.into(), source };
    let found = fs::metadata(path).ok();
    let target = followed(path).map_err(io)?;
    // A link of /proc to an open file that has no name any more leads to something, but nowhere.
    let special = |found: &fs::Metadata| !found.is_file() && !found.is_dir() || !target.exists();
    if found.as_ref().is_some_and(special) {
        return write_through(path, fill).map_err(io);
    }
    replace_file(&target, found.map(|found| found.permissions()), outlives, fill).map_err(io)
}

/// Writes to a device or a FIFO; what is written stays written if it fails half-way.
fn write_through(path: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(1 << 20, File::options().write(true).open(path)?);
    fill(&mut out).and_then(|()| out.flush())
}

fn replace_file(
    path: &Path,
    permissions: Option<fs::Permissions>,
    outlives: Outlives,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    builder.prefix(UNFINISHED);
    #[cfg(unix)]
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o666); // less the umask, as for any new file
    #[cfg(unix)]
    builder.permissions(mode);
    let temporary = builder.tempfile_in(parent)?;
    // A file system without locks is no reason not to write.
    let _ = temporary.as_file().try_lock();
    let mut out = BufWriter::with_capacity(1 << 20, temporary.as_file());
    fill(&mut out).and_then(|()| out.flush())?;
    drop(out);
    if let Some(permissions) = permissions {
        temporary.as_file().set_permissions(permissions)?;
    }
    if outlives != Outlives::Reader {
        flush(temporary.as_file())?;
    }
    temporary.persist(path).map_err(|e| e.error)?;
    // The rename is on the disk when the folder is.
    let flushed = match outlives {
        Outlives::Reader => Ok(()),
        _ if cfg!(not(unix)) => Ok(()),
        _ => File::open(parent).and_then(|folder| flush(&folder)),
    };
    if outlives == Outlives::Answer { flushed } else { Ok(()) }
}

/// Brings a file to the disk. Network volumes of macOS refuse F_FULLFSYNC, which is what the standard library asks for there.
fn flush(file: &File) -> io::Result<()> {
    let flushed = file.sync_all();
    #[cfg(target_os = "macos")]
    let flushed = flushed.or_else(|_| Ok(nix::unistd::fsync(file)?));
    flushed
}

/// The file that a path leads to, which need not be there.
fn followed(path: &Path) -> io::Result<PathBuf> {
    let mut at = path.to_path_buf();
    for _ in 0..LINKS {
        match fs::read_link(&at) {
            Ok(link) => at = at.parent().unwrap_or(Path::new("")).join(link),
            // No link, or nothing at all.
            Err(_) => return Ok(at),
        }
    }
    Err(io::Error::other(format!("more than {LINKS} symbolic links")))
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
