//! A small attention layer in mlx-rs that decodes 2,000 tokens through the cache, with tiers, and prints bytes, tiers and the error
//! against an exact cache: `cargo run --release --example attend`.

#[cfg(not(feature = "mlx"))]
fn main() {
    eprintln!("this example needs the feature mlx");
}

#[cfg(feature = "mlx")]
fn main() -> turbomoq::Result<()> {
    mlx::run()
}

#[cfg(feature = "mlx")]
mod mlx {
    use mlx_rs::ops::{self, matmul};
    use mlx_rs::{Array, Dtype};
    use turbomoq::Engine;
    use turbomoq::Mlx;
    use turbomoq::Rules;
    use turbomoq::cache::{LayerCache, LayerShape, OBSERVE_EVERY};
    use turbomoq::internals::math::rng::Rng;
    use turbomoq::{Recipe, Result, Tensor};

    const TOKENS: usize = 2000;
    const HIDDEN: usize = 256;
    const HEADS: usize = 8;
    const KV_HEADS: usize = 2;
    const DIM: usize = 64;

    /// Projections of an attention layer.
    struct Attention {
        q: Array,
        k: Array,
        v: Array,
        o: Array,
    }

    fn random(shape: &[usize], scale: f64, stream: u64) -> Result<Tensor> {
        let mut rng = Rng::new(7, stream);
        Tensor::new(shape, (0..shape.iter().product()).map(|_| (scale * rng.normal()) as f32).collect())
    }

    impl Attention {
        fn new(mlx: &Mlx) -> Result<Attention> {
            let weight = |rows: usize, columns: usize, stream| -> Result<Array> {
                let weight = random(&[rows, columns], (rows as f64).powf(-0.5), stream)?;
                Ok(mlx.put(&weight)?.as_dtype(Dtype::Float16)?)
            };
            Ok(Attention {
                q: weight(HIDDEN, HEADS * DIM, 1)?,
                k: weight(HIDDEN, KV_HEADS * DIM, 2)?,
                v: weight(HIDDEN, KV_HEADS * DIM, 3)?,
                o: weight(HEADS * DIM, HIDDEN, 4)?,
            })
        }

        /// One step: x [1, L, hidden] in, the same shape out; keys and values go into the cache.
        fn forward(&self, x: &Array, cache: &mut LayerCache<Mlx>) -> Result<Array> {
            let l = x.shape()[1];
            let heads = |y: Array, n: usize| -> Result<Array> {
                Ok(y.reshape(&[1, l, n as i32, DIM as i32])?.transpose_axes(&[0, 2, 1, 3])?)
            };
            let (q, k) = (heads(matmul(x, &self.q)?, HEADS)?, heads(matmul(x, &self.k)?, KV_HEADS)?);
            let v = heads(matmul(x, &self.v)?, KV_HEADS)?;
            let rules = Rules::causal((DIM as f32).powf(-0.5));
            let out = cache.update_and_attend(&q, &k, &v, &rules)?;
            let out = out.transpose_axes(&[0, 2, 1, 3])?.reshape(&[1, l, (HEADS * DIM) as i32])?;
            Ok(matmul(out, &self.o)?)
        }
    }

    pub fn run() -> Result<()> {
        let mlx = Mlx::new();
        let layer = Attention::new(&mlx)?;
        let shape = LayerShape { key_dim: DIM, value_dim: DIM };
        let cache = |recipe: &str| -> Result<LayerCache<Mlx>> {
            let recipe: Recipe = recipe.parse()?;
            LayerCache::new(mlx.clone(), &recipe, 0, shape)
        };
        let policy = "progressive:256=8/8,1024=4/4,rest=3/2".parse()?;
        let mut packed = cache("best@4/4,window=64")?.with_tiers(&policy, OBSERVE_EVERY)?;
        let mut exact = cache("best@16/16")?;
        let inputs = mlx.put(&random(&[1, TOKENS, HIDDEN], 1.0, 5)?)?.as_dtype(Dtype::Float16)?;
        let (mut error, mut norm) = (0f64, 0f64);
        for t in 0..TOKENS as i32 {
            let x = inputs.take_axis(Array::from_slice(&[t], &[1]), 1)?;
            let (a, b) = (layer.forward(&x, &mut packed)?, layer.forward(&x, &mut exact)?);
            // One evaluation a token: the sums below pull everything.
            let b = b.as_dtype(Dtype::Float32)?;
            let e = a.as_dtype(Dtype::Float32)?.subtract(&b)?.square()?.sum(None)?;
            let sums = ops::stack(&[e, b.square()?.sum(None)?], 0)?;
            let sums = mlx.get(&sums)?.to_f32()?;
            error += f64::from(sums[0]);
            norm += f64::from(sums[1]);
        }
        let report = packed.report()?;
        for part in &report.parts {
            println!(
                "{:8} from {:4}: {:4} tokens, {}/{} bits, {:6} bytes",
                part.tier, part.start, part.tokens, part.key_bits, part.value_bits, part.bytes
            );
        }
        println!("{} bytes, exact {}", packed.nbytes(), 2 * TOKENS * KV_HEADS * 2 * DIM);
        println!("relative error of the layer's output over {TOKENS} tokens: {:.4}", (error / norm).sqrt());
        Ok(())
    }
}
