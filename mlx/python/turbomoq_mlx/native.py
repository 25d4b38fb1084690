"""The cache of one sequence in one layer, held by the C library, which packs it by any recipe and attends on the packed form."""

from __future__ import annotations

import ctypes
from typing import Optional, Sequence

import mlx.core as mx
import numpy as np

from .library import CacheInfo, Rows, Rules, check, load
from .memory import address


class Native:
    """A `tmq_cache`. One thread at a time."""

    def __init__(self, recipe: str, layer: int, key_dim: int, value_dim: int):
        self._handle = ctypes.c_void_p()
        check(load().tmq_cache_new(recipe.encode(), layer, key_dim, value_dim, ctypes.byref(self._handle)))

    @classmethod
    def _of(cls, handle: ctypes.c_void_p) -> "Native":
        native = cls.__new__(cls)
        native._handle = handle
        return native

    def __del__(self):
        if handle := getattr(self, "_handle", None):
            load().tmq_cache_free(handle)

    def copy(self) -> "Native":
        """A cache of its own; what neither changes they share."""
        handle = ctypes.c_void_p()
        check(load().tmq_cache_copy(self._handle, ctypes.byref(handle)))
        return Native._of(handle)

    @property
    def info(self) -> CacheInfo:
        """Tokens, position, bytes, packed tokens."""
        info = CacheInfo(ctypes.sizeof(CacheInfo))
        check(load().tmq_cache_get_info(self._handle, info))
        return info

    def extend(self, keys: Rows, values: Rows) -> None:
        """Appends."""
        check(load().tmq_cache_extend(self._handle, keys, values))

    def attend(self, queries: Rows, rules: Rules, out: np.ndarray) -> None:
        """Attends with queries of the newest tokens."""
        check(load().tmq_cache_attend_by_rules(self._handle, queries, rules, address(out), out.size))

    def fetch(self, heads: int, tokens: int, dims: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """All keys (H, T, D) and values (H, T, Dv), unpacked to f32."""
        keys, values = (np.empty((heads, tokens, dim), np.float32) for dim in dims)
        check(load().tmq_cache_fetch(self._handle, address(keys), keys.size, address(values), values.size))
        return keys, values

    def trim(self, tokens: int) -> None:
        """Drops the newest tokens."""
        check(load().tmq_cache_trim(self._handle, tokens, None))

    def save(self) -> mx.array:
        """The cache as an array of bytes."""
        library, blob, count = load(), ctypes.c_void_p(), ctypes.c_size_t()
        check(library.tmq_cache_save(self._handle, ctypes.byref(blob)))
        try:
            check(library.tmq_bytes_len(blob, ctypes.byref(count)))
            data = np.empty(count.value, np.uint8)
            check(library.tmq_bytes_copy(blob, address(data), data.size))
        finally:
            library.tmq_bytes_free(blob)
        return mx.array(data)

    @classmethod
    def load(cls, data: mx.array) -> "Native":
        """A cache from what `save` gave. `Unsupported` if it is something else."""
        data, handle = np.array(data), ctypes.c_void_p()
        check(load().tmq_cache_load(address(data), data.size, ctypes.byref(handle)))
        return cls._of(handle)


def update_and_attend(
    caches: Sequence[Native], rows: Sequence[tuple[Rows, Rows, Rows]], rules: Sequence[Rules], outs: Sequence[np.ndarray]
) -> None:
    """Appends (queries, keys, values) to each cache and attends: `outs` get floats by token, query head and channel."""
    count = len(caches)
    sides = [(Rows * count)(*side) for side in zip(*rows)]
    handles = (ctypes.c_void_p * count)(*(cache._handle.value for cache in caches))
    places = (ctypes.c_void_p * count)(*(address(out) for out in outs))
    sizes = (ctypes.c_size_t * count)(*(out.size for out in outs))
    check(load().tmq_caches_update_and_attend(handles, count, *sides, (Rules * count)(*rules), places, sizes))


def rules(scale: float, causal: bool, window: Optional[int], logits: Optional[np.ndarray], mask: Optional[np.ndarray]) -> Rules:
    """Rules over arrays of f32 that the caller keeps: logits (Hq), mask (1 or Hq, L, T)."""
    at = lambda a: None if a is None else address(a)
    heads = 0 if mask is None else mask.shape[0]
    return Rules(ctypes.sizeof(Rules), scale, causal, window or 0, 0.0, at(logits), at(mask), heads)
