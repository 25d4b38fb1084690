//! `turbomoq top` and `turbomoq stats`: what a server holds, live or once.

use super::say::{name, say};
use super::{bytes, print_json, table};
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;
use turbomoq::pool::{Agent, PoolStats};
use turbomoq::serve::{Client, Reply, Request, default_folder};
use turbomoq::{Error, Result};

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
}

/// Arguments of `stats`.
#[derive(clap::Args)]
pub struct StatsArguments {
    /// Folder of the server
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Runs `top`.
pub fn top(arguments: &TopArguments) -> Result<()> {
    let every = Duration::try_from_secs_f64(arguments.every).map_err(|e| Error::Unsupported {
        field: "every",
        value: arguments.every.to_string(),
        reason: e.to_string(),
    })?;
    let mut client = Client::connect(&arguments.folder.clone().unwrap_or_else(default_folder))?;
    for look in 0..arguments.count.unwrap_or(usize::MAX) {
        if look > 0 {
            std::thread::sleep(every);
        }
        let (recipe, pool, agents) = ask(&mut client)?;
        if std::io::stdout().is_terminal() {
            let _ = write!(std::io::stdout(), "\x1b[H\x1b[2J");
        }
        print(&recipe, &pool, &agents);
    }
    Ok(())
}

/// Runs `stats`.
pub fn stats(arguments: &StatsArguments) -> Result<()> {
    let mut client = Client::connect(&arguments.folder.clone().unwrap_or_else(default_folder))?;
    let (recipe, pool, agents) = ask(&mut client)?;
    if arguments.json {
        print_json(&serde_json::json!({ "recipe": recipe, "pool": pool, "agents": agents }));
    } else {
        print(&recipe, &pool, &agents);
    }
    Ok(())
}

fn ask(client: &mut Client) -> Result<(String, PoolStats, Vec<Agent>)> {
    match client.call(&Request::Stats)? {
        Reply::Stats { recipe, pool, agents } => Ok((recipe, pool, agents)),
        other => {
            let detail = format!("an unexpected reply: {other:?}");
            Err(Error::Format { path: client.folder().into(), detail })
        }
    }
}

fn print(recipe: &str, pool: &PoolStats, agents: &[Agent]) {
    say!(
        "{} of {} in memory, {} more but for sharing; {} on the disk",
        bytes(pool.used as u64),
        bytes(pool.budget as u64),
        bytes(pool.saved_by_sharing as u64),
        bytes(pool.disk_bytes)
    );
    say!(
        "{} agents, {} in memory, {} on the disk; {} stored, {} from memory, {} from the disk, {} spilled, {} lost",
        pool.agents,
        pool.in_memory,
        pool.on_disk,
        pool.stores,
        pool.hits,
        pool.loads,
        pool.spills,
        pool.evictions
    );
    say!("recipe {recipe}");
    let mut table = table(&["agent", "type", "priority", "pinned", "in memory", "shared", "on disk", "idle"]);
    let size = |n: Option<u64>| n.map_or("-".into(), bytes);
    for agent in agents {
        table.add_row([
            name(&agent.id),
            name(&agent.kind),
            agent.priority.to_string(),
            if agent.pinned { "yes".into() } else { String::new() },
            size(agent.bytes.map(|n| n as u64)),
            bytes(agent.shared_bytes as u64),
            size(agent.disk_bytes),
            agent.idle.to_string(),
        ]);
    }
    say!("{table}");
}
