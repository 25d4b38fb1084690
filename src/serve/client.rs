//! The other end of the socket, for the command line and for programs in Rust.

use super::folder::socket_path;
use super::protocol::{Reply, Request, VERSION};
use crate::error::{Error, Result};
use crate::prompt_cache::PromptCache;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// A connection to a server.
#[derive(Debug)]
pub struct Client {
    reader: BufReader<UnixStream>,
    socket: PathBuf,
    folder: PathBuf,
    parked: u64,
}

impl Client {
    /// Connects to the server of a folder.
    ///
    /// # Errors
    /// [`Error::Io`] if none listens there, [`Error::Refused`] if it does not want this client.
    pub fn connect(folder: &Path) -> Result<Client> {
        let socket = socket_path(folder);
        let stream =
            UnixStream::connect(&socket).map_err(|source| Error::Io { path: socket.clone(), source })?;
        let mut client = Client { reader: BufReader::new(stream), socket, folder: PathBuf::new(), parked: 0 };
        match client.reply()? {
            Reply::Hello { version: VERSION, folder, .. } => Ok(Client { folder, ..client }),
            other => Err(client.unexpected(&other)),
        }
    }

    /// Sends a request and waits for its reply, which is no [`Reply::Error`].
    ///
    /// # Errors
    /// [`Error::Refused`] with the server's words, [`Error::Io`] if the connection ends.
    pub fn call(&mut self, request: &Request) -> Result<Reply> {
        let line = serde_json::to_string(request).map_err(|e| self.bad(e.to_string()))? + "\n";
        let sent = self.reader.get_mut().write_all(line.as_bytes());
        sent.map_err(|source| Error::Io { path: self.socket.clone(), source })?;
        self.reply()
    }

    /// Parks a prompt cache.
    ///
    /// # Errors
    /// As [`Client::call`] and [`PromptCache::write`].
    pub fn park(&mut self, id: &str, kind: &str, priority: f32, cache: &PromptCache) -> Result<Reply> {
        self.parked += 1;
        let segment = format!("p{}.safetensors", self.parked);
        cache.write(self.folder.join(&segment), cache.layout)?;
        let (id, kind) = (id.into(), kind.into());
        self.call(&Request::Park { id, segment, kind, priority, recipe: None, uneven: false })
    }

    /// The prompt cache of an agent.
    ///
    /// # Errors
    /// As [`Client::call`] and [`PromptCache::read`].
    pub fn resume(&mut self, id: &str) -> Result<PromptCache> {
        match self.call(&Request::Resume { id: id.into(), layout: None })? {
            Reply::Resumed { segment, .. } => {
                let path = self.folder.join(segment);
                let cache = PromptCache::read(&path);
                std::fs::remove_file(&path).map_err(|source| Error::Io { path, source })?;
                cache
            }
            other => Err(self.unexpected(&other)),
        }
    }

    /// The folder in which this client's files are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn reply(&mut self) -> Result<Reply> {
        let io = |source| Error::Io { path: self.socket.clone(), source };
        let mut line = String::new();
        if self.reader.read_line(&mut line).map_err(io)? == 0 {
            return Err(io(std::io::ErrorKind::UnexpectedEof.into()));
        }
        match serde_json::from_str(&line) {
            Ok(Reply::Error { code, message }) => Err(Error::Refused { code, message }),
            Ok(reply) => Ok(reply),
            Err(e) => Err(self.bad(format!("{e}: {}", line.trim()))),
        }
    }

    fn bad(&self, detail: String) -> Error {
        Error::Format { path: self.socket.clone(), detail }
    }

    fn unexpected(&self, reply: &Reply) -> Error {
        self.bad(format!("an unexpected reply: {reply:?}"))
    }
}
