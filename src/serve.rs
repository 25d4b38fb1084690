//! A server that holds the caches of many mlx-lm processes in one pool: `turbomoq serve`.
//!
//! Control goes over a Unix socket ([`Request`], [`Reply`]), caches go through safetensors files in a folder of the client's own on a
//! memory file system: what mlx-lm saves and loads anyway. A connection has a thread, so a slow client holds up nobody; packing and
//! unpacking wait for one of a fixed number of places, so memory is bounded. When a connection ends, its folder goes with it. Lengths
//! in a file are checked against the file, which is read and never mapped, so one that shrinks is an error and no fault.
//!
//! Only a stop ends a server: a panic is the error of its request, and what runs short (threads, descriptors, memory) is the error of
//! whoever needed it. A stop writes every cache that can be written.

mod client;
mod connection;
mod connections;
mod folder;
mod gate;
mod listener;
mod protocol;
mod trim;

pub use client::Client;
pub use folder::{default_folder, socket_path};
pub use protocol::{Reply, Request, VERSION};

use crate::error::{Error, Result, guarded};
use crate::io::archive::{Archive, SpillFolder};
use crate::pool::MemoryPool;
use crate::recipe::Recipe;
use connections::Connections;
use folder::Folders;
use gate::Gate;
use listener::{Event, Listener};
use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Clients at a time, if there are descriptors for so many.
const CLIENTS: usize = 256;
/// Descriptors that a server needs for itself, and that one job does.
const DESCRIPTORS: [usize; 2] = [14, 4];

/// The recipe for parked caches if none is named: no exact window, which only a cache that grows has a use for.
pub const PARKING: &str = "best,window=0";

/// How a server is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// Folder of the socket, see [`default_folder`]: a new one, or one of this user that nobody else may write to.
    pub folder: PathBuf,
    /// Bytes of the pool.
    pub budget: usize,
    /// Bytes of the caches of a type of agents.
    pub quotas: BTreeMap<String, usize>,
    /// Folder for caches that have to leave the memory, of the same kind; without it they are lost.
    pub spill: Option<PathBuf>,
    /// How caches are packed if a client does not say, for example [`PARKING`].
    pub recipe: Recipe,
    /// Caches that are packed or unpacked at a time.
    pub jobs: usize,
    /// Signals that end the server as [`Server::stop`] does, from its start on.
    pub signals: Vec<i32>,
}

/// A server that has its folder and listens.
#[derive(Debug)]
pub struct Server {
    listener: Listener,
    folders: Folders,
    pool: MemoryPool<Archive>,
    recipe: Recipe,
    spills: bool,
    gate: Gate,
    connections: Connections,
    /// Clients at a time.
    places: usize,
}

/// Clients at a time, so that those who wait leave descriptors for the work.
fn places(jobs: usize) -> usize {
    use nix::sys::resource::{Resource, getrlimit};
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(CLIENTS as u64, |(soft, _)| soft);
    let [own, job] = DESCRIPTORS;
    let reserve = own.saturating_add(jobs.saturating_mul(job));
    usize::try_from(limit).unwrap_or(usize::MAX).saturating_sub(reserve).clamp(1, CLIENTS)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// Takes the folder, removes what a dead server left there, finds the caches on the disk, and listens.
    ///
    /// # Errors
    /// [`Error::InUse`] if another server has one of the folders, [`Error::Io`] (also if others may write to one of them),
    /// [`Error::Unsupported`] if the folder's path is too long for a socket.
    pub fn start(options: Options) -> Result<Server> {
        let folders = Folders::open(&options.folder)?;
        let listener = Listener::open(&folders.socket, &options.signals)?;
        let pool = match &options.spill {
            Some(folder) => MemoryPool::with_spill(options.budget, Box::new(SpillFolder::open(folder)?))?,
            None => MemoryPool::new(options.budget),
        };
        options.quotas.iter().for_each(|(kind, bytes)| pool.set_quota(kind, *bytes));
        Ok(Server {
            listener,
            folders,
            pool,
            recipe: options.recipe,
            spills: options.spill.is_some(),
            gate: Gate::new(options.jobs),
            connections: Connections::default(),
            places: places(options.jobs.max(1)),
        })
    }

    /// The pool.
    pub fn pool(&self) -> &MemoryPool<Archive> {
        &self.pool
    }

    /// Serves until [`Server::stop`] is called or a signal comes: then every request under way is answered, all caches are written to
    /// the disk if there is one, and socket and segments are removed.
    ///
    /// # Errors
    /// [`Error::Unsaved`] names every agent whose cache cannot be written; [`Error::Io`] if the folders cannot be cleaned up.
    pub fn run(&self) -> Result<()> {
        thread::scope(|scope| {
            for number in 0.. {
                match self.listener.next() {
                    Event::Client(stream) => self.admit(scope, number, Arc::new(stream)),
                    // One descriptor less, and the next client may come.
                    Event::Short => drop(self.connections.hang_up()),
                    Event::Stop => break,
                }
            }
            self.connections.close();
        });
        let saved = if self.spills { self.pool.save_all().map(drop) } else { Ok(()) };
        let removed = self.listener.remove();
        let cleaned = self.folders.clean_up();
        saved.and(removed).and(cleaned)
    }

    /// Serves a client in a thread of its own, or tells it why not.
    fn admit<'a>(&'a self, scope: &'a thread::Scope<'a, '_>, number: u64, stream: Arc<UnixStream>) {
        let refuse = |error: &Error| drop(connection::send(&stream, &connection::refusal(error)));
        if let Err(error) = connection::prepare(&stream, &self.folders.socket) {
            return refuse(&error);
        }
        if self.connections.len() >= self.places && !self.connections.hang_up() {
            let (value, reason) = ((self.places + 1).to_string(), format!("{} at a time", self.places));
            return refuse(&Error::Unsupported { field: "clients", value, reason });
        }
        let folder = match self.folders.client(number) {
            Ok(folder) => Arc::new(Mutex::new(folder)),
            Err(error) => return refuse(&error),
        };
        self.connections.enter(number, stream.clone(), &lock(&folder).path);
        for last in [false, true] {
            let (stream, folder) = (stream.clone(), folder.clone());
            let serve = move || {
                // Errors of the connection itself end it, and nobody is left to hear of them.
                drop(guarded(|| Ok(connection::serve(self, &stream, number, &mut lock(&folder)))));
                self.connections.leave(number);
            };
            let Err(error) = thread::Builder::new().spawn_scoped(scope, serve) else { return };
            // A thread that waits for an idle client may have been the one too many; it takes a moment to end.
            if last || !self.connections.hang_up_but(number) {
                self.connections.leave(number);
                return refuse(&Error::Threads { reason: error.to_string() });
            }
            thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    /// Ends [`Server::run`], from any thread.
    pub fn stop(&self) {
        self.listener.stop();
    }
}
