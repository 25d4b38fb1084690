//! Cases: what a cache is, and what is asked of it, drawn from a seed.

use crate::values::Kind;
use turbomoq::PRESETS;
use turbomoq::Rules;
use turbomoq::internals::math::rng::Rng;
use turbomoq::{Dtype, Tensor};

/// Where a cache lives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum On {
    Cpu,
    #[cfg_attr(not(feature = "mlx"), allow(dead_code))]
    Mlx,
}

/// One call.
#[derive(Clone, Debug)]
pub enum Call {
    Append(usize),
    /// Query tokens, and the seed of queries and rules.
    Attend(usize, u64),
    /// The same with as many new tokens.
    Step(usize, u64),
    Trim(usize),
    Fork,
    /// Through `state` and `from_state`.
    Reload,
    /// Through a state to the other engine.
    Move,
}

/// A cache and its calls.
#[derive(Clone, Debug)]
pub struct Case {
    pub seed: u64,
    pub on: On,
    pub recipe: String,
    pub tiers: Option<&'static str>,
    pub batch: usize,
    pub heads: usize,
    pub group: usize,
    pub dims: [usize; 2],
    pub dtype: Dtype,
    pub keys: Kind,
    pub values: Kind,
    pub queries: Kind,
    pub calls: Vec<Call>,
}

const DIMS: [usize; 12] = [64, 128, 32, 80, 96, 112, 160, 192, 256, 320, 512, 576];
const KINDS: [Kind; 10] = [
    Kind::Gaussian,
    Kind::Gaussian,
    Kind::Gaussian,
    Kind::HeavyTailed,
    Kind::OneHot,
    Kind::Constant,
    Kind::Scaled(1e-4),
    Kind::Scaled(1e4),
    Kind::Subnormal,
    Kind::SomeNan,
];
/// Codecs that no preset has.
const OTHERS: [&str; 6] = [
    // Tiles of more tokens than sums in integers hold.
    "key=d128:b4:channel-affine128:identity,value=d128:b4:lloyd:hadamard",
    "key=d128:b2:channel-affine64:identity,value=d128:b4:beta:hadamard:log8",
    "key=d128:b4:equalised:beta:hadamard,value=d128:b4:lloyd:hadamard,centred",
    "key=d128:b3+32:equalised:lloyd:hadamard,value=d128:b2:uniform:identity,centred",
    "key=d128:b4:lloyd:dense,value=d128:b3:trellis10:hadamard:least-squares",
    "key=d128:b2:qjl64x3:lloyd:hadamard:plain,value=d128:b1:uniform:hadamard:log8",
];
/// Widths of rows that are never packed: not all multiples of eight.
const EXACT_DIMS: [usize; 5] = [20, 24, 40, 72, 100];
const TIERS: [&str; 2] = ["progressive:128=16/16,256=4/4,rest=3/2", "progressive:128=8/8,rest=4/4"];

/// Draws.
pub struct Draw(Rng);

impl Draw {
    pub fn new(seed: u64, stream: u64) -> Draw {
        Draw(Rng::new(seed, stream))
    }
    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.0.bits() % n as u64) as usize
    }
    pub fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
    /// Once in `n`.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
    pub fn normal(&mut self) -> f32 {
        self.0.normal() as f32
    }
}

impl Case {
    /// The case of a seed. Presets and bits go round, so that every pair comes.
    pub fn draw(seed: u64, on: On) -> Case {
        let mut draw = Draw::new(seed, 1);
        let preset = PRESETS[(seed % 8) as usize].0;
        let bits = (seed / 8 % 8 + 1) as usize;
        let key = if draw.one_in(8) {
            "16".into()
        } else if draw.one_in(8) {
            format!("{bits}.5")
        } else {
            bits.to_string()
        };
        let value = if draw.one_in(8) {
            "16".into()
        } else if draw.one_in(2) {
            bits.to_string()
        } else {
            (draw.below(8) + 1).to_string()
        };
        let (sinks, window) = (draw.of(&[0, 0, 4, 1]), draw.of(&[0, 0, 16, 128]));
        let key_dim = if draw.one_in(3) { draw.of(&DIMS) } else { draw.of(&DIMS[..2]) };
        let value_dim = if draw.one_in(6) { draw.of(&DIMS) } else { key_dim };
        let kind = |draw: &mut Draw| draw.of(&KINDS);
        let queries = match draw.of(&KINDS) {
            Kind::SomeNan | Kind::Subnormal | Kind::Scaled(_) => draw.of(&Kind::QUERIES),
            kind => kind,
        };
        let heavy = key_dim.max(value_dim) > 200;
        let (mut what, mut dims) = (format!("{preset}@{key}/{value}"), [key_dim, value_dim]);
        if draw.one_in(12) {
            what = draw.of(&OTHERS).into();
        } else if draw.one_in(16) {
            (what, dims) = ("best@16/16".into(), [draw.of(&EXACT_DIMS), draw.of(&EXACT_DIMS)]);
        }
        let mut case = Case {
            seed,
            on,
            recipe: format!("{what},sinks={sinks},window={window}"),
            tiers: draw.one_in(8).then(|| draw.of(&TIERS)),
            batch: if draw.one_in(4) { 2 } else { 1 },
            heads: if heavy { 1 } else { draw.of(&[1, 1, 2, 3]) },
            group: if draw.one_in(3) { draw.of(&[16, 5, 8, 12]) } else { draw.of(&[1, 2, 3, 4]) },
            dims,
            dtype: draw.of(&[Dtype::F32, Dtype::F16, Dtype::BF16]),
            keys: kind(&mut draw),
            values: kind(&mut draw),
            queries,
            calls: vec![],
        };
        case.calls = calls(&mut draw, heavy);
        case
    }

    /// Keys and values of the append with number `n`.
    pub fn rows(&self, n: usize, tokens: usize) -> (Tensor, Tensor) {
        let shape = |dim| [self.batch, self.heads, tokens, dim];
        let id = self.seed.wrapping_mul(4096) + 2 * n as u64;
        (
            crate::values::tensor(self.keys, self.dtype, &shape(self.dims[0]), id),
            crate::values::tensor(self.values, self.dtype, &shape(self.dims[1]), id + 1),
        )
    }

    /// Queries and rules of an attention call on `held` tokens, the last at position `held - 1`.
    pub fn question(&self, l: usize, seed: u64, held: usize) -> (Tensor, Rules<Tensor>) {
        let mut draw = Draw::new(seed, 2);
        let hq = self.heads * self.group;
        let q = crate::values::tensor(
            self.queries,
            self.dtype,
            &[self.batch, hq, l, self.dims[0]],
            seed ^ 0x5eed,
        );
        let mut rules = Rules::causal(draw.of(&[1.0, 1.0, 0.3, 2.0]) / (self.dims[0] as f32).sqrt());
        rules.causal = !draw.one_in(8);
        rules.exact = draw.one_in(6);
        rules.sliding_window = draw.one_in(4).then(|| draw.below(held + 5) + 1);
        if draw.one_in(4) {
            rules.left_padding = (0..self.batch).map(|_| draw.below(held / 2 + 1)).collect();
        }
        rules.soft_cap = draw.one_in(5).then(|| 1.0 + draw.below(50) as f32);
        if draw.one_in(4) {
            rules.sink_logits =
                Some(Tensor::new(&[hq], (0..hq).map(|_| 2.0 * draw.normal()).collect()).unwrap());
        }
        if draw.one_in(3) {
            let shape = [draw.of(&[1, self.batch]), draw.of(&[1, hq]), l, held];
            let count = shape.iter().product();
            rules.mask = Some(if draw.one_in(2) {
                Tensor::new(&shape, (0..count).map(|_| u8::from(!draw.one_in(4))).collect()).unwrap()
            } else {
                let dtype = draw.of(&[Dtype::F32, Dtype::F16, Dtype::BF16]);
                let one = |_| if draw.one_in(4) { f32::NEG_INFINITY } else { draw.normal() };
                // The least number of the dtype hides too: half types saturate there.
                Tensor::from_f32(dtype, &shape, (0..count).map(one).collect()).unwrap()
            });
        }
        (q, rules)
    }

    /// The same with less of everything, the greatest cuts first.
    pub fn smaller(&self) -> Vec<Case> {
        let with = |change: &dyn Fn(&mut Case)| {
            let mut case = self.clone();
            change(&mut case);
            case
        };
        let n = self.calls.len();
        let mut list = vec![];
        for run in [n / 2, n / 4, 1] {
            for at in (0..n).step_by(run.max(1)) {
                list.push(with(&|c| drop(c.calls.drain(at..(at + run.max(1)).min(n)))));
            }
        }
        for i in 0..n {
            list.push(with(&|c| match &mut c.calls[i] {
                Call::Append(n) | Call::Trim(n) | Call::Attend(n, _) | Call::Step(n, _) => {
                    *n = (*n / 2).max(1)
                }
                _ => {}
            }));
        }
        list.push(with(&|c| (c.batch, c.heads) = (1, 1)));
        list.push(with(&|c| c.group = 1));
        list.push(with(&|c| c.dtype = Dtype::F32));
        list.push(with(&|c| c.tiers = None));
        list.push(with(&|c| (c.keys, c.values) = (Kind::Gaussian, Kind::Gaussian)));
        list.push(with(&|c| c.queries = Kind::Gaussian));
        list.retain(|c| format!("{c:?}") != format!("{self:?}"));
        list
    }
}

/// Calls: some tokens first, then whatever comes, questions most of all.
fn calls(draw: &mut Draw, heavy: bool) -> Vec<Call> {
    let most = if heavy { 200 } else { 330 };
    let mut calls = vec![Call::Append(1 + draw.below(most))];
    for _ in 0..6 {
        calls.push(match draw.below(10) {
            0..=2 => {
                let most = draw.of(&[20, 20, 150]);
                Call::Append(1 + draw.below(most))
            }
            3..=5 => Call::Step(1 + draw.below(16), draw.below(1 << 30) as u64),
            6 => {
                let most = draw.of(&[12, 12, 200]);
                Call::Trim(1 + draw.below(most))
            }
            7 => Call::Fork,
            8 => Call::Reload,
            _ => Call::Move,
        });
        for _ in 0..6 {
            let l = if draw.one_in(3) { 1 + draw.below(16) } else { 1 };
            calls.push(Call::Attend(l, draw.below(1 << 30) as u64));
        }
    }
    calls
}
