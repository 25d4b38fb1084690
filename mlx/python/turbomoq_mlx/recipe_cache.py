"""`RecipeCache`: the cache of one layer by any recipe, with mlx-lm's contract (0.31 and 0.32); `BatchRecipeCache` for several sequences.

Both hold their tokens in the C library. Each sequence of a batch is a cache of its own there, so that it holds what it would hold
alone, bit for bit; its padding is nowhere.
"""

from __future__ import annotations

from typing import Any, Iterable, Optional

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.base import create_causal_mask

from . import masks
from .attention import Mask
from .contract import Contract
from .native import Native
from .rows import DTYPES
from .sequences import Sequences, Way

VERSION = 1
"""Version of a state's header."""


class RecipeCache(Contract, Sequences):
    """Keys and values of one layer, packed by a recipe such as `best@3`; through `make_turbomoq_cache`.

    A query sees what it would have seen had all tokens come one by one: the same rows in any calls give the same bytes and the same
    attention.
    """

    @property
    def offset(self) -> int:
        """Tokens so far: the position of the next one."""
        return self._columns

    def make_mask(self, N: int, return_array: bool = False, window_size: Optional[int] = None) -> Mask:
        """The mask of `N` tokens that come next: None, "causal" or an array, as of mlx-lm's own caches."""
        mask = mlx_cache.create_attention_mask(N, self.offset, return_array, window_size)
        return masks.made(mask, window_size) if isinstance(mask, mx.array) else mask

    def trim(self, n: int) -> int:
        """Drops the last `n` tokens, or all if there are fewer, and says how many."""
        self.settle()
        self._call = None
        n = max(0, min(n, self._columns))
        if n:
            for cache in self._natives:
                cache.trim(n)
            self._columns -= n
            self._lengths = [length - n for length in self._lengths]
        return n

    def merge(self, caches: list["RecipeCache"]) -> "BatchRecipeCache":
        """One batch of copies of caches that hold one sequence each, the shorter ones padded at the left."""
        return BatchRecipeCache.merge(caches)

    @property
    def state(self) -> list[mx.array]:
        """A header of int32 with the recipe's text behind it, and for each sequence the bytes of its cache in the library."""
        self.settle()
        heads, dims, dtypes = self._like or (0, (0, 0), (mx.float16, mx.float16))
        header = [VERSION, self.layer, self._columns, heads, *dims, *map(DTYPES.index, dtypes)]
        text = [*self.recipe.encode()]
        return [mx.array(header + text, dtype=mx.int32), *(n.save() for n in self._natives)]

    @state.setter
    def state(self, state: Iterable[mx.array]) -> None:
        header, *saved = state
        numbers = header.tolist()
        if header.dtype != mx.int32 or len(numbers) < 8 or numbers[0] != VERSION:
            raise ValueError(f"a RecipeCache state begins with {header.dtype} {numbers[:8]}, version {VERSION} is needed")
        _, layer, columns, heads, key_dim, value_dim, *dtypes = numbers[:8]
        if min(numbers) < 0 or max(dtypes) >= len(DTYPES) or (columns > 0) != bool(saved):
            raise ValueError(f"a RecipeCache state with the header {numbers[:8]} and {len(saved)} sequences")
        natives = [Native.load(data) for data in saved]
        if any(n.info.offset != columns for n in natives):
            raise ValueError(f"a RecipeCache state of {columns} tokens holds {[n.info.offset for n in natives]}")
        Sequences.__init__(self, bytes(numbers[8:]).decode(), layer)
        self._natives, self._columns = natives, columns
        self._lengths, self._pads = [columns] * len(saved), [0] * len(saved)
        if heads:
            self._like = (heads, (key_dim, value_dim), tuple(DTYPES[d] for d in dtypes))


class BatchRecipeCache(Sequences):
    """The cache of several sequences that come and go, as mlx-lm's `BatchKVCache`: columns are right-aligned, with padding at the left."""

    def __init__(self, recipe: str, left_padding: list[int], layer: int = 0, way: Optional[Way] = None):
        super().__init__(recipe, layer, way)
        self._pads, self._lengths = list(left_padding), [0] * len(left_padding)
        self._natives = [None] * len(left_padding)
        self._remaining: Optional[list[int]] = None
        """Tokens that each sequence takes yet, while calls are padded at the right."""
        self._right: list[int] = []

    @property
    def offset(self) -> mx.array:
        """Position of the next token of each sequence."""
        return mx.array([self._columns - pad for pad in self._pads])

    @property
    def left_padding(self) -> mx.array:
        """Columns of each sequence that are padding."""
        return mx.array(self._pads)

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        """Tells the padding of the calls that come, at the left (into an empty cache) or at the right, until `finalize`."""
        if left_padding is not None:
            if self._columns:
                raise ValueError("left padding can only be added to an empty BatchRecipeCache")
            self._pads = [a + int(b) for a, b in zip(self._pads, left_padding)]
        if right_padding is not None and max(right_padding) > 0:
            self._right, self._remaining = [int(n) for n in right_padding], [int(n) for n in lengths]

    def _spans(self, tokens: int) -> list[tuple[int, int]]:
        spans = super()._spans(tokens)
        if self._remaining is None:
            return spans
        spans = [(start, max(start, min(tokens, left))) for (start, _), left in zip(spans, self._remaining)]
        self._remaining = [max(left - tokens, 0) for left in self._remaining]
        return spans

    def finalize(self) -> None:
        """What was padding at the right is at the left from here on."""
        if self._remaining is not None:
            self.settle()
            self._pads = [a + b for a, b in zip(self._pads, self._right)]
            self._right, self._remaining = [], None

    def make_mask(self, N: int, return_array: bool = False, window_size: Optional[int] = None, **options: Any) -> mx.array:
        """The mask (B, 1, N, T) of `N` tokens that come next."""
        if window_size is not None:
            options["window_size"] = window_size
        mask = create_causal_mask(N, offset=self._columns, left_padding=self.left_padding, **options)
        return masks.made(mask, window_size) if options.keys() <= {"window_size"} else mask

    def trim(self, n: int) -> int:
        """Drops the last `n` columns, or all if there are fewer, and says how many."""
        self.settle()
        self._call = None
        n = max(0, min(n, self._columns))
        for i, cache in enumerate(self._natives):
            dropped = min(n, self._lengths[i])
            if dropped:
                cache.trim(dropped)
            self._lengths[i] -= dropped
        self._columns -= n
        return n

    def filter(self, batch_indices: Any) -> None:
        """Keeps the given sequences, and columns that one of them has a token in."""
        self.settle()
        keep = batch_indices.tolist() if isinstance(batch_indices, mx.array) else list(batch_indices)
        self._natives, self._lengths, self._pads = ([a[i] for i in keep] for a in (self._natives, self._lengths, self._pads))
        if least := min(self._pads, default=0):
            self._pads = [pad - least for pad in self._pads]
            self._columns -= least
        self._call = None

    def extend(self, other: "BatchRecipeCache") -> None:
        """Takes the sequences of another batch behind its own; that one is not used afterwards."""
        for cache in (self, other):
            cache.settle()
            cache._call = None
        columns = max(self._columns, other._columns)
        self._pads = [pad + columns - c._columns for c in (self, other) for pad in c._pads]
        self._natives = [n for c in (self, other) for n in c._natives]
        self._lengths = [n for c in (self, other) for n in c._lengths]
        self._columns, self._like = columns, self._like or other._like

    def extract(self, idx: int) -> RecipeCache:
        """The cache of one sequence, alone."""
        self.settle()
        cache = RecipeCache(self.recipe, self.layer, self._way)
        if self._natives[idx] and self._lengths[idx]:
            cache._natives, cache._lengths, cache._pads = [self._natives[idx].copy()], [self._lengths[idx]], [0]
            cache._columns, cache._like = self._lengths[idx], self._like
        return cache

    @classmethod
    def merge(cls, caches: list[RecipeCache]) -> "BatchRecipeCache":
        """See `RecipeCache.merge`."""
        if len({(cache.recipe, cache.layer) for cache in caches}) != 1:
            raise ValueError(f"caches of several recipes or layers: {sorted({c.recipe for c in caches})}")
        if any(len(cache._natives) > 1 for cache in caches):
            raise ValueError("a cache that holds several sequences is a batch already")
        columns = max(cache.offset for cache in caches)
        batch = cls(caches[0].recipe, [columns - cache.offset for cache in caches], caches[0].layer, caches[0]._way)
        for i, cache in enumerate(caches):
            cache.settle()
            if cache.offset:
                batch._natives[i], batch._lengths[i], batch._like = cache._natives[0].copy(), cache.offset, cache._like
        batch._columns = columns
        return batch

    @property
    def state(self) -> list[mx.array]:
        """Columns and padding, and for each sequence that has tokens the bytes of its cache in the library."""
        self.settle()
        numbers = mx.array([self._columns, *self._pads], dtype=mx.int32)
        return [numbers, *(n.save() for n in self._natives if n)]


# mlx-lm looks the classes of a saved cache up among its own names.
mlx_cache.RecipeCache = RecipeCache
