//! Test vectors for `benches/cuda`: packed keys and values of several grids, a launch of the attention kernel, and what the row form
//! of the codecs gives. `cargo run --release --no-default-features --example kernel_vectors -- FILE`

use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};
use turbomoq::Codec;
use turbomoq::internals::codec::frame::RowFrame;
use turbomoq::internals::engine::mlx::kernels::plan::{self, Pass, Value};
use turbomoq::internals::engine::mlx::kernels::{Form, table};
use turbomoq::internals::math::rng::Rng;
use turbomoq::{CodecSpec, Grid};

const DIM: usize = 128;
const HEADS: usize = 2;
const GROUP: usize = 4;
const TOKENS: usize = 333;

/// Packed rows of one side.
struct Side {
    words: Vec<u32>,
    scales: Vec<u16>,
}

fn side(codec: &Codec, rng: &mut Rng) -> Side {
    let mut side = Side { words: vec![], scales: vec![] };
    let mut scratch = codec.scratch();
    for _ in 0..HEADS * TOKENS {
        let x: Vec<f32> = (0..DIM).map(|c| rng.normal() as f32 * (0.5 + (c % 7) as f32)).collect();
        let (mut words, mut scales) = (vec![0; codec.row_words()], [0]);
        codec.encode_row(RowFrame::default(), &x, &mut words, &mut scales, &mut scratch);
        side.words.extend(words);
        side.scales.extend(scales);
    }
    side
}

/// Softmax of scores and the weighted sum of rows, in the rotated domain, in f64.
fn attend(codec: &Codec, k: &Side, v: &Side, q: &[f32], head: usize) -> Vec<f32> {
    let (w, mut scratch) = (codec.row_words(), codec.scratch());
    let prepared = codec.prepare_row(RowFrame::default(), q, &mut scratch);
    let rows = head * TOKENS..(head + 1) * TOKENS;
    let scores: Vec<f64> = rows
        .clone()
        .map(|r| codec.score_row(&prepared, &k.words[r * w..][..w], &k.scales[r..=r], &mut scratch).into())
        .collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let (mut sum, mut total) = (vec![0f64; DIM], 0.0);
    for (r, s) in rows.zip(scores) {
        let (weight, mut row) = ((s - top).exp(), vec![0.0; DIM]);
        codec.add_weighted_row(&v.words[r * w..][..w], &v.scales[r..=r], 1.0, &mut row, &mut scratch);
        sum.iter_mut().zip(row).for_each(|(s, x)| *s += weight * f64::from(x));
        total += weight;
    }
    sum.into_iter().map(|x| (x / total) as f32).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("name the file to write")?;
    let mut file = BufWriter::new(File::create(path)?);
    let mut grids = vec![];
    for bits in [2, 3, 4, 8] {
        grids.extend([(bits, Grid::Uniform), (bits, Grid::Lloyd)]);
    }
    grids.extend([1, 2, 3, 4].map(|bits| (bits, Grid::Trellis { states: 8 })));
    file.write_all(&(grids.len() as i32).to_le_bytes())?;
    for (i, (bits, grid)) in grids.into_iter().enumerate() {
        let codec = Codec::new(CodecSpec::new(DIM, bits, grid))?;
        let form = Form::of(&codec).ok_or("a grid without a kernel")?;
        let mut rng = Rng::new(7, i as u64);
        let (k, v) = (side(&codec, &mut rng), side(&codec, &mut rng));
        let scale = (DIM as f32).powf(-0.5) * 0.3;
        let queries: Vec<Vec<f32>> =
            (0..HEADS * GROUP).map(|_| (0..DIM).map(|_| rng.normal() as f32 * scale).collect()).collect();
        let pass = Pass {
            batch: 1,
            heads: HEADS,
            group: GROUP,
            queries: 1,
            tokens: TOKENS,
            position: TOKENS as i64 - 1,
            window: 0,
            causal: true,
            masked: false,
        };
        let (launch, place) = plan::attend(form, form, &pass).ok_or("queries that do not fit")?;
        let values = launch.template.iter().map(|(_, v)| match v {
            Value::Int(n) => *n,
            Value::Type(_) => 0,
        });
        let levels = table(&codec, form);
        let sizes = [HEADS, GROUP, TOKENS, codec.row_words(), levels.len()].map(|n| n as i32);
        for n in values.chain(place).chain(sizes) {
            file.write_all(&n.to_le_bytes())?;
        }
        let mut scratch = codec.scratch();
        for q in &queries {
            file.write_all(bytemuck::cast_slice(
                &codec.prepare_row(RowFrame::default(), q, &mut scratch).rotated,
            ))?;
        }
        for side in [&k, &v] {
            file.write_all(bytemuck::cast_slice(&side.words))?;
            file.write_all(bytemuck::cast_slice(&side.scales))?;
        }
        file.write_all(bytemuck::cast_slice(&levels))?;
        for (row, q) in queries.iter().enumerate() {
            file.write_all(bytemuck::cast_slice(&attend(&codec, &k, &v, q, row / GROUP)))?;
        }
    }
    Ok(file.flush()?)
}
