//! The folders of a server: the one with the socket, and the one on a memory file system with the clients' files.
//!
//! One server holds both, see [`HeldFolder`]; so what lies in the second one when it is taken was left by a dead server and is removed,
//! if its name is one that servers give. Names are short: a socket's path must fit into 103 bytes on macOS.

use crate::error::{Error, Result};
use crate::io::folders::{self, HeldFolder};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Longest path of a socket that both macOS and Linux take.
const SOCKET_PATH: usize = 103;

/// The folder that server and clients use if none is given: `$TURBOMOQ_FOLDER`, else `turbomoq` in `$XDG_RUNTIME_DIR`, else on macOS
/// `~/Library/Caches/turbomoq` (its `/tmp` is cleared of what is three days old), else `/tmp/turbomoq-<user>`.
pub fn default_folder() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = || set("HOME").filter(|_| cfg!(target_os = "macos"));
    set("TURBOMOQ_FOLDER")
        .or_else(|| set("XDG_RUNTIME_DIR").map(|run| run.join("turbomoq")))
        .or_else(|| home().map(|home| home.join("Library/Caches/turbomoq")))
        .unwrap_or_else(|| format!("/tmp/turbomoq-{}", nix::unistd::geteuid()).into())
}

/// Path of the socket in a server's folder.
pub fn socket_path(folder: &Path) -> PathBuf {
    folder.join("socket")
}

/// Folders of a running server.
#[derive(Debug)]
pub(super) struct Folders {
    pub(super) socket: PathBuf,
    data: HeldFolder,
    _folder: HeldFolder,
}

impl Folders {
    /// Takes the folder and removes the clients' files that a dead server left.
    pub(super) fn open(folder: &Path) -> Result<Folders> {
        let folder = HeldFolder::take(folder)?;
        let socket = socket_path(folder.path());
        let length = socket.as_os_str().len();
        if length > SOCKET_PATH {
            let reason =
                format!("the socket's path would have {length} bytes, the system takes {SOCKET_PATH}");
            let value = folder.path().display().to_string();
            return Err(Error::Unsupported { field: "folder", value, reason });
        }
        let data = HeldFolder::take(&data_folder(&folder)?)?;
        let folders = Folders { socket, data, _folder: folder };
        folders.remove_clients()?;
        Ok(folders)
    }

    /// The folder of one client.
    pub(super) fn client(&self, number: u64) -> Result<ClientFolder> {
        let path = self.data.path().join(format!("c{number}"));
        folders::own(self.data.path())?; // someone may have removed it
        folders::own(&path)?;
        Ok(ClientFolder { path, count: 0 })
    }

    /// Removes the clients' files and their folder at the end of a server.
    pub(super) fn clean_up(&self) -> Result<()> {
        self.remove_clients()?;
        match fs::remove_dir(self.data.path()) {
            Err(e) if !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) => {
                Err(Error::Io { path: self.data.path().into(), source: e })
            }
            _ => Ok(()),
        }
    }

    fn remove_clients(&self) -> Result<()> {
        let io = |path: &Path, source| Error::Io { path: path.into(), source };
        let entries = match fs::read_dir(self.data.path()) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(|e| io(self.data.path(), e))?,
        };
        for entry in entries {
            let path = entry.map_err(|e| io(self.data.path(), e))?.path();
            let name = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_prefix('c'));
            if name.is_some_and(|n| n.parse::<u64>().is_ok()) {
                fs::remove_dir_all(&path).map_err(|e| io(&path, e))?;
            }
        }
        Ok(())
    }
}

/// On Linux a folder on the memory file system, named after the device and inode of the server's folder, which no other server can
/// have at the same time; elsewhere a folder in that one, whose files the system keeps in memory as long as there is room.
fn data_folder(folder: &HeldFolder) -> Result<PathBuf> {
    let shm = Path::new("/dev/shm");
    if cfg!(target_os = "linux") && shm.is_dir() {
        let (device, inode) = folder.identity()?;
        return Ok(shm.join(format!("tmq-{}-{device:x}-{inode:x}", nix::unistd::geteuid())));
    }
    Ok(folder.path().join("clients"))
}

/// The files of one client, removed with their folder when the client is gone.
#[derive(Debug)]
pub(super) struct ClientFolder {
    pub(super) path: PathBuf,
    count: u64,
}

impl ClientFolder {
    /// The file of a name that the client gave: a regular file right inside the folder.
    pub(super) fn segment(&self, name: &str) -> Result<PathBuf> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.chars().all(plain) {
            let reason = "letters, digits, dots, dashes; 64 at most, no dot in front".into();
            return Err(Error::Unsupported { field: "segment", value: name.into(), reason });
        }
        let path = self.path.join(name);
        let io = |source| Error::Io { path: path.clone(), source };
        // A pipe would keep its reader waiting.
        if !fs::symlink_metadata(&path).map_err(io)?.is_file() {
            return Err(Error::Format { path, detail: "not a regular file".into() });
        }
        Ok(path)
    }

    /// A name that was not given before.
    pub(super) fn fresh(&mut self) -> Result<String> {
        folders::own(&self.path)?; // someone may have removed it
        self.count += 1;
        Ok(format!("r{}.safetensors", self.count))
    }
}

impl Drop for ClientFolder {
    fn drop(&mut self) {
        // What cannot be removed now the next start removes.
        drop(fs::remove_dir_all(&self.path));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_inside() {
        let folder = tempfile::tempdir().unwrap();
        let client = ClientFolder { path: folder.path().join("c1"), count: 0 };
        folders::own(&client.path).unwrap();
        fs::write(client.path.join("p1"), b"x").unwrap();
        fs::write(folder.path().join("secret"), b"x").unwrap();
        std::os::unix::fs::symlink(folder.path().join("secret"), client.path.join("link")).unwrap();
        assert!(client.segment("p1").is_ok());
        for bad in ["", "..", "../secret", "/etc/passwd", ".p1", "a/b", "é", "p2", "link", &"x".repeat(65)] {
            assert!(client.segment(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_folder_has_one_server_and_loses_what_a_dead_one_left() {
        let folder = tempfile::tempdir().unwrap();
        let first = Folders::open(folder.path()).unwrap();
        assert!(matches!(Folders::open(folder.path()), Err(Error::InUse { .. })));
        let left = first.client(7).unwrap();
        fs::write(left.path.join("p1"), b"x").unwrap();
        let data = first.data.path().to_path_buf();
        fs::write(data.join("mine"), b"x").unwrap();
        std::mem::forget(left); // as a kill would
        drop(first);
        let second = Folders::open(folder.path()).unwrap();
        let names: Vec<_> = fs::read_dir(&data).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["mine"], "only what a server has made is removed");
        second.clean_up().unwrap();
        fs::remove_file(data.join("mine")).unwrap();
        second.clean_up().unwrap();
        assert!(!data.exists());
        // A folder that is gone is made again for the next client, private as before.
        let client = second.client(1).unwrap();
        folders::check(&data, folders::ANY).unwrap();
        fs::remove_dir_all(&client.path).unwrap();
        let mut client = client;
        client.fresh().unwrap();
        folders::check(&client.path, folders::ANY).unwrap();
        second.clean_up().unwrap();
    }

    #[test]
    fn two_folders_never_share_the_files_of_clients() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (a, b) = (Folders::open(a.path()).unwrap(), Folders::open(b.path()).unwrap());
        assert_ne!(a.data.path(), b.data.path());
        [a, b].iter().for_each(|f| f.clean_up().unwrap());
    }
}
