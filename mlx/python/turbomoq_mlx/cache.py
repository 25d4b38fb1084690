"""`TurboMoqCache`: the cache of one layer, packed while the model decodes, with mlx-lm's contract (0.31 and 0.32).

The first tokens stay exact, and so do the newest; in between lie packed blocks of 128 tokens, see `codec`. New tokens join the
window; when it would grow beyond `window + 128`, its oldest 128 leave it as one block, so any chunking of a text gives the same
words. The call that brings tokens still sees them exact, whatever becomes of them then: a prompt that comes at once is attended to as
without compression.
"""

from __future__ import annotations

import weakref
from typing import Any, Iterable, Optional

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from .attention import Mask, Side, View, attend
from .codec import WIDTHS, Codec, codec, recipe
from .library import KEY, VALUE, Unsupported, load

BLOCK = 128
"""Tokens that leave the window together."""
STEP = 64
"""Rows by which the window's buffer grows until it has its full size."""
VERSION = 1
"""Version of `state`."""
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def _put(buffer: Optional[mx.array], start: int, rows: mx.array, room: int) -> mx.array:
    """The buffer with rows written from `start` on; one that is too short is replaced by one of `room` tokens."""
    end = start + rows.shape[2]
    if buffer is None or end > buffer.shape[2]:
        grown = mx.zeros((*rows.shape[:2], max(room, end), *rows.shape[3:]), rows.dtype)
        if start:
            grown[:, :, :start] = buffer[:, :, :start]
        buffer = grown
    if end > start:
        buffer[:, :, start:end] = rows
    return buffer


class TurboMoqCache:
    """Packed keys and values of one layer.

    `key_bits` and `value_bits` are 2, 3, 4, 5, 6 or 8; the first `sinks` tokens and the newest `window` to `window + 128` stay exact.
    `layer` seeds the rotations. In `mlx_lm` use it through `make_turbomoq_cache`.
    """

    def __init__(self, key_bits: int = 4, value_bits: int = 4, sinks: int = 4, window: int = 128, layer: int = 0):
        for name, bits in (("key_bits", key_bits), ("value_bits", value_bits)):
            if bits not in WIDTHS:
                raise Unsupported(f"{name} {bits}: MLX's kernels read {', '.join(map(str, WIDTHS))}")
        for name, count in (("sinks", sinks), ("window", window), ("layer", layer)):
            if not 0 <= count < 1 << 31:
                raise ValueError(f"{name} {count}: not a number from 0 to 2^31")
        load()
        self._options = (key_bits, value_bits, sinks, window, layer)
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
        arrays = (*self._sinks, *self._words, *self._scales, self._centre, self.keys, self.values)
        return sum(a.nbytes for a in arrays if a is not None)

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
        return self._fetch(self._append(keys, values))

    def keys_and_values(self) -> tuple[Optional[mx.array], Optional[mx.array]]:
        """The same pair without appending; packed tokens as they decode."""
        self._fetched = None
        if self._dims is None:
            return self.keys, self.values
        return self._fetch(self._view(self._held[1], self._tail()))

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
        self.keys, self.values = (_put(None, 0, rows[:, :, :0], STEP) for rows in (keys, values))

    def _append(self, keys: mx.array, values: mx.array) -> View:
        """Stores new tokens; gives what the call that brings them attends to."""
        rows = [a.astype(DTYPES[d]) for a, d in zip((keys, values), self._dtypes)]
        _, _, sinks, window, _ = self._options
        if self._held[1] == self._held[2] == 0 and self._held[0] < sinks:
            n = min(sinks - self._held[0], keys.shape[2])
            for side in (KEY, VALUE):
                self._sinks[side] = _put(self._sinks[side], self._held[0], rows[side][:, :, :n], sinks)
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
        return self._view(packed, tail)

    def _tail(self) -> list[mx.array]:
        return [a[:, :, : self._held[2]] for a in (self.keys, self.values)]

    def _set_window(self, rows: list[mx.array], start: int = 0) -> None:
        """Writes rows into the window behind its first `start`; without any it begins anew."""
        end = start + rows[KEY].shape[2]
        room = min(self._options[3] + BLOCK, -(-end // STEP) * STEP)
        buffers = (self.keys, self.values) if start else (None, None)
        self.keys, self.values = (_put(b, start, a, room) for b, a in zip(buffers, rows))
        self._held[2] = end

    def _pack(self, rows: list[mx.array]) -> None:
        """Packs whole blocks behind what is packed."""
        start, end = self._held[1], self._held[1] + rows[KEY].shape[2]
        # An eighth more than is needed, so that growing copies little.
        room = -(-(end + max(2 * BLOCK, end // 8)) // BLOCK) * BLOCK
        if start == 0:
            self._centre = rows[KEY][:, :, :BLOCK].astype(mx.float32).mean(2, keepdims=True)
        for side in (KEY, VALUE):
            words, scales = self._codec(side).encode(rows[side], self._centre if side == KEY else None)
            self._words[side] = _put(self._words[side], start, words, room)
            self._scales[side] = _put(self._scales[side], start, scales, room)
        self._held[1] = end

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
    def state(self) -> list[mx.array]:
        """Everything, cut to what is held: scalars, sinks, words and scales of keys and of values, centre, window."""
        # A cache without tokens forgets for what heads it was.
        dims = self._dims if self.offset else (0, 0)
        scalars = [VERSION, *self._options, *self._held, *dims, *self._dtypes]
        arrays = [mx.array(scalars, dtype=mx.int32)]
        sinks, packed, window = self._held
        if sinks:
            arrays += [a[:, :, :sinks] for a in self._sinks]
        if packed:
            arrays += [a[:, :, :packed] for a in (*self._words, *self._scales)] + [self._centre]
        if window:
            arrays += self._tail()
        return arrays

    @state.setter
    def state(self, state: Iterable[mx.array]) -> None:
        scalars, *arrays = state
        scalars = scalars.tolist()
        if scalars[0] != VERSION or len(scalars) != 13:
            raise ValueError(f"a TurboMoqCache state of version {scalars[0]}, this package reads {VERSION}")
        self._clear()
        self._options, self._held = tuple(scalars[1:6]), scalars[6:9]
        wanted = [2, 5, 2]
        if len(arrays) != sum(n for n, held in zip(wanted, self._held) if held):
            raise ValueError(f"a TurboMoqCache state of {len(arrays)} arrays for {self._held} tokens")
        # A wrapper each: buffers are written in place.
        arrays = [mx.array(a) for a in arrays]
        if not scalars[9]:
            return
        self._dims, self._dtypes = tuple(scalars[9:11]), tuple(scalars[11:13])
        if self._held[0]:
            self._sinks = [arrays.pop(0), arrays.pop(0)]
        if self._held[1]:
            self._words, self._scales, self._centre = arrays[:2], arrays[2:4], arrays[4]
            arrays = arrays[5:]
        if self._held[2]:
            self.keys, self.values = arrays
        else:
            lead = (self._sinks if self._held[0] else self._words)[KEY].shape[:2]
            self.keys, self.values = (mx.zeros((*lead, STEP, d), DTYPES[t]) for d, t in zip(self._dims, self._dtypes))

    @property
    def meta_state(self) -> str:
        """Nothing, for mlx-lm 0.31: `state` has it all."""
        return ""

    @meta_state.setter
    def meta_state(self, _: Any) -> None:
        pass

    @classmethod
    def from_state(cls, state: Iterable[mx.array], meta_state: Any = None) -> "TurboMoqCache":
        """A cache from what `state` gave; `meta_state` is of mlx-lm 0.31 and holds nothing."""
        load()
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def __getstate__(self) -> dict[str, Any]:
        # What a call has fetched is that call's.
        return self.__dict__ | {"_fetched": None}


# mlx-lm looks the classes of a saved cache up among its own names.
mlx_cache.TurboMoqCache = TurboMoqCache


def convert(cache: list[Any], *, exact_last: bool = False, **options: int) -> list[Any]:
    """A prompt cache whose plain layers are packed, with what they hold; `options` are those of `TurboMoqCache`.

    Only layers that are exactly mlx-lm's `KVCache` change; all others are the same objects. `exact_last` leaves out the last of them.
    """
    plain = [i for i, entry in enumerate(cache) if type(entry) is mlx_cache.KVCache]
    out = list(cache)
    for i in plain[:-1] if exact_last else plain:
        out[i] = TurboMoqCache(layer=i, **options)
        if cache[i].offset:
            out[i].update_and_fetch(cache[i].keys[:, :, : cache[i].offset], cache[i].values[:, :, : cache[i].offset])
    return out


def make_turbomoq_cache(model: Any, *, max_kv_size: Optional[int] = None, exact_last: bool = False, **options: int) -> list[Any]:
    """An empty prompt cache for a model, as `mlx_lm.models.cache.make_prompt_cache` with plain layers packed, see `convert`."""
    return convert(mlx_cache.make_prompt_cache(model, max_kv_size), exact_last=exact_last, **options)
