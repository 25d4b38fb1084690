//! Runs of cases: every answer is held to the oracle, and a case that fails is made small before it is shown.

use crate::cases::{Call, Case, On};
use crate::levels::at;
use crate::oracle::compare;
use crate::subject::{Subject, restore};
use rayon::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use turbomoq::Cpu;
use turbomoq::Rules;
use turbomoq::cache::{LayerCache, LayerShape, OBSERVE_EVERY};
use turbomoq::internals::engine::cpu::probe;
use turbomoq::policy::TierPolicy;
use turbomoq::{Recipe, Tensor};

/// What cases have seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    pub cases: usize,
    pub attended: usize,
    /// Greatest error in units of its bound.
    pub worst: f64,
    /// Sum of the parts of channels whose bound is sharp, a call each.
    pub sharp: f64,
    /// Cases that have no form.
    pub without: usize,
}

impl Seen {
    pub fn and(self, other: Seen) -> Seen {
        Seen {
            cases: self.cases + other.cases,
            attended: self.attended + other.attended,
            worst: self.worst.max(other.worst),
            sharp: self.sharp + other.sharp,
            without: self.without + other.without,
        }
    }
}

fn empty(case: &Case) -> Option<Box<dyn Subject>> {
    let recipe: Recipe = case.recipe.parse().ok()?;
    let shape = LayerShape { key_dim: case.dims[0], value_dim: case.dims[1] };
    let cache = LayerCache::new(Cpu, &recipe, 3, shape).ok()?;
    let cache = match case.tiers {
        Some(tiers) => cache.with_tiers(&tiers.parse::<TierPolicy>().unwrap(), OBSERVE_EVERY).ok()?,
        None => cache,
    };
    match case.on {
        On::Cpu => Some(Box::new(cache)),
        #[cfg(feature = "mlx")]
        On::Mlx => {
            let mlx = turbomoq::Mlx::new();
            let cache = LayerCache::new(mlx, &recipe, 3, shape).ok()?;
            Some(match case.tiers {
                Some(tiers) => Box::new(cache.with_tiers(&tiers.parse().unwrap(), OBSERVE_EVERY).ok()?),
                None => Box::new(cache),
            })
        }
        #[cfg(not(feature = "mlx"))]
        On::Mlx => None,
    }
}

/// A case with its cache, on its way through the calls.
struct Run<'a> {
    case: &'a Case,
    cache: Box<dyn Subject>,
    on: On,
    appended: usize,
    seen: Seen,
}

/// Runs a case.
///
/// # Errors
/// What went wrong, in words.
pub fn run(case: &Case) -> Result<Seen, String> {
    let Some(cache) = empty(case) else { return Ok(Seen { without: 1, ..Seen::default() }) };
    let mut run = Run { case, cache, on: case.on, appended: 0, seen: Seen { cases: 1, ..Seen::default() } };
    let mut held = None;
    for (i, call) in case.calls.iter().enumerate() {
        let what = |e: String| format!("call {i}, {call:?}: {e}");
        if let Call::Attend(l, seed) = *call {
            let l = l.min(run.cache.offset());
            if l == 0 {
                continue;
            }
            let held = held.get_or_insert_with(|| run.cache.held());
            let (q, rules) = case.question(l, seed, held.tokens);
            let got = run.cache.attend(&q, &rules).map_err(|e| what(e.to_string()))?;
            run.note(&got, &held.attend(&q, &rules)).map_err(what)?;
        } else {
            held = None;
            run.call(call).map_err(what)?;
        }
    }
    Ok(run.seen)
}

impl Run<'_> {
    fn note(&mut self, got: &Tensor, want: &[crate::oracle::Want]) -> Result<(), String> {
        let dtype = self.case.dtype;
        if got.float() != Some(dtype) {
            return Err(format!("{} out", got.dtype()));
        }
        let (worst, sharp) = compare(&got.to_f32().unwrap(), want, dtype)?;
        self.seen.attended += 1;
        self.seen.worst = self.seen.worst.max(worst);
        self.seen.sharp += sharp;
        Ok(())
    }

    fn call(&mut self, call: &Call) -> Result<(), String> {
        let words = |e: turbomoq::Error| e.to_string();
        let before = self.cache.offset();
        match *call {
            Call::Append(n) => {
                let (k, v) = self.case.rows(self.appended, n);
                self.appended += 1;
                self.cache.append(&k, &v).map_err(words)?;
                self.newest_rows_are(&k, &v)?;
                self.offset_is(before + n)
            }
            Call::Step(l, seed) => self.step(l, seed),
            Call::Trim(n) => {
                let dropped = self.cache.trim(n).map_err(words)?;
                if dropped != n.min(before) {
                    return Err(format!("{dropped} tokens dropped"));
                }
                self.offset_is(before - dropped)
            }
            Call::Fork => {
                // What the other one does must not be seen in this one.
                let mut other = self.cache.fork();
                let (k, v) = self.case.rows(1000 + self.appended, 9);
                other.trim(3).map_err(words)?;
                other.append(&k, &v).map_err(words)?;
                if self.appended % 2 == 0 {
                    self.cache = other;
                }
                Ok(())
            }
            Call::Reload => self.reload(self.on),
            Call::Move => self.reload(match self.on {
                On::Cpu if cfg!(feature = "mlx") && self.case.on == On::Mlx => On::Mlx,
                _ => On::Cpu,
            }),
            Call::Attend(..) => Ok(()),
        }
    }

    fn offset_is(&self, want: usize) -> Result<(), String> {
        let got = self.cache.offset();
        if got == want { Ok(()) } else { Err(format!("offset {got}, not {want}")) }
    }

    /// The newest exact rows are those that were given.
    fn newest_rows_are(&self, keys: &Tensor, values: &Tensor) -> Result<(), String> {
        let Some((start, k, v)) = self.cache.newest() else { return Ok(()) };
        let n = (self.cache.offset() - start).min(keys.shape()[2]);
        for (name, held, given) in [("keys", k, keys), ("values", v, values)] {
            let last = |t: &Tensor| t.slice(2, t.shape()[2] - n, t.shape()[2]).unwrap().to_f32().unwrap();
            let same = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
            if held.float() == given.float() && !last(&held).iter().zip(&last(given)).all(same) {
                return Err(format!("the newest exact {name} are not those given"));
            }
        }
        Ok(())
    }

    /// Appends and attends at once; the oracle looks at a fork that does the same token by token.
    fn step(&mut self, l: usize, seed: u64) -> Result<(), String> {
        let words = |e: turbomoq::Error| e.to_string();
        let before = self.cache.offset();
        let (k, v) = self.case.rows(self.appended, l);
        self.appended += 1;
        let (q, mut rules) = self.case.question(l, seed, before + l);
        // Token by token, a query cannot look ahead.
        rules.causal = true;
        let mut slow = self.cache.fork();
        let mut want = vec![];
        for i in 0..l {
            let cut = |t: &Tensor| t.slice(2, i, i + 1).unwrap();
            let mask = rules.mask.as_ref().map(|m| cut(m).slice(3, 0, before + i + 1).unwrap());
            let rules = Rules { mask, ..rules.clone() };
            slow.step(&cut(&q), &cut(&k), &cut(&v), &rules).map_err(words)?;
            want.push(slow.held().attend(&cut(&q), &rules));
        }
        let got = self.cache.step(&q, &k, &v, &rules).map_err(words)?;
        // [L][B, Hq, Dv] to [B, Hq, L, Dv].
        let dv = self.case.dims[1];
        let rows = self.case.batch * self.case.heads * self.case.group;
        let in_order = (0..rows).flat_map(|r| want.iter().flat_map(move |w| &w[r * dv..][..dv])).copied();
        self.note(&got, &in_order.collect::<Vec<_>>())?;
        self.offset_is(before + l)
    }

    fn reload(&mut self, on: On) -> Result<(), String> {
        if self.cache.offset() == 0 {
            return Ok(());
        }
        let state = self.cache.state().map_err(|e| e.to_string())?;
        let before = self.cache.offset();
        let restored = match on {
            On::Cpu => restore(&Cpu, &state),
            #[cfg(feature = "mlx")]
            On::Mlx => restore(&turbomoq::Mlx::new(), &state),
            #[cfg(not(feature = "mlx"))]
            On::Mlx => restore(&Cpu, &state),
        };
        self.cache = restored.map_err(|e| e.to_string())?;
        self.on = on;
        self.offset_is(before)
    }
}

/// Runs a case; a panic is a failure like another.
fn tried(case: &Case) -> Result<Seen, String> {
    catch_unwind(AssertUnwindSafe(|| run(case))).unwrap_or_else(|panic| {
        let text =
            panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(format!("panic: {}", text.unwrap_or("without words")))
    })
}

/// Runs a case, and panics with a smaller one that fails too.
fn held_to_the_oracle(case: Case, level: &str) -> Seen {
    let mut error = match tried(&case) {
        Ok(seen) => return seen,
        Err(error) => error,
    };
    let (seed, mut case, mut left) = (case.seed, case, 300);
    while let Some((smaller, e)) = case.smaller().into_iter().find_map(|c| {
        left = i32::max(left - 1, 0);
        (left > 0).then(|| tried(&c).err().map(|e| (c, e)))?
    }) {
        (case, error) = (smaller, e);
    }
    panic!("TURBOMOQ_DIFFERENTIAL_SEED={seed} fails at {level}: {error}\nsmallest: {case:#?}");
}

/// Cases from a seed on, on the CPU engine at every level.
pub fn on_cpu(seed: u64, cases: u64) -> Seen {
    let levels = probe::levels();
    let total = Mutex::new(Seen::default());
    for (level, name) in levels.iter().enumerate() {
        let mine =
            (seed..seed + cases).into_par_iter().filter(|s| (s / 64 + s) as usize % levels.len() == level);
        at(level, || {
            mine.for_each(|seed| {
                let seen = held_to_the_oracle(Case::draw(seed, On::Cpu), name);
                let mut total = total.lock().unwrap();
                *total = total.and(seen);
            });
        });
    }
    total.into_inner().unwrap()
}

/// Cases from a seed on, on MLX and, after a move, on the CPU engine.
#[cfg(feature = "mlx")]
pub fn on_mlx(seed: u64, cases: u64) -> Seen {
    (seed..seed + cases)
        .fold(Seen::default(), |all, seed| all.and(held_to_the_oracle(Case::draw(seed, On::Mlx), "mlx")))
}
