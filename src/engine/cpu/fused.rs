//! Fused attention: one pass over the cache, block by block, with a softmax that is corrected as its maximum grows.
//!
//! A task is up to 1024 tokens of one segment and one KV head; all query rows that share the head take part in each unpacked
//! block. With m the maximum so far, a block adds w = exp(x - m) to the sum l and w v to the accumulator, which shrink by
//! exp(m - m') when the maximum grows (FlashAttention, arXiv 2205.14135). Tasks are cut and merged in a fixed order, so the
//! result does not depend on the threads. Values whose weight is below 1e-6 of the sum so far are skipped (sparse V): of T tokens
//! that moves the output by at most 1e-6 T times the greatest distance between two values. No score outlives its block. Sums of 4-bit
//! values are formed in integers where the machine has a form for it, with weights of 15 bits (`simd/weighted.rs`).

use super::attend::{Hidden, QueryMask};
use super::blocks::{StoredSide, Tile, TileRows};
use super::domain::{Domain, Ready};
use super::paths::{self, Path, note};
use super::simd;
use super::simd::greater;
use super::workers;
use crate::engine::attention::{Rules, Segment, Sizes, check};
use crate::error::Result;
use crate::tensor::Tensor;
use rayon::prelude::*;
use std::cell::RefCell;
use std::cmp::Ordering;

/// Tokens of a task.
const TASK: usize = 1024;
/// Tokens of a block: its tile stays in the first-level cache.
const TOKENS_PER_TILE: usize = 64;
/// Query rows of a KV head that go together.
const ROWS: usize = 64;
/// Weights below this part of the sum so far add nothing.
const SPARSE: f32 = 1e-6;

/// A segment in the driver's terms.
struct SegmentSides {
    /// Index and position of the first token, and the number of tokens.
    first: usize,
    start: usize,
    len: usize,
    keys: StoredSide,
    values: StoredSide,
    /// Index into `domains` of the key side (rotated queries) and of the value side (accumulators).
    domains: [usize; 2],
}

/// Tokens `from..to` of a part, for one KV head.
struct Task {
    head: usize,
    part: usize,
    from: usize,
    to: usize,
}

#[derive(Default)]
struct SpanScratch {
    tile: Tile,
    scores: Vec<f32>,
    picks: Vec<u32>,
    /// Query rows that give a token weight.
    users: Vec<u32>,
}

thread_local! {
    static WORK: RefCell<SpanScratch> = RefCell::default();
}

/// Attention of queries [B, Hq, L, D] over all segments: [B, Hq, L, Dv] in the dtype of the queries.
pub(super) fn attend(
    segments: &[Segment<Tensor>],
    queries: &Tensor,
    rules: &Rules<Tensor>,
) -> Result<Tensor> {
    let sizes = check(segments, queries.shape(), rules)?;
    let dtype = queries.float().ok_or_else(|| queries.wrong_dtype("queries", "F32, F16 or BF16"))?;
    let Sizes { batch, heads, group, queries: l, value_dim, .. } = sizes;
    let (mut parts, mut domains, mut first) = (Vec::<SegmentSides>::new(), [vec![], vec![]], 0);
    for s in segments {
        let (keys, values) = (StoredSide::new(&s.keys)?, StoredSide::new(&s.values)?);
        let mut at = [0, 0];
        for (i, side) in [&keys, &values].into_iter().enumerate() {
            let known = parts.iter().find(|p| side.shares([&p.keys, &p.values][i]));
            at[i] = known.map_or(domains[i].len(), |p| p.domains[i]);
            if known.is_none() {
                domains[i].push(side.domain()?);
            }
        }
        let len = s.keys.len();
        parts.push(SegmentSides { first, start: s.start, len, keys, values, domains: at });
        first += len;
    }
    let (hidden, q) = (Hidden::new(segments, rules, sizes)?, queries.to_f32()?);
    let mut out = vec![0f32; batch * heads * group * l * value_dim];
    let step = (ROWS / group).clamp(1, l.max(1));
    workers::run(|| {
        for first in (0..l).step_by(step) {
            let n = step.min(l - first);
            let run = QuerySpan {
                sizes,
                hidden: &hidden,
                parts: &parts,
                domains: &domains,
                first,
                n,
                exact: rules.exact,
            };
            run.attend(&q, &mut out);
        }
    })?;
    Tensor::from_f32(dtype, &[batch, heads * group, l, value_dim], out)
}

/// Weights of tokens times the scales of their values.
#[inline(always)]
fn scale_weights(weights: &mut [f32], factors: &[f32], sparse: bool) {
    let pairs = weights.iter_mut().zip(factors);
    if sparse {
        // A weight of exact zero hides what is in the row, NaN included.
        pairs.for_each(|(x, f)| *x = if *x == 0.0 { 0.0 } else { *x * f });
    } else {
        pairs.for_each(|(x, f)| *x *= f);
    }
}

/// The softmax of each query row so far: the greatest logit, the sum of the exponentials, and the values weighted by them, in rows of
/// `dim` channels.
struct Running<'a> {
    tops: &'a mut [f32],
    sums: &'a mut [f32],
    acc: &'a mut [f32],
    dim: usize,
}

impl Running<'_> {
    /// Makes weights of the logits `x` of a block, the greatest of which is `top`, and says whether some of them are zero.
    #[inline(always)]
    fn weigh(&mut self, r: usize, top: f32, x: &mut [f32]) -> bool {
        let top = greater(self.tops[r], top);
        if top == f32::NEG_INFINITY {
            note(Path::NothingSeen);
            x.fill(0.0);
            return true;
        }
        if top != self.tops[r] {
            let shrink = (self.tops[r] - top).exp();
            self.sums[r] *= shrink;
            self.acc[r * self.dim..][..self.dim].iter_mut().for_each(|a| *a *= shrink);
            self.tops[r] = top;
        }
        let (sum, smallest) = simd::exponentials(x, top);
        self.sums[r] += sum;
        let least = SPARSE * self.sums[r];
        // A NaN among the weights counts as below, so that it is looked at.
        let some_below = !matches!(smallest.partial_cmp(&least), Some(Ordering::Greater));
        if some_below {
            x.iter_mut().for_each(|x| *x = if *x < least { 0.0 } else { *x });
        }
        some_below
    }

    /// Rows of values that are not finite are added only where their weight is not zero, and become zeros in the tile: in a product
    /// of whole tiles a NaN would reach the rows that do not see it too. `users` counts the query rows that use each token.
    fn take_out_rows_not_finite(&mut self, scores: &[f32], block: usize, users: &[u32], tile: &mut Tile) {
        let (rows, dim) = (self.tops.len(), self.dim);
        for (k, &users) in users.iter().enumerate() {
            let row = &mut tile.rows[k * dim..][..dim];
            if users < rows as u32 && !row.iter().all(|x| x.is_finite()) {
                note(Path::RowNotFinite);
                for r in (0..rows).filter(|r| scores[r * block + k] != 0.0) {
                    let weight = scores[r * block + k];
                    self.acc[r * dim..][..dim].iter_mut().zip(&*row).for_each(|(a, v)| *a += weight * v);
                }
                row.fill(0.0);
            }
        }
    }
}

/// Query tokens `first..first + n`; the rows of a KV head are its query heads times these.
struct QuerySpan<'a> {
    sizes: Sizes,
    hidden: &'a Hidden<'a>,
    parts: &'a [SegmentSides],
    domains: &'a [Vec<Domain>; 2],
    first: usize,
    n: usize,
    exact: bool,
}

impl QuerySpan<'_> {
    fn attend(&self, q: &[f32], out: &mut [f32]) {
        let Sizes { batch, heads, group, queries: l, key_dim, value_dim, .. } = self.sizes;
        let (rows, dim) = (group * self.n, value_dim.next_multiple_of(8));
        if rows == 0 || batch == 0 || value_dim == 0 {
            return;
        }
        let enter = |head: usize| {
            let mut mine = Vec::with_capacity(rows * key_dim);
            for g in 0..group {
                let at = ((head * group + g) * l + self.first) * key_dim;
                mine.extend_from_slice(&q[at..at + self.n * key_dim]);
            }
            let ready = self.domains[0].iter().map(|d| d.enter(head, &mine, key_dim, self.exact));
            let ready = ready.collect::<Vec<Ready>>();
            paths::flush();
            ready
        };
        let ready: Vec<Vec<Ready>> = (0..batch * heads).into_par_iter().map(enter).collect();
        let rules: Vec<Vec<QueryMask>> = (0..batch * heads).map(|head| self.rules(head)).collect();
        let tasks: Vec<Vec<Task>> = rules.iter().enumerate().map(|(h, r)| self.tasks(h, r)).collect();
        let flat: Vec<&Task> = tasks.iter().flatten().collect();
        let size = rows * (dim + 2);
        // Zeroed by the allocator, so that each part is first touched by the thread that fills it.
        let mut partials = bytemuck::zeroed_vec::<f32>(flat.len() * size);
        partials.par_chunks_mut(size).zip(&flat).for_each(|(partial, task)| {
            WORK.with_borrow_mut(|work| {
                self.task(
                    task,
                    &ready[task.head][self.parts[task.part].domains[0]],
                    &rules[task.head],
                    work,
                    partial,
                )
            });
            paths::flush();
        });
        let mut at = 0;
        let mut merged = vec![];
        for (head, tasks) in tasks.iter().enumerate() {
            merged.push((head, tasks, &partials[at * size..][..tasks.len() * size]));
            at += tasks.len();
        }
        out.par_chunks_mut(group * l * value_dim).zip(&merged).for_each(|(out, (head, tasks, partials))| {
            self.merge(*head, tasks, &rules[*head], partials, out)
        });
    }

    fn rules(&self, head: usize) -> Vec<QueryMask<'_>> {
        let Sizes { heads, group, .. } = self.sizes;
        let row = |r: usize| {
            self.hidden.row(head / heads, head % heads * group + r / self.n, self.first + r % self.n)
        };
        (0..group * self.n).map(row).collect()
    }

    /// The tasks of a KV head that hold a token which one of its queries may see.
    fn tasks(&self, head: usize, rules: &[QueryMask]) -> Vec<Task> {
        let mut tasks = vec![];
        for (i, part) in self.parts.iter().enumerate() {
            for from in (0..part.len).step_by(TASK) {
                let to = (from + TASK).min(part.len);
                let seen =
                    |row: &QueryMask| row.span.start < part.start + to && part.start + from < row.span.end;
                if rules.iter().any(seen) {
                    tasks.push(Task { head, part: i, from, to });
                }
            }
        }
        tasks
    }

    /// Whether sums of values are formed in integers.
    fn in_integers(&self, values: &TileRows, block: usize) -> bool {
        let (has_form, short) = (values.in_integers(&[]).is_some(), block <= simd::MOST_SUMMED);
        if !self.exact && has_form && !short {
            note(Path::BlockTooLong);
        }
        !self.exact && has_form && short
    }

    /// Fills a partial: maxima of the rows, their sums, their accumulators.
    fn task(
        &self,
        task: &Task,
        ready: &Ready,
        rules: &[QueryMask],
        work: &mut SpanScratch,
        partial: &mut [f32],
    ) {
        let part = &self.parts[task.part];
        let (key_dim, value_dim) = (part.keys.dim, part.values.dim);
        let (rows, dim) = (rules.len(), value_dim.next_multiple_of(8));
        let (tops, partial) = partial.split_at_mut(rows);
        let (sums, acc) = partial.split_at_mut(rows);
        tops.fill(f32::NEG_INFINITY);
        let block = TOKENS_PER_TILE.max(part.keys.tile());
        let head = [task.head / self.sizes.heads, task.head % self.sizes.heads];
        let small = [0, 1].map(|i| self.domains[i][part.domains[i]].small.as_ref());
        let (keys, values) = (part.keys.rows(head, small[0]), part.values.rows(head, small[1]));
        let integers = self.in_integers(&values, block);
        let SpanScratch { tile, scores, picks, users } = work;
        scores.resize(rows * block, 0.0);
        let mut running = Running { tops, sums, acc, dim };
        for from in (task.from..task.to).step_by(block) {
            let n = block.min(task.to - from);
            let seen =
                |row: &QueryMask| row.span.start < part.start + from + n && part.start + from < row.span.end;
            if !rules.iter().any(seen) {
                continue;
            }
            picks.clear();
            picks.extend(from as u32..(from + n) as u32);
            tile.fit(block, key_dim);
            keys.scores(ready, picks, [key_dim, block], tile, scores);
            let mut sparse = false;
            for (r, row) in rules.iter().enumerate() {
                let x = &mut scores[r * block..][..n];
                let top =
                    row.to_logits([part.first + from, part.start + from], &tile.factors, ready.bias[r], x);
                sparse |= running.weigh(r, top, x);
            }
            let live = if sparse { Self::live(scores, block, picks, users) } else { n };
            if live == 0 {
                note(Path::BlockSkipped);
                continue;
            }
            if live < n {
                note(Path::SomeTokensSkipped);
            }
            tile.fit(block, value_dim);
            if integers {
                values.factors(picks, tile);
            } else {
                values.decode(picks, value_dim, tile);
            }
            for x in scores.chunks_exact_mut(block) {
                scale_weights(&mut x[..live], &tile.factors, sparse);
            }
            if integers {
                let levels = values.in_integers(picks);
                if levels.is_some_and(|(levels, rows)| {
                    simd::weighted_levels(levels, rows, scores, block, running.acc)
                }) {
                    note(Path::IntegerSums);
                    continue;
                }
                note(Path::WeightsNotFinite);
                values.decode(picks, value_dim, tile);
            }
            if sparse {
                running.take_out_rows_not_finite(scores, block, &users[..live], tile);
            }
            note(Path::FloatSums);
            let tile = simd::LaneBlock { rows: &tile.rows[..], width: dim, n: live, stride: block };
            simd::accumulate(&scores[..rows * block], tile, running.acc);
        }
    }

    /// Counts the query rows that use each token, and moves the tokens that some row uses to the front; their number.
    fn live(scores: &mut [f32], block: usize, picks: &mut Vec<u32>, users: &mut Vec<u32>) -> usize {
        let (n, from) = (picks.len(), picks[0]);
        users.clear();
        users.resize(n, 0);
        for x in scores.chunks_exact(block) {
            users.iter_mut().zip(x).for_each(|(users, x)| *users += u32::from(*x != 0.0));
        }
        let live = users.iter().filter(|&&u| u > 0).count();
        if 0 < live && live < n {
            picks.retain(|&pick| users[(pick - from) as usize] > 0);
            for x in scores.chunks_exact_mut(block) {
                (0..live).for_each(|k| x[k] = x[(picks[k] - from) as usize]);
            }
            users.retain(|&u| u > 0);
        }
        live
    }

    /// Puts the partials of a KV head together, in the order of the tasks.
    fn merge(&self, head: usize, tasks: &[Task], rules: &[QueryMask], partials: &[f32], out: &mut [f32]) {
        let Sizes { queries: l, value_dim, .. } = self.sizes;
        let (rows, dim) = (rules.len(), value_dim.next_multiple_of(8));
        let size = rows * (dim + 2);
        let (mut sum, mut left) = (vec![0f32; dim], vec![0f32; value_dim]);
        for (r, row) in rules.iter().enumerate() {
            let out = &mut out[(r / self.n * l + self.first + r % self.n) * value_dim..][..value_dim];
            let top = partials.chunks_exact(size).fold(row.sink, |top, p| greater(top, p[r]));
            if top == f32::NEG_INFINITY {
                continue;
            }
            let share = |p: &[f32]| (p[r] - top).exp();
            let total: f32 = partials.chunks_exact(size).map(|p| share(p) * p[rows + r]).sum();
            let inverse = 1.0 / (total + (row.sink - top).exp());
            for (i, domain) in self.domains[1].iter().enumerate() {
                let mut weights = 0.0;
                sum.fill(0.0);
                for (task, p) in tasks.iter().zip(partials.chunks_exact(size)) {
                    if self.parts[task.part].domains[1] == i && p[r] != f32::NEG_INFINITY {
                        let share = share(p) * inverse;
                        weights += share * p[rows + r];
                        let acc = &p[2 * rows + r * dim..][..dim];
                        sum.iter_mut().zip(acc).for_each(|(s, a)| *s += share * a);
                    }
                }
                domain.leave(head, &mut sum[..value_dim], weights, &mut left);
                out.iter_mut().zip(&left).for_each(|(o, s)| *o += s);
            }
        }
    }
}
