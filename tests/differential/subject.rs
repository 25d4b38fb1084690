//! A live cache on any engine behind one face, with arrays of the host going in and coming out.

use crate::oracle::Held;
use turbomoq::Engine;
use turbomoq::Rules;
use turbomoq::cache::{LayerCache, State};
use turbomoq::{Result, Tensor};

/// A live cache.
pub trait Subject {
    fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<()>;
    fn attend(&self, queries: &Tensor, rules: &Rules<Tensor>) -> Result<Tensor>;
    fn step(
        &mut self,
        queries: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        rules: &Rules<Tensor>,
    ) -> Result<Tensor>;
    fn trim(&mut self, n: usize) -> Result<usize>;
    fn fork(&self) -> Box<dyn Subject>;
    /// Its state, on the host.
    fn state(&self) -> Result<State<Tensor>>;
    fn offset(&self) -> usize;
    /// What it holds, decoded by the row form.
    fn held(&self) -> Held;
    /// Exact rows of the newest tokens: the position of the first, keys, values.
    fn newest(&self) -> Option<(usize, Tensor, Tensor)>;
}

/// A cache of an engine from a state on the host.
pub fn restore<E: Engine + Clone + 'static>(engine: &E, state: &State<Tensor>) -> Result<Box<dyn Subject>> {
    let put = |(name, array): (&String, &Tensor)| Ok((name.clone(), engine.put(array)?));
    let arrays = state.arrays.iter().map(put).collect::<Result<_>>()?;
    Ok(Box::new(LayerCache::from_state(engine.clone(), &State { arrays, meta: state.meta.clone() })?))
}

fn rules_on<E: Engine>(engine: &E, rules: &Rules<Tensor>) -> Result<Rules<E::Tensor>> {
    Ok(Rules {
        scale: rules.scale,
        causal: rules.causal,
        sliding_window: rules.sliding_window,
        left_padding: rules.left_padding.clone(),
        mask: rules.mask.as_ref().map(|m| engine.put(m)).transpose()?,
        sink_logits: rules.sink_logits.as_ref().map(|s| engine.put(s)).transpose()?,
        soft_cap: rules.soft_cap,
        exact: rules.exact,
    })
}

impl<E: Engine + Clone + 'static> Subject for LayerCache<E> {
    fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<()> {
        let (k, v) = (self.engine().put(keys)?, self.engine().put(values)?);
        LayerCache::append(self, &k, &v)
    }

    fn attend(&self, queries: &Tensor, rules: &Rules<Tensor>) -> Result<Tensor> {
        let engine = self.engine();
        engine.get(&LayerCache::attend(self, &engine.put(queries)?, &rules_on(engine, rules)?)?)
    }

    fn step(
        &mut self,
        queries: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        rules: &Rules<Tensor>,
    ) -> Result<Tensor> {
        let engine = self.engine().clone();
        let [q, k, v] = [engine.put(queries)?, engine.put(keys)?, engine.put(values)?];
        engine.get(&self.update_and_attend(&q, &k, &v, &rules_on(&engine, rules)?)?)
    }

    fn trim(&mut self, n: usize) -> Result<usize> {
        LayerCache::trim(self, n)
    }

    fn fork(&self) -> Box<dyn Subject> {
        Box::new(self.clone())
    }

    fn state(&self) -> Result<State<Tensor>> {
        let state = LayerCache::state(self)?;
        let get = |(name, array): (&String, &E::Tensor)| Ok((name.clone(), self.engine().get(array)?));
        Ok(State { arrays: state.arrays.iter().map(get).collect::<Result<_>>()?, meta: state.meta })
    }

    fn offset(&self) -> usize {
        LayerCache::offset(self)
    }

    fn held(&self) -> Held {
        Held::new(self.engine(), &self.segments())
    }

    fn newest(&self) -> Option<(usize, Tensor, Tensor)> {
        use turbomoq::Stored;
        let last = self.segments().pop().map(|s| crate::oracle::host(self.engine(), &s))?;
        match (last.keys, last.values) {
            (Stored::Exact { rows: k, .. }, Stored::Exact { rows: v, .. }) => Some((last.start, k, v)),
            _ => None,
        }
    }
}
