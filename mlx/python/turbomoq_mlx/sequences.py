"""Sequences of one layer, each in a cache of the C library, as a model's calls see them: columns of one batch, with padding.

A call brings (B, H, L, D); of sequence b the tokens `spans[b]` are real. They are appended when attention comes with the queries of the
same tokens, in one call of the library, or without it when something asks for what is held.
"""

from __future__ import annotations

import weakref
from typing import Any, Optional

import mlx.core as mx
import numpy as np

from . import masks, native
from .attention import Mask
from .fetched import Fetched
from .library import KEY, VALUE, load
from .memory import Tensor
from .native import Native
from .rows import DTYPES, cast

SEEN, UNPACKED = "the C library, on the packed form", "the C library, unpacked at every step"


class Way:
    """How a layer of a model uses what it fetches, learned from its first call and shared by all copies of its cache."""

    direct: Optional[bool] = None
    """Whether it hands it to attention as it is."""

    def __deepcopy__(self, _: Any) -> "Way":
        return self


class Call:
    """What one call has brought, and whether it is appended."""

    def __init__(self, owner: "Sequences", pair: tuple[mx.array, mx.array], spans: list[tuple[int, int]], before: list[int]):
        self.owner, self.pair, self.spans, self.before = weakref.ref(owner), pair, spans, before
        self.tokens = pair[0].shape[2]
        self.given: tuple[Any, Any] = (None, None)
        """Weak references to the arrays that the model got, if it got arrays."""

    def newest(self) -> "Sequences":
        owner = self.owner()
        if owner is None or owner._call is not self:
            raise RuntimeError("keys and values of an earlier call: the cache has gone on since")
        return owner

    def dense(self) -> tuple[mx.array, mx.array]:
        """All keys and values after this call."""
        owner = self.newest()
        owner.settle()
        return owner.dense()


class Sequences:
    """Base of the caches of one sequence and of several."""

    def __init__(self, recipe: str, layer: int = 0, way: Optional[Way] = None):
        load()
        self.recipe, self.layer = recipe, layer
        """The recipe, as `turbomoq --recipe` understands it, and the ordinal of the layer among those with keys and values."""
        self._way = way or Way()
        self._natives: list[Optional[Native]] = []
        self._lengths: list[int] = []
        self._pads: list[int] = []
        self._columns = 0
        self._like: Optional[tuple[int, tuple[int, int], tuple[mx.Dtype, mx.Dtype]]] = None
        """KV heads, channels and dtypes."""
        self._call: Optional[Call] = None

    @property
    def road(self) -> str:
        """Who packs and attends."""
        return UNPACKED if self._way.direct is False else SEEN

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers in the library, room for growth included."""
        self.settle()
        return sum(n.info.bytes for n in self._natives if n)

    @property
    def packed_tokens(self) -> int:
        """Tokens that are packed, of the sequence that has most."""
        self.settle()
        return max((n.info.packed for n in self._natives if n), default=0)

    def is_trimmable(self) -> bool:
        """Any number of tokens can be dropped, packed ones too."""
        return True

    def empty(self) -> bool:
        """Whether no token is held."""
        return self._columns == 0

    def size(self) -> int:
        """Tokens held, padding included."""
        return self._columns

    def _check(self, keys: mx.array, values: mx.array) -> None:
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(f"keys {keys.shape} and values {values.shape}: (B, H, L, D) and (B, H, L, Dv) are needed")
        for name, array in (("keys", keys), ("values", values)):
            if array.dtype not in DTYPES:
                raise ValueError(f"{name} of {array.dtype}: float32, float16 or bfloat16 is needed")
        dims = (keys.shape[3], values.shape[3])
        if self._natives and len(self._natives) != keys.shape[0]:
            raise ValueError(f"keys {keys.shape} do not fit a cache of {len(self._natives)} sequences")
        if self._like and (self._like[0] != keys.shape[1] or self._like[1] != dims):
            raise ValueError(f"keys {keys.shape} and values {values.shape} do not fit a cache of {self._like[:2]}")

    def _spans(self, tokens: int) -> list[tuple[int, int]]:
        """The real tokens of each sequence in a call."""
        return [(min(max(pad - self._columns, 0), tokens), tokens) for pad in self._pads]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Appends keys (B, H, L, D) and values (B, H, L, Dv) and gives those of all tokens, for attention by this call.

        Raises `ValueError` for what does not fit, `Unsupported` for a head dim that the recipe has no form for; nothing has changed then.
        """
        self._check(keys, values)
        self.settle()
        batch, heads, tokens, _ = keys.shape
        dims = (keys.shape[3], values.shape[3])
        if not any(self._natives):
            made = [Native(self.recipe, self.layer, *dims) for _ in range(batch)]
            self._natives = made
            self._lengths, self._pads = self._lengths or [0] * batch, self._pads or [0] * batch
        self._natives = [n or Native(self.recipe, self.layer, *dims) for n in self._natives]
        self._like = self._like or (heads, dims, (keys.dtype, values.dtype))
        fresh = self._columns == 0
        call = Call(self, (keys, values), self._spans(tokens), list(self._lengths))
        self._count(call, 1)
        self._call = call
        if self._way.direct:
            shape = lambda side: (batch, heads, self._columns, dims[side])
            return tuple(Fetched(call, side, shape(side), self._like[2][side]) for side in (KEY, VALUE))
        given = (keys, values) if fresh else call.dense()
        call.given = tuple(weakref.ref(a) for a in given)
        return given

    def _count(self, call: Call, sign: int) -> None:
        """Counts the tokens of a call, or takes them back."""
        self._columns += sign * call.tokens
        self._lengths = [n + sign * (end - start) for n, (start, end) in zip(self._lengths, call.spans)]

    def keys_and_values(self) -> tuple[Optional[mx.array], Optional[mx.array]]:
        """All keys and values, unpacked; None before the first."""
        self.settle()
        return self.dense() if self._like else (None, None)

    def settle(self) -> None:
        """Appends what the last call has brought, if nothing attended with it."""
        call = self._call
        if call is None or call.pair is None:
            return
        pair, call.pair = call.pair, None
        try:
            mx.eval(*pair)
            sides = [Tensor(a) for a in pair]
            for i, (start, end) in enumerate(call.spans):
                if end > start:
                    self._natives[i].extend(*(side.rows(i, start, end) for side in sides))
        except BaseException:
            self._take_back(call)
            raise

    def _take_back(self, call: Call) -> None:
        for cache, before in zip(self._natives, call.before):
            if (more := cache.info.offset - before) > 0:
                cache.trim(more)
        self._count(call, -1)
        self._call = None

    def dense(self) -> tuple[mx.array, mx.array]:
        """All keys and values that are appended, (B, H, columns, D); zeros where there is padding."""
        heads, dims, dtypes = self._like
        whole = [np.zeros((len(self._natives), heads, self._columns, dim), np.float32) for dim in dims]
        for i, (cache, pad, length) in enumerate(zip(self._natives, self._pads, self._lengths)):
            if length:
                for all_rows, rows in zip(whole, cache.fetch(heads, length, dims)):
                    all_rows[i, :, pad : pad + length] = rows
        return tuple(cast(mx.array(rows), dtype) for rows, dtype in zip(whole, dtypes))

    def known(self, keys: Any, values: Any) -> Optional[Call]:
        """The newest call, if these are the very keys and values that the model got from it."""
        call = self._call
        if call is None:
            return None
        same = call.given[0] is not None and call.given[0]() is keys and call.given[1]() is values
        if self._way.direct is None or same:
            self._way.direct = same
        return call if same else None

    def attend(
        self, call: Call, queries: mx.array, scale: float, mask: Mask = None, sinks: Optional[mx.array] = None
    ) -> mx.array:
        """Attention of queries (B, Hq, L, D) after a call: (B, Hq, L, Dv) in their dtype. See `attention.attend` for masks."""
        call.newest()
        batch, heads, length, _ = queries.shape
        if isinstance(mask, str) and mask != "causal":
            raise ValueError(f"the mask {mask!r} is neither an array nor 'causal'")
        own = masks.window_of(mask)
        plain = own is not None or isinstance(mask, str) or (mask is None and length == 1)
        window = own[0] if own else None
        logits = None if sinks is None else np.array(sinks.astype(mx.float32)).reshape(-1)
        together = plain and call.pair is not None and length == call.tokens
        if together:
            mx.eval(queries, *call.pair)
        else:
            self.settle()
            mx.eval(queries)
        q = Tensor(queries)
        out = np.zeros((batch, length, heads, self._like[1][VALUE]), np.float32)
        # Queries are the newest tokens of the call.
        spans = [(max(start - call.tokens + length, 0), end - call.tokens + length) for start, end in call.spans]
        used = [(i, max(a, 0), b) for i, (a, b) in enumerate(spans) if b > a and b > 0]
        kept = []
        for i, start, end in used:
            part = None
            if isinstance(mask, mx.array) and not plain:
                tokens = slice(self._pads[i], self._pads[i] + self._lengths[i])
                part = masks.additive(mask, i, slice(start, end), tokens, (length, self._columns))
            kept.append((part, native.rules(scale, plain, window, logits, part)))
        if together:
            self._attend_together(call, q, used, [rules for _, rules in kept], out)
        else:
            for (i, start, end), (_, rules) in zip(used, kept):
                self._natives[i].attend(q.rows(i, start, end), rules, out[i, start:end])
        return cast(mx.array(out).transpose(0, 2, 1, 3), queries.dtype)

    def _attend_together(self, call: Call, q: Tensor, used: list[tuple[int, int, int]], rules: list[Any], out: np.ndarray) -> None:
        pair, call.pair = call.pair, None
        k, v = map(Tensor, pair)
        try:
            rows = [tuple(side.rows(i, start, end) for side in (q, k, v)) for i, start, end in used]
            if rows:
                native.update_and_attend([self._natives[i] for i, *_ in used], rows, rules, [out[i, a:b] for i, a, b in used])
        except BaseException:
            self._take_back(call)
            raise

    def __deepcopy__(self, _: Any) -> "Sequences":
        self.settle()
        other = type(self).__new__(type(self))
        other.__dict__.update({k: list(v) if isinstance(v, list) else v for k, v in self.__dict__.items()})
        other._natives = [n and n.copy() for n in self._natives]
        other._call = None
        return other
