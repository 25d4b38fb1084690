//! What people see of an answer: lines and tables that fit the terminal, and the same answer as JSON for programs.
//!
//! A terminal has its own width; elsewhere `COLUMNS` is one, and without it nothing is broken, so that a pipe finds whole lines.
//! Nothing is coloured.

use super::say::{complain, say};
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, LineStyle, Width};
use serde::Serialize;
use std::fmt::Display;

/// Blanks between columns.
const GAP: usize = 2;

/// What a command has found out.
pub trait Answer: Serialize {
    /// Shows it to people.
    fn show(&self, page: &mut Page);
}

/// How people and programs want their answers.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Wishes {
    /// Print as JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// Show seeds, whole recipes and every layer by itself
    #[arg(short, long, global = true)]
    pub verbose: bool,
}

/// An answer of any command.
pub trait AnyAnswer {
    /// The screen of a width, without a line break at its end.
    fn screen(&self, width: Option<usize>, verbose: bool) -> String;
    /// The same for programs.
    fn json(&self) -> serde_json::Result<String>;
}

impl<A: Answer> AnyAnswer for A {
    fn screen(&self, width: Option<usize>, verbose: bool) -> String {
        let mut page = Page { width, verbose, text: String::new() };
        self.show(&mut page);
        page.text.truncate(page.text.trim_end_matches('\n').len());
        page.text
    }

    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }
}

/// Prints an answer as it is wished for.
pub fn print(wishes: Wishes, answer: &dyn AnyAnswer) {
    match wishes.json {
        true => match answer.json() {
            Ok(text) => say!("{text}"),
            Err(error) => complain!("turbomoq: {error}"),
        },
        false => say!("{}", answer.screen(width(), wishes.verbose)),
    }
}

/// Columns of the terminal, or those that `COLUMNS` asks for.
pub fn width() -> Option<usize> {
    let asked = || std::env::var("COLUMNS").ok()?.parse().ok();
    comfy_table::Table::new().width().map(usize::from).or_else(asked).filter(|columns| *columns > 0)
}

/// A screen that is being written.
pub struct Page {
    width: Option<usize>,
    /// Whether details are wanted that most people do not need.
    pub verbose: bool,
    text: String,
}

impl Page {
    /// A line, broken between words where it is too long; what follows is indented like its beginning.
    pub fn line(&mut self, text: impl Display) {
        for line in text.to_string().split('\n') {
            self.wrap(line);
        }
    }

    fn wrap(&mut self, line: &str) {
        let indent = " ".repeat(line.len() - line.trim_start().len());
        let room = self.width.map_or(usize::MAX, |width| width.saturating_sub(indent.len()));
        for part in broken(line, room) {
            self.text += &format!("{indent}{part}\n");
        }
    }

    /// A line as it is.
    pub fn as_is(&mut self, text: impl Display) {
        self.text += &format!("{text}\n");
    }

    /// Columns, where there is a limit.
    pub fn width(&self) -> Option<usize> {
        self.width
    }

    /// An empty line.
    pub fn gap(&mut self) {
        self.text.push('\n');
    }

    /// A table.
    pub fn table(&mut self, table: &Table) {
        self.text += &table.text(self.width);
        self.text.push('\n');
    }
}

/// A table with a rule below its head and no other.
pub struct Table {
    head: Vec<String>,
    /// Whether the column is of numbers, which stand to the right.
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns; `>` before a name is for numbers.
    pub fn new<S: AsRef<str>>(head: &[S]) -> Table {
        let names = head.iter().map(|name| name.as_ref());
        Table {
            head: names.clone().map(|name| name.trim_start_matches('>').to_string()).collect(),
            right: names.map(|name| name.starts_with('>')).collect(),
            rows: vec![],
        }
    }

    /// Adds a row.
    pub fn row<S: Display>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(|cell| cell.to_string()).collect());
    }

    fn text(&self, width: Option<usize>) -> String {
        let columns = self.head.len();
        let least: Vec<usize> = (0..columns).map(|i| self.least_width(i)).collect();
        if width.is_some_and(|width| least.iter().sum::<usize>() + GAP * (columns - 1) > width) {
            return self.records(width.unwrap_or(usize::MAX));
        }
        let rule = LineStyle::none().fill('─');
        let mut table = comfy_table::Table::new();
        table.load_style(NOTHING.header_separator(rule)).set_header(&self.head).add_rows(&self.rows);
        if let Some(width) = width {
            table.set_content_arrangement(ContentArrangement::Dynamic);
            table.set_width(u16::try_from(width).unwrap_or(u16::MAX));
        } else {
            table.set_content_arrangement(ContentArrangement::Disabled);
        }
        for (i, (column, right)) in table.column_iter_mut().zip(&self.right).enumerate() {
            let gap = if i + 1 == columns { 0 } else { GAP };
            column.set_padding((0, gap as u16));
            column.set_cell_alignment(if *right { CellAlignment::Right } else { CellAlignment::Left });
            let least = u16::try_from(least[i] + gap).unwrap_or(u16::MAX);
            column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(least)));
        }
        table.trim_fmt()
    }

    /// Columns below which a number or a word would break.
    fn least_width(&self, column: usize) -> usize {
        let words = |text: &str| text.split_whitespace().map(|w| w.chars().count()).max().unwrap_or(0);
        let cell = |row: &Vec<String>| match (row.get(column), self.right[column]) {
            (Some(text), true) => text.chars().count(),
            (Some(text), false) => words(text),
            (None, _) => 0,
        };
        self.rows.iter().map(cell).max().unwrap_or(0).max(words(&self.head[column]))
    }

    /// One row after the other, a line for each cell: for windows in which the columns have no room.
    fn records(&self, width: usize) -> String {
        let wide = self.head.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        let line = |(name, cell): (&String, &String)| {
            let indent = "\n".to_string() + &" ".repeat(wide + GAP);
            let cell = broken(cell, width.saturating_sub(wide + GAP)).join(&indent);
            format!("{name:<wide$}{}{cell}", " ".repeat(GAP))
        };
        let record = |row: &Vec<String>| -> String {
            let cells = self.head.iter().zip(row).filter(|(_, cell)| !cell.is_empty());
            cells.map(line).collect::<Vec<_>>().join("\n")
        };
        self.rows.iter().map(record).collect::<Vec<_>>().join("\n\n")
    }
}

/// The text in lines of at most so many columns, broken between words where that is possible.
fn broken(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = vec![];
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_string()),
        }
    }
    lines
}

/// Bytes in units of 2^20, for a column whose head says MiB.
pub fn mib(bytes: impl TryInto<u64>) -> String {
    format!("{:.2}", bytes.try_into().unwrap_or(u64::MAX) as f64 / 1048576.0)
}

/// A whole number with commas between thousands.
pub fn commas(n: impl TryInto<u64>) -> String {
    indicatif::HumanCount(n.try_into().unwrap_or(u64::MAX)).to_string()
}

/// Runs of equal things in a list: the first and the last index of each.
pub fn runs<T>(list: &[T], equal: impl Fn(&T, &T) -> bool) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = vec![];
    for (i, item) in list.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if equal(&list[run.0], item) => run.1 = i,
            _ => runs.push((i, i)),
        }
    }
    runs
}

/// The name of a run of layers: `3`, or `0-29`.
pub fn span(first: &str, last: &str) -> String {
    if first == last { first.into() } else { format!("{first}-{last}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    struct Sample;

    impl Answer for Sample {
        fn show(&self, page: &mut Page) {
            page.line("one two three four five six\n  indented words that are broken too");
            page.gap();
            let mut table = Table::new(&["name", ">bytes"]);
            table.row(["a", "1"]);
            table.row(["a longer name of several words", "23"]);
            page.table(&table);
        }
    }

    #[test]
    fn a_screen_fits_its_width_and_a_pipe_gets_whole_lines() {
        let wide = Sample.screen(None, false);
        assert!(
            wide.contains("one two three four five six\n  indented words that are broken too\n\nname"),
            "{wide}"
        );
        assert_eq!(wide.matches('─').count(), wide.lines().last().unwrap().chars().count(), "{wide}");
        for width in [80, 40, 20] {
            let text = Sample.screen(Some(width), false);
            assert!(text.lines().all(|line| line.chars().count() <= width), "{width}:\n{text}");
            assert!(text.lines().all(|line| line.trim_end() == line), "{width}:\n{text}");
            assert!(width > 20 || text.contains("\n  that are broken\n"), "{text}");
        }
    }

    #[test]
    fn a_table_without_room_becomes_records() {
        let mut table = Table::new(&["recipe", ">tokens", ">ratio"]);
        table.row(["best@4,window=0", "32,768", "3.83"]);
        table.row(["best@3", "", "4.9"]);
        let expected = "recipe  best@4,window=0\ntokens  32,768\nratio   3.83\n\nrecipe  best@3\nratio   4.9";
        assert_eq!(table.text(Some(24)), expected);
        assert!(table.text(Some(40)).contains('─'));
    }

    #[test]
    fn runs_are_named_by_their_ends() {
        let runs = runs(&[1, 1, 2, 1, 1, 1], |a, b| a == b);
        assert_eq!(runs, [(0, 1), (2, 2), (3, 5)]);
        assert_eq!([span("3", "5"), span("2", "2")], ["3-5", "2"]);
        assert_eq!((mib(1572864u64), commas(32768u64)), ("1.50".into(), "32,768".into()));
    }
}
