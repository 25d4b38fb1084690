//! `turbomoq top` and `turbomoq stats`: what a server holds, live or once.

use super::bytes;
use super::say::{harmless, name};
use super::screen::{self, Answer, AnyAnswer, Page, Table, Wishes, mib};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
use serde::Serialize;
use std::cmp::Reverse;
use std::io::{IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use turbomoq::pool::{Agent, PoolStats};
use turbomoq::serve::{Client, Reply, Request, default_folder};
use turbomoq::{Error, Recipe, Result};

/// Arguments of `top`.
#[derive(clap::Args)]
pub struct TopArguments {
    /// Folder of the server
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Seconds between two looks
    #[arg(long, default_value_t = 1.0)]
    every: f64,
    /// Looks, then the end [default: no end]
    #[arg(long)]
    count: Option<usize>,
    /// Order of the agents
    #[arg(long, value_enum, default_value_t)]
    sort: SortBy,
}

/// Arguments of `stats`.
#[derive(clap::Args)]
pub struct StatsArguments {
    /// Folder of the server
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Order of the agents
    #[arg(long, value_enum, default_value_t)]
    sort: SortBy,
}

/// What agents are listed by.
#[derive(Clone, Copy, Debug, Default, PartialEq, clap::ValueEnum)]
enum SortBy {
    /// By name
    #[default]
    Agent,
    /// The greatest first
    Memory,
    /// The longest unused first
    Idle,
    /// The first to leave first
    Priority,
}

/// What a server holds.
#[derive(Serialize)]
pub struct Held {
    pub recipe: String,
    pub pool: PoolStats,
    pub agents: Vec<Agent>,
}

/// Runs `top`: on a terminal until `q` or the count, elsewhere one answer after the other.
pub fn top(arguments: &TopArguments, wishes: Wishes) -> Result<()> {
    let every = Duration::try_from_secs_f64(arguments.every).map_err(|e| Error::Unsupported {
        field: "every",
        value: arguments.every.to_string(),
        reason: e.to_string(),
    })?;
    let mut client = Client::connect(&arguments.folder.clone().unwrap_or_else(default_folder))?;
    let live = std::io::stdout().is_terminal() && !wishes.json;
    let keys = if live { Keys::listen() } else { None };
    for look in 0..arguments.count.unwrap_or(usize::MAX) {
        if look > 0 && wait(keys.as_ref(), every) {
            break;
        }
        let held = ask(&mut client, arguments.sort)?;
        match live {
            true => redraw(&held.screen(screen::width(), wishes.verbose)),
            false => screen::print(wishes, &held),
        }
    }
    Ok(())
}

/// Writes over the last screen line by line and clears only what is left of it, so nothing flickers.
fn redraw(text: &str) {
    let mut screen = String::from("\x1b[H");
    for line in harmless(text, "\n").lines() {
        screen += line;
        screen += "\x1b[K\n";
    }
    screen += "q quits\x1b[K\x1b[J";
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(screen.as_bytes()).and_then(|()| out.flush());
}

/// Waits, and says whether `q` was pressed meanwhile.
fn wait(keys: Option<&Keys>, every: Duration) -> bool {
    let end = Instant::now() + every;
    let Some(keys) = keys else {
        std::thread::sleep(every);
        return false;
    };
    loop {
        let left = end.saturating_duration_since(Instant::now());
        match keys.next(left) {
            Some(b'q' | b'Q') => return true,
            Some(_) => {}
            None => return false,
        }
    }
}

/// A terminal that gives keys without waiting for the end of a line, and is put back at the end.
struct Keys(Termios);

impl Keys {
    fn listen() -> Option<Keys> {
        let stdin = std::io::stdin();
        let before = tcgetattr(&stdin).ok()?;
        let mut raw = before.clone();
        raw.local_flags.remove(LocalFlags::ICANON | LocalFlags::ECHO);
        tcsetattr(&stdin, SetArg::TCSANOW, &raw).ok()?;
        let _ = write!(std::io::stdout(), "\x1b[2J");
        Some(Keys(before))
    }

    /// The next key within `left`.
    fn next(&self, left: Duration) -> Option<u8> {
        let stdin = std::io::stdin();
        let mut ready = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        if poll(&mut ready, timeout).is_ok_and(|n| n > 0) {
            let mut key = [0];
            if nix::unistd::read(&stdin, &mut key).is_ok_and(|n| n == 1) {
                return Some(key[0]);
            }
            // Nobody is at the keys any more.
            std::thread::sleep(left);
        }
        None
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        let _ = tcsetattr(std::io::stdin(), SetArg::TCSANOW, &self.0);
        let _ = writeln!(std::io::stdout());
    }
}

/// Asks once.
pub fn stats(arguments: &StatsArguments) -> Result<Held> {
    let mut client = Client::connect(&arguments.folder.clone().unwrap_or_else(default_folder))?;
    ask(&mut client, arguments.sort)
}

fn ask(client: &mut Client, sort: SortBy) -> Result<Held> {
    match client.call(&Request::Stats)? {
        Reply::Stats { recipe, pool, mut agents } => {
            match sort {
                SortBy::Agent => agents.sort_by(|a, b| a.id.cmp(&b.id)),
                SortBy::Memory => agents.sort_by_key(|a| Reverse(a.bytes)),
                SortBy::Idle => agents.sort_by_key(|a| Reverse(a.idle)),
                SortBy::Priority => agents.sort_by(|a, b| a.priority.total_cmp(&b.priority)),
            }
            Ok(Held { recipe, pool, agents })
        }
        other => {
            let detail = format!("an unexpected reply: {other:?}");
            Err(Error::Format { path: client.folder().into(), detail })
        }
    }
}

impl Answer for Held {
    fn show(&self, page: &mut Page) {
        let pool = &self.pool;
        page.line(format_args!(
            "{} of {} in memory, {} more but for sharing; {} on the disk",
            bytes(pool.used as u64),
            bytes(pool.budget as u64),
            bytes(pool.saved_by_sharing as u64),
            bytes(pool.disk_bytes)
        ));
        page.line(format_args!(
            "{} agents, {} in memory, {} on the disk; {} stored, {} from memory, {} from the disk, {} spilled, {} lost",
            pool.agents,
            pool.in_memory,
            pool.on_disk,
            pool.stores,
            pool.hits,
            pool.loads,
            pool.spills,
            pool.evictions
        ));
        let short = self.recipe.parse::<Recipe>().map_or_else(|_| self.recipe.clone(), |r| r.name());
        page.line(format_args!("recipe: {}", if page.verbose { &self.recipe } else { &short }));
        page.gap();
        let mut table = Table::new(&[
            "agent",
            "type",
            ">priority",
            "pinned",
            ">memory MiB",
            ">shared MiB",
            ">disk MiB",
            ">idle",
        ]);
        let size = |n: Option<u64>| n.map_or("-".into(), mib);
        for agent in &self.agents {
            table.row([
                name(&agent.id),
                name(&agent.kind),
                agent.priority.to_string(),
                if agent.pinned { "yes".into() } else { String::new() },
                size(agent.bytes.map(|n| n as u64)),
                mib(agent.shared_bytes as u64),
                size(agent.disk_bytes),
                agent.idle.to_string(),
            ]);
        }
        page.table(&table);
    }
}
