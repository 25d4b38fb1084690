//! An engine that fails when a test wants it to: for every call of a cache and every call of the engine inside it, "on an error nothing
//! has changed" can then be tried.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use turbomoq::Codec;
use turbomoq::Dtype;
use turbomoq::Engine;
use turbomoq::{Codes, Frame};
use turbomoq::{Error, Result, Tensor};
use turbomoq::{Rules, Segment};

/// When the calls of an engine fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    Never,
    /// The call with this number since [`Failing::fail`], from zero.
    At(usize),
    /// That call and all after it.
    From(usize),
}

/// Any engine, with calls that fail. Clones share the count of calls, so a cache made with a clone fails too.
#[derive(Clone, Debug)]
pub struct Failing<E> {
    inner: E,
    when: Rc<Cell<When>>,
    calls: Rc<Cell<usize>>,
}

impl<E> Failing<E> {
    pub fn new(inner: E) -> Failing<E> {
        Failing { inner, when: Rc::new(Cell::new(When::Never)), calls: Rc::default() }
    }

    /// Counts calls from zero again and says which of them fail.
    pub fn fail(&self, when: When) {
        self.calls.set(0);
        self.when.set(when);
    }

    /// Calls since [`Failing::fail`].
    pub fn calls(&self) -> usize {
        self.calls.get()
    }

    fn step(&self) -> Result<()> {
        let n = self.calls.replace(self.calls.get() + 1);
        let fails = match self.when.get() {
            When::Never => false,
            When::At(at) => n == at,
            When::From(first) => n >= first,
        };
        if fails { Err(injected()) } else { Ok(()) }
    }
}

/// The error of a call that was made to fail.
pub fn injected() -> Error {
    Error::Unsupported { field: "call", value: "injected".into(), reason: "the test wants it to fail".into() }
}

/// Whether an error is [`injected`].
pub fn is_injected(error: &Error) -> bool {
    matches!(error, Error::Unsupported { field: "call", value, .. } if value == "injected")
}

impl<E: Engine> Engine for Failing<E> {
    type Tensor = E::Tensor;

    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn put(&self, tensor: &Tensor) -> Result<E::Tensor> {
        self.step()?;
        self.inner.put(tensor)
    }

    fn get(&self, tensor: &E::Tensor) -> Result<Tensor> {
        self.step()?;
        self.inner.get(tensor)
    }

    fn frame(
        &self,
        codec: &Codec,
        centred: bool,
        block: &E::Tensor,
        queries: Option<&E::Tensor>,
    ) -> Result<Frame<E::Tensor>> {
        self.step()?;
        self.inner.frame(codec, centred, block, queries)
    }

    fn encode(&self, codec: &Arc<Codec>, frame: Frame<E::Tensor>, x: &E::Tensor) -> Result<Codes<E::Tensor>> {
        self.step()?;
        self.inner.encode(codec, frame, x)
    }

    fn decode(&self, codes: &Codes<E::Tensor>, dtype: Dtype) -> Result<E::Tensor> {
        self.step()?;
        self.inner.decode(codes, dtype)
    }

    fn scores(&self, codes: &Codes<E::Tensor>, queries: &E::Tensor) -> Result<E::Tensor> {
        self.step()?;
        self.inner.scores(codes, queries)
    }

    fn weighted_sum(&self, codes: &Codes<E::Tensor>, weights: &E::Tensor) -> Result<E::Tensor> {
        self.step()?;
        self.inner.weighted_sum(codes, weights)
    }

    fn attend(
        &self,
        segments: &[Segment<E::Tensor>],
        queries: &E::Tensor,
        rules: &Rules<E::Tensor>,
    ) -> Result<E::Tensor> {
        self.step()?;
        self.inner.attend(segments, queries, rules)
    }

    fn masses(
        &self,
        segments: &[Segment<E::Tensor>],
        queries: &E::Tensor,
        rules: &Rules<E::Tensor>,
    ) -> Result<Vec<f32>> {
        self.step()?;
        self.inner.masses(segments, queries, rules)
    }

    fn dtype(&self, tensor: &E::Tensor) -> Result<Dtype> {
        self.step()?;
        self.inner.dtype(tensor)
    }

    fn zeros(&self, dtype: Dtype, shape: &[usize]) -> Result<E::Tensor> {
        self.step()?;
        self.inner.zeros(dtype, shape)
    }

    /// Fails after it has written, the worse of the two.
    fn write(&self, buffer: &mut E::Tensor, start: usize, rows: &E::Tensor) -> Result<()> {
        self.inner.write(buffer, start, rows)?;
        self.step()
    }

    fn compact(&self, tensor: &E::Tensor) -> Result<E::Tensor> {
        self.step()?;
        self.inner.compact(tensor)
    }
}
