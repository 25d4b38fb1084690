//! What a cache costs in the process and in MLX, beside what it reports. One test has 64K tokens on the CPU and 32K on MLX, with 8 KV
//! heads of 128 channels at 4 bits, and runs itself again with an allocator that gives large blocks back at once, so that pages are
//! those in use; others make random calls and count what is allocated. Each waits for the others.

#[path = "common/counting.rs"]
mod counting;

use counting::{CALLS, Counting, LIVE};
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use turbomoq::Engine;
use turbomoq::Rules;
use turbomoq::Tensor;
use turbomoq::cache::{LayerCache, LayerShape};
use turbomoq::internals::math::rng::Rng;

#[cfg(feature = "mlx")]
const MLX_TOKENS: usize = 32768;
const CHUNK: usize = 1024;
const HEADS: usize = 8;
const DIM: usize = 128;
/// On MLX a uniform grid is what `quantized_matmul` reads as it lies; levels of other grids are looked up into arrays of f32 first,
/// unless a kernel does it.
#[cfg(feature = "mlx")]
const MLX_RECIPE: &str = "rotation-only@4/4,sinks=4,window=128";

fn rows(heads: usize, tokens: usize, stream: u64) -> Tensor {
    let mut rng = Rng::new(3, stream);
    let values = (0..heads * tokens * DIM).map(|_| half::f16::from_f64(rng.normal())).collect();
    Tensor::new(&[1, heads, tokens, DIM], values).unwrap()
}

fn empty<E: Engine + Clone>(engine: &E, recipe: &str) -> LayerCache<E> {
    let shape = LayerShape { key_dim: DIM, value_dim: DIM };
    LayerCache::new(engine.clone(), &recipe.parse().unwrap(), 0, shape).unwrap()
}

/// Single tokens with one query each; `evaluate` is the caller's one evaluation a token.
fn decode<E: Engine + Clone>(
    cache: &mut LayerCache<E>,
    steps: usize,
    inputs: &[E::Tensor; 3],
    evaluate: impl Fn(&E::Tensor),
) {
    let rules = Rules::causal((DIM as f32).powf(-0.5));
    for _ in 0..steps {
        let [q, k, v] = inputs;
        evaluate(&cache.update_and_attend(q, k, v, &rules).unwrap());
    }
}

fn fp16_bytes(tokens: usize) -> usize {
    tokens * HEADS * DIM * 2 * 2
}

#[cfg(target_os = "linux")]
mod process {
    use super::*;
    use turbomoq::Cpu;

    const RECIPE: &str = "turboquant-mse@4/4,sinks=4,window=128";
    const TOKENS: usize = 65536;
    const CHILD: &str = "TURBOMOQ_MEMORY_CHILD";

    /// A line of /proc/self/status in bytes.
    fn status(name: &str) -> usize {
        let text = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = text.lines().find(|l| l.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
    }

    /// Without the pages of the program's own file, which come in as code is run for the first time.
    fn resident() -> usize {
        status("RssAnon:")
    }

    /// Runs this test alone in a process of its own.
    pub fn alone() -> bool {
        if std::env::var_os(CHILD).is_some() {
            return true;
        }
        let done = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "bytes_are_those_of_the_report", "--nocapture"])
            .env(CHILD, "1")
            .env("MALLOC_MMAP_THRESHOLD_", "65536")
            .env("MALLOC_TRIM_THRESHOLD_", "4096")
            .env("MALLOC_TOP_PAD_", "0")
            .env("MALLOC_ARENA_MAX", "1")
            // Blocks that two threads allocate in turn lie between each other, which the pages show on a busy machine.
            .env("RAYON_NUM_THREADS", "1")
            .output()
            .unwrap();
        let text =
            String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
        print!("{text}");
        assert!(done.status.success(), "{text}");
        false
    }

    pub fn cpu() {
        let (k, v) = (rows(HEADS, CHUNK, 1), rows(HEADS, CHUNK, 2));
        let one = [rows(4 * HEADS, 1, 3), rows(HEADS, 1, 4), rows(HEADS, 1, 5)];
        let fill = |tokens: usize| {
            let mut cache = empty(&Cpu, RECIPE);
            (0..tokens / CHUNK).for_each(|_| cache.append(&k, &v).unwrap());
            cache
        };
        // Threads, tables and work buffers are there before anything is measured.
        decode(&mut fill(2 * CHUNK), 140, &one, |_| ());
        let before = resident();
        let mut cache = fill(TOKENS);
        let (held, reported) = (resident() - before, cache.nbytes());
        let off = held as f64 / reported as f64 - 1.0;
        println!("{held} bytes resident, {reported} reported, {off:+.4}");
        assert!(100 * held.abs_diff(reported) < reported, "{held} bytes resident, {reported} reported");
        assert_eq!(cache.report().unwrap().bytes(), reported);
        let ratio = fp16_bytes(TOKENS) as f64 / held as f64;
        assert!(ratio >= 3.7, "{ratio} times below half precision");

        // The high-water mark starts again.
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        decode(&mut cache, 140, &one, |_| ());
        let program = status("RssFile:");
        let (peak, reported) = (status("VmHWM:") - program - before, cache.nbytes());
        println!("{peak} bytes at the peak of 140 steps, {reported} reported");
        assert!(peak as f64 <= 1.05 * reported as f64, "{peak} bytes at the peak, {reported} reported");
    }
}

#[cfg(feature = "mlx")]
fn mlx() {
    use mlx_rs::memory::{active_memory, clear_cache, peak_memory, reset_peak_memory};
    use turbomoq::Mlx;
    use turbomoq::mlx::evaluate;

    let mlx = Mlx::new();
    let put = |x: &Tensor| mlx.put(x).unwrap();
    let (k, v) = (put(&rows(HEADS, CHUNK, 1)), put(&rows(HEADS, CHUNK, 2)));
    let one = [put(&rows(4 * HEADS, 1, 3)), put(&rows(HEADS, 1, 4)), put(&rows(HEADS, 1, 5))];
    let eval = |out: &mlx_rs::Array| evaluate(&[out]).unwrap();
    // A step over everything evaluates everything.
    let fill = |tokens: usize| {
        let mut cache = empty(&mlx, MLX_RECIPE);
        for _ in 0..tokens / CHUNK {
            cache.append(&k, &v).unwrap();
            eval(&cache.attend(&one[0], &Rules::causal(0.1)).unwrap());
        }
        cache
    };
    drop(fill(CHUNK));
    let before = active_memory().unwrap();
    let mut cache = fill(MLX_TOKENS);
    let (held, reported) = (active_memory().unwrap() - before, cache.nbytes());
    println!("MLX: {held} bytes active, {reported} reported");
    assert!((held as f64 / reported as f64 - 1.0).abs() < 0.01, "{held} bytes active, {reported} reported");
    assert!(fp16_bytes(MLX_TOKENS) as f64 / held as f64 >= 3.7);
    clear_cache().unwrap();
    reset_peak_memory().unwrap();
    // A block leaves the window at the fifth.
    decode(&mut cache, 8, &one, eval);
    let (peak, reported) = (peak_memory().unwrap() - before, cache.nbytes());
    println!("MLX: {peak} bytes at the peak of 8 steps, {reported} reported");
    // Scores of 32 query heads in f32, five arrays of that size at once, and scales in f32.
    let scores = 5 * 4 * HEADS * cache.len() * 4;
    assert!(peak as f64 <= 1.05 * reported as f64 + scores as f64, "{peak} at the peak, {reported} reported");
    assert!(peak < fp16_bytes(MLX_TOKENS) / 2, "{peak} at the peak: a dense copy");
}

static ALONE: Mutex<()> = Mutex::new(());

#[global_allocator]
static COUNTING: Counting = Counting;

fn half(heads: usize, tokens: usize, dim: usize, rng: &mut Rng) -> Tensor {
    let values = (0..heads * tokens * dim).map(|_| half::f16::from_f64(rng.normal())).collect();
    Tensor::new(&[1, heads, tokens, dim], values).unwrap()
}

/// Makes random calls on a cache, drops all that they take and give, and holds what is live to what the cache reports.
fn held_is_reported<E: Engine + Clone>(
    engine: &E,
    recipe: &str,
    policy: &str,
    calls: u64,
    slack: usize,
    live: impl Fn(&LayerCache<E>) -> usize,
) {
    const H: usize = 4;
    const D: usize = 64;
    let shape = LayerShape { key_dim: D, value_dim: D };
    let new = LayerCache::new(engine.clone(), &recipe.parse().unwrap(), 0, shape).unwrap();
    let mut cache = new.with_tiers(&policy.parse().unwrap(), 16).unwrap();
    let mut rng = Rng::new(11, 1);
    let mut call = |cache: &mut LayerCache<E>, i: u64| {
        let tokens = [1, 1, 7, 128, 300, 2048][if i == 0 { 5 } else { (rng.uniform() * 6.0) as usize }];
        let mut put = |heads: usize| engine.put(&half(heads, tokens, D, &mut rng)).unwrap();
        let (k, v, q) = (put(H), put(H), put(2 * H));
        let kind = (rng.uniform() * 6.0) as usize;
        match kind {
            0 => drop(cache.update_and_fetch(&k, &v).unwrap()),
            1 | 2 => cache.append(&k, &v).unwrap(),
            3 => {
                cache.trim([1, 200, 10, 1500][(rng.uniform() * 4.0) as usize]).unwrap();
            }
            4 => {
                let state = cache.state().unwrap();
                *cache = LayerCache::from_state(engine.clone(), &state).unwrap();
            }
            _ => {
                let one = |x: &E::Tensor| turbomoq::Buffer::slice(x, 2, 0, 1).unwrap();
                let mut other = cache.clone();
                other.append(&one(&k), &one(&v)).unwrap();
                let rules = Rules::causal(0.125);
                drop(cache.update_and_attend(&one(&q), &one(&k), &one(&v), &rules).unwrap());
            }
        }
        kind
    };
    // Tables and threads are there before anything is counted; codecs are shared by clones.
    let mut warm = cache.clone();
    for i in 0..3 {
        call(&mut warm, i);
    }
    live(&warm);
    drop(warm);
    let before = live(&cache);
    for i in 0..calls {
        let kind = call(&mut cache, i);
        let (held, reported) = (live(&cache) - before, cache.nbytes());
        let what = format!("{recipe}, {policy}, call {i} of kind {kind}, {} tokens", cache.len());

        assert!(held.abs_diff(reported) < slack, "{what}: {held} bytes held, {reported} reported");
    }
}

#[test]
fn any_calls_hold_what_is_reported() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    // Every worker keeps the buffers that it attends with.
    let slack = (24 << 10) + (20 << 10) * std::thread::available_parallelism().map_or(1, |n| n.get());
    for (recipe, policy) in [
        ("best@4,sinks=4,window=32", "none"),
        ("kivi@2/2,sinks=0,window=0", "none"),
        ("turboquant-mse@4/16,sinks=100,window=100", "none"),
        ("key=exact,value=exact,sinks=4", "none"),
        ("turboquant-mse@4/4,window=16", "progressive:256=16/16,512=4/4,rest=3/2"),
        ("turboquant-mse@4/4,window=16", "progressive:1024=4/4,rest=drop"),
    ] {
        let live = |_: &LayerCache<turbomoq::Cpu>| LIVE.load(Relaxed);
        held_is_reported(&turbomoq::Cpu, recipe, policy, 25, slack, live);
    }
}

#[test]
fn bytes_of_a_strided_view_take_one_allocation() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let x = half(4, 1000, 64, &mut Rng::new(1, 1));
    let views = [x.slice(2, 100, 900).unwrap(), x.permute(&[0, 3, 2, 1]).unwrap(), x.slice(3, 1, 2).unwrap()];
    for view in views {
        let before = CALLS.load(Relaxed);
        let bytes = view.row_major_bytes();
        let calls = CALLS.load(Relaxed) - before;
        assert_eq!(bytes.len(), view.nbytes());
        assert!(calls < 10, "{calls} allocations for {:?}", view.shape());
        assert_eq!(
            bytemuck::pod_collect_to_vec::<u8, half::f16>(&bytes),
            view.to_vec::<half::f16>().unwrap()
        );
    }
}

#[cfg(feature = "mlx")]
#[test]
fn any_calls_of_the_mlx_engine_hold_what_is_reported() {
    use mlx_rs::memory::active_memory;
    use turbomoq::Mlx;
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let live = |cache: &LayerCache<Mlx>| {
        let state = cache.state().unwrap();
        turbomoq::mlx::evaluate(&state.arrays.values().collect::<Vec<_>>()).unwrap();
        drop(state);
        active_memory().unwrap()
    };
    for (recipe, policy) in [
        ("turboquant-mse@4/16,sinks=4,window=128", "none"),
        ("kivi@2/2,sinks=4,window=0", "none"),
        ("turboquant-mse@4/4,window=16", "progressive:256=16/16,rest=3/2"),
    ] {
        held_is_reported(&Mlx::new(), recipe, policy, 12, 160 << 10, live);
    }
}

/// The search keeps the costs of every step: 49 KB for each of 8,192 vectors of 64 channels, 400 MB, if all are searched at once.
#[cfg(feature = "mlx")]
#[test]
fn a_trellis_is_searched_in_bounded_memory() {
    use mlx_rs::memory::{active_memory, clear_cache, peak_memory, reset_peak_memory};
    use turbomoq::Mlx;
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let mlx = Mlx::plain();
    let peak = |run: &dyn Fn()| {
        clear_cache().unwrap();
        let before = active_memory().unwrap();
        reset_peak_memory().unwrap();
        run();
        peak_memory().unwrap() - before
    };
    let mut rng = Rng::new(5, 1);
    let recipe: turbomoq::Recipe = "best@2".parse().unwrap();
    let spec = recipe.spec(turbomoq::Side::Value, 0, 64).unwrap().unwrap();
    assert!(matches!(spec.grid, turbomoq::Grid::Trellis { .. }), "{spec}");
    let codec = std::sync::Arc::new(turbomoq::Codec::new(spec).unwrap());
    let x = mlx.put(&half(8, 512, 64, &mut rng)).unwrap();
    let at_once = peak(&|| {
        let codes = mlx.encode(&codec, Default::default(), &x).unwrap();
        turbomoq::mlx::evaluate(&[codes.words(), codes.scales()]).unwrap();
    });
    let (k, v) =
        (mlx.put(&half(4, 1160, 64, &mut rng)).unwrap(), mlx.put(&half(4, 1160, 64, &mut rng)).unwrap());
    // Nothing is evaluated before all of the prompt has come.
    let lazy = peak(&|| {
        let recipe = "key=exact,value=d64:b2:hadamard:trellis8,sinks=4,window=0".parse().unwrap();
        let shape = LayerShape { key_dim: 64, value_dim: 64 };
        let mut cache = LayerCache::new(mlx.clone(), &recipe, 0, shape).unwrap();
        cache.append(&k, &v).unwrap();
        let state = cache.state().unwrap();
        turbomoq::mlx::evaluate(&state.arrays.values().collect::<Vec<_>>()).unwrap();
    });
    println!("{at_once} and {lazy} bytes at the peak");
    assert!(at_once.max(lazy) < 120 << 20, "{at_once} and {lazy} bytes at the peak");
}

#[test]
fn bytes_are_those_of_the_report() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    #[cfg(target_os = "linux")]
    if !process::alone() {
        return;
    }
    #[cfg(target_os = "linux")]
    process::cpu();
    #[cfg(feature = "mlx")]
    mlx();
}
