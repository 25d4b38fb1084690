//! The packed cache itself behind the model: attention reads the packed form, on the engine that is asked for.

use crate::Result;
use crate::cache::{Attend, Usage};
use mlx_rs::Array;
use turbomoq::Buffer;
use turbomoq::Cpu;
use turbomoq::Engine;
use turbomoq::Mlx;
use turbomoq::Recipe;
use turbomoq::cache::{HeadGroups, LayerShape, OBSERVE_EVERY};
use turbomoq::mlx::{get, put};
use turbomoq::policy::TierPolicy;
use turbomoq::{Rules, Stored};

/// A layer's cache and the way of arrays into its engine and back.
pub struct Live<E: Engine> {
    cache: HeadGroups<E>,
    enter: fn(&Array) -> turbomoq::Result<E::Tensor>,
    leave: fn(E::Tensor) -> turbomoq::Result<Array>,
}

impl Live<Cpu> {
    /// A cache on the CPU engine.
    pub fn cpu(recipe: &Recipe, tiers: &TierPolicy, layer: usize, heads: [usize; 2]) -> Result<Live<Cpu>> {
        Ok(Live { cache: cache(Cpu, recipe, tiers, layer, heads)?, enter: get, leave: |x| put(&x) })
    }
}

impl Live<Mlx> {
    /// A cache on the MLX engine.
    pub fn mlx(
        mlx: &Mlx,
        recipe: &Recipe,
        tiers: &TierPolicy,
        layer: usize,
        heads: [usize; 2],
    ) -> Result<Live<Mlx>> {
        let cache = cache(mlx.clone(), recipe, tiers, layer, heads)?;
        Ok(Live { cache, enter: |x| Ok(x.clone()), leave: Ok })
    }
}

/// The cache of a layer of `heads` = channels and number of KV heads.
fn cache<E: Engine + Clone>(
    engine: E,
    recipe: &Recipe,
    tiers: &TierPolicy,
    layer: usize,
    [head_dim, kv_heads]: [usize; 2],
) -> Result<HeadGroups<E>> {
    let shape = LayerShape { key_dim: head_dim, value_dim: head_dim };
    Ok(HeadGroups::new(engine, recipe, layer, shape, kv_heads)?.with_tiers(tiers, OBSERVE_EVERY)?)
}

impl<E: Engine + Clone> Attend for Live<E> {
    fn attend(&mut self, q: &Array, k: &Array, v: &Array, scale: f32) -> Result<Array> {
        let [q, k, v] = [q, k, v].map(self.enter);
        Ok((self.leave)(self.cache.update_and_attend(&q?, &k?, &v?, &Rules::causal(scale))?)?)
    }

    fn usage(&self) -> Usage {
        let mut usage = Usage { bytes: self.cache.nbytes(), ..Usage::default() };
        for segment in self.cache.groups().flat_map(|(_, cache)| cache.segments()) {
            for side in [&segment.keys, &segment.values] {
                if let Stored::Packed(codes) = side {
                    let [b, h, t] = codes.shape();
                    usage.stored_bytes += codes.words().nbytes() + codes.scales().nbytes();
                    usage.stored_values += b * h * t * side.dim();
                }
            }
        }
        usage
    }
}
