//! A server that holds the caches of many mlx-lm processes in one pool: `turbomoq serve`.
//!
//! Control goes over a Unix socket ([`Request`], [`Reply`]), caches go through safetensors files in a folder of the client's own on a
//! memory file system: what mlx-lm saves and loads anyway. A connection has a thread, so a slow client holds up nobody; packing and
//! unpacking wait for one of a fixed number of places, so memory is bounded. When a connection ends, its folder goes with it. Lengths
//! in a file are checked against the file, which is read and never mapped, so one that shrinks is an error and no fault.

mod client;
mod connection;
mod folder;
mod protocol;
mod trim;

pub use client::Client;
pub use folder::{default_folder, socket_path};
pub use protocol::{Reply, Request, VERSION};

use crate::archive::{Archive, SpillFolder};
use crate::error::{Error, Result};
use crate::pool::MemoryPool;
use crate::recipe::Recipe;
use folder::Folders;
use std::collections::BTreeMap;
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Clients at a time.
const CLIENTS: usize = 256;

/// How a server is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// Folder of socket and lock, see [`default_folder`].
    pub folder: PathBuf,
    /// Bytes of the pool.
    pub budget: usize,
    /// Bytes of the caches of a type of agents.
    pub quotas: BTreeMap<String, usize>,
    /// Folder for caches that have to leave the memory; without it they are lost.
    pub spill: Option<PathBuf>,
    /// How caches are packed if a client does not say.
    pub recipe: Recipe,
    /// Caches that are packed or unpacked at a time.
    pub jobs: usize,
}

/// A server that has its folder and listens.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    folders: Folders,
    pool: MemoryPool<Archive>,
    recipe: Recipe,
    spills: bool,
    gate: Gate,
    stopping: AtomicBool,
    /// Connections that a stop has to end.
    streams: Mutex<BTreeMap<u64, UnixStream>>,
}

/// A number of places.
#[derive(Debug)]
struct Gate {
    free: Mutex<usize>,
    left: Condvar,
}

impl Gate {
    /// Runs a job as soon as a place is free.
    fn run<R>(&self, job: impl FnOnce() -> R) -> R {
        struct Place<'a>(&'a Gate);
        impl Drop for Place<'_> {
            fn drop(&mut self) {
                *lock(&self.0.free) += 1;
                self.0.left.notify_one();
            }
        }
        let mut free = lock(&self.free);
        while *free == 0 {
            free = self.left.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        *free -= 1;
        drop(free);
        let _place = Place(self);
        job()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// Takes the folder, removes what a dead server left there, finds the caches on the disk, and listens.
    ///
    /// # Errors
    /// [`Error::InUse`] if another server has one of the folders, [`Error::Io`], [`Error::Unsupported`] if the folder's path is too
    /// long for a socket.
    pub fn start(options: Options) -> Result<Server> {
        let folders = Folders::open(&options.folder)?;
        let pool = match &options.spill {
            Some(folder) => MemoryPool::with_spill(options.budget, Box::new(SpillFolder::open(folder)?))?,
            None => MemoryPool::new(options.budget),
        };
        options.quotas.iter().for_each(|(kind, bytes)| pool.set_quota(kind, *bytes));
        let io = |source| Error::Io { path: folders.socket.clone(), source };
        let listener = UnixListener::bind(&folders.socket).map_err(io)?;
        std::fs::set_permissions(&folders.socket, std::fs::Permissions::from_mode(0o600)).map_err(io)?;
        Ok(Server {
            listener,
            pool,
            recipe: options.recipe,
            spills: options.spill.is_some(),
            gate: Gate { free: Mutex::new(options.jobs.max(1)), left: Condvar::new() },
            stopping: AtomicBool::new(false),
            streams: Mutex::new(BTreeMap::new()),
            folders,
        })
    }

    /// The pool.
    pub fn pool(&self) -> &MemoryPool<Archive> {
        &self.pool
    }

    /// Serves until [`Server::stop`] is called: then every request under way is answered, all caches are written to the disk if there
    /// is one, and socket and segments are removed.
    ///
    /// # Errors
    /// [`Error::Io`] if the socket fails or a cache cannot be written.
    pub fn run(&self) -> Result<()> {
        let io = |source| Error::Io { path: self.folders.socket.clone(), source };
        let outcome = std::thread::scope(|scope| {
            let mut number = 0;
            let outcome = loop {
                let stream = match self.listener.accept() {
                    _ if self.stopping.load(Ordering::SeqCst) => break Ok(()),
                    Ok((stream, _)) => stream,
                    // The client has left, or there are too many files open: nothing of this ends the server.
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                    Err(e) if matches!(e.raw_os_error(), Some(nix::libc::EMFILE | nix::libc::ENFILE)) => {
                        std::thread::sleep(std::time::Duration::from_millis(50));
                        continue;
                    }
                    Err(e) if e.kind() == std::io::ErrorKind::ConnectionAborted => continue,
                    Err(e) => break Err(io(e)),
                };
                number += 1;
                let Ok(twin) = stream.try_clone() else { continue };
                let mut streams = lock(&self.streams);
                let full = streams.len() >= CLIENTS;
                streams.insert(number, twin);
                drop(streams);
                scope.spawn(move || {
                    connection::serve(self, stream, number, full);
                    lock(&self.streams).remove(&number);
                });
            };
            // Whoever waits for a request reads an end; whoever works on one answers it first.
            lock(&self.streams).values().for_each(|stream| drop(stream.shutdown(Shutdown::Read)));
            outcome
        });
        outcome?;
        if self.spills {
            self.pool.save_all()?;
        }
        self.folders.clean_up()
    }

    /// Ends [`Server::run`], from any thread.
    pub fn stop(&self) {
        if !self.stopping.swap(true, Ordering::SeqCst) {
            // Wakes up the wait for a client.
            drop(UnixStream::connect(&self.folders.socket));
        }
    }
}
