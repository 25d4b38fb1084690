//! `turbomoq serve` as a child of a test, killed when the test forgets it.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use turbomoq::serve::Client;

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_turbomoq");

pub struct Running {
    pub child: Child,
    folder: PathBuf,
}

impl Running {
    /// A server that listens; with `spills` its disk is `spill` in the folder.
    pub fn start(folder: &Path, budget: &str, recipe: &str, spills: bool) -> Running {
        let mut command = Command::new(PROGRAM);
        command.args(["serve", "--budget", budget, "--recipe", recipe, "--folder"]).arg(folder);
        if spills {
            command.arg("--spill").arg(folder.join("spill"));
        }
        Running::of(command, folder)
    }

    /// The server of a command that uses this folder.
    pub fn of(mut command: Command, folder: &Path) -> Running {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("serving"), "{line}");
        Running { child, folder: folder.into() }
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.folder).unwrap()
    }

    /// Asks it to end and sees that it ends well.
    pub fn terminate(mut self) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
