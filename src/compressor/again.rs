//! Rows that were packed before: their codes are kept, continued, or found again.

use super::{CompressedSide, Compressor, TOKENS_PER_BLOCK};
use crate::codec::Codec;
use crate::codec::codes::{Codes, Frame};
use crate::engine::Engine;
use crate::error::Result;
use crate::spec::{CodecSpec, ScaleRule};
use crate::tensor::Tensor;
use std::sync::Arc;

impl<E: Engine> Compressor<E> {
    /// The codes of the first rows, followed by the codes of the others with the same frame.
    pub(super) fn append(
        &self,
        codec: &Arc<Codec>,
        kept: Codes<E::Tensor>,
        rows: &Tensor,
    ) -> Result<Codes<E::Tensor>> {
        let (start, end) = (kept.shape()[2], rows.shape()[2]);
        if start == end {
            return Ok(kept);
        }
        let rows = self.engine.put(&rows.slice(2, start, end)?)?;
        let new = self.engine.encode(codec, kept.frame().clone(), &rows)?;
        Codes::concat(&[kept, new])
    }

    /// Encodes rows that were unpacked from codes of this codec and frame. A plain scale is the norm of what is packed, and what was
    /// unpacked is a little shorter than the rows before it: the least-squares scale finds the one that it was unpacked with.
    pub(super) fn encode_again(
        &self,
        codec: &Arc<Codec>,
        frame: &Frame<Tensor>,
        rows: &Tensor,
    ) -> Result<Codes<E::Tensor>> {
        let put = |table: &Option<Tensor>| table.as_ref().map(|t| self.engine.put(t)).transpose();
        let frame = Frame { centre: put(&frame.centre)?, gain: put(&frame.gain)?, order: put(&frame.order)? };
        let rows = self.engine.put(rows)?;
        if codec.spec().scale != ScaleRule::Plain || codec.affine_group().is_some() {
            return self.engine.encode(codec, frame, &rows);
        }
        let spec = CodecSpec { scale: ScaleRule::LeastSquares, ..*codec.spec() };
        let fitting = match codec.fitted() {
            Some(levels) => Codec::with_levels(spec, levels.clone())?,
            None => Codec::new(spec)?,
        };
        let codes = self.engine.encode(&Arc::new(fitting), frame, &rows)?;
        // The rule only says how a scale is found: the codes are read by the same tables.
        Codes::new(codec.clone(), codes.frame().clone(), codes.words().clone(), codes.scales().clone())
    }

    /// The codes of `before`, if they are of this codec and unpack to the tokens of `x` behind the sinks.
    pub(super) fn kept(
        &self,
        before: &CompressedSide<E::Tensor>,
        codec: &Codec,
        x: &Tensor,
        sinks: usize,
        packed: usize,
    ) -> Result<Option<Codes<E::Tensor>>> {
        let Some(codes) = &before.body else { return Ok(None) };
        let (old, new) = (before.shape, x.shape());
        let [old_sinks, len, _] = before.split();
        let alike =
            [old[0], old[1], old[3]] == [new[0], new[1], new[3]] && old_sinks == sinks && len <= packed;
        // A frame is made from a whole block, or it would not be the one that a longer cache has.
        if !alike || len < TOKENS_PER_BLOCK || !codes.codec().same(codec) || x.float() != Some(before.dtype) {
            return Ok(None);
        }
        let dense = self.engine.get(&self.engine.decode(codes, before.dtype)?)?;
        let same = dense.row_major_bytes() == x.slice(2, sinks, sinks + len)?.row_major_bytes();
        Ok(same.then(|| codes.clone()))
    }
}
