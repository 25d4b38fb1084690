//! The cache of a whole model: what an application holds in place of its own KV cache.
//!
//! One [`LayerKind`] a layer says what the layer caches; keys and values of the first call say its heads and channels. Every kind stands
//! on [`HeadGroups`], one for each layer, so recipes may give heads and layers widths of their own.

mod files;
mod plan;
mod prompt;

pub use plan::LayerKind;
use plan::{Plan, unsupported};

use crate::cache::{HeadGroups, LayerShape, Mask, OBSERVE_EVERY};
use crate::codec::codes::Buffer;
use crate::engine::Engine;
use crate::engine::attention::Rules;
use crate::engine::bridge::Bridge;
use crate::error::{Error, Result};
use crate::policy::TierPolicy;
use crate::recipe::Recipe;

/// The engine that [`Cache::new`] takes: MLX where this build has a GPU for it (macOS, or the feature `cuda`), the CPU engine elsewhere,
/// where it is the faster one.
#[cfg(all(feature = "mlx", any(target_os = "macos", feature = "cuda")))]
pub type DefaultEngine = crate::engine::mlx::Mlx;
/// The engine that [`Cache::new`] takes: MLX where this build has a GPU for it (macOS, or the feature `cuda`), the CPU engine elsewhere,
/// where it is the faster one.
#[cfg(not(all(feature = "mlx", any(target_os = "macos", feature = "cuda"))))]
pub type DefaultEngine = crate::engine::cpu::Cpu;

/// The KV cache of a model.
///
/// Arrays are those of the application: `mlx_rs::Array` or [`crate::Tensor`], keys [B, H, L, D] and values [B, H, L, Dv] behind their
/// rotary embedding, queries [B, Hq, L, D]. On the MLX engine everything is lazy; the CPU engine evaluates what it is handed.
///
/// A clone is a fork: it shares all buffers until one side writes. On the CPU engine a cache may move between threads; on the MLX engine
/// it may not, since MLX evaluates an array on the thread that made it, and the compiler says so:
///
/// ```compile_fail
/// fn moves<T: Send>() {}
/// moves::<turbomoq::Cache<turbomoq::Mlx>>();
/// ```
///
/// ```
/// use turbomoq::{Cache, Cpu, Tensor};
///
/// # fn main() -> turbomoq::Result<()> {
/// // Two layers of two KV heads; a prompt of 300 tokens and three decoded ones.
/// let mut cache = Cache::on(Cpu, "best@3", 2)?;
/// for tokens in [300, 1, 1, 1] {
///     assert!(cache.offset() == 0 || cache.offset() >= 300); // where the rotary embedding of this pass begins
///     for layer in 0..2 {
///         let q = Tensor::new(&[1, 8, tokens, 64], vec![0.1f32; 8 * tokens * 64])?;
///         let k = Tensor::new(&[1, 2, tokens, 64], vec![0.2f32; 2 * tokens * 64])?;
///         let out = cache.update_and_attend(layer, &q, &k, &k, 0.125)?;
///         assert_eq!(out.shape(), [1, 8, tokens, 64]);
///     }
/// }
/// assert_eq!(cache.offset(), 303);
/// assert!(cache.nbytes() < 2 * 303 * 2 * 2 * 64 * 4);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Cache<E: Engine = DefaultEngine> {
    engine: E,
    plan: Plan,
    /// `None` before the first token, and for layers without keys and values of their own.
    layers: Vec<Option<HeadGroups<E>>>,
}

impl<E: Engine> std::fmt::Debug for Cache<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Cache({}, {} layers on {})",
            self.plan.recipe.name(),
            self.layers.len(),
            self.engine.name()
        )
    }
}

impl Cache {
    /// An empty cache for a model of `layers` layers with full attention, on the engine for this machine.
    ///
    /// The recipe is any text that `turbomoq compress --recipe` takes, and may have a tier policy behind a bar:
    /// `best@3`, `best@4|progressive`.
    ///
    /// # Errors
    /// [`Error::Parse`] and [`Error::Unsupported`] for a text that is no recipe, or a plan of bits for another number of layers.
    pub fn new(recipe: &str, layers: usize) -> Result<Cache> {
        Cache::on(DefaultEngine::default(), recipe, layers)
    }

    /// As [`Cache::new`] for layers of several kinds.
    ///
    /// # Errors
    /// As [`Cache::on_layers`].
    pub fn with_layers(recipe: &str, kinds: Vec<LayerKind>) -> Result<Cache> {
        Cache::on_layers(DefaultEngine::default(), recipe, kinds)
    }
}

impl<E: Engine + Clone> Cache<E> {
    /// As [`Cache::new`] on a given engine.
    ///
    /// # Errors
    /// As [`Cache::new`].
    pub fn on(engine: E, recipe: &str, layers: usize) -> Result<Cache<E>> {
        Cache::on_layers(engine, recipe, vec![LayerKind::Full; layers])
    }

    /// An empty cache on an engine, with the kind of each layer of the model.
    ///
    /// # Errors
    /// As [`Cache::new`]; [`Error::Unsupported`] for a window of no tokens, and a layer that shares with one that is not an earlier one
    /// with keys and values of its own.
    pub fn on_layers(engine: E, recipe: &str, kinds: Vec<LayerKind>) -> Result<Cache<E>> {
        let (recipe, policy) = recipe.split_once('|').unwrap_or((recipe, "none"));
        let plan = Plan { recipe: recipe.parse()?, policy: policy.parse()?, kinds, padding: vec![] };
        plan.check()?;
        Ok(Cache { engine, layers: plan.kinds.iter().map(|_| None).collect(), plan })
    }

    /// Tells an empty cache that the first `padding[b]` tokens of sequence `b` are padding, see
    /// [`crate::cache::LayerCache::with_left_padding`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the cache holds tokens.
    pub fn with_left_padding(mut self, padding: Vec<usize>) -> Result<Cache<E>> {
        if self.layers.iter().any(Option::is_some) {
            let (value, reason) = (self.offset().to_string(), "the cache already holds tokens".into());
            return Err(Error::Unsupported { field: "left padding", value, reason });
        }
        self.plan.padding = padding;
        Ok(self)
    }

    /// The engine.
    pub fn engine(&self) -> &E {
        &self.engine
    }

    /// The recipe of the packed layers.
    pub fn recipe(&self) -> &Recipe {
        &self.plan.recipe
    }

    /// The kind of each layer.
    pub fn kinds(&self) -> &[LayerKind] {
        &self.plan.kinds
    }

    /// The cache of a layer, once it has seen tokens.
    pub fn layer(&self, layer: usize) -> Option<&HeadGroups<E>> {
        self.layers.get(layer)?.as_ref()
    }

    /// Position of the next token, where the rotary embedding of new queries and keys begins. While a forward pass goes through the
    /// layers this stays where the pass began, until the last layer with keys and values has them too.
    pub fn offset(&self) -> i32 {
        let own = |kind: &LayerKind| !matches!(kind, LayerKind::Shares { .. } | LayerKind::State);
        let last = self.plan.kinds.iter().rposition(own).and_then(|last| self.layer(last));
        i32::try_from(last.map_or(0, HeadGroups::offset)).unwrap_or(i32::MAX)
    }

    /// Bytes of every buffer, allocated rows that hold no token yet included.
    pub fn nbytes(&self) -> usize {
        self.layers.iter().flatten().map(HeadGroups::nbytes).sum()
    }

    /// Bytes that the tokens held need.
    pub fn used_bytes(&self) -> usize {
        self.layers.iter().flatten().map(HeadGroups::used_bytes).sum()
    }

    /// Drops the last `n` tokens of every layer and says how many were dropped (all, if there are fewer). Of the newest
    /// [`Recipe::draft`] tokens any number leaves no trace, see [`crate::cache::LayerCache::trim`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a layer with a sliding window no longer has the tokens that would come back into sight; the engine's
    /// own. The cache is then as it was.
    pub fn trim(&mut self, n: usize) -> Result<usize> {
        let n = self.layers.iter().flatten().map(HeadGroups::offset).min().unwrap_or(0).min(n);
        let mut layers = self.layers.clone();
        for (layer, kind) in layers.iter_mut().zip(&self.plan.kinds) {
            let Some(layer) = layer else { continue };
            layer.trim(n)?;
            if let LayerKind::Sliding { window } = kind
                && layer.len() < layer.offset().min(window - 1)
            {
                let reason = format!("a window of {window} tokens would hold {}", layer.len());
                return Err(unsupported("trim", n, &reason));
            }
        }
        self.layers = layers;
        Ok(n)
    }

    /// Appends keys and values to a layer and attends causally: [B, Hq, L, Dv] in the dtype of the queries. `scale` is usually
    /// 1 / sqrt(head_dim). Of a layer that shares another one's cache, keys and values are not looked at.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Dtype`] if an array does not fit, [`Error::Unsupported`] if the layer has no keys and values or the
    /// recipe no form for its channels; the cache is then as it was.
    pub fn update_and_attend<A>(&mut self, layer: usize, q: &A, k: &A, v: &A, scale: f32) -> Result<A>
    where
        E: Bridge<A>,
    {
        self.update_and_attend_by(layer, q, k, v, &Rules::causal(scale))
    }

    /// As [`Cache::update_and_attend`] by other rules: masks, learned sinks, a soft cap. A sliding layer sees its window, whatever the
    /// rules say.
    ///
    /// # Errors
    /// As [`Cache::update_and_attend`].
    pub fn update_and_attend_by<A>(
        &mut self,
        layer: usize,
        q: &A,
        k: &A,
        v: &A,
        rules: &Rules<A>,
    ) -> Result<A>
    where
        E: Bridge<A>,
    {
        let engine = self.engine.clone();
        let (q, rules) = (engine.enter(q)?, self.rules(layer, rules)?);
        if let LayerKind::Shares { layer } = self.kind(layer)? {
            return engine.leave(self.filled(layer)?.attend(&q, &rules)?);
        }
        let (k, v) = (engine.enter(k)?, engine.enter(v)?);
        let out = self.update(layer, &k, &v, |cache| cache.update_and_attend(&q, &k, &v, &rules))?;
        engine.leave(out)
    }

    /// Appends keys and values to a layer and gives all of them dense, for attention that the application does by itself.
    ///
    /// # Errors
    /// As [`Cache::update_and_attend`].
    pub fn update_and_fetch<A>(&mut self, layer: usize, k: &A, v: &A) -> Result<(A, A)>
    where
        E: Bridge<A>,
    {
        let engine = self.engine.clone();
        let (keys, values) = match self.kind(layer)? {
            LayerKind::Shares { layer } => self.filled(layer)?.fetch()?,
            _ => {
                let (k, v) = (engine.enter(k)?, engine.enter(v)?);
                self.update(layer, &k, &v, |cache| cache.update_and_fetch(&k, &v))?
            }
        };
        Ok((engine.leave(keys)?, engine.leave(values)?))
    }

    /// The mask for `n` tokens that will come next in a layer, over what [`Cache::update_and_fetch`] will give: a word where a word
    /// does, else booleans (of host arrays u8) that hide where false.
    ///
    /// # Errors
    /// As [`Cache::update_and_attend`]; the engine's own.
    pub fn make_mask<A>(&self, layer: usize, n: usize) -> Result<Mask<A>>
    where
        E: Bridge<A>,
    {
        let (window, source) = match self.kind(layer)? {
            LayerKind::Sliding { window } => (Some(window), layer),
            LayerKind::Shares { layer } => (self.window(layer), layer),
            _ => (None, layer),
        };
        let mask = match self.layer(source) {
            Some(cache) => cache.make_mask(n, false, window)?,
            None if n == 1 && self.plan.padding.is_empty() => Mask::None,
            None if self.plan.padding.is_empty() && window.is_none_or(|window| n <= window) => Mask::Causal,
            None => self
                .empty(source, 1, LayerShape { key_dim: 64, value_dim: 64 })?
                .make_mask(n, false, window)?,
        };
        Ok(match mask {
            Mask::None => Mask::None,
            Mask::Causal => Mask::Causal,
            Mask::Array(array) => Mask::Array(self.engine.leave_mask(array)?),
        })
    }

    fn kind(&self, layer: usize) -> Result<LayerKind> {
        match self.plan.kinds.get(layer) {
            Some(LayerKind::State) => Err(unsupported("layer", layer, "it has no keys and values")),
            Some(kind) => Ok(*kind),
            None => Err(unsupported("layer", layer, &format!("the model has {} layers", self.layers.len()))),
        }
    }

    fn filled(&self, layer: usize) -> Result<&HeadGroups<E>> {
        self.layer(layer)
            .ok_or_else(|| unsupported("layer", layer, "it holds no tokens that another layer could share"))
    }

    fn window(&self, layer: usize) -> Option<usize> {
        match self.plan.kinds.get(layer) {
            Some(LayerKind::Sliding { window }) => Some(*window),
            _ => None,
        }
    }

    /// The application's rules as the engine's, with the window of the layer.
    fn rules<A>(&self, layer: usize, rules: &Rules<A>) -> Result<Rules<E::Tensor>>
    where
        E: Bridge<A>,
    {
        let source = match self.kind(layer)? {
            LayerKind::Shares { layer } => layer,
            _ => layer,
        };
        let enter = |array: &Option<A>| array.as_ref().map(|array| self.engine.enter(array)).transpose();
        let windows = [self.window(source), rules.sliding_window];
        Ok(Rules {
            mask: enter(&rules.mask)?,
            sink_logits: enter(&rules.sink_logits)?,
            sliding_window: windows.into_iter().flatten().min(),
            left_padding: rules.left_padding.clone(),
            scale: rules.scale,
            causal: rules.causal,
            soft_cap: rules.soft_cap,
            exact: rules.exact,
        })
    }

    /// Runs a call on the cache of a layer, which the first keys and values make; if that call fails there is none yet.
    fn update<R>(
        &mut self,
        layer: usize,
        k: &E::Tensor,
        v: &E::Tensor,
        call: impl FnOnce(&mut HeadGroups<E>) -> Result<R>,
    ) -> Result<R> {
        if let Some(cache) = self.layers[layer].as_mut() {
            return call(cache);
        }
        let (keys, values) = (k.shape(), v.shape());
        let (&[_, heads, _, key_dim], &[_, _, _, value_dim]) = (&keys[..], &values[..]) else {
            let got = if keys.len() == 4 { values } else { keys };
            return Err(Error::Shape { what: "keys or values", expected: "[B, H, L, D]".into(), got });
        };
        let mut cache = self.empty(layer, heads, LayerShape { key_dim, value_dim })?;
        let done = call(&mut cache)?;
        self.layers[layer] = Some(cache);
        Ok(done)
    }

    /// An empty cache for a layer of given heads.
    fn empty(&self, layer: usize, heads: usize, shape: LayerShape) -> Result<HeadGroups<E>> {
        let ordinal = self.plan.ordinal(layer);
        let exact = |window| Recipe { window, ..Recipe::exact() };
        let (recipe, policy) = match self.plan.kinds[layer] {
            LayerKind::Full => (self.plan.recipe.clone(), self.plan.policy.clone()),
            // Blocks that leave the window are seen by no query any more.
            LayerKind::Sliding { window } => {
                (exact(window), format!("progressive:{window}=16/16,rest=drop").parse()?)
            }
            _ => (exact(0), TierPolicy::None),
        };
        let cache = HeadGroups::new(self.engine.clone(), &recipe, ordinal, shape, heads)?;
        cache.with_tiers(&policy, OBSERVE_EVERY)?.with_left_padding(self.plan.padding.clone())
    }
}
