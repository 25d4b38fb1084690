//! What commands print: results on standard output, complaints on standard error.
//!
//! `println!` panics when a line cannot be written. Here a reader that has gone (`turbomoq recipes | head -1`) ends the program
//! quietly, and any other failure (a full disk) is an error like others. A command prints when its work is done, so nothing is cut off.
//!
//! Names come from files and clients of strangers: characters that steer a terminal are shown as escapes.

use std::fmt::{Arguments, Write as _};
use std::io::{ErrorKind, Write, stderr, stdout};
use std::process::exit;

/// Prints a line on standard output.
macro_rules! say {
    ($($text:tt)*) => { $crate::cli::say::line(format_args!($($text)*)) };
}

/// Prints a line on standard error.
macro_rules! complain {
    ($($text:tt)*) => { $crate::cli::say::complaint(format_args!($($text)*)) };
}

pub(crate) use {complain, say};

pub(crate) fn line(text: Arguments) {
    let mut out = stdout().lock();
    match writeln!(out, "{}", harmless(&text.to_string(), "\n")).and_then(|()| out.flush()) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::BrokenPipe => exit(0),
        Err(error) => {
            complaint(format_args!("turbomoq: standard output: {error}"));
            exit(1)
        }
    }
}

pub(crate) fn complaint(text: Arguments) {
    // Where standard error is gone too there is nobody left to tell.
    let _ = writeln!(stderr(), "{}", harmless(&text.to_string(), "\n"));
}

/// A name that a stranger chose, on one line.
pub(crate) fn name(text: &str) -> String {
    harmless(text, "")
}

/// `text` with escapes in place of control characters and of marks that turn the direction of writing; `kept` stay as they are.
pub(crate) fn harmless(text: &str, kept: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        let steers = c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        match steers && !kept.contains(c) {
            true => {
                let _ = write!(out, "{}", c.escape_default());
            }
            false => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_steer_the_terminal() {
        assert_eq!(name("a\u{1b}[2Jb\n\u{9b}1m\u{7f}\u{202e}é"), "a\\u{1b}[2Jb\\n\\u{9b}1m\\u{7f}\\u{202e}é");
        assert_eq!(harmless("two\nlines\r", "\n"), "two\nlines\\r");
    }
}
