"""Attention over exact and packed tokens: scores of every part, one f32 softmax over all, one rotation of what was packed.

The query heads that share a KV head are folded into the rows of one product, (B, Hkv, rep L, D). MLX's quantized kernels read the
words as they are, for one query and for many. A token whose weight is zero is not there: not even NaN or infinity in its row shows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Optional, Union

import mlx.core as mx

from .codec import Codec
from .rows import cast

BUDGET = 32 << 20
"""Bytes of f32 scores that are formed at a time; queries that need more go in runs."""

@dataclass
class Side:
    """Keys or values as a call sees them: exact sinks, the packed buffer, exact newest tokens."""

    codec: Optional[Codec]
    words: Optional[mx.array]
    scales: Optional[mx.array]
    centre: Optional[mx.array]
    sinks: Optional[mx.array]
    tail: Optional[mx.array]

    def dense(self, packed: int, dtype: mx.Dtype) -> mx.array:
        """All tokens, (B, H, T, D)."""
        parts = [] if self.sinks is None else [self.sinks]
        if packed:
            body = self.codec.decode(self.words[:, :, :packed], self.scales[:, :, :packed], self.centre)
            parts.append(cast(body, dtype))
        if self.tail is not None:
            parts.append(self.tail)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


@dataclass
class View:
    """What one call attends to, `packed` tokens of the buffers among it."""

    key: Side
    value: Side
    packed: int

    def spans(self) -> list[tuple[str, int, int]]:
        """The parts in token order: their kind and their tokens."""
        rows = lambda a: 0 if a is None else a.shape[2]
        spans, start = [], 0
        for kind, count in (("sinks", rows(self.key.sinks)), ("packed", self.packed), ("tail", rows(self.key.tail))):
            if count:
                spans.append((kind, start, start + count))
            start += count
        return spans


Mask = Union[None, str, mx.array]


def attend(view: View, queries: mx.array, scale: float, mask: Mask, logits: Optional[mx.array]) -> mx.array:
    """Attention of queries (B, Hq, L, D), the last of which stands at the last token: (B, Hq, L, Dv) in their dtype.

    A mask is None, "causal", or an array that broadcasts to (B, Hq, L, T), boolean or additive; `logits` (Hq) is one more logit a
    head, without a value. A query that sees nothing gives zeros.
    """
    batch, heads, length, _ = queries.shape
    tokens = view.spans()[-1][2]
    run = max(1, BUDGET // (4 * batch * heads * tokens))
    outs: list[mx.array] = []
    for first in range(0, length, run):
        last = min(first + run, length)
        part = queries[:, :, first:last]
        if outs:
            # MLX runs ahead of what is computed: without this the scores of many runs are there at the same time.
            mx.eval(outs[-1])
        rows = mask
        if isinstance(mask, mx.array) and mask.shape[-2] > 1:
            rows = mask[..., first:last, :]
        outs.append(_attend_run(view, part, scale, rows, logits, tokens - length + first))
    return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)


def _attend_run(
    view: View, queries: mx.array, scale: float, mask: Mask, logits: Optional[mx.array], position: int
) -> mx.array:
    """The same for queries of which the first stands at `position`."""
    batch, heads, length, dim = queries.shape
    key, value = view.key, view.value
    exact = key.tail if key.tail is not None else key.sinks
    kv_heads = exact.shape[1] if exact is not None else key.words.shape[1]
    rows = heads // kv_heads * length
    q = (queries.astype(mx.float32) * scale).reshape(batch, kv_heads, rows, dim)
    spans = view.spans()
    if view.packed:
        rotated = key.codec.rotate(q)
        bias = (q * key.centre).sum(-1, keepdims=True)

    def scores(kind: str, start: int, end: int) -> mx.array:
        if kind != "packed":
            return q @ getattr(key, kind).astype(mx.float32).swapaxes(-1, -2)
        return key.codec.scores(rotated, key.words, key.scales, end - start) + bias

    shape = (batch, heads, length, -1)
    parts = [_masked(scores(*span).reshape(shape), mask, span, position) for span in spans]
    top = functools.reduce(mx.maximum, [s.max(-1, keepdims=True) for s in parts])
    if logits is not None:
        logits = logits.astype(mx.float32).reshape(1, heads, 1, 1)
        top = mx.maximum(top, logits)
    top = mx.where(top == -float("inf"), 0.0, top)
    weights = [mx.exp(s - top) for s in parts]
    total: Any = sum(w.sum(-1, keepdims=True) for w in weights)
    if logits is not None:
        total = total + mx.exp(logits - top)
    out: Any = 0
    for (kind, start, end), w in zip(spans, weights):
        w = w.reshape(batch, kv_heads, rows, end - start)
        if kind == "packed":
            out = out + value.codec.unrotate(value.codec.weighted_sum(w, value.words, value.scales))
        else:
            out = out + _weighted_rows(w, getattr(value, kind).astype(mx.float32))
    out = out.reshape(batch, heads, length, out.shape[-1]) / mx.where(total == 0, 1.0, total)
    return cast(out, queries.dtype)


def _weighted_rows(weights: mx.array, rows: mx.array) -> mx.array:
    """Sums (B, H, M, D) of exact rows (B, H, T, D) with weights (B, H, M, T); all NaN where a row that is not finite has a weight."""
    good = mx.isfinite(rows)
    bad = mx.logical_not(good.all(-1, keepdims=True)).astype(mx.float32)
    out = weights @ mx.where(good, rows, 0.0)
    return mx.where(weights @ bad > 0, float("nan"), out)


def _masked(scores: mx.array, mask: Mask, span: tuple[str, int, int], position: int) -> mx.array:
    """Scores (B, Hq, L, n) of the tokens of a span behind a mask over all tokens."""
    _, start, end = span
    hidden = -float("inf")
    if mask is None:
        return scores
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f"the mask {mask!r} is neither an array nor 'causal'")
        if end <= position + 1:
            return scores
        query = mx.arange(position, position + scores.shape[2])[:, None]
        return mx.where(mx.arange(start, end)[None] <= query, scores, hidden)
    part = mask if mask.shape[-1] == 1 else mask[..., start:end]
    if mask.dtype == mx.bool_:
        return mx.where(part, scores, hidden)
    part = part.astype(mx.float32)
    # NaN plus -inf is NaN, but what is hidden is hidden.
    return mx.where(part == hidden, hidden, scores + part)
