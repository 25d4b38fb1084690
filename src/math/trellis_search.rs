//! Viterbi search for the codes of `trellis`.
//!
//! Window `p << b | j` is followed by `new << (L-b) | p`: the `2^b` windows that share the high bits `p` have the same successors, so the search
//! keeps one cost a group and step, `cost[i+1][p] = min over j of cost[i][(p << b | j) mod 2^(L-b)] + (y[i] - T[p << b | j])^2`. Decisions are not
//! kept: the walk back compares the `2^b` candidates of each step again and takes the least, the smallest `j` among equals.
//! Costs are u16 with saturating sums, and a common amount is taken off every few steps: every machine finds the same path.
//!
//! Tail-biting: a free search from `lead` coordinates before the seam to `lead` after it proposes the window at the seam, then a search over the
//! vector is held to start and end there. With `lead = 16 L / b` this adds 0.1 to 0.3 % to the least squared error over all windows at d = 128,
//! 0.2 to 1.5 % at d = 64. Short rings try all windows.

use pulp::{Arch, NullaryFnOnce};

use crate::math::trellis::{Trellis, to_units};

/// Costs are computed in blocks of this many groups; every supported trellis has a multiple of it.
const LANES: usize = 16;

/// Rings of fewer bits try every window at the seam: half of such a ring is one window, and the free search gains nothing from its laps.
const SHORT: usize = 64;

/// Steps between renormalisations. A step adds at most 2^14, so the best path stays below saturation.
const RENORM: usize = 4;

/// Buffers of a search, to be reused; they grow to the largest search seen.
#[derive(Clone, Debug, Default)]
pub struct SearchScratch {
    y: Vec<i16>,
    costs: Vec<u16>,
}

impl Trellis {
    /// Finds codes whose decoded values are close to `y` (unit variance expected; NaN counts as 0, the rest is held to +-4) and writes them
    /// to `words`, all of it: bits past `y.len() * b` become zero.
    ///
    /// # Panics
    /// If `words` is shorter than `self.words(y.len())`, or the ring of `y.len() * b` bits is shorter than one window.
    pub fn encode(&self, y: &[f32], words: &mut [u32], scratch: &mut SearchScratch) {
        Arch::new().dispatch(PathSearch { trellis: self, y, words, scratch, seam: None });
    }
}

/// A search as one function, which `pulp` compiles for each instruction set.
struct PathSearch<'a> {
    trellis: &'a Trellis,
    y: &'a [f32],
    words: &'a mut [u32],
    scratch: &'a mut SearchScratch,
    /// The last window, where it is known.
    seam: Option<usize>,
}

impl NullaryFnOnce for PathSearch<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        match (self.trellis.states_log2, self.trellis.bits) {
            (8, 1) => self.run::<256, 8, 1, false>(),
            (8, 2) => self.run::<256, 8, 2, false>(),
            (8, 3) => self.run::<256, 8, 3, true>(),
            (8, _) => self.run::<256, 8, 4, true>(),
            (_, 1) => self.run::<1024, 10, 1, false>(),
            (_, 2) => self.run::<1024, 10, 2, false>(),
            (_, 3) => self.run::<1024, 10, 3, true>(),
            _ => self.run::<1024, 10, 4, true>(),
        }
    }
}

impl PathSearch<'_> {
    #[inline(always)]
    fn run<const N: usize, const L: usize, const B: usize, const FINE: bool>(self) {
        let PathSearch { trellis, y, words, scratch, seam } = self;
        let (dim, groups, lead) = (y.len(), N >> B, 16 * L / B);
        assert!(words.len() >= trellis.words(dim), "{} words, {} needed", words.len(), trellis.words(dim));
        assert!(dim * B >= L, "a ring of {} bits, a window of {L}", dim * B);
        let branch: &[i16; N] = trellis.branch[..].try_into().expect("a table has 2^L levels");
        let fixed: &[i16; N] = trellis.fixed[..].try_into().expect("a table has 2^L levels");
        // The vector, then the neighbourhood of its seam.
        scratch.y.clear();
        scratch.y.extend(y.iter().map(|&v| to_units(v)));
        for k in 0..2 * lead {
            scratch.y.push(scratch.y[(lead * dim - lead + k) % dim]);
        }
        scratch.costs.resize((dim.max(2 * lead) + 1) * groups, 0);
        let (y, around) = scratch.y.split_at(dim);
        let costs = &mut scratch.costs[..];

        // No closures here: one that is not inlined would be compiled for the baseline instruction set.
        let seam = match seam {
            Some(window) => window,
            None if dim * B < SHORT => {
                let mut best = (u32::MAX, 0);
                for window in 0..N {
                    costs[..groups].fill(u16::MAX);
                    costs[place::<B>(window >> B)] = 0;
                    let off = forward::<N, B, FINE>(branch, &y[..dim - 1], costs);
                    let last = costs[(dim - 1) * groups + place::<B>(window % groups)];
                    best = best.min((
                        off + u32::from(last) + u32::from(distance::<FINE>(fixed[window], y[dim - 1])),
                        window,
                    ));
                }
                best.1
            }
            None => {
                costs[..groups].fill(0);
                forward::<N, B, FINE>(branch, around, costs);
                let last = &costs[2 * lead * groups..][..groups];
                let mut group = (0..groups).min_by_key(|&p| last[place::<B>(p)]).unwrap_or(0);
                let mut window = 0;
                for i in (lead - 1..2 * lead).rev() {
                    window = back::<N, B, FINE>(fixed, group, around[i], &costs[i * groups..][..groups]);
                    group = window % groups;
                }
                window
            }
        };

        costs[..groups].fill(u16::MAX);
        costs[place::<B>(seam >> B)] = 0;
        forward::<N, B, FINE>(branch, y, costs);
        words.fill(0);
        let mut window = seam;
        for i in (0..dim).rev() {
            if i + 1 < dim {
                window = back::<N, B, FINE>(fixed, window % groups, y[i], &costs[i * groups..][..groups]);
            }
            let (code, at) = ((window >> (L - B)) as u32, i * B);
            words[at / 32] |= code << (at % 32);
            if at % 32 + B > 32 {
                words[at / 32 + 1] |= code >> (32 - at % 32);
            }
        }
    }
}

/// From the costs in the first row of `costs` on, one row a coordinate; returns what was taken off.
#[inline(always)]
fn forward<const N: usize, const B: usize, const FINE: bool>(
    branch: &[i16; N],
    y: &[i16],
    costs: &mut [u16],
) -> u32 {
    let groups = N >> B;
    let mut off = 0;
    for (i, &y) in y.iter().enumerate() {
        let (from, to) = costs[i * groups..].split_at_mut(groups);
        let to = &mut to[..groups];
        step::<N, B, FINE>(branch, y, from, to);
        if i % RENORM == RENORM - 1 {
            let least = to.iter().fold(u16::MAX, |a, &c| a.min(c));
            to.iter_mut().for_each(|c| *c -= least);
            off += u32::from(least);
        }
    }
    off
}

/// One row of costs from the row before it. Rows are ordered by `place`, which makes the costs of groups with equal low bits `j`
/// runs of a block, so that reading them takes few shuffles; all else is element by element.
#[inline(always)]
fn step<const N: usize, const B: usize, const FINE: bool>(
    branch: &[i16; N],
    y: i16,
    from: &[u16],
    to: &mut [u16],
) {
    let groups = N >> B;
    let (run, sub) = (LANES >> B, groups >> B);
    // spread[j * wide..]: the costs of the groups with low bits j, repeated if they do not fill a block.
    let wide = if sub > LANES { sub } else { LANES };
    let mut spread = [0; N];
    for j in 0..1 << B {
        for k in (0..wide).step_by(run) {
            let block = k % sub / run * LANES;
            spread[j * wide + k..][..run].copy_from_slice(&from[block + j * run..][..run]);
        }
    }
    for at in (0..groups).step_by(LANES) {
        let mut best = [u16::MAX; LANES];
        for j in 0..1 << B {
            let cost = &spread[j * wide + at % wide..][..LANES];
            let levels = &branch[j * groups + at..][..LANES];
            for k in 0..LANES {
                best[k] = best[k].min(cost[k].saturating_add(distance::<FINE>(levels[k], y)));
            }
        }
        for k in 0..LANES {
            to[at + k] = best[((k % run) << B) | (k / run)];
        }
    }
}

/// Where a row keeps the cost of group `p`: inside a block, low bits before high bits.
#[inline(always)]
fn place<const B: usize>(p: usize) -> usize {
    let k = p % LANES;
    p - k + k % (1 << B) * (LANES >> B) + (k >> B)
}

/// The cheapest window with high bits `group`, paying `y`, from the row before it.
#[inline(always)]
fn back<const N: usize, const B: usize, const FINE: bool>(
    fixed: &[i16; N],
    group: usize,
    y: i16,
    from: &[u16],
) -> usize {
    let first = group << B;
    let near = place::<B>(first % (N >> B));
    let (levels, from) = (&fixed[first..][..1 << B], &from[near..][..LANES - (LANES >> B) + 1]);
    let mut best = u32::MAX;
    for j in 0..1 << B {
        let cost = from[j * (LANES >> B)].saturating_add(distance::<FINE>(levels[j], y));
        best = best.min(u32::from(cost) << B | j as u32);
    }
    first | (best as usize % (1 << B))
}

/// `(y - T)^2` in units of 2^-10, where `|y - T|` saturates at 4; FINE: 2^-12, at 2.
#[inline(always)]
fn distance<const FINE: bool>(level: i16, y: i16) -> u16 {
    let mut d = level.saturating_sub(y);
    if FINE {
        d = d.saturating_add(d);
    }
    ((i32::from(d) * i32::from(d)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::trellis::tests::{all, measure, normals};

    const DIM: usize = 128;

    /// Sums of twelve uniform integers: nearly normal, and the same on every machine.
    fn integers(count: usize, mut seed: u64) -> Vec<f32> {
        let mut next = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 48) as i32
        };
        (0..count).map(|_| ((0..12).map(|_| next()).sum::<i32>() - 6 * 65_535) as f32 / 65_536.0).collect()
    }

    fn codes(trellis: &Trellis, y: &[f32], seam: Option<usize>) -> Vec<u32> {
        let mut words = vec![!0; trellis.words(y.len())];
        let (w, scratch) = (&mut words[..], &mut SearchScratch::default());
        Arch::new().dispatch(PathSearch { trellis, y, words: w, scratch, seam });
        words
    }

    /// All 2^16 codes of 16 coordinates.
    #[test]
    fn best_of_all_codes_of_a_tiny_vector() {
        let t = Trellis::new(8, 1).unwrap();
        let (mut found, mut least) = (0.0, 0.0);
        for y in normals(24 * 16, 9).chunks_exact(16) {
            let error = |ring: usize| {
                let twice = ring | ring << 16;
                (0..16).map(|i| (y[i] - t.levels()[twice >> (i + 9) & 255]).powi(2)).sum::<f32>()
            };
            let best = (0..1 << 16).map(error).fold(f32::INFINITY, f32::min);
            let ours = error(codes(&t, y, None)[0] as usize);
            assert!(ours >= best);
            (found, least) = (found + ours, least + best);
        }
        assert!(found < 1.001 * least, "{found} against {least}");
    }

    /// What the free search around the seam loses against trying every window there.
    #[test]
    fn seam_is_nearly_the_best() {
        for bits in 1..=4 {
            let t = Trellis::new(8, bits).unwrap();
            let (mut found, mut least) = (0.0, 0.0);
            for y in normals(40 * DIM, 3).chunks_exact(DIM) {
                let error = |seam| measure(&t, &codes(&t, y, seam), y)[0];
                found += error(None);
                least += (0..256).map(|w| error(Some(w))).fold(f64::INFINITY, f64::min);
            }
            assert!(found < 1.005 * least, "b {bits}: {found} against {least}");
        }
    }

    /// The textbook recursion over all states, exact sums, held to the same seam.
    #[test]
    fn path_costs_what_the_plain_recursion_says() {
        for t in all() {
            let (n, bits, log2) = (t.levels().len(), u32::from(t.bits), u32::from(t.states_log2));
            let cost = |w: usize, y: f32| {
                let y = to_units(y);
                u64::from(if bits > 2 {
                    distance::<true>(t.fixed[w], y)
                } else {
                    distance::<false>(t.fixed[w], y)
                })
            };
            for (k, y) in normals(3 * 64, 8).chunks_exact(64).enumerate() {
                let seam = t.window(&codes(&t, y, None), 64, 63) ^ (k & 1);
                let mut paid = vec![u64::MAX / 2; n];
                paid[seam] = 0;
                for &y in y {
                    paid = (0..n)
                        .map(|w| {
                            (0..1 << bits).map(|j| paid[w << bits & (n - 1) | j]).min().unwrap() + cost(w, y)
                        })
                        .collect();
                }
                let words = codes(&t, y, Some(seam));
                assert_eq!(t.window(&words, 64, 63), seam);
                let ours: u64 = (0..64).map(|i| cost(t.window(&words, 64, i), y[i])).sum();
                assert_eq!(ours, paid[seam], "L {log2} b {bits}");
            }
        }
    }

    #[test]
    fn any_input_has_a_code() {
        for t in all() {
            for dim in [16, 18, 22, 64, 80, 130] {
                let zero = codes(&t, &vec![0.0; dim], None);
                assert_eq!(zero, codes(&t, &vec![f32::NAN; dim], None));
                assert_eq!(zero, codes(&t, &vec![-0.0; dim], None));
                assert!(measure(&t, &zero, &vec![0.0; dim])[0] < 0.5 * dim as f64);
                for y in [f32::INFINITY, f32::MIN, 1e30, f32::MIN_POSITIVE] {
                    let words = codes(&t, &vec![y; dim], None);
                    let used = dim * usize::from(t.bits) % 32;
                    assert!(used == 0 || words.last().unwrap() >> used == 0, "bits past the ring");
                }
            }
        }
    }

    #[test]
    fn codes_are_golden_on_every_machine() {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for t in all() {
            let mut scratch = SearchScratch::default();
            for (y, dim) in integers(8 * 256, 77).chunks_exact(256).zip([16, 30, 64, 80, 96, 128, 250, 256]) {
                let mut words = vec![!0; t.words(dim)];
                t.encode(&y[..dim], &mut words, &mut scratch);
                let mut plain = vec![0; words.len()];
                PathSearch {
                    trellis: &t,
                    y: &y[..dim],
                    words: &mut plain,
                    scratch: &mut scratch,
                    seam: None,
                }
                .call();
                assert_eq!(
                    words, plain,
                    "L {} b {} dim {dim}: dispatched against plain",
                    t.states_log2, t.bits
                );
                for word in words {
                    hash = (hash ^ u64::from(word)).wrapping_mul(0x100_0000_01b3);
                }
            }
        }
        assert_eq!(hash, 0x98d9_5957_b1eb_ea43, "{hash:#x}");
    }
}
