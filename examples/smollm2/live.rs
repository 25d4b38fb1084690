//! The packed cache itself behind the model: one `turbomoq::Cache` for all layers, and the seat of each layer at it.

use crate::Result;
use crate::cache::{Attend, Usage};
use mlx_rs::Array;
use std::cell::RefCell;
use std::rc::Rc;
use turbomoq::{Bridge, Buffer, Cache, Engine, Stored};

/// A layer at the cache of its model.
pub struct Live<E: Engine> {
    cache: Rc<RefCell<Cache<E>>>,
    layer: usize,
}

impl<E: Engine> Live<E> {
    /// A layer at a cache that others share.
    pub fn new(cache: &Rc<RefCell<Cache<E>>>, layer: usize) -> Live<E> {
        Live { cache: cache.clone(), layer }
    }
}

impl<E: Bridge<Array> + Clone> Attend for Live<E> {
    fn attend(&mut self, q: &Array, k: &Array, v: &Array, scale: f32) -> Result<Array> {
        Ok(self.cache.borrow_mut().update_and_attend(self.layer, q, k, v, scale)?)
    }

    fn usage(&self) -> Usage {
        let cache = self.cache.borrow();
        let Some(layer) = cache.layer(self.layer) else { return Usage::default() };
        let mut usage = Usage { bytes: layer.nbytes(), ..Usage::default() };
        for segment in layer.groups().flat_map(|(_, cache)| cache.segments()) {
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
