//! One client: who it is, its requests one after another, and its files.

use super::Server;
use super::folder::ClientFolder;
use super::protocol::{Reply, Request, VERSION};
use super::trim;
use crate::compressor::Compressor;
use crate::error::{Error, Result, guarded};
use crate::io::archive::Archive;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Longest line of a request.
const LINE: u64 = 1 << 16;
/// A client that does not read its replies for so long is gone.
const PATIENCE: Duration = Duration::from_secs(30);

/// Sets up a connection whose other end is a process of this user.
///
/// # Errors
/// [`Error::Unsupported`] for another user's, [`Error::Io`].
pub(super) fn prepare(stream: &UnixStream, socket: &std::path::Path) -> Result<()> {
    let io = |source| Error::Io { path: socket.into(), source };
    stream.set_nonblocking(false).and_then(|()| stream.set_write_timeout(Some(PATIENCE))).map_err(io)?;
    let (user, owner) = (peer(stream).map_err(io)?, nix::unistd::geteuid().as_raw());
    if user == owner {
        return Ok(());
    }
    let reason = format!("the server is for user {owner}");
    Err(Error::Unsupported { field: "user", value: user.to_string(), reason })
}

/// Serves a client until it leaves.
pub(super) fn serve(
    server: &Server,
    stream: &UnixStream,
    number: u64,
    folder: &mut ClientFolder,
) -> std::io::Result<()> {
    let hello = Reply::Hello { version: VERSION, server: std::process::id(), folder: folder.path.clone() };
    send(stream, &hello)?;
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = vec![];
        (&mut reader).take(LINE).read_until(b'\n', &mut line)?;
        if line.last() != Some(&b'\n') {
            if line.len() as u64 == LINE {
                let (value, reason) = (line.len().to_string(), format!("less than {LINE}"));
                return send(
                    stream,
                    &refusal(&Error::Unsupported { field: "bytes of a request", value, reason }),
                );
            }
            return Ok(());
        }
        if !server.connections.begin(number) {
            return Ok(());
        }
        let request = serde_json::from_slice(&line).map_err(|e| Error::Parse {
            what: "request",
            text: String::from_utf8_lossy(&line).trim().chars().take(80).collect(),
            reason: e.to_string(),
        });
        let stops = matches!(request, Ok(Request::Shutdown));
        let reply = guarded(|| request.and_then(|request| answer(server, folder, request)));
        send(stream, &reply.unwrap_or_else(|e| refusal(&e)))?;
        server.connections.end(number);
        if stops {
            server.stop();
        }
    }
}

/// Writes a reply.
pub(super) fn send(mut out: &UnixStream, reply: &Reply) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    out.write_all(&line)
}

/// An error as a reply.
pub(super) fn refusal(error: &Error) -> Reply {
    Reply::Error { code: error.code().into(), message: error.to_string() }
}

/// The user at the other end.
pub(super) fn peer(stream: &UnixStream) -> std::io::Result<u32> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let user = nix::sys::socket::getsockopt(stream, nix::sys::socket::sockopt::PeerCredentials)?.uid();
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let user = nix::unistd::getpeereid(stream)?.0.as_raw();
    Ok(user)
}

fn answer(server: &Server, folder: &mut ClientFolder, request: Request) -> Result<Reply> {
    let pool = &server.pool;
    match request {
        Request::Ping | Request::Shutdown => {}
        Request::Park { id, segment, kind, priority, recipe, uneven } => {
            let path = folder.segment(&segment)?;
            let parked = park(server, &path, [&id, &kind], priority, recipe.as_deref(), uneven);
            // The client may have removed it, and its folder goes anyway.
            drop(std::fs::remove_file(&path));
            return parked;
        }
        Request::Resume { id, layout } => return resume(server, folder, &id, layout.as_deref()),
        Request::Fork { from, to } => {
            pool.fork_or_allocate(&from, &to)?;
        }
        Request::Pin { id } => pool.pin(&id)?,
        Request::Unpin { id } => pool.unpin(&id)?,
        Request::Spill { id } => pool.spill(&id)?,
        Request::Drop { id } => pool.remove(&id)?,
        Request::Stats => {
            let recipe = server.recipe.to_string();
            return Ok(Reply::Stats { recipe, pool: pool.stats(), agents: pool.agents() });
        }
    }
    Ok(Reply::Done)
}

fn park(
    server: &Server,
    path: &std::path::Path,
    [id, kind]: [&str; 2],
    priority: f32,
    recipe: Option<&str>,
    uneven: bool,
) -> Result<Reply> {
    let recipe = match recipe {
        Some(text) => text.parse()?,
        None => server.recipe.clone(),
    };
    let parked = server.gate.run(|| {
        // An agent that comes back keeps the codes of what it was given.
        let before = server.pool.peek(id).ok();
        Archive::compress_file(before.as_deref(), path, &Compressor::new(recipe), uneven)
    });
    let parked =
        parked.and_then(|(parcel, stats)| Ok((server.pool.park_parcel(id, kind, priority, parcel)?, stats)));
    trim::give_back();
    let (outcome, stats) = parked?;
    let bits = [stats.avg_k_bits, stats.avg_v_bits];
    Ok(Reply::Parked { outcome, fp16_bytes: stats.fp16_bytes, bits })
}

fn resume(server: &Server, folder: &mut ClientFolder, id: &str, layout: Option<&str>) -> Result<Reply> {
    let layout = layout.map(str::parse).transpose()?;
    let segment = folder.fresh()?;
    let path = folder.path.join(&segment);
    let bytes = server.gate.run(|| -> Result<u64> {
        let parcel = server.pool.parcel(id)?;
        let compressor = Compressor::new(parcel.rest().recipe.clone());
        Archive::restore_file(&parcel, &compressor, &path, layout)
    });
    trim::give_back();
    let bytes = bytes?;
    let private = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&path, private).map_err(|source| Error::Io { path, source })?;
    Ok(Reply::Resumed { segment, bytes })
}
