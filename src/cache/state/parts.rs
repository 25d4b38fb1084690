//! The arrays of a state on their way back into a cache: found by name, held to the shapes that the scalars promise.

use super::{SIDES, StoredRun, expect_rows};
use crate::cache::Exact;
use crate::cache::consistent::misfit;
use crate::codec::Codec;
use crate::codec::codes::{Codes, Frame};
use crate::engine::Engine;
use crate::engine::attention::{Segment, Stored};
use crate::error::Result;
use crate::spec::CodecSpec;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The arrays of a state, each copied into a buffer of its own: an array of a state may show a part of a larger one.
pub(super) struct Parts<'a, E: Engine> {
    pub engine: E,
    pub arrays: &'a BTreeMap<String, E::Tensor>,
    /// Channels of a key and of a value.
    pub dims: [usize; 2],
}

impl<E: Engine> Parts<'_, E> {
    pub fn optional(&self, name: &str) -> Result<Option<E::Tensor>> {
        self.arrays.get(name).map(|array| self.engine.compact(array)).transpose()
    }

    pub fn array(&self, name: &str) -> Result<E::Tensor> {
        self.optional(name)?.ok_or_else(|| misfit(format!("there is no array {name}")))
    }

    /// The codec of side `k`, calibrated levels included.
    pub fn codec(&self, k: usize, spec: Option<CodecSpec>) -> Result<Option<Arc<Codec>>> {
        let Some(spec) = spec else { return Ok(None) };
        let codec = match self.arrays.get(&format!("levels.{}", SIDES[k])) {
            Some(levels) => Codec::with_levels(spec, self.engine.get(levels)?.to_f32()?.into())?,
            None => Codec::new(spec)?,
        };
        Ok(Some(Arc::new(codec)))
    }

    /// The exact rows of sinks or window.
    pub fn exact(&self, name: &str, len: usize) -> Result<Option<Exact<E::Tensor>>> {
        if len == 0 && !self.arrays.contains_key(&format!("{name}.keys")) {
            return Ok(None);
        }
        let [keys, values] = [self.array(&format!("{name}.keys"))?, self.array(&format!("{name}.values"))?];
        expect_rows(&keys, len, self.dims[0])?;
        expect_rows(&values, len, self.dims[1])?;
        Ok(Some(Exact { keys, values, capacity: len }))
    }

    /// The frame of side `k`.
    pub fn frame(&self, k: usize) -> Result<Frame<E::Tensor>> {
        let table = |name: &str| self.optional(&format!("frame.{}.{name}", SIDES[k]));
        Ok(Frame { centre: table("centre")?, gain: table("gain")?, order: table("order")? })
    }
}

/// What packed segments are put together from.
pub(super) struct Packed<'a, E: Engine> {
    pub parts: &'a Parts<'a, E>,
    /// The codecs of the recipe and of its tiers.
    pub known: &'a [Arc<Codec>],
    pub frames: &'a [Frame<E::Tensor>; 2],
}

impl<E: Engine> Packed<'_, E> {
    /// Side `k` of a run of tokens, whose arrays are named `prefix.SIDE.…`.
    fn side(&self, prefix: &str, run: &StoredRun, k: usize) -> Result<Stored<E::Tensor>> {
        let array = |what: &str| self.parts.array(&format!("{prefix}.{}.{what}", SIDES[k]));
        let Some(spec) = &run.specs[k] else {
            let rows = array("rows")?;
            expect_rows(&rows, run.len, self.parts.dims[k])?;
            return Ok(Stored::Exact { rows, len: run.len });
        };
        let codec = self.known.iter().find(|c| c.spec() == spec).cloned();
        let codec = codec.ok_or_else(|| misfit(format!("{spec} is no codec of the recipe")))?;
        Codes::new(codec, self.frames[k].clone(), array("words")?, array("scales")?).map(Stored::Packed)
    }

    pub fn segments(&self, part: &str, runs: &[StoredRun]) -> Result<Vec<Segment<E::Tensor>>> {
        let segment = |(i, run): (usize, &StoredRun)| {
            let prefix = format!("{part}.{i}");
            let (keys, values) = (self.side(&prefix, run, 0)?, self.side(&prefix, run, 1)?);
            if [keys.len(), values.len()] != [run.len; 2] {
                let found = keys.len();
                return Err(misfit(format!("{part} segment {i} has {found} tokens, not {}", run.len)));
            }
            Ok(Segment { start: run.start, keys, values })
        };
        runs.iter().enumerate().map(segment).collect()
    }
}
