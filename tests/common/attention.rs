//! A cache of one layer, and the attention that it is held to.

use turbomoq::Engine;
use turbomoq::cache::{LayerCache, LayerShape};
use turbomoq::internals::engine::cpu::{dense_scores, dense_sum};
use turbomoq::{Recipe, Tensor};

/// An empty cache of layer 1, `d` channels.
pub fn cache<E: Engine + Clone>(engine: &E, recipe: &str, d: usize) -> LayerCache<E> {
    let recipe: Recipe = recipe.parse().unwrap();
    LayerCache::new(engine.clone(), &recipe, 1, LayerShape { key_dim: d, value_dim: d }).unwrap()
}

/// Exact attention in the plainest form, f64 softmax, causal, over dense keys and values.
pub fn exact(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f32,
    hide: impl Fn(usize, usize, usize, usize) -> bool,
) -> Vec<f32> {
    let ([b, hq, l, _], t) = (q.shape().try_into().unwrap(), k.shape()[2]);
    let mut w = dense_scores(k, q).unwrap().to_f32().unwrap();
    for (row, w) in w.chunks_exact_mut(t).enumerate() {
        let (bi, hi, i) = (row / (hq * l), row / l % hq, row % l);
        let shown = |j: usize| j + l <= t + i && !hide(bi, hi, i, j);
        let top =
            (0..t).filter(|&j| shown(j)).map(|j| f64::from(w[j] * scale)).fold(f64::NEG_INFINITY, f64::max);
        let e: Vec<f64> =
            (0..t).map(|j| if shown(j) { (f64::from(w[j] * scale) - top).exp() } else { 0.0 }).collect();
        let sum: f64 = e.iter().sum();
        w.iter_mut().zip(e).for_each(|(w, e)| *w = if sum == 0.0 { 0.0 } else { (e / sum) as f32 });
    }
    dense_sum(v, &Tensor::new(&[b, hq, l, t], w).unwrap()).unwrap().to_f32().unwrap()
}
