//! The other end of the socket, for the command line and for programs in Rust.
//!
//! A client believes nobody but a server of its own user. A connection that has failed, timed out or was hung up on is given up, so
//! no request ever reads the reply to another; the next call connects again. A request is sent a second time only if the server has
//! certainly not seen the first.

use super::connection::peer;
use super::folder::socket_path;
use super::protocol::{IDLE, Reply, Request, VERSION};
use crate::error::{Error, Result};
use crate::io::folders;
use crate::io::prompt_cache::PromptCache;
use nix::sys::socket::{MsgFlags, recv};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a reply may take if nothing else is set: packing a long cache of a large model takes minutes.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long the greeting may take, and a request to be taken.
const GREETING: Duration = Duration::from_secs(30);

/// A connection to a server, made anew when it has ended.
#[derive(Debug)]
pub struct Client {
    server: PathBuf,
    link: Option<Link>,
    timeout: Option<Duration>,
    folder: PathBuf,
    parked: u64,
}

/// One connection.
#[derive(Debug)]
struct Link {
    reader: BufReader<UnixStream>,
    socket: PathBuf,
    /// For this client's files, as long as the connection lasts.
    folder: PathBuf,
}

/// Why there is no reply.
enum Failure {
    /// The server has not seen the request.
    Unseen(Error),
    /// The server has refused it.
    Refused(Error),
    /// Nobody knows whether it was done.
    Unknown(Error),
}

impl Client {
    /// Connects to the server of a folder.
    ///
    /// # Errors
    /// [`Error::Io`] if none listens there, or if folder or server are not this user's alone; [`Error::Refused`] if it does not want
    /// this client.
    pub fn connect(folder: &Path) -> Result<Client> {
        let (server, folder) = (folder.to_path_buf(), PathBuf::new());
        let mut client = Client { server, link: None, timeout: Some(PATIENCE), folder, parked: 0 };
        client.link()?;
        Ok(client)
    }

    /// How long a reply may take, ten minutes by default; `None` waits for ever.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.timeout = timeout.map(|t| t.max(Duration::from_millis(1)));
    }

    /// Sends a request and waits for its reply, which is no [`Reply::Error`].
    ///
    /// # Errors
    /// [`Error::Refused`] with the server's words, [`Error::Io`] if the connection ends or there is no reply in time: the request may
    /// then have been done or not.
    pub fn call(&mut self, request: &Request) -> Result<Reply> {
        self.ask(|_| Ok(request.clone()))
    }

    /// Parks a prompt cache.
    ///
    /// # Errors
    /// As [`Client::call`] and [`PromptCache::write`].
    pub fn park(&mut self, id: &str, kind: &str, priority: f32, cache: &PromptCache) -> Result<Reply> {
        self.parked += 1;
        let segment = format!("p{}.safetensors", self.parked);
        let (id, kind) = (id.to_string(), kind.to_string());
        self.ask(|folder| {
            cache.write(folder.join(&segment), cache.layout)?;
            let (id, segment, kind) = (id.clone(), segment.clone(), kind.clone());
            Ok(Request::Park { id, segment, kind, priority, recipe: None, uneven: false })
        })
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
            other => {
                let detail = format!("an unexpected reply: {other:?}");
                Err(Error::Format { path: socket_path(&self.server), detail })
            }
        }
    }

    /// The folder in which this client's files are; another one after the connection was made anew.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The connection, made anew if it has ended.
    fn link(&mut self) -> Result<&mut Link> {
        let link = match self.link.take().filter(Link::is_fresh) {
            Some(link) => link,
            None => Link::open(&self.server)?,
        };
        self.folder.clone_from(&link.folder);
        Ok(self.link.insert(link))
    }

    /// Sends what `request` makes for the folder of a connection.
    fn ask(&mut self, request: impl Fn(&Path) -> Result<Request>) -> Result<Reply> {
        let timeout = self.timeout;
        let mut again = true;
        loop {
            let link = self.link()?;
            let asked = request(&link.folder)?;
            match link.exchange(&asked, timeout) {
                Ok(reply) => return Ok(reply),
                Err(Failure::Refused(error)) => return Err(error),
                Err(Failure::Unseen(_)) if again => again = false,
                Err(Failure::Unseen(error) | Failure::Unknown(error)) => {
                    self.link = None;
                    return Err(error);
                }
            }
            self.link = None;
        }
    }
}

impl Link {
    fn open(server: &Path) -> Result<Link> {
        folders::check(server, folders::WRITE)?;
        let socket = socket_path(server);
        let io = |source| Error::Io { path: socket.clone(), source };
        let stream = UnixStream::connect(&socket).map_err(io)?;
        let (user, owner) = (peer(&stream).map_err(io)?, nix::unistd::geteuid().as_raw());
        if user != owner {
            let text = format!("a server of user {user}, not of user {owner}");
            return Err(io(std::io::Error::new(ErrorKind::PermissionDenied, text)));
        }
        stream.set_write_timeout(Some(GREETING)).map_err(io)?;
        let mut link = Link { reader: BufReader::new(stream), socket, folder: PathBuf::new() };
        match link.reply(Some(GREETING))? {
            Reply::Hello { version: VERSION, folder, .. } => {
                folders::check(&folder, folders::ANY)?;
                Ok(Link { folder, ..link })
            }
            Reply::Error { code, message } => Err(Error::Refused { code, message }),
            other => Err(link.bad(format!("an unexpected greeting: {other:?}"))),
        }
    }

    /// Whether the connection is open and nothing lies in it that no request has asked for.
    fn is_fresh(&self) -> bool {
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        let waiting = recv(self.reader.get_ref().as_raw_fd(), &mut [0], flags);
        self.reader.buffer().is_empty() && waiting == Err(nix::errno::Errno::EAGAIN)
    }

    fn exchange(&mut self, request: &Request, timeout: Option<Duration>) -> Result<Reply, Failure> {
        let unseen = |e| Failure::Unseen(e);
        let line = serde_json::to_string(request).map_err(|e| unseen(self.bad(e.to_string())))? + "\n";
        // A line that was not written to its end is none to the server.
        let sent = self.reader.get_mut().write_all(line.as_bytes());
        sent.map_err(|source| unseen(Error::Io { path: self.socket.clone(), source }))?;
        match self.reply(timeout).map_err(Failure::Unknown)? {
            Reply::Error { code, message } if code == IDLE => Err(unseen(Error::Refused { code, message })),
            Reply::Error { code, message } => Err(Failure::Refused(Error::Refused { code, message })),
            reply => Ok(reply),
        }
    }

    fn reply(&mut self, timeout: Option<Duration>) -> Result<Reply> {
        let io = |source: std::io::Error| {
            let text = match (source.kind(), timeout) {
                (ErrorKind::WouldBlock | ErrorKind::TimedOut, Some(limit)) => {
                    format!(
                        "no reply within {} s; whether the request was done is not known",
                        limit.as_secs_f32()
                    )
                }
                _ => return Error::Io { path: self.socket.clone(), source },
            };
            Error::Io { path: self.socket.clone(), source: std::io::Error::new(ErrorKind::TimedOut, text) }
        };
        let mut line = String::new();
        self.reader.get_ref().set_read_timeout(timeout).map_err(io)?;
        if self.reader.read_line(&mut line).map_err(io)? == 0 {
            let text = "the server has ended the connection";
            return Err(io(std::io::Error::new(ErrorKind::UnexpectedEof, text)));
        }
        serde_json::from_str(&line).map_err(|e| self.bad(format!("{e}: {}", line.trim())))
    }

    fn bad(&self, detail: String) -> Error {
        Error::Format { path: self.socket.clone(), detail }
    }
}
