"""Masks that caches make themselves, known again when a model hands them to attention: they need no array there."""

from __future__ import annotations

import weakref
from typing import Any, Optional

import mlx.core as mx
import numpy as np

_made: dict[int, tuple[Any, Optional[int]]] = {}


def made(mask: mx.array, window: Optional[int]) -> mx.array:
    """Remembers a mask that is causal, within a window if there is one, and hides padding."""
    key = id(mask)
    _made[key] = (weakref.ref(mask, lambda _: _made.pop(key, None)), window)
    return mask


def window_of(mask: Any) -> Optional[tuple[Optional[int]]]:
    """The window of a mask that was made here, in a tuple; None for any other."""
    found = _made.get(id(mask))
    return (found[1],) if found and found[0]() is mask else None


def additive(mask: mx.array, row: int, queries: slice, tokens: slice, of: tuple[int, int]) -> np.ndarray:
    """The part of a mask (B or 1, Hq or 1, L or 1, T or 1) for one sequence, (Hq or 1, L, T) in f32; `of` is the whole (L, T)."""
    whole = mx.broadcast_to(mask, (*mask.shape[:-2], *of))
    whole = whole.reshape(*(1,) * (4 - whole.ndim), *whole.shape)
    part = whole[row if whole.shape[0] > 1 else 0, :, queries, tokens]
    if part.dtype == mx.bool_:
        part = mx.where(part, 0.0, -float("inf"))
    elif part.dtype != mx.float32:
        # The least finite value of a half type hides too.
        part = mx.where(part <= mx.finfo(part.dtype).min, -float("inf"), part.astype(mx.float32))
    return np.ascontiguousarray(np.array(part))
