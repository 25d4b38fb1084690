"""`TurboMoqCache`: the cache of one layer, packed while the model decodes, with mlx-lm's contract (0.31 and 0.32).

The first tokens stay exact, and so do the newest; in between lie packed blocks of 128 tokens, see `codec`. New tokens join the
window; when it would grow beyond `window + 128`, its oldest 128 leave it as one block. The same rows give the same words, whatever
calls bring them.

The call that brings tokens sees them exact, whatever becomes of them then: a prompt that comes at once is attended to as without
compression. Layers behind the first therefore see rows that depend on the calls: in one call of 1,000 tokens a row comes from exact
attention, in calls of 100 from attention that was packed in part. The difference is at most the error of packed attention itself, twice
if both were packed in part. With `exact_call=False` each call attends to what the cache holds after it, packed blocks included: a
prompt pays the error of packed attention, and needs less memory.
"""

from __future__ import annotations

import weakref
from typing import Any, Iterable, Optional

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from .attention import Mask, Side, View, attend
from .codec import WIDTHS, Codec, codec, recipe
from .contract import Contract
from .library import KEY, VALUE, Unsupported, load
from .rows import DTYPES, cast, finite_mean, put
from .state import VERSION, Header, Held, parts

BLOCK = 128
"""Tokens that leave the window together."""
STEP = 64
"""Rows by which the window's buffer grows until it has its full size."""


class TurboMoqCache(Contract):
    """Packed keys and values of one layer.

    `key_bits` and `value_bits` are 2, 3, 4, 5, 6 or 8; the first `sinks` tokens and the newest `window` to `window + 128` stay exact.
    `layer` seeds the rotations. With `exact_call=False` a call that brings tokens attends to the packed form of them at once. In
    `mlx_lm` use it through `make_turbomoq_cache`.

    A row with NaN or infinity stays NaN when it is packed, and changes no other row. Values beyond the range of the cache's dtype,
    that of the first rows, become its largest finite value.
    """

    def __init__(
        self,
        key_bits: int = 4,
        value_bits: int = 4,
        sinks: int = 4,
        window: int = 128,
        layer: int = 0,
        exact_call: bool = True,
    ):
        for name, bits in (("key_bits", key_bits), ("value_bits", value_bits)):
            if bits not in WIDTHS:
                raise Unsupported(f"{name} {bits}: MLX's kernels read {', '.join(map(str, WIDTHS))}")
        for name, count in (("sinks", sinks), ("window", window), ("layer", layer)):
            if not 0 <= count < 1 << 31:
                raise ValueError(f"{name} {count}: not a number from 0 to 2^31")
        load()
        self._options = (key_bits, value_bits, sinks, window, layer)
        self._exact_call = bool(exact_call)
        self._clear()

    def _clear(self) -> None:
        self._dims: Optional[tuple[int, int]] = None
        self._dtypes: tuple[int, int] = (0, 0)
        self._held = [0, 0, 0]
        """Tokens: exact sinks, packed, exact window."""
        self._sinks: list[Optional[mx.array]] = [None, None]
        self._words: list[Optional[mx.array]] = [None, None]
        self._scales: list[Optional[mx.array]] = [None, None]
        self._centre: Optional[mx.array] = None
        self.keys: Optional[mx.array] = None
        """Buffer of the exact newest keys (not of all: `keys_and_values` gives those)."""
        self.values: Optional[mx.array] = None
        """Buffer of the exact newest values."""
        self._fetched: Any = None

    @property
    def recipe(self) -> str:
        """What this cache does, as `turbomoq --recipe` understands it."""
        return recipe(*self._options[:4])

    @property
    def road(self) -> str:
        """Who packs and attends."""
        return "MLX operations, on the packed form"

    @property
    def offset(self) -> int:
        """Tokens so far: the position of the next one."""
        return sum(self._held)

    def size(self) -> int:
        """Tokens held."""
        return self.offset

    def empty(self) -> bool:
        """Whether no token is held."""
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, room for growth included."""
        return sum(a.nbytes for a in self._buffers())

    def _buffers(self) -> list[mx.array]:
        arrays = (*self._sinks, *self._words, *self._scales, self._centre, self.keys, self.values)
        return [a for a in arrays if a is not None]

    @property
    def packed_tokens(self) -> int:
        """Tokens that are packed."""
        return self._held[1]

    def _codec(self, side: int) -> Codec:
        return codec(side, self._options[4], self._options[side], self._dims[side])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends keys (B, H, L, D) and values (B, H, L, Dv) and gives those of all tokens, for attention by this call.

        What is given is not evaluated unless it is used: attention by `install()` reads the packed form instead.
        """
        self._check(keys, values)
        self._fetched = None
        before = {name: list(value) if isinstance(value, list) else value for name, value in self.__dict__.items()}
        try:
            return self._fetch(self._append(keys, values))
        except BaseException:
            # Buffers are written behind what is held only, so that the old counts and buffers are the old cache.
            self.__dict__.update(before)
            raise

    def keys_and_values(self) -> tuple[Optional[mx.array], Optional[mx.array]]:
        """The same pair without appending; packed tokens as they decode."""
        self._fetched = None
        if self._dims is None:
            return self.keys, self.values
        return self._fetch(self._now())

    def _check(self, keys: mx.array, values: mx.array) -> None:
        dims = (keys.shape[-1], values.shape[-1])
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(f"keys {keys.shape} and values {values.shape}: (B, H, L, D) and (B, H, L, Dv) are needed")
        for name, array in (("keys", keys), ("values", values)):
            if array.dtype not in DTYPES:
                raise ValueError(f"{name} of {array.dtype}: float32, float16 or bfloat16 is needed")
        if self._dims is not None:
            like = self.keys.shape
            if self._dims != dims or like[:2] != keys.shape[:2]:
                raise ValueError(f"keys {keys.shape} and values {values.shape} do not fit a cache of {like[:2]} x {self._dims}")
            return
        # Both codecs before anything changes: a head dim without a form is refused at the first token.
        for side in (KEY, VALUE):
            codec(side, self._options[4], self._options[side], dims[side])
        self._dims = dims
        self._dtypes = (DTYPES.index(keys.dtype), DTYPES.index(values.dtype))
        self.keys, self.values = (put(None, 0, rows[:, :, :0], STEP) for rows in (keys, values))

    def _append(self, keys: mx.array, values: mx.array) -> View:
        """Stores new tokens; gives what the call that brings them attends to."""
        rows = [cast(a, DTYPES[d]) for a, d in zip((keys, values), self._dtypes)]
        _, _, sinks, window, _ = self._options
        if self._held[1] == self._held[2] == 0 and self._held[0] < sinks:
            n = min(sinks - self._held[0], keys.shape[2])
            for side in (KEY, VALUE):
                self._sinks[side] = put(self._sinks[side], self._held[0], rows[side][:, :, :n], self._sink_room(self._held[0] + n))
            self._held[0] += n
            rows = [a[:, :, n:] for a in rows]
        full, new = window + BLOCK, rows[KEY].shape[2]
        if new and self._held[2] == full:
            self._pack([a[:, :, :BLOCK] for a in self._tail()])
            self._set_window([a[:, :, BLOCK:] for a in self._tail()])
        packed = self._held[1]
        if self._held[2] + new <= full:
            if new:
                self._set_window(rows, self._held[2])
            tail = self._tail()
        else:
            tail = [mx.concatenate([old, a], axis=2) for old, a in zip(self._tail(), rows)]
            surplus = self._held[2] + new - full
            n = -(-surplus // BLOCK) * BLOCK
            self._pack([a[:, :, :n] for a in tail])
            self._set_window([a[:, :, n:] for a in tail])
        return self._view(packed, tail) if self._exact_call else self._now()

    def _now(self) -> View:
        """What is held, packed blocks as such."""
        return self._view(self._held[1], self._tail())

    def _tail(self) -> list[mx.array]:
        return [a[:, :, : self._held[2]] for a in (self.keys, self.values)]

    def _set_window(self, rows: list[mx.array], start: int = 0) -> None:
        """Writes rows into the window behind its first `start`; without any it begins anew."""
        end = start + rows[KEY].shape[2]
        room = min(self._options[3] + BLOCK, -(-end // STEP) * STEP)
        buffers = (self.keys, self.values) if start else (None, None)
        self.keys, self.values = (put(b, start, a, room) for b, a in zip(buffers, rows))
        self._held[2] = end

    def _pack(self, rows: list[mx.array]) -> None:
        """Packs whole blocks behind what is packed."""
        start, end = self._held[1], self._held[1] + rows[KEY].shape[2]
        room = self._packed_room(end)
        if start == 0:
            self._centre = finite_mean(rows[KEY][:, :, :BLOCK].astype(mx.float32))
        for side in (KEY, VALUE):
            words, scales = self._codec(side).encode(rows[side], self._centre if side == KEY else None)
            self._words[side] = put(self._words[side], start, words, room)
            self._scales[side] = put(self._scales[side], start, scales, room)
        self._held[1] = end

    def _sink_room(self, tokens: int) -> int:
        return min(self._options[2], -(-tokens // STEP) * STEP)

    @staticmethod
    def _packed_room(tokens: int) -> int:
        """An eighth more than is needed, so that growing copies little."""
        return -(-(tokens + max(2 * BLOCK, tokens // 8)) // BLOCK) * BLOCK

    def _view(self, packed: int, tail: list[mx.array]) -> View:
        def side(i: int) -> Side:
            sinks = self._sinks[i][:, :, : self._held[0]] if self._held[0] else None
            rows = tail[i] if tail[i].shape[2] or not self.offset else None
            centre = self._centre if i == KEY else None
            return Side(self._codec(i), self._words[i], self._scales[i], centre, sinks, rows)

        return View(side(KEY), side(VALUE), packed)

    def _fetch(self, view: View) -> tuple[mx.array, mx.array]:
        keys = view.key.dense(view.packed, DTYPES[self._dtypes[KEY]])
        values = view.value.dense(view.packed, DTYPES[self._dtypes[VALUE]])
        if view.packed:
            # What the call sees is kept as long as the model holds what it was given, and no longer.
            kept = [view]
            self._fetched = (weakref.ref(keys, lambda _: kept.clear()), weakref.ref(values), kept)
        return keys, values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Mask = None,
        sinks: Optional[mx.array] = None,
    ) -> Optional[mx.array]:
        """Attention on the packed form, if `keys` and `values` are the very arrays that the last call gave and some are packed.

        None otherwise: a model that has changed what it fetched means its own arrays, and exact ones need no care.
        """
        fetched, self._fetched = self._fetched, None
        if fetched is None or fetched[0]() is not keys or fetched[1]() is not values:
            return None
        return attend(fetched[2][0], queries, scale, mask, sinks)

    def make_mask(self, N: int, return_array: bool = False, window_size: Optional[int] = None) -> Mask:
        """The mask of `N` tokens that come next: None, "causal" or an array, as of mlx-lm's own caches."""
        return mlx_cache.create_attention_mask(N, self.offset, return_array, window_size)

    def is_trimmable(self) -> bool:
        """Any number of tokens can be dropped, packed ones too."""
        return True

    def trim(self, n: int) -> int:
        """Drops the last `n` tokens, or all if there are fewer, and says how many."""
        self._fetched = None
        n = max(0, min(n, self.offset))
        left = n
        for part in (2, 1, 0):
            dropped = min(left, self._held[part])
            self._held[part] -= dropped
            left -= dropped
        if self._held[1] == 0:
            # What comes next is a first block again.
            self._centre = None
        return n

    @property
    def state(self) -> list[Held]:
        """Keys and values cut to what is held, each a list of arrays as `turbomoq_mlx.state` has them."""
        return [self._side_state(side) for side in (KEY, VALUE)]

    def _side_state(self, side: int) -> Held:
        _, _, sinks, window, layer = self._options
        # A cache without tokens forgets for what heads it was.
        dim, dtype = (self._dims[side], self._dtypes[side]) if self.offset else (0, 0)
        header = Header(VERSION, layer, sinks, window, int(self._exact_call), self._options[side], dim, dtype, *self._held)
        arrays = [mx.array(header, dtype=mx.int32)]
        held_sinks, packed, held_window = self._held
        if held_sinks:
            arrays.append(self._sinks[side][:, :, :held_sinks])
        if packed:
            arrays += [self._words[side][:, :, :packed], self._scales[side][:, :, :packed]]
            arrays += [self._centre] if side == KEY else []
        if held_window:
            arrays.append(self._tail()[side])
        lead = (0, 0) if self._dims is None else self.keys.shape[:2]
        return Held(arrays, self, (*lead, self.offset, dim))

    @state.setter
    def state(self, state: Iterable[Any]) -> None:
        pair = list(state)
        if len(pair) != 2:
            raise ValueError(f"a TurboMoqCache state of {len(pair)} parts: keys and values are needed")
        sides = [parts(arrays, name, name == "keys") for arrays, name in zip(pair, ("keys", "values"))]
        (key, *_), (value, *_) = sides
        if key.common != value.common:
            raise ValueError(f"keys {key.common} and values {value.common} of a TurboMoqCache do not agree")
        leads = {a.shape[:2] for side in sides for a in side[1:] if a is not None}
        if len(leads) > 1 or (leads and 0 in (key.head_dim, value.head_dim)):
            raise ValueError(f"keys and values of a TurboMoqCache with heads {leads} and {key.head_dim}, {value.head_dim} channels")
        for side, header in ((KEY, key), (VALUE, value)):
            if header.head_dim:
                codec(side, key.layer, header.bits, header.head_dim)
        self._clear()
        self._options = (key.bits, value.bits, key.sinks, key.window, key.layer)
        self._exact_call = bool(key.exact_call)
        if not leads:
            return
        self._held = [key.held_sinks, key.held_packed, key.held_window]
        self._dims, self._dtypes = (key.head_dim, value.head_dim), (key.dtype, value.dtype)
        # Copies, made now: the arrays may be views of another cache, or read from a file that is written to before they are used.
        own = lambda array, room: None if array is None else put(None, 0, array, room)
        self._sinks = [own(side.sinks, self._sink_room(key.held_sinks)) for side in sides]
        self._words = [own(side.words, self._packed_room(key.held_packed)) for side in sides]
        self._scales = [own(side.scales, self._packed_room(key.held_packed)) for side in sides]
        self._centre = None if sides[KEY].centre is None else mx.contiguous(sides[KEY].centre)
        empty = [mx.zeros((*next(iter(leads)), 0, d), DTYPES[t]) for d, t in zip(self._dims, self._dtypes)]
        windows = [empty[i] if side.window is None else side.window for i, side in enumerate(sides)]
        self._set_window(windows)
        mx.eval(*self._buffers())

    def __getstate__(self) -> dict[str, Any]:
        # What a call has fetched is that call's.
        return self.__dict__ | {"_fetched": None}
