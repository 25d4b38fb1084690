//! `turbomoq serve`: one pool for many mlx-lm processes, until SIGTERM or SIGINT.

use super::screen::Wishes;
use super::{Size, bytes};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use turbomoq::serve::{Options, PARKING, Server, default_folder};
use turbomoq::{Error, Result};

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Arguments {
    /// Folder of the socket, a new one or one of yours that nobody else may write to [default: $TURBOMOQ_FOLDER, else turbomoq in
    /// $XDG_RUNTIME_DIR, else ~/Library/Caches/turbomoq on macOS, else /tmp/turbomoq-UID]
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Bytes of all caches in memory, for example 8GiB
    #[arg(long)]
    budget: Size,
    /// Bytes of the caches of one type of agents, for example coding=2GiB
    #[arg(long, value_name = "TYPE=BYTES")]
    quota: Vec<String>,
    /// Folder for caches that have to leave the memory, a new one or one of yours that nobody else may write to; without it they are lost
    #[arg(long)]
    spill: Option<PathBuf>,
    /// How caches are packed if a client does not say; a parked cache has no use for an exact window
    #[arg(long, default_value = PARKING)]
    recipe: String,
    /// Caches packed or unpacked at a time [default: 2]
    #[arg(long, default_value_t = 2)]
    jobs: usize,
}

/// Runs the command.
pub fn run(arguments: &Arguments, wishes: Wishes) -> Result<()> {
    let quota = |text: &String| -> Result<(String, usize)> {
        let (kind, size) = text.split_once('=').ok_or_else(|| Error::Parse {
            what: "quota",
            text: text.clone(),
            reason: "expected TYPE=BYTES".into(),
        })?;
        Ok((kind.into(), size.parse::<Size>()?.0))
    };
    let options = Options {
        folder: arguments.folder.clone().unwrap_or_else(default_folder),
        budget: arguments.budget.0,
        quotas: arguments.quota.iter().map(quota).collect::<Result<BTreeMap<_, _>>>()?,
        spill: arguments.spill.clone(),
        recipe: arguments.recipe.parse()?,
        jobs: arguments.jobs,
        signals: vec![SIGTERM, SIGINT],
    };
    let folder = options.folder.clone();
    // Whatever the server writes, wherever, is for this user alone.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    let server = Server::start(options)?;
    let on_disk = server.pool().stats().on_disk;
    // A server whose standard output is closed serves all the same.
    let line = match wishes.json {
        true => serde_json::json!({ "folder": folder, "budget": arguments.budget.0, "on_disk": on_disk })
            .to_string(),
        false => {
            let budget = bytes(arguments.budget.0 as u64);
            format!("serving {} in {budget}, {on_disk} agents on the disk", folder.display())
        }
    };
    let _ = writeln!(std::io::stdout(), "{line}");
    server.run()
}
