//! The connections of a server: who is being served, who waits, and who has to go when there is no place for another.
//!
//! A client that waits holds a thread, a descriptor and a place. When one of these runs short, the client that has asked for nothing
//! for the longest time is told so and hung up on; both clients of this package then connect again when they need the server.

use super::lock;
use super::protocol::{IDLE, Reply};
use std::collections::BTreeMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A client that has a file in its folder may be about to send it: it is left alone for so long.
const TRANSFER: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Connection {
    stream: Arc<UnixStream>,
    folder: PathBuf,
    /// Since when it has been without a request; `None` while one is under way.
    idle: Option<Instant>,
}

/// Connections by their numbers.
#[derive(Debug, Default)]
pub(super) struct Connections(Mutex<BTreeMap<u64, Connection>>);

impl Connections {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        lock(&self.0).len()
    }

    /// A client has come.
    pub(super) fn enter(&self, number: u64, stream: Arc<UnixStream>, folder: &Path) {
        let connection = Connection { stream, folder: folder.into(), idle: Some(Instant::now()) };
        lock(&self.0).insert(number, connection);
    }

    /// A request is under way. `false` if the client was hung up on before: then nothing may be done.
    pub(super) fn begin(&self, number: u64) -> bool {
        lock(&self.0).get_mut(&number).map(|c| c.idle = None).is_some()
    }

    /// It is answered.
    pub(super) fn end(&self, number: u64) {
        if let Some(connection) = lock(&self.0).get_mut(&number) {
            connection.idle = Some(Instant::now());
        }
    }

    /// A client is gone.
    pub(super) fn leave(&self, number: u64) {
        lock(&self.0).remove(&number);
    }

    /// Hangs up on the client that has waited longest. `false` if there is none.
    pub(super) fn hang_up(&self) -> bool {
        self.hang_up_but(u64::MAX)
    }

    /// As [`Connections::hang_up`], on any client but one.
    pub(super) fn hang_up_but(&self, but: u64) -> bool {
        let mut connections = lock(&self.0);
        let others = connections.iter().filter(|(n, _)| **n != but);
        let mut waiting: Vec<_> = others.filter_map(|(&n, c)| Some((c.idle?, n))).collect();
        waiting.sort();
        let may_go = |&(since, number): &(Instant, u64)| {
            since.elapsed() > TRANSFER || connections.get(&number).is_some_and(|c| is_empty(&c.folder))
        };
        let Some((_, number)) = waiting.into_iter().find(may_go) else { return false };
        let Some(connection) = connections.remove(&number) else { return false };
        drop(connections);
        let message = "others needed the place of this idle connection; nothing was done".into();
        // Nobody may be there to read it.
        drop(super::connection::send(&connection.stream, &Reply::Error { code: IDLE.into(), message }));
        drop(connection.stream.shutdown(Shutdown::Both));
        true
    }

    /// Whoever waits for a request reads an end; whoever works on one answers it first.
    pub(super) fn close(&self) {
        lock(&self.0).values().for_each(|c| drop(c.stream.shutdown(Shutdown::Read)));
    }
}

/// Whether there is nothing in a folder. One that cannot be read for want of descriptors counts as empty: there a place is needed.
fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).map_or(true, |mut entries| entries.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn the_longest_idle_client_without_a_file_goes_first_and_no_working_one() {
        let connections = Connections::default();
        let folders: Vec<_> = (0..4).map(|_| tempfile::tempdir().unwrap()).collect();
        let mut ends = vec![];
        for (number, folder) in folders.iter().enumerate() {
            let (mine, theirs) = UnixStream::pair().unwrap();
            connections.enter(number as u64, Arc::new(mine), folder.path());
            ends.push(theirs);
        }
        assert!(connections.begin(0)); // works
        std::fs::write(folders[1].path().join("p1"), b"x").unwrap(); // is about to send
        connections.begin(2);
        connections.end(2); // has just asked
        assert!(connections.hang_up());
        assert!(!connections.begin(3), "the one that has waited longest and is not about to send");
        let mut text = String::new();
        ends[3].read_to_string(&mut text).unwrap();
        assert!(text.contains("\"code\":\"idle\""), "{text}");
        assert!(connections.hang_up() && !connections.hang_up());
        assert!(!connections.begin(2) && connections.begin(1) && connections.begin(0));
        assert_eq!(connections.len(), 2);
    }
}
