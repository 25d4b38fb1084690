"""What a saved `TurboMoqCache` consists of: for keys and for values a list of arrays, of which the first is a header.

    header    int32, the fields of `Header` in their order
    sinks     (B, H, sinks held, D) in the dtype of the rows, if any are held
    words     (B, H, packed held, W) uint32, if any are held; then
    scales    (B, H, packed held) float16, and for keys
    centre    (B, H, 1, D) float32
    window    (B, H, window held, D) in the dtype of the rows, if any are held

The arrangement is the same in both releases of mlx-lm, and src/io/prompt_cache of the Rust crate reads it too.
"""

from __future__ import annotations

from typing import Any, Iterable, NamedTuple, Optional

import mlx.core as mx

from .codec import WIDTHS
from .rows import DTYPES

VERSION = 2
"""Version of the arrangement. Version 1 was one flat list, without the header of each side."""


class Header(NamedTuple):
    """Numbers of one side. Those of keys and values agree in all but `bits`, `head_dim` and `dtype`."""

    version: int
    layer: int
    sinks: int
    """Tokens that stay exact at the start; `held_sinks` of them are there."""
    window: int
    """Newest tokens that stay exact at least."""
    exact_call: int
    bits: int
    head_dim: int
    """0 if no token is held."""
    dtype: int
    """Of the rows, a place in `rows.DTYPES`."""
    held_sinks: int
    held_packed: int
    held_window: int

    @property
    def common(self) -> tuple[int, ...]:
        """What keys and values have in common."""
        return (self.layer, self.sinks, self.window, self.exact_call, self.held_sinks, self.held_packed, self.held_window)


class Held(list):
    """The arrays of one side, as `TurboMoqCache.state` gives them, with the cache that they are of.

    Some models of mlx-lm 0.31 take `keys, values = cache.state` for rows and hand them to attention: `install()` knows them there.
    """

    def __init__(self, arrays: Iterable[mx.array] = (), cache: Any = None, shape: tuple[int, ...] = ()):
        super().__init__(arrays)
        self.cache = cache
        self.shape = shape
        """(B, H, tokens, D) of the rows that this side stands for."""


class Parts(NamedTuple):
    """A side of a saved cache, checked."""

    header: Header
    sinks: Optional[mx.array]
    words: Optional[mx.array]
    scales: Optional[mx.array]
    centre: Optional[mx.array]
    window: Optional[mx.array]


def parts(arrays: Any, name: str, keys: bool) -> Parts:
    """One side of a state. `ValueError` if it is none."""
    if not isinstance(arrays, (list, tuple)):
        raise ValueError(f"a TurboMoqCache state of version 1, this package reads version {VERSION}")
    header, *rest = arrays
    if header.ndim != 1 or header.dtype != mx.int32 or header.size == 0:
        raise ValueError(f"{name} of a TurboMoqCache begin with a header of int32, not {header.dtype} {header.shape}")
    numbers = header.tolist()
    if numbers[0] != VERSION:
        raise ValueError(f"a TurboMoqCache state of version {numbers[0]}, this package reads version {VERSION}")
    if len(numbers) != len(Header._fields):
        raise ValueError(f"the header of {name} has {len(numbers)} numbers, {len(Header._fields)} are needed")
    h = Header(*numbers)
    if min(numbers) < 0 or h.bits not in WIDTHS or h.dtype >= len(DTYPES) or h.exact_call > 1 or h.held_sinks > h.sinks:
        raise ValueError(f"the header of {name} is {h._asdict()}")
    tokens = (h.held_sinks, h.held_packed, h.held_window)
    found = dict.fromkeys(Parts._fields[1:])
    held = {"sinks": h.held_sinks, "words": h.held_packed, "scales": h.held_packed, "centre": keys and h.held_packed, "window": h.held_window}
    wanted = [part for part, count in held.items() if count]
    if len(rest) != len(wanted):
        raise ValueError(f"{name} of a TurboMoqCache consist of {len(rest)} arrays, {len(wanted)} are needed for {tokens} tokens")
    found.update(zip(wanted, rest))
    for part, array in zip(wanted, rest):
        shape, dtype = _expected(part, h)
        if array.ndim != 2 + len(shape) or array.shape[2:] != shape or array.shape[:2] != rest[0].shape[:2] or array.dtype != dtype:
            raise ValueError(f"{part} of {name} are {array.dtype} {array.shape}, not {dtype} (B, H, {', '.join(map(str, shape))})")
    return Parts(h, **found)


def _expected(part: str, h: Header) -> tuple[tuple[int, ...], mx.Dtype]:
    """Shape behind the heads, and dtype."""
    if part == "words":
        return (h.held_packed, -(-h.head_dim // 32) * h.bits), mx.uint32
    if part == "scales":
        return (h.held_packed,), mx.float16
    if part == "centre":
        return (1, h.head_dim), mx.float32
    return (h.held_sinks if part == "sinks" else h.held_window, h.head_dim), DTYPES[h.dtype]
