//! Trellis-coded grid: `b` bits a coordinate, yet each value is one of `2^L` levels.
//!
//! The codes of `d` coordinates are a ring of `d * b` bits. Coordinate `i` owns bits `b*i .. b*(i+1)`; its value is looked up by the `L` bits that
//! end there, most of them owned by the coordinates before it: `w(i) = (ring >> (b*(i+1) - L)) mod 2^L`, `value(i) = T[w(i)]`. Newer bits are the
//! high bits of a window: `w(i+1) = w(i) >> b | new << (L-b)`. Positions below zero wrap around (tail-biting), so no bit pays for a start.
//! The ring is stored LSB-first: bit `k` is bit `k % 32` of word `k / 32`; bits of the last word past `d * b` are zero.
//!
//! Bit-shift trellis: QTIP (arXiv 2406.11235). The tables are trained for N(0, 1) by `examples/train_trellis.rs`: multiples of 1/8192 below 4,
//! odd under complement (`T[!w] = -T[w]`), so the file keeps the first halves. The search is in `trellis_search`.
//! Invariant: `decode` gives `levels()[window(words, dim, i)]` for any words.

/// Levels, and the inputs of the search, are integers in this unit.
pub(crate) const UNIT: f32 = 1.0 / 8192.0;

/// For L = 8 and 10, b = 1 to 4: the first 2^(L-1) levels in `UNIT`s, i16 little-endian.
static TABLES: &[u8; 4 * (256 + 1024)] = include_bytes!("trellis_tables.bin");

/// Mean square error on N(0, 1), for L = 8 and 10, b = 1 to 4, measured on 40,000 vectors of 128 (L 10: 10,000).
const MSE: [[f32; 4]; 2] = [[0.27647, 0.07371, 0.01935, 0.00516], [0.27216, 0.07091, 0.01835, 0.00478]];

/// A trellis with windows of L bits and b new bits a coordinate.
#[derive(Clone, Debug)]
pub struct Trellis {
    pub(crate) states_log2: u8,
    pub(crate) bits: u8,
    levels: Box<[f32]>,
    /// The levels in `UNIT`s.
    pub(crate) fixed: Box<[i16]>,
    /// The same in the order of the search: entry `j * 2^(L-b) + p` is level `p << b | j`.
    pub(crate) branch: Box<[i16]>,
}

impl Trellis {
    /// The shipped trellis of `states_log2` 8 or 10 and 1 to 4 bits; `None` for anything else.
    pub fn new(states_log2: u8, bits: u8) -> Option<Trellis> {
        if !supported(states_log2, bits) {
            return None;
        }
        let (n, before) = if states_log2 == 8 { (256, 0) } else { (1024, 4 * 256) };
        // Half of n levels of two bytes: n bytes.
        let half = TABLES[before + (usize::from(bits) - 1) * n..][..n].chunks_exact(2);
        let half: Vec<f32> = half.map(|e| f32::from(i16::from_le_bytes([e[0], e[1]])) * UNIT).collect();
        let levels: Vec<f32> = half.iter().copied().chain(half.iter().rev().map(|t| -t)).collect();
        Trellis::with_levels(states_log2, bits, &levels)
    }

    /// A trellis with the caller's levels, rounded to multiples of 1/8192 within +-4: the hook of the training program.
    /// `None` unless `states_log2` is 8 or 10, `bits` 1 to 4, and there are `2^states_log2` levels.
    pub fn with_levels(states_log2: u8, bits: u8, levels: &[f32]) -> Option<Trellis> {
        if !supported(states_log2, bits) || levels.len() != 1 << states_log2 {
            return None;
        }
        let fixed: Box<[i16]> = levels.iter().map(|&t| to_units(t)).collect();
        let groups = fixed.len() >> bits;
        let branch = (0..fixed.len()).map(|k| fixed[((k % groups) << bits) | (k / groups)]).collect();
        let levels = fixed.iter().map(|&t| f32::from(t) * UNIT).collect();
        Some(Trellis { states_log2, bits, levels, fixed, branch })
    }

    /// The `2^L` levels, indexed by window.
    pub fn levels(&self) -> &[f32] {
        &self.levels
    }

    /// Mean square error of the shipped levels on N(0, 1).
    pub fn mse(&self) -> f32 {
        MSE[usize::from(self.states_log2 == 10)][usize::from(self.bits) - 1]
    }

    /// Words that hold the codes of `dim` coordinates.
    pub fn words(&self, dim: usize) -> usize {
        (dim * usize::from(self.bits)).div_ceil(32)
    }

    /// The window of coordinate `i` of `dim`, bit by bit: the definition.
    ///
    /// # Panics
    /// If `i >= dim`, `words` is too short, or the ring is shorter than one window.
    pub fn window(&self, words: &[u32], dim: usize, i: usize) -> usize {
        let (window, bits) = (usize::from(self.states_log2), usize::from(self.bits));
        let ring = dim * bits;
        assert!(i < dim, "coordinate {i} of {dim}");
        assert!(ring >= window, "a ring of {ring} bits, a window of {window}");
        (0..window).fold(0, |w, k| {
            let at = (bits * (i + 1) + ring - window + k) % ring;
            w | ((words[at / 32] >> (at % 32)) as usize & 1) << k
        })
    }

    /// Decodes `out.len()` coordinates.
    ///
    /// # Panics
    /// If `words` is shorter than `self.words(out.len())`, or the ring is shorter than one window.
    pub fn decode(&self, words: &[u32], out: &mut [f32]) {
        match (self.states_log2, self.bits) {
            (8, 1) => self.decode_as::<256, 8, 1>(words, out),
            (8, 2) => self.decode_as::<256, 8, 2>(words, out),
            (8, 3) => self.decode_as::<256, 8, 3>(words, out),
            (8, _) => self.decode_as::<256, 8, 4>(words, out),
            (_, 1) => self.decode_as::<1024, 10, 1>(words, out),
            (_, 2) => self.decode_as::<1024, 10, 2>(words, out),
            (_, 3) => self.decode_as::<1024, 10, 3>(words, out),
            _ => self.decode_as::<1024, 10, 4>(words, out),
        }
    }

    /// Eight coordinates at a time from one u64: the `L - b` bits before them, then the `8 b <= 32` bits that they own.
    fn decode_as<const N: usize, const L: usize, const B: usize>(&self, words: &[u32], out: &mut [f32]) {
        let ring = out.len() * B;
        assert!(
            words.len() >= self.words(out.len()),
            "{} words, {} needed",
            words.len(),
            self.words(out.len())
        );
        assert!(ring >= L, "a ring of {ring} bits, a window of {L}");
        let levels: &[f32; N] = self.levels[..].try_into().expect("a table has 2^L levels");
        let mut before = read(words, ring - (L - B), L - B);
        let mut at = 0;
        let mut eights = out.chunks_exact_mut(8);
        for eight in &mut eights {
            let run = read(words, at, 8 * B) << (L - B) | before;
            for (k, x) in eight.iter_mut().enumerate() {
                *x = levels[(run >> (B * k)) as usize % N];
            }
            before = run >> (8 * B);
            at += 8 * B;
        }
        let rest = eights.into_remainder();
        if !rest.is_empty() {
            let run = read(words, at, rest.len() * B) << (L - B) | before;
            for (k, x) in rest.iter_mut().enumerate() {
                *x = levels[(run >> (B * k)) as usize % N];
            }
        }
    }
}

fn supported(states_log2: u8, bits: u8) -> bool {
    matches!(states_log2, 8 | 10) && matches!(bits, 1..=4)
}

/// `x` in `UNIT`s, saturating at +-4; NaN becomes 0.
#[inline(always)]
pub(crate) fn to_units(x: f32) -> i16 {
    (x / UNIT).round_ties_even() as i16
}

/// `count <= 32` bits from bit `at` on.
#[inline(always)]
pub(crate) fn read(words: &[u32], at: usize, count: usize) -> u64 {
    let low = u64::from(words[at / 32]);
    let high = words.get(at / 32 + 1).map_or(0, |&w| u64::from(w));
    (high << 32 | low) >> (at % 32) & ((1 << count) - 1)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::math::trellis_search::SearchScratch;

    const DIM: usize = 128;

    pub(crate) fn normals(count: usize, mut seed: u64) -> Vec<f32> {
        let mut next = || {
            seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let z = (seed ^ seed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
            (((z ^ z >> 31) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
        };
        (0..count)
            .map(|_| ((-2.0 * next().ln()).sqrt() * (std::f64::consts::TAU * next()).cos()) as f32)
            .collect()
    }

    pub(crate) fn all() -> impl Iterator<Item = Trellis> {
        [8, 10].into_iter().flat_map(|l| (1..=4).map(move |b| Trellis::new(l, b).unwrap()))
    }

    /// Squared error of a code, and <y, c>, |c|^2.
    pub(crate) fn measure(t: &Trellis, words: &[u32], y: &[f32]) -> [f64; 3] {
        let mut c = vec![0.0; y.len()];
        t.decode(words, &mut c);
        let pairs = || y.iter().zip(&c).map(|(&y, &c)| (f64::from(y), f64::from(c)));
        [
            pairs().map(|(y, c)| (y - c) * (y - c)).sum(),
            pairs().map(|(y, c)| y * c).sum(),
            pairs().map(|(_, c)| c * c).sum(),
        ]
    }

    #[test]
    fn distortion_on_normal_blocks() {
        // The specification's figures (1 bit: a cosine of .852, so .274).
        let bounds = [0.274, 0.0780, 0.0212, 0.0060, 0.274, 0.0743, 0.0200, 0.0053];
        for (t, bound) in all().zip(bounds) {
            let law = f64::from(t.mse());
            let y = normals(if t.states_log2 == 8 { 4000 } else { 1000 } * DIM, 5);
            let mut scratch = SearchScratch::default();
            let mut words = vec![0; t.words(DIM)];
            let mut sum = [0.0; 3];
            for y in y.chunks_exact(DIM) {
                t.encode(y, &mut words, &mut scratch);
                let m = measure(&t, &words, y);
                (0..3).for_each(|k| sum[k] += m[k]);
            }
            let mse = sum[0] / y.len() as f64;
            let what = format!("L {} b {}: {mse}", t.states_log2, t.bits);
            assert!((mse / law - 1.0).abs() < 0.02, "{what}, expected {law}");
            assert!(mse < 1.02 * bound, "{what}, at most {bound}");
            let norm: f64 = y.iter().map(|&y| f64::from(y).powi(2)).sum();
            let cosine = sum[1] / (norm * sum[2]).sqrt();
            assert!(cosine >= 0.85, "{what}, cosine {cosine}");
        }
    }

    #[test]
    fn decode_is_window_by_window() {
        let mut seed = 1u32;
        for (log2, bits) in [8, 10].into_iter().flat_map(|l| (1..=4).map(move |b| (l, b))) {
            let t = Trellis::new(log2, bits).unwrap();
            for dim in (16..=130).step_by(2).chain([192, 256, 512, 576, 1024]) {
                let mut words: Vec<u32> = (0..t.words(dim))
                    .map(|_| {
                        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        seed ^ seed >> 15
                    })
                    .collect();
                let mut out = vec![f32::NAN; dim];
                t.decode(&words, &mut out);
                for (i, &x) in out.iter().enumerate() {
                    assert_eq!(x, t.levels()[t.window(&words, dim, i)], "L {log2} b {bits} dim {dim} i {i}");
                }
                // Bits past the ring, and words past the last, do not matter.
                let used = dim * usize::from(bits) % 32;
                if used > 0 {
                    *words.last_mut().unwrap() ^= !0 << used;
                }
                words.push(!0);
                let mut again = vec![f32::NAN; dim];
                t.decode(&words, &mut again);
                assert_eq!(out, again, "L {log2} b {bits} dim {dim}");
            }
        }
    }

    #[test]
    fn window_follows_the_written_order() {
        let t = Trellis::new(8, 2).unwrap();
        // A ring of 32 bits: 8 nibbles.
        let words = [0x8765_4321];
        assert_eq!(t.window(&words, 16, 3), 0x21);
        assert_eq!(t.window(&words, 16, 5), 0x32);
        assert_eq!(t.window(&words, 16, 15), 0x87);
        assert_eq!(t.window(&words, 16, 1), 0x18, "bits 28..32, then 0..4");
    }

    #[test]
    fn tables_are_odd_and_golden() {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for &byte in TABLES {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
        assert_eq!(hash, 0xf161_707f_9828_2636, "{hash:#x}");
        for (log2, bits) in [8, 10].into_iter().flat_map(|l| (1..=4).map(move |b| (l, b))) {
            let t = Trellis::new(log2, bits).unwrap();
            let n = t.levels().len();
            assert_eq!(n, 1 << log2);
            assert!((0..n).all(|w| t.levels()[w] == -t.levels()[n - 1 - w] && t.levels()[w].abs() < 4.0));
            assert!((0..n).all(|w| t.levels()[w] / UNIT % 1.0 == 0.0));
            let again = Trellis::with_levels(log2, bits, t.levels()).unwrap();
            assert_eq!((again.levels(), &again.branch), (t.levels(), &t.branch));
        }
    }

    #[test]
    fn refuses_what_has_no_table() {
        for (log2, bits) in [(8, 0), (8, 5), (9, 2), (0, 2), (10, 255), (255, 1)] {
            assert!(Trellis::new(log2, bits).is_none(), "L {log2} b {bits}");
        }
        assert!(Trellis::with_levels(8, 2, &[0.0; 255]).is_none());
        let t = Trellis::with_levels(8, 2, &[f32::NAN; 256]).unwrap();
        assert!(t.levels().iter().all(|&x| x == 0.0));
    }
}
