//! The original system's Quick Start, snippet by snippet, in Rust: `cargo run --release --example quickstart`.

use turbomoq::Compressor;
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::Rules;
use turbomoq::Side;
use turbomoq::allocation::calibration::{Calibration, Unit, score_heads};
use turbomoq::cache::{LayerCache, LayerShape, OBSERVE_EVERY};
use turbomoq::internals::math::rng::Rng;
use turbomoq::policy::{ModelShape, ProgressivePolicy};
use turbomoq::pool::MemoryPool;
use turbomoq::{Recipe, Result, Tensor};

/// Stand-in for a model's cache: [B, H, T, D] with normal values.
fn sample(stream: u64) -> Result<Tensor> {
    let shape = [1, 8, 512, 128];
    let mut rng = Rng::new(42, stream);
    Tensor::new(&shape, (0..shape.iter().product()).map(|_| rng.normal() as f32).collect())
}

#[allow(clippy::too_many_lines)] // read from top to bottom
fn main() -> Result<()> {
    let layers = (0..4).map(|i| Ok((sample(2 * i)?, sample(2 * i + 1)?))).collect::<Result<Vec<_>>>()?;

    println!("-- compress a KV cache");
    let recipe: Recipe = "turbomoq@4/4".parse()?;
    let mut compressor = Compressor::new(recipe);
    // Optional: fit the codebooks to sample data.
    for (layer, (keys, values)) in layers.iter().enumerate() {
        compressor.calibrate(layer, keys, values)?;
    }
    let compressed = compressor.compress(layers.iter().map(|(k, v)| (k, v)))?;
    println!("{:?}", compressed.stats());
    let restored = compressor.decompress(&compressed)?;
    println!("restored {} layers, keys {:?}", restored.len(), restored[0].0.shape());

    println!("-- multi-agent memory pool");
    let pool = MemoryPool::new(compressed.stats().bytes * 5 / 2);
    pool.allocate("research-agent-1", "research", 1.0)?;
    pool.allocate("coding-agent-2", "coding", 0.8)?;
    pool.store("research-agent-1", compressed.clone())?;
    // Equal caches share their blocks: a second agent with the same prefix costs nearly nothing.
    let outcome = pool.store("coding-agent-2", compressed)?;
    println!("{} bytes alone, {} more in the pool", outcome.bytes, outcome.added);
    // The lowest priority leaves first.
    let evicted = pool.set_budget(pool.stats().used - 1)?.evicted;
    println!("evicted {evicted:?}, still there: {}", pool.get("research-agent-1")?.layers.len());
    println!("-- score heads, and spread three bits a value over them");
    let keys: Vec<&Tensor> = layers.iter().map(|(keys, _)| keys).collect();
    let scores = score_heads(&keys, None)?;
    println!("bits of the heads of layer 0: {:?}", &scores.allocate_bits(3.0)?[..8]);
    let shape = ModelShape { layers: 4, kv_heads: 8, key_dim: 128, value_dim: 128 };
    let plan = Calibration::from_scores(shape, "the keys", &scores)?.plan(Unit::Head, 3.0, 1, 8)?;
    println!("key bits {}, value bits {}", plan.key, plan.value);

    println!("-- stages on an engine: rotate, quantize, look up, score");
    let codec = compressor.codec(Side::Key, 0, 128)?.expect("keys are packed");
    let (keys, queries) = (&layers[0].0, sample(99)?.slice(2, 0, 1)?);
    let codes = Cpu.encode(&codec, Default::default(), keys)?;
    println!("{}: {} bytes a vector", codec.spec(), codec.row_bytes());
    println!("scores of packed keys {:?}", Cpu.scores(&codes, &queries)?.shape());

    #[cfg(feature = "mlx")]
    {
        println!("-- the same as a lazy MLX graph");
        let mlx = turbomoq::Mlx::new();
        let codes = mlx.encode(&codec, Default::default(), &mlx.put(keys)?)?;
        let scores = mlx.scores(&codes, &mlx.put(&queries)?)?;
        println!("scores of packed keys {:?}", mlx.get(&scores)?.shape());
    }

    println!("-- tiers by received attention, with a pinned prompt");
    let shape = LayerShape { key_dim: 128, value_dim: 128 };
    let mut cache = LayerCache::new(Cpu, &"best".parse()?, 0, shape)?;
    cache = cache.with_tiers(&"attention".parse()?, OBSERVE_EVERY)?;
    cache.pin(0..64)?;
    let rules = Rules::causal(1.0 / 128f32.sqrt());
    for step in 0..4 {
        let (k, v) = (sample(100 + 2 * step)?, sample(101 + 2 * step)?);
        cache.update_and_attend(&k, &k, &v, &rules)?;
    }
    for part in cache.report()?.parts {
        println!("{}: {} tokens at {}/{} bits", part.tier, part.tokens, part.key_bits, part.value_bits);
    }

    println!("-- capacity of 8.1 GB with progressive tiers");
    let model = ModelShape { layers: 32, kv_heads: 8, key_dim: 128, value_dim: 128 };
    let tokens = ProgressivePolicy::default().capacity(&"best".parse()?, &model, 8_100_000_000)?;
    println!("context: {tokens} tokens");

    println!("-- QJL residual at sub-2-bit widths, and what beats it at equal bits");
    for text in [
        "key=d128:b1:plain:f16:lloyd,value=exact",
        "key=d128:b1:plain:f16:lloyd:qjl128x1,value=exact",
        "key=d128:b2:trellis8:least-squares:f16,value=exact",
    ] {
        let compressor = Compressor::new(text.parse()?);
        let layer = compressor.compress_layer(0, &layers[0].0, &layers[0].1)?;
        let back = compressor.decompress_side(&layer.key)?;
        let row = turbomoq::quality::compare("0".into(), Side::Key, &layer.key, &layers[0].0, &back, None)?;
        let bits = 8.0 * layer.key.nbytes() as f64 / layer.key.elements() as f64;
        println!("{text}: cosine {:.3} at {bits:.2} stored bits", row.cosine);
    }
    Ok(())
}
