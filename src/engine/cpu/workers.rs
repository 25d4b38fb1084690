//! The threads that parallel stages run on, also in a process that was forked.
//!
//! A forked child inherits rayon's global pool without its threads: a call that waits for them waits for ever. So a process uses the
//! global pool only if it was there when this process made its first call; a child gets a pool of its own. A pool is also made here
//! where the global one could not be started, which rayon would answer with a panic.

use crate::error::{Error, Result};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::error::Error as _;
use std::sync::OnceLock;

/// The threads of one process.
struct Workers {
    process: u32,
    /// `None` for the global pool, or for the pool that the caller runs in.
    own: Option<ThreadPool>,
    /// The next process of a line of forks.
    child: OnceLock<Box<Workers>>,
}

static FIRST: OnceLock<Box<Workers>> = OnceLock::new();

/// Runs `work`, whose parallel iterators then use threads of this process.
///
/// # Errors
/// [`Error::Threads`] if this process may not start a single thread.
pub(crate) fn run<R: Send>(work: impl FnOnce() -> R + Send) -> Result<R> {
    match &of_process(std::process::id())?.own {
        None => Ok(work()),
        Some(pool) => Ok(pool.install(work)),
    }
}

/// No lock is held while threads are made, so that a fork at any time leaves a child that can go on from here.
fn of_process(process: u32) -> Result<&'static Workers> {
    let mut place = &FIRST;
    loop {
        match place.get() {
            Some(workers) if workers.process == process => return Ok(workers),
            Some(workers) => place = &workers.child,
            None => {
                let own = if std::ptr::eq(place, &FIRST) && global() { None } else { Some(started()?) };
                // Another thread may have been faster; the loop then finds its workers.
                let _ = place.set(Box::new(Workers { process, own, child: OnceLock::new() }));
            }
        }
    }
}

/// Whether the global pool is running, after an attempt to start it.
fn global() -> bool {
    // Inside of a pool of the application, that pool does the work.
    if rayon::current_thread_index().is_some() {
        return true;
    }
    match ThreadPoolBuilder::new().build_global() {
        Ok(()) => true,
        // Without a source: it was started before.
        Err(error) => error.source().is_none(),
    }
}

/// A pool of as many threads as the system grants, at most one a core.
fn started() -> Result<ThreadPool> {
    let mut threads = std::thread::available_parallelism().map_or(1, usize::from);
    loop {
        let name = |i| format!("turbomoq-{i}");
        match ThreadPoolBuilder::new().num_threads(threads).thread_name(name).build() {
            Ok(pool) => return Ok(pool),
            Err(_) if threads > 1 => threads /= 2,
            Err(error) => return Err(Error::Threads { reason: error.to_string() }),
        }
    }
}
