//! Which engine a piece of work goes to: from a table of times that both engines took, measured on the machine.
//!
//! The ratio of the two times is interpolated in the logarithm of the rows, on the measured head dim that is nearest in ratio;
//! beyond the measured rows the last ratio holds. Work goes to MLX where it took less time there. Pure: no clock, no array.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// What is done with rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Work {
    /// Packing and unpacking vectors.
    Encode,
    /// One step of attention over packed tokens of a head.
    Attend,
}

/// Times of one piece of work on both engines.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// The work.
    pub work: Work,
    /// Channels of a vector.
    pub head_dim: usize,
    /// Vectors, over all sequences and KV heads.
    pub rows: usize,
    /// Milliseconds of the CPU engine.
    pub cpu_ms: f64,
    /// Milliseconds of MLX.
    pub mlx_ms: f64,
}

/// A table of times.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Crossover {
    /// The device that MLX ran on.
    pub device: String,
    /// What was measured.
    pub points: Vec<Measured>,
}

impl Crossover {
    /// What `turbomoq tune` gave on a Linux machine of two cores, where MLX has its CPU device only. No GPU was measured.
    ///
    /// # Errors
    /// None: the table is part of the program and read in a test.
    pub fn shipped() -> Result<Crossover> {
        Crossover::from_json(include_str!("crossover.json"))
    }

    /// A table from its JSON text.
    ///
    /// # Errors
    /// [`Error::Parse`] if the text is none, or a time or a size is not positive.
    pub fn from_json(text: &str) -> Result<Crossover> {
        let fail = |reason: String| Error::Parse { what: "crossover table", text: text.into(), reason };
        let table: Crossover = serde_json::from_str(text).map_err(|e| fail(e.to_string()))?;
        let positive = |p: &Measured| {
            let times = [p.cpu_ms, p.mlx_ms].iter().all(|t| t.is_finite() && *t > 0.0);
            times && p.head_dim > 0 && p.rows > 0
        };
        match table.points.iter().find(|p| !positive(p)) {
            Some(bad) => Err(fail(format!("{bad:?}: times and sizes are positive"))),
            None => Ok(table),
        }
    }

    /// Whether MLX is expected to take less time. A table without such work says no.
    pub fn prefers_mlx(&self, work: Work, head_dim: usize, rows: usize) -> bool {
        let far = |dim: usize| (dim as f64 / head_dim.max(1) as f64).ln().abs();
        let of_work = || self.points.iter().filter(|p| p.work == work);
        let Some(nearest) = of_work().map(|p| p.head_dim).min_by(|a, b| far(*a).total_cmp(&far(*b))) else {
            return false;
        };
        let mut curve: Vec<(f64, f64)> = of_work()
            .filter(|p| p.head_dim == nearest)
            .map(|p| ((p.rows as f64).ln(), (p.cpu_ms / p.mlx_ms).ln()))
            .collect();
        curve.sort_by(|a, b| a.0.total_cmp(&b.0));
        let x = (rows.max(1) as f64).ln();
        let after = curve.partition_point(|p| p.0 <= x);
        let y = match (after.checked_sub(1).map(|i| curve[i]), curve.get(after)) {
            (Some(a), Some(b)) => a.1 + (b.1 - a.1) * (x - a.0) / (b.0 - a.0),
            (Some(end), None) => end.1,
            (None, Some(end)) => end.1,
            (None, None) => 0.0,
        };
        y > 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Crossover {
        let point = |work, head_dim, rows, cpu_ms, mlx_ms| Measured { work, head_dim, rows, cpu_ms, mlx_ms };
        let points = vec![
            point(Work::Encode, 128, 10_000, 4.0, 1.0),
            point(Work::Encode, 128, 100, 1.0, 4.0),
            point(Work::Encode, 64, 100, 1.0, 2.0),
            point(Work::Attend, 128, 100, 1.0, 2.0),
        ];
        Crossover { device: "test".into(), points }
    }

    #[test]
    fn work_goes_where_it_takes_less_time() {
        let table = table();
        // The ratio goes from 1/4 to 4 between 100 and 10,000 rows: it is one at 1,000.
        for (rows, mlx) in
            [(1, false), (100, false), (990, false), (1010, true), (10_000, true), (1 << 30, true)]
        {
            assert_eq!(table.prefers_mlx(Work::Encode, 128, rows), mlx, "{rows} rows");
        }
        assert!(table.prefers_mlx(Work::Encode, 96, 1 << 20), "96 channels are nearer to 128");
        assert!(!table.prefers_mlx(Work::Encode, 80, 1 << 20), "80 channels are nearer to 64");
        assert!(!table.prefers_mlx(Work::Attend, 128, 1 << 20));
        assert!(!Crossover { points: vec![], ..table }.prefers_mlx(Work::Encode, 128, 1 << 20));
    }

    #[test]
    fn the_shipped_table_reads() {
        let table = Crossover::shipped().unwrap();
        assert_eq!(table.device, "cpu");
        for work in [Work::Encode, Work::Attend] {
            assert!(table.points.iter().any(|p| p.work == work));
            assert!(!table.prefers_mlx(work, 128, 1 << 14), "the CPU engine is the faster one on a CPU");
        }
    }

    #[test]
    fn tables_are_read_back_and_bad_ones_refused() {
        let text = serde_json::to_string(&table()).unwrap();
        assert_eq!(Crossover::from_json(&text).unwrap(), table());
        for (from, to) in
            [("4.0", "0.0"), ("4.0", "-1.0"), ("\"rows\":100", "\"rows\":0"), ("encode", "other"), ("{", "")]
        {
            let bad = text.replacen(from, to, 1);
            assert_ne!(bad, text);
            assert!(Crossover::from_json(&bad).is_err(), "{from} to {to}");
        }
    }
}
