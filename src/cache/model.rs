//! The cache of a model: one [`LayerCache`] for each layer that has keys and values, counted by their own ordinals.
//!
//! A hybrid model has layers without keys and values (a state space, a convolution); they have no cache here and no ordinal, so
//! recipes, seeds and exemptions of the others do not depend on how many of them lie between.

use super::{LayerCache, LayerReport, LayerShape};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::policy::TierPolicy;
use crate::recipe::Recipe;

/// A layer by its ordinal among the layers of a model that have keys and values: the one numbering of recipes, plans, live caches and
/// compressed files. In a hybrid model with attention in layers 3, 7 and 11 these are 0, 1 and 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KvLayer(pub usize);

/// Caches of the KV layers of a model.
#[derive(Clone)]
pub struct KvCache<E: Engine> {
    pub(super) layers: Vec<LayerCache<E>>,
    /// Ordinal of each layer of the model.
    pub(super) ordinals: Vec<Option<usize>>,
}

impl<E: Engine> std::fmt::Debug for KvCache<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KvCache({} layers with keys and values of {})", self.layers.len(), self.ordinals.len())
    }
}

impl<E: Engine + Clone> KvCache<E> {
    /// An empty cache with one recipe, whose plan may differ by layer (heads that differ are for [`super::HeadGroups`]); `shapes` has an
    /// entry per layer of the model, `None` for one without keys and values. The KV layers whose ordinals are in `exempt` keep everything
    /// exact.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the recipe has no form for a head dim, its plan is for another number of layers or differs by head,
    /// or there is no KV layer of an exempt ordinal.
    pub fn new(
        engine: E,
        recipe: &Recipe,
        shapes: &[Option<LayerShape>],
        exempt: &[KvLayer],
    ) -> Result<KvCache<E>> {
        let count = shapes.iter().flatten().count();
        if let Some(bad) = exempt.iter().find(|layer| layer.0 >= count) {
            let reason = format!("the model has {count} layers with keys and values");
            return Err(Error::Unsupported { field: "exempt", value: bad.0.to_string(), reason });
        }
        if let Some(plan) = &recipe.plan
            && [plan.key.layers(), plan.value.layers()] != [count; 2]
        {
            let value = format!("{}/{} layers", plan.key.layers(), plan.value.layers());
            let reason = format!("the model has {count} layers with keys and values");
            return Err(Error::Unsupported { field: "bits of a layer", value, reason });
        }
        KvCache::with_recipes(engine, shapes, |ordinal| match exempt.contains(&KvLayer(ordinal)) {
            true => Recipe { key: None, value: None, ..recipe.clone() },
            false => recipe.clone(),
        })
    }

    /// An empty cache with a recipe of its own for each KV layer.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a recipe has no form for its layer's head dims.
    pub fn with_recipes(
        engine: E,
        shapes: &[Option<LayerShape>],
        recipe: impl Fn(usize) -> Recipe,
    ) -> Result<KvCache<E>> {
        let (mut layers, mut ordinals) = (vec![], vec![]);
        for shape in shapes {
            ordinals.push(shape.map(|_| layers.len()));
            if let Some(shape) = shape {
                let ordinal = layers.len();
                layers.push(LayerCache::new(engine.clone(), &recipe(ordinal), ordinal, *shape)?);
            }
        }
        Ok(KvCache { layers, ordinals })
    }

    /// Gives every layer the same tier policy, see [`LayerCache::with_tiers`]; exempt layers have nothing that could fall, but a limit
    /// holds for them too.
    ///
    /// # Errors
    /// As [`LayerCache::with_tiers`].
    pub fn with_tiers(self, policy: &TierPolicy, observe_every: usize) -> Result<KvCache<E>> {
        let layers = self.layers.into_iter().map(|l| l.with_tiers(policy, observe_every));
        Ok(KvCache { layers: layers.collect::<Result<_>>()?, ordinals: self.ordinals })
    }

    /// Tells every layer the padding of the batch, see [`LayerCache::with_left_padding`].
    ///
    /// # Errors
    /// As [`LayerCache::with_left_padding`].
    pub fn with_left_padding(self, padding: Vec<usize>) -> Result<KvCache<E>> {
        let layers = self.layers.into_iter().map(|l| l.with_left_padding(padding.clone()));
        Ok(KvCache { layers: layers.collect::<Result<_>>()?, ordinals: self.ordinals })
    }

    /// Layers with keys and values, in order.
    pub fn layers(&self) -> &[LayerCache<E>] {
        &self.layers
    }

    /// The same, to append to and attend on.
    pub fn layers_mut(&mut self) -> &mut [LayerCache<E>] {
        &mut self.layers
    }

    /// Ordinal of a layer of the model among those with keys and values.
    pub fn ordinal(&self, layer: usize) -> Option<KvLayer> {
        self.ordinals.get(layer).copied().flatten().map(KvLayer)
    }

    /// The cache of a layer of the model, if it has one.
    pub fn at(&mut self, layer: usize) -> Option<&mut LayerCache<E>> {
        let KvLayer(ordinal) = self.ordinal(layer)?;
        self.layers.get_mut(ordinal)
    }

    /// Position of the next token. Within a forward pass the layers differ: this is the last layer's, which a whole pass has reached.
    pub fn offset(&self) -> usize {
        self.layers.last().map_or(0, LayerCache::offset)
    }

    /// Bytes that the tokens need, see [`LayerCache::used_bytes`].
    pub fn used_bytes(&self) -> usize {
        self.layers.iter().map(LayerCache::used_bytes).sum()
    }

    /// Bytes of every buffer.
    pub fn nbytes(&self) -> usize {
        self.layers.iter().map(LayerCache::nbytes).sum()
    }

    /// Drops the last `n` tokens of every layer and says how many were dropped: all, if a layer has fewer.
    ///
    /// # Errors
    /// As [`Engine`]'s methods; all layers are then as they were.
    pub fn trim(&mut self, n: usize) -> Result<usize> {
        let n = self.layers.iter().map(LayerCache::offset).min().unwrap_or(0).min(n);
        let mut layers = self.layers.clone();
        for layer in &mut layers {
            layer.trim(n)?;
        }
        self.layers = layers;
        Ok(n)
    }

    /// What each KV layer holds.
    ///
    /// # Errors
    /// As [`Engine`]'s methods.
    pub fn report(&self) -> Result<Vec<LayerReport>> {
        self.layers.iter().map(LayerCache::report).collect()
    }
}
