//! What a cache costs in the process and in MLX, beside what it reports: 32K tokens, 8 KV heads of 128 channels, 4 bits. The only test
//! of its binary; it runs itself again with an allocator that gives large blocks back at once, so that pages are those in use.

use turbomoq::Tensor;
use turbomoq::attention::Rules;
use turbomoq::cache::{LayerCache, LayerShape};
use turbomoq::engine::Engine;
use turbomoq::rng::Rng;

const TOKENS: usize = 32768;
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
    use turbomoq::cpu::Cpu;

    const RECIPE: &str = "turboquant-mse@4/4,sinks=4,window=128";
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
            .env("RAYON_NUM_THREADS", "2")
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
    use turbomoq::graph::Graph;
    use turbomoq::mlx_ops::evaluate;

    let graph = Graph::new();
    let put = |x: &Tensor| graph.put(x).unwrap();
    let (k, v) = (put(&rows(HEADS, CHUNK, 1)), put(&rows(HEADS, CHUNK, 2)));
    let one = [put(&rows(4 * HEADS, 1, 3)), put(&rows(HEADS, 1, 4)), put(&rows(HEADS, 1, 5))];
    let eval = |out: &mlx_rs::Array| evaluate(&[out]).unwrap();
    // A step over everything evaluates everything.
    let fill = |tokens: usize| {
        let mut cache = empty(&graph, MLX_RECIPE);
        for _ in 0..tokens / CHUNK {
            cache.append(&k, &v).unwrap();
            eval(&cache.attend(&one[0], &Rules::causal(0.1)).unwrap());
        }
        cache
    };
    drop(fill(CHUNK));
    let before = active_memory().unwrap();
    let mut cache = fill(TOKENS);
    let (held, reported) = (active_memory().unwrap() - before, cache.nbytes());
    println!("MLX: {held} bytes active, {reported} reported");
    assert!((held as f64 / reported as f64 - 1.0).abs() < 0.01, "{held} bytes active, {reported} reported");
    assert!(fp16_bytes(TOKENS) as f64 / held as f64 >= 3.7);
    clear_cache().unwrap();
    reset_peak_memory().unwrap();
    // A block leaves the window at the fifth.
    decode(&mut cache, 8, &one, eval);
    let (peak, reported) = (peak_memory().unwrap() - before, cache.nbytes());
    println!("MLX: {peak} bytes at the peak of 8 steps, {reported} reported");
    // Scores of 32 query heads in f32, five arrays of that size at once, and scales in f32.
    let scores = 5 * 4 * HEADS * cache.len() * 4;
    assert!(peak as f64 <= 1.05 * reported as f64 + scores as f64, "{peak} at the peak, {reported} reported");
    assert!(peak < fp16_bytes(TOKENS) / 2, "{peak} at the peak: a dense copy");
}

#[test]
fn bytes_are_those_of_the_report() {
    #[cfg(target_os = "linux")]
    if !process::alone() {
        return;
    }
    #[cfg(target_os = "linux")]
    process::cpu();
    #[cfg(feature = "mlx")]
    mlx();
}
