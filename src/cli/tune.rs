//! `turbomoq tune`: times both engines on packing and on attention, and keeps the table from which `--engine auto` chooses.

use super::say::say;
use super::{print_json, table};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use turbomoq::Codec;
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::Mlx;
use turbomoq::Side;
use turbomoq::internals::engine::crossover::Crossover;
use turbomoq::internals::engine::crossover::Measured;
use turbomoq::internals::engine::crossover::Work;
use turbomoq::internals::io::files;
use turbomoq::internals::math::rng::Rng;
use turbomoq::mlx::on_gpu;
use turbomoq::{Dtype, Error, Recipe, Result, Tensor};
use turbomoq::{Rules, Segment, Stored};

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Arguments {
    /// Where the table is kept [default: turbomoq/crossover.json in the user's configuration]
    #[arg(long)]
    file: Option<PathBuf>,
    /// Recipe whose codecs are timed
    #[arg(long, default_value = "best")]
    recipe: String,
    /// Print the table as JSON
    #[arg(long)]
    json: bool,
}

const HEADS: usize = 8;

/// Whether packing so many vectors goes to MLX: by the table of this machine; without one, by the shipped table where MLX runs on the
/// CPU, and always where it runs on a GPU.
pub fn prefers_mlx(head_dim: usize, rows: usize) -> Result<bool> {
    match place().filter(|path| path.exists()) {
        Some(path) => {
            let text = std::fs::read_to_string(&path).map_err(|source| Error::Io { path, source })?;
            Ok(Crossover::from_json(&text)?.prefers_mlx(Work::Encode, head_dim, rows))
        }
        None => Ok(on_gpu() || Crossover::shipped()?.prefers_mlx(Work::Encode, head_dim, rows)),
    }
}

fn place() -> Option<PathBuf> {
    let configuration = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config"));
    Some(configuration.or_else(home)?.join("turbomoq/crossover.json"))
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let Some(path) = arguments.file.clone().or_else(place) else {
        let reason = "neither XDG_CONFIG_HOME nor HOME is set".into();
        return Err(Error::Unsupported { field: "file", value: "default".into(), reason });
    };
    let recipe: Recipe = arguments.recipe.parse()?;
    let times = measure(&recipe)?;
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.into(), source })?;
    }
    let text = serde_json::to_string_pretty(&times).unwrap_or_default();
    files::replace(&path, &[text.as_bytes()])?;
    if arguments.json {
        print_json(&times);
        return Ok(());
    }
    let mut table = table(&["work", "head dim", "rows", "CPU engine ms", "MLX ms", "auto"]);
    for p in &times.points {
        let auto = if times.prefers_mlx(p.work, p.head_dim, p.rows) { "mlx" } else { "cpu" };
        table.add_row([
            format!("{:?}", p.work).to_lowercase(),
            p.head_dim.to_string(),
            p.rows.to_string(),
            format!("{:.3}", p.cpu_ms),
            format!("{:.3}", p.mlx_ms),
            auto.into(),
        ]);
    }
    say!("{table}\nMLX on {}; kept in {}", times.device, path.display());
    Ok(())
}

/// Shortest of three runs after one that does not count, in milliseconds.
fn shortest(mut step: impl FnMut() -> Result<()>) -> Result<f64> {
    step()?;
    let mut least = f64::INFINITY;
    for _ in 0..3 {
        let start = Instant::now();
        step()?;
        least = least.min(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(least)
}

/// Milliseconds of packing and unpacking, and of a step of attention with four query heads a KV head.
fn times<E: Engine>(engine: &E, codec: &Arc<Codec>, host: &Tensor, queries: &Tensor) -> Result<[f64; 2]> {
    let (x, q) = (engine.put(host)?, engine.put(queries)?);
    let frame = engine.frame(codec, false, &x, None)?;
    let encode = shortest(|| {
        let codes = engine.encode(codec, frame.clone(), &x)?;
        engine.get(&engine.decode(&codes, Dtype::F16)?).map(|_| ())
    })?;
    let codes = engine.encode(codec, frame, &x)?;
    engine.get(codes.words())?;
    let segment = Segment { start: 0, keys: Stored::Packed(codes.clone()), values: Stored::Packed(codes) };
    let rules = Rules::causal((codec.spec().head_dim as f32).powf(-0.5));
    let attend =
        shortest(|| engine.get(&engine.attend(std::slice::from_ref(&segment), &q, &rules)?).map(|_| ()))?;
    Ok([encode, attend])
}

fn measure(recipe: &Recipe) -> Result<Crossover> {
    let mlx = Mlx::new();
    let mut points = vec![];
    for head_dim in [64, 128, 256] {
        let Some(spec) = recipe.spec(Side::Key, 0, head_dim)? else { continue };
        let codec = Arc::new(Codec::new(spec)?);
        for tokens in [32, 256, 2048] {
            let x = normals(&[1, HEADS, tokens, head_dim], 1)?;
            let q = normals(&[1, 4 * HEADS, 1, head_dim], 2)?;
            let (cpu, mlx) = (times(&Cpu, &codec, &x, &q)?, times(&mlx, &codec, &x, &q)?);
            for (i, work) in [Work::Encode, Work::Attend].into_iter().enumerate() {
                let rows = HEADS * tokens;
                points.push(Measured { work, head_dim, rows, cpu_ms: cpu[i], mlx_ms: mlx[i] });
            }
        }
    }
    let device = if on_gpu() { "gpu" } else { "cpu" };
    Ok(Crossover { device: device.into(), points })
}

fn normals(shape: &[usize], stream: u64) -> Result<Tensor> {
    let mut rng = Rng::new(1, stream);
    Tensor::new(shape, (0..shape.iter().product()).map(|_| half::f16::from_f64(rng.normal())).collect())
}
