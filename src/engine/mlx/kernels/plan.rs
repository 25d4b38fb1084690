//! Launches of kernels: template values, grid, outputs and the small arrays of a call, from sizes alone.

use super::{ATTEND, DEQUANTIZE, ENCODE, ENCODE_TRELLIS, ENTER, FINISH, Form, KernelSource, Kind, MERGE};
use crate::spec::{ScaleFormat, ScaleRule};

/// ElementType types of arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// f32.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    BF16,
    /// u32.
    U32,
    /// u8.
    U8,
    /// i32.
    I32,
}

/// A value that is known when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Value {
    /// A number.
    Int(i32),
    /// A type.
    Type(ElementType),
}

/// A call of a kernel but for its arrays.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The text.
    pub source: &'static KernelSource,
    /// Template values by name; every new list is a compilation.
    pub template: Vec<(&'static str, Value)>,
    /// Threads.
    pub grid: [usize; 3],
    /// Threads of a threadgroup.
    pub group: [usize; 3],
    /// Outputs: element type and shape.
    pub outputs: Vec<(ElementType, Vec<usize>)>,
}

/// Threads of a simdgroup.
const WIDTH: usize = 32;
/// Most simdgroups of a threadgroup of attention: 256 threads, which every GPU takes whatever registers a text needs (CUDA gives a
/// thread at most 255 of the 65,536 of a block).
const SIMDGROUPS: usize = 8;
/// Registers of a lane for the queries and the sums of all query heads of a simdgroup.
const REGISTERS: usize = 80;
/// Query tokens of a first pass; with more, unpacked rows are better multiplied as matrices.
const MOST_QUERIES: usize = 16;
/// Threadgroups that fill a GPU a few times.
const ENOUGH: usize = 1024;
/// Most parts that the second pass joins.
pub const MOST_PARTS: usize = 1024;

/// Sizes and rules of a first pass over one segment.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Sequences.
    pub batch: usize,
    /// KV heads.
    pub heads: usize,
    /// Query heads of a KV head.
    pub group: usize,
    /// Query tokens.
    pub queries: usize,
    /// Tokens of the segment.
    pub tokens: usize,
    /// Place of the first query token, counted from the first token of the segment.
    pub position: i64,
    /// Tokens that a query sees, its own included; 0 for all.
    pub window: usize,
    /// Whether a query sees only tokens up to its own place.
    pub causal: bool,
    /// Whether there is a mask.
    pub masked: bool,
}

/// Query heads that share an unpacked row: as many as registers hold.
fn heads_at_once(group: usize, sides: [Form; 2]) -> usize {
    let bands = sides.iter().flat_map(|f| [f.dim, f.second.map_or(0, |(_, dim)| dim)]);
    let each: usize = bands.map(|dim| dim.div_ceil(WIDTH)).sum();
    (1..=group.min(8)).rev().find(|g| group.is_multiple_of(*g) && g * each <= REGISTERS).unwrap_or(1)
}

/// First pass, and the array `place` of the text; `None` for too many query tokens.
pub fn attend(keys: Form, values: Form, pass: &Pass) -> Option<(Launch, [i32; 10])> {
    let gqa = heads_at_once(pass.group, [keys, values]);
    let all = pass.group / gqa * pass.queries;
    if all == 0 || pass.queries > MOST_QUERIES {
        return None;
    }
    // Threadgroups that the units of a KV head are dealt to, and units of each.
    let groups = all.div_ceil(SIMDGROUPS);
    let units = all.div_ceil(groups);
    let stripes = SIMDGROUPS / units;
    let tile = WIDTH / gqa.next_power_of_two();
    // A stripe has work for two tiles, and all threadgroups together fill a GPU a few times.
    let fill = (ENOUGH / (pass.batch * pass.heads * groups).max(1)).max(1);
    let shares = pass.tokens.div_ceil(2 * tile * stripes).clamp(1, fill.min(MOST_PARTS));
    let narrow = |n: i64| n.clamp(i32::MIN.into(), i32::MAX.into()) as i32;
    // Clamped to +-2^30: the kernel adds L and the window in i32, and every position outside of the segment gives the same mask.
    let edge = 1i64 << 30;
    let place = [
        pass.queries as i32,
        shares as i32,
        stripes as i32,
        (pass.group / gqa) as i32,
        narrow(pass.position.clamp(-edge, edge)),
        narrow((pass.window as i64).min(edge)),
        i32::from(pass.causal),
        i32::from(pass.masked),
        units as i32,
        groups as i32,
    ];
    let int = |n: usize| Value::Int(n as i32);
    // Without a second band its bits are those of the first, and it has no channels.
    let more = |form: Form| {
        let (bits, dim) = form.second.unwrap_or((form.bits, 0));
        (usize::from(bits), dim)
    };
    let template = vec![
        ("KGRID", Value::Int(keys.kind as i32)),
        ("KBITS", int(keys.bits.into())),
        ("VGRID", Value::Int(values.kind as i32)),
        ("VBITS", int(values.bits.into())),
        ("DIM", int(keys.dim)),
        ("VDIM", int(values.dim)),
        ("KBITS2", int(more(keys).0)),
        ("DIM2", int(more(keys).1)),
        ("VBITS2", int(more(values).0)),
        ("VDIM2", int(more(values).1)),
        ("GQA", int(gqa)),
    ];
    let rows = [pass.batch, pass.heads * pass.group, pass.queries, shares];
    let group = [WIDTH, units * stripes, 1];
    let launch = Launch {
        source: &ATTEND,
        template,
        grid: [WIDTH * shares, group[1] * pass.heads * groups, pass.batch],
        group,
        outputs: vec![
            (ElementType::F32, [&rows[..], &[values.channels()]].concat()),
            (ElementType::F32, [&rows[..], &[2]].concat()),
        ],
    };
    Some((launch, place))
}

/// Second pass over `parts` parts of rows [B, Hq, L], and the array `counts`. `sinks`: whether the sink of a head takes part;
/// `divide`: whether sums are divided by the weights.
pub fn merge(
    rows: [usize; 3],
    parts: usize,
    dim: usize,
    out: ElementType,
    sinks: bool,
    divide: bool,
) -> (Launch, [i32; 5]) {
    let [batch, heads, queries] = rows;
    let counts = [parts as i32, queries as i32, heads as i32, i32::from(sinks), i32::from(divide)];
    let launch = Launch {
        source: &MERGE,
        template: vec![("DIM", Value::Int(dim as i32)), ("OUT", Value::Type(out))],
        grid: [128 * batch * heads * queries, 1, 1],
        group: [128, 1, 1],
        outputs: vec![
            (out, vec![batch, heads, queries, dim]),
            (ElementType::F32, vec![batch, heads, queries, 2]),
        ],
    };
    (launch, counts)
}

/// What of a frame and a rotation there is: a centre, a gain, an order, a rotation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Turn {
    /// A centre.
    pub centre: bool,
    /// Gains of channels.
    pub gain: bool,
    /// An order of channels.
    pub order: bool,
    /// A rotation, and the orders of the factors of its bands.
    pub rotation: Option<[usize; 2]>,
}

/// Sizes of the kernels around attention: rows [B, Hq, L], and query heads of a KV head.
#[derive(Clone, Copy, Debug)]
pub struct Around {
    /// Sequences, query heads, query tokens.
    pub rows: [usize; 3],
    /// Query heads of a KV head.
    pub group: usize,
}

impl Around {
    /// The first seven entries of `place`.
    fn place(self, turn: Turn) -> [i32; 7] {
        let flag = i32::from;
        let [_, heads, queries] = self.rows;
        let sizes = [queries as i32, heads as i32, self.group as i32];
        let flags = [turn.centre, turn.gain, turn.order, turn.rotation.is_some()].map(flag);
        std::array::from_fn(|i| if i < 3 { sizes[i] } else { flags[i - 3] })
    }

    /// Threads, one per channel, and the template.
    fn launch(self, form: Form, turn: Turn) -> (usize, Vec<(&'static str, Value)>) {
        let threads = form.channels().next_multiple_of(WIDTH);
        let [order, order2] = turn.rotation.unwrap_or([1; 2]);
        let values = [
            ("DIM", form.dim),
            ("DIM2", form.second.map_or(0, |(_, dim)| dim)),
            ("ORDER", order),
            ("ORDER2", order2),
        ];
        (threads, values.map(|(name, n)| (name, Value::Int(n as i32))).to_vec())
    }
}

/// Queries [B, Hq, L, D] into the domain of keys, and the array `place`.
pub fn enter(form: Form, turn: Turn, around: Around) -> (Launch, [i32; 7]) {
    let (threads, template) = around.launch(form, turn);
    let [batch, heads, queries] = around.rows;
    let launch = Launch {
        source: &ENTER,
        template,
        grid: [threads * batch * heads * queries, 1, 1],
        group: [threads, 1, 1],
        outputs: vec![
            (ElementType::F32, vec![batch, heads, queries, form.channels()]),
            (ElementType::F32, vec![batch, heads, queries, 1]),
        ],
    };
    (launch, around.place(turn))
}

/// Joins `parts` shares of a segment and of two more of exact rows, and the array `place`; `None` for too many shares.
pub fn finish(
    form: Form,
    turn: Turn,
    around: Around,
    parts: [usize; 3],
    (out, sinks): (ElementType, bool),
) -> Option<(Launch, [i32; 11])> {
    if parts.iter().sum::<usize>() > MOST_PARTS || form.channels() > super::MOST_CHANNELS {
        return None;
    }
    let (threads, mut template) = around.launch(form, turn);
    template.push(("OUT", Value::Type(out)));
    let [batch, heads, queries] = around.rows;
    let launch = Launch {
        source: &FINISH,
        template,
        grid: [threads * batch * heads * queries, 1, 1],
        group: [threads, 1, 1],
        outputs: vec![(out, vec![batch, heads, queries, form.channels()])],
    };
    let before = around.place(turn);
    let place = std::array::from_fn(|i| match i {
        0..7 => before[i],
        7..10 => parts[i - 7] as i32,
        _ => i32::from(sinks),
    });
    Some((launch, place))
}

/// Unpacks rows [B, H, T, D] in the rotated domain.
pub fn dequantize(form: Form, [batch, heads, tokens]: [usize; 3], out: ElementType) -> Launch {
    Launch {
        source: &DEQUANTIZE,
        template: vec![
            ("GRID", Value::Int(form.kind as i32)),
            ("BITS", Value::Int(form.bits.into())),
            ("DIM", Value::Int(form.dim as i32)),
            ("OUT", Value::Type(out)),
        ],
        grid: [WIDTH * tokens.div_ceil(SIMDGROUPS), SIMDGROUPS * heads, batch],
        group: [WIDTH, SIMDGROUPS, 1],
        outputs: vec![(out, vec![batch, heads, tokens, form.dim])],
    }
}

/// Packs vectors [B, H, T, D], and the array `place`.
pub fn encode(
    form: Form,
    order: usize,
    rotated: bool,
    rule: ScaleRule,
    format: ScaleFormat,
    [batch, heads, tokens]: [usize; 3],
) -> (Launch, [i32; 2]) {
    let (source, threads) = match form.kind {
        Kind::Trellis8 => (&ENCODE_TRELLIS, form.dim.max(256 >> form.bits)),
        Kind::Trellis10 => (&ENCODE_TRELLIS, form.dim.max(1024 >> form.bits)),
        _ => (&ENCODE, form.dim),
    };
    let threads = threads.next_multiple_of(WIDTH);
    let stored = match format {
        ScaleFormat::F16 => ElementType::F16,
        ScaleFormat::Log8 | ScaleFormat::Wide8 => ElementType::U8,
    };
    let rule = match rule {
        ScaleRule::Plain => 0,
        ScaleRule::Matched => 1,
        ScaleRule::Unbiased => 2,
        ScaleRule::LeastSquares => 3,
    };
    let launch = Launch {
        source,
        template: vec![
            ("GRID", Value::Int(form.kind as i32)),
            ("BITS", Value::Int(form.bits.into())),
            ("DIM", Value::Int(form.dim as i32)),
            ("ORDER", Value::Int(order as i32)),
        ],
        grid: [threads * tokens, heads, batch],
        group: [threads, 1, 1],
        outputs: vec![
            (ElementType::U32, vec![batch, heads, tokens, form.words()]),
            (stored, vec![batch, heads, tokens, 1]),
        ],
    };
    (launch, [i32::from(rotated), rule])
}
