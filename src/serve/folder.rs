//! The folders of a server: the one with socket and lock, and the one on a memory file system with the clients' files.
//!
//! One server has a folder, by a lock that the system releases when the process ends, however it ends; so whatever else lies there
//! when the lock is taken was left by a dead server and is removed. Names are short: a socket's path must fit into 103 bytes on macOS.

use crate::error::{Error, Result};
use crate::files;
use std::fs;
use std::path::{Path, PathBuf};

/// Longest path of a socket that both macOS and Linux take.
const SOCKET_PATH: usize = 103;

/// The folder that server and clients use if none is given: `$TURBOMOQ_FOLDER`, else `turbomoq` in `$XDG_RUNTIME_DIR`, else
/// `/tmp/turbomoq-<user>`.
pub fn default_folder() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("TURBOMOQ_FOLDER")
        .or_else(|| set("XDG_RUNTIME_DIR").map(|run| run.join("turbomoq")))
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
    data: PathBuf,
    _lock: fs::File,
}

impl Folders {
    /// Takes the folder and removes what a dead server left.
    pub(super) fn open(folder: &Path) -> Result<Folders> {
        files::private_folder(folder)?;
        let lock = files::lock(folder)?;
        let io = |path: &Path| {
            let path = path.to_path_buf();
            move |source| Error::Io { path, source }
        };
        let full = folder.canonicalize().map_err(io(folder))?;
        let socket = socket_path(&full);
        let length = socket.as_os_str().len();
        if length > SOCKET_PATH {
            let reason =
                format!("the socket's path would have {length} bytes, the system takes {SOCKET_PATH}");
            return Err(Error::Unsupported { field: "folder", value: full.display().to_string(), reason });
        }
        let data = data_folder(&full);
        files::private_folder(&data)?;
        for entry in fs::read_dir(&data).map_err(io(&data))? {
            let path = entry.map_err(io(&data))?.path();
            if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) }
                .map_err(io(&path))?;
        }
        match fs::remove_file(&socket) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(io(&socket)(e)),
            _ => {}
        }
        Ok(Folders { socket, data, _lock: lock })
    }

    /// The folder of one client.
    pub(super) fn client(&self, number: u64) -> Result<ClientFolder> {
        let path = self.data.join(format!("c{number}"));
        files::private_folder(&path)?;
        Ok(ClientFolder { path, count: 0 })
    }

    /// Removes socket and data at the end of a server.
    pub(super) fn clean_up(&self) -> Result<()> {
        let io = |source| Error::Io { path: self.data.clone(), source };
        fs::remove_file(&self.socket).map_err(|source| Error::Io { path: self.socket.clone(), source })?;
        fs::remove_dir_all(&self.data).map_err(io)
    }
}

/// On Linux a folder on the memory file system, named after the server's folder; elsewhere a folder in that one, whose files the
/// system keeps in memory as long as there is room.
fn data_folder(folder: &Path) -> PathBuf {
    let shm = Path::new("/dev/shm");
    if cfg!(target_os = "linux") && shm.is_dir() {
        let hash = files::stable_hash(folder.as_os_str().as_encoded_bytes());
        return shm.join(format!("tmq-{}-{:08x}", nix::unistd::geteuid(), hash as u32));
    }
    folder.join("data")
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
    pub(super) fn fresh(&mut self) -> String {
        self.count += 1;
        format!("r{}.safetensors", self.count)
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
    fn names_are_short_and_stay_inside() {
        let data = data_folder(Path::new(&format!("/{}", "é/".repeat(100))));
        if cfg!(target_os = "linux") {
            assert!(data.file_name().unwrap().len() <= 30, "{data:?}");
        }
        let folder = tempfile::tempdir().unwrap();
        let client = ClientFolder { path: folder.path().join("c1"), count: 0 };
        files::private_folder(&client.path).unwrap();
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
        fs::write(&first.socket, b"").unwrap();
        let data = first.data.clone();
        std::mem::forget(left); // as a kill would
        drop(first);
        let second = Folders::open(folder.path()).unwrap();
        assert_eq!(fs::read_dir(&data).unwrap().count(), 0);
        assert!(!second.socket.exists());
        fs::write(&second.socket, b"").unwrap();
        second.clean_up().unwrap();
        assert!(!data.exists());
    }
}
