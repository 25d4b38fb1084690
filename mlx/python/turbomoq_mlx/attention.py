"""Attention over exact and packed tokens: scores of every part, one f32 softmax over all, one rotation of what was packed.

The query heads that share a KV head are folded into the rows of one product, (B, Hkv, rep L, D). Where few rows meet the packed
tokens, as in a decode step, MLX's quantized kernel reads the words as they are; many rows unpack them tile by tile.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Optional, Union

import mlx.core as mx

from .codec import Codec

BUDGET = 32 << 20
"""Bytes of f32 scores that are formed at a time; queries that need more go in runs."""
TILE = 2048
"""Packed tokens that are unpacked at a time for many rows."""
ROWS = 64
"""Rows from which tiles are unpacked."""


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
            parts.append(body.astype(dtype))
        if self.tail is not None:
            parts.append(self.tail)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


@dataclass
class View:
    """What one call attends to, `packed` tokens of the buffers among it."""

    key: Side
    value: Side
    packed: int

    def spans(self, tiled: bool) -> list[tuple[str, int, int]]:
        """The parts in token order: their kind and their tokens."""
        sinks = 0 if self.key.sinks is None else self.key.sinks.shape[2]
        step = TILE if tiled else max(self.packed, 1)
        starts = range(0, self.packed, step)
        spans = [("sinks", 0, sinks)] if sinks else []
        spans += [("packed", sinks + s, sinks + min(s + step, self.packed)) for s in starts]
        end = sinks + self.packed
        if self.key.tail is not None:
            spans.append(("tail", end, end + self.key.tail.shape[2]))
        return spans


Mask = Union[None, str, mx.array]


def attend(view: View, queries: mx.array, scale: float, mask: Mask, logits: Optional[mx.array]) -> mx.array:
    """Attention of queries (B, Hq, L, D), the last of which stands at the last token: (B, Hq, L, Dv) in their dtype.

    A mask is None, "causal", or an array that broadcasts to (B, Hq, L, T), boolean or additive; `logits` (Hq) is one more logit a
    head, without a value. A query that sees nothing gives zeros.
    """
    batch, heads, length, _ = queries.shape
    tokens = view.spans(False)[-1][2]
    run = max(1, BUDGET // (4 * batch * heads * tokens))
    outs: list[mx.array] = []
    for first in range(0, length, run):
        last = min(first + run, length)
        part = queries[:, :, first:last]
        if outs:
            # One run after the other, so that their scores are not there at the same time.
            part = mx.depends([part], [outs[-1]])[0]
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
    tiled = rows >= ROWS
    spans = view.spans(tiled)
    if view.packed:
        rotated = key.codec.rotate(q)
        bias = (q * key.centre).sum(-1, keepdims=True)
    first = 0 if key.sinks is None else key.sinks.shape[2]

    def scores(kind: str, start: int, end: int) -> mx.array:
        if kind != "packed":
            return q @ getattr(key, kind).astype(mx.float32).swapaxes(-1, -2)
        if tiled:
            return rotated @ _tile(key, start - first, end - first).swapaxes(-1, -2) + bias
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
    plain: Any = 0
    packed: Any = 0
    for (kind, start, end), w in zip(spans, weights):
        w = w.reshape(batch, kv_heads, rows, end - start)
        if kind != "packed":
            plain = plain + w @ getattr(value, kind).astype(mx.float32)
        elif tiled:
            packed = packed + w @ _tile(value, start - first, end - first)
        else:
            packed = packed + value.codec.weighted_sum(w, value.words, value.scales)
    out = plain + value.codec.unrotate(packed) if view.packed else plain
    out = out.reshape(batch, heads, length, out.shape[-1]) / mx.where(total == 0, 1.0, total)
    return out.astype(queries.dtype)


def _tile(side: Side, start: int, end: int) -> mx.array:
    return side.codec.levels(side.words[:, :, start:end], side.scales[:, :, start:end])


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
    return scores + part.astype(mx.float32)
