//! The control plane: one JSON object per line, a request and its reply. Bytes of caches do not go this way.

use crate::pool::{Agent, Outcome, PoolStats};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Version of the protocol, in the greeting.
pub const VERSION: u32 = 1;

/// Code of the error that an idle client reads when others needed its place: what it sent since was not done.
pub(super) const IDLE: &str = "idle";

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// Nothing but an answer.
    Ping,
    /// Packs the prompt cache in a file of the client's folder and holds it: on the disk too, when the answer comes, if the agent was
    /// there, else in memory until it has to leave or is spilled.
    Park {
        /// The agent.
        id: String,
        /// Name of the file in the client's folder.
        segment: String,
        /// Type of the agent, for quotas.
        #[serde(default)]
        kind: String,
        /// Low ones leave first.
        #[serde(default = "one")]
        priority: f32,
        /// Recipe in place of the server's.
        #[serde(default)]
        recipe: Option<String>,
        /// Whether layers may hold different numbers of tokens.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        uneven: bool,
    },
    /// Unpacks an agent's cache into a file of the client's folder. The pool keeps it.
    Resume {
        /// The agent.
        id: String,
        /// Layout of the file, 0.31 or 0.32; by default the layout of the source.
        #[serde(default)]
        layout: Option<String>,
    },
    /// Gives a second agent the cache of a first one.
    Fork {
        /// The first.
        from: String,
        /// The second.
        to: String,
    },
    /// Keeps an agent's cache in memory.
    Pin {
        /// The agent.
        id: String,
    },
    /// Undoes that.
    Unpin {
        /// The agent.
        id: String,
    },
    /// Moves an agent's cache to the disk; the answer comes when it is there.
    Spill {
        /// The agent.
        id: String,
    },
    /// Forgets an agent.
    Drop {
        /// The agent.
        id: String,
    },
    /// Figures of the pool and of every agent.
    Stats,
    /// Ends the server.
    Shutdown,
}

fn one() -> f32 {
    1.0
}

/// What the server answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "lowercase")]
pub enum Reply {
    /// First line of every connection.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// The server's process.
        server: u32,
        /// Folder of this client alone, removed when the connection ends.
        folder: PathBuf,
    },
    /// It is done.
    Done,
    /// A cache is held.
    Parked {
        /// What storing it has done.
        #[serde(flatten)]
        outcome: Outcome,
        /// Bytes of the same keys and values in half precision.
        fp16_bytes: usize,
        /// Stored bits a key scalar and a value scalar.
        bits: [f64; 2],
    },
    /// A cache is in a file of the client's folder.
    Resumed {
        /// Name of the file.
        segment: String,
        /// Its bytes.
        bytes: u64,
    },
    /// Figures.
    Stats {
        /// The server's recipe.
        recipe: String,
        /// Of the pool.
        pool: PoolStats,
        /// Of the agents.
        agents: Vec<Agent>,
    },
    /// It could not be done; the pool is as it was.
    Error {
        /// The kind of error, see [`crate::Error::code`].
        code: String,
        /// In words.
        message: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_what_the_python_side_writes() {
        let park: Request = serde_json::from_str(r#"{"op":"park","id":"a","segment":"p1"}"#).unwrap();
        let want = Request::Park {
            id: "a".into(),
            segment: "p1".into(),
            kind: String::new(),
            priority: 1.0,
            recipe: None,
            uneven: false,
        };
        assert_eq!(park, want);
        for bad in
            [r#"{"op":"park","id":"a"}"#, r#"{"op":"parc"}"#, r#"{"op":"pin","id":"a","x":1}"#, "{}", ""]
        {
            assert!(serde_json::from_str::<Request>(bad).is_err(), "{bad}");
        }
        let reply = Reply::Parked { outcome: Outcome::default(), fp16_bytes: 8, bits: [2.0, 1.5] };
        let text = serde_json::to_string(&reply).unwrap();
        assert!(text.starts_with(r#"{"reply":"parked","bytes":0,"#), "{text}");
        assert_eq!(serde_json::from_str::<Reply>(&text).unwrap(), reply);
    }
}
