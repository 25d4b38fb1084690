//! The socket of a server and what ends the wait for clients.
//!
//! A stop comes through a pipe, so it does not depend on the socket's file, which programs that clear temporary folders may remove.
//! The file is made anew when that has happened. No error of `accept` ends a server: what it holds is worth more.

use crate::error::{Error, Result};
use nix::libc::c_int;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use signal_hook::SigId;
use std::fs;
use std::io::{ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Milliseconds between two looks whether the socket's file is still there.
const LOOK: u16 = 1000;
/// Milliseconds without clients after an error of `accept`, so that it cannot keep a core busy.
const REST: u16 = 50;

/// What a server waits for.
pub(super) enum Event {
    /// Somebody has connected.
    Client(UnixStream),
    /// Somebody wants to, but there are not enough descriptors or there is not enough memory.
    Short,
    /// It is to end.
    Stop,
}

/// A socket that listens.
#[derive(Debug)]
pub(super) struct Listener {
    path: PathBuf,
    bound: Mutex<Bound>,
    stopped: UnixStream,
    stop: UnixStream,
    signals: Vec<SigId>,
}

#[derive(Debug)]
struct Bound {
    socket: UnixListener,
    /// Device and inode of its file.
    file: (u64, u64),
}

impl Listener {
    /// Listens at a path, until one of the signals comes.
    ///
    /// # Errors
    /// [`Error::InUse`] if someone answers there, [`Error::Io`] if something else lies there.
    pub(super) fn open(path: &Path, signals: &[c_int]) -> Result<Listener> {
        let io = |source| Error::Io { path: path.into(), source };
        let (stopped, stop) = UnixStream::pair().map_err(io)?;
        let register = |&signal: &c_int| signal_hook::low_level::pipe::register(signal, stop.try_clone()?);
        let signals = signals.iter().map(register).collect::<std::io::Result<_>>().map_err(io)?;
        let bound = Mutex::new(bind(path)?);
        Ok(Listener { path: path.into(), bound, stopped, stop, signals })
    }

    /// Ends the wait, now and at every later call.
    pub(super) fn stop(&self) {
        // If the pipe is full, it was stopped before.
        drop((&self.stop).write(&[0]));
    }

    /// Waits for the next client or the end.
    pub(super) fn next(&self) -> Event {
        let mut bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let wanted = |fd| PollFd::new(fd, PollFlags::POLLIN);
            let mut wait = [wanted(self.stopped.as_fd()), wanted(bound.socket.as_fd())];
            let ready = poll(&mut wait, PollTimeout::from(LOOK));
            let [stop, client] = wait.map(|fd| fd.any().unwrap_or(false));
            match ready {
                Ok(0) => self.renew(&mut bound),
                Ok(_) if stop => return Event::Stop,
                Ok(_) if client => match bound.socket.accept() {
                    Ok((stream, _)) => return Event::Client(stream),
                    // The client has left already.
                    Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionAborted) => {}
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    Err(_) => {
                        self.rest();
                        return Event::Short;
                    }
                },
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(_) => self.rest(),
            }
        }
    }

    /// Does nothing for a moment, unless it is the end.
    fn rest(&self) {
        let mut stop = [PollFd::new(self.stopped.as_fd(), PollFlags::POLLIN)];
        if poll(&mut stop, PollTimeout::from(REST)).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(REST.into()));
        }
    }

    /// Binds again if the socket's file is gone.
    fn renew(&self, bound: &mut Bound) {
        let gone = matches!(fs::symlink_metadata(&self.path), Err(e) if e.kind() == ErrorKind::NotFound);
        if gone && let Ok(next) = bind(&self.path) {
            *bound = next;
        }
    }

    /// Removes the socket's file, if it is still the one that was made here.
    pub(super) fn remove(&self) -> Result<()> {
        let bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
        match fs::symlink_metadata(&self.path) {
            Ok(found) if (found.dev(), found.ino()) == bound.file => {
                fs::remove_file(&self.path).map_err(|source| Error::Io { path: self.path.clone(), source })
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        for id in self.signals.drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }
}

/// A socket at a path where at most the socket of a dead server lies.
fn bind(path: &Path) -> Result<Bound> {
    let io = |source| Error::Io { path: path.into(), source };
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => {}
        Err(e) => return Err(io(e)),
        Ok(found) if found.file_type().is_socket() => match UnixStream::connect(path) {
            Ok(_) => return Err(Error::InUse { path: path.parent().unwrap_or(path).into() }),
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path).map_err(io)?,
            Err(e) => return Err(io(e)),
        },
        Ok(_) => return Err(io(std::io::Error::new(ErrorKind::AlreadyExists, "a file that is no socket"))),
    }
    let socket = UnixListener::bind(path).map_err(io)?;
    let made = || -> std::io::Result<Bound> {
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        socket.set_nonblocking(true)?;
        let found = fs::symlink_metadata(path)?;
        Ok(Bound { file: (found.dev(), found.ino()), socket })
    };
    made().map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_socket_and_a_socket_that_answers_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        fs::write(&path, b"mine").unwrap();
        assert!(matches!(Listener::open(&path, &[]), Err(Error::Io { .. })));
        assert_eq!(fs::read(&path).unwrap(), b"mine");
        fs::remove_file(&path).unwrap();
        let first = Listener::open(&path, &[]).unwrap();
        assert!(matches!(Listener::open(&path, &[]), Err(Error::InUse { .. })));
        // One that nobody listens on any more is replaced.
        drop(first);
        let second = Listener::open(&path, &[]).unwrap();
        second.remove().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_removed_socket_is_made_anew_and_a_stop_needs_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::open(&path, &[]).unwrap();
        fs::remove_file(&path).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| listener.next());
            while UnixStream::connect(&path).is_err() {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            assert!(matches!(waiting.join().unwrap(), Event::Client(_)));
            fs::remove_file(&path).unwrap();
            listener.stop();
            // The client of the loop above may have come several times.
            while !matches!(listener.next(), Event::Stop) {}
        });
        // What others have put in its place stays.
        fs::write(&path, b"mine").unwrap();
        listener.remove().unwrap();
        assert!(path.exists());
    }
}
