"""The codec of one side of a layer as MLX operations: Hadamard rotation, uniform grid, words in MLX's quantized layout.

A vector x of a head becomes y = R (x - mu), u = y sqrt(D) / |y|, codes on a uniform grid, and one scale s with y ~ s c. Since every
level is `step * (code - middle)`, MLX's quantized kernels read the words with a constant scale and bias, and s goes to the scores of
keys and to the weights of values. It is the codec of the same name in the Rust crate, with its rotation and levels, so both read
each other's words.
"""

from __future__ import annotations

import functools
import math
from typing import Optional

import mlx.core as mx

from .library import KEY, VALUE, Unsupported, tables

WIDTHS = (2, 3, 4, 5, 6, 8)
"""Bits that MLX's quantized kernels read."""
MOST = 65504.0
"""The largest scale."""


def recipe(key_bits: int, value_bits: int, sinks: int, window: int) -> str:
    """What a cache does, as `turbomoq --recipe` and `tmq_cache_new` understand it."""
    key = f"key=d128:b{key_bits}:hadamard:uniform:matched:f16"
    value = f"value=d128:b{value_bits}:hadamard:uniform:least-squares:f16"
    return f"{key},{value},centred,sinks={sinks},window={window}"


_constants: dict[float, mx.array] = {}


def _filled(value: float, shape: tuple[int, ...]) -> mx.array:
    """A constant, cut from one buffer a value that all layers share."""
    size = math.prod(shape)
    if value not in _constants or _constants[value].size < size:
        _constants[value] = mx.full((size,), value, dtype=mx.float32)
        mx.eval(_constants[value])
    return _constants[value][:size].reshape(shape)


@functools.lru_cache(maxsize=None)
def codec(side: int, layer: int, bits: int, head_dim: int) -> "Codec":
    """The codec of a side of a layer, made once."""
    return Codec(side, layer, bits, head_dim)


class Codec:
    """Rotation and grid for vectors of `head_dim` channels."""

    def __init__(self, side: int, layer: int, bits: int, head_dim: int):
        bits_of = {KEY: (bits, 4), VALUE: (4, bits)}[side]
        what = f"head dim {head_dim} of layer {layer}'s {'keys' if side == KEY else 'values'}"
        try:
            rotation, levels, row_bytes = tables(recipe(*bits_of, 0, 0), side, layer, head_dim, bits)
        except Unsupported as error:
            raise Unsupported(f"{what}: {error}") from error
        if row_bytes != 4 * -(-head_dim * bits // 32) + 2:
            # Such as 576 = 512 + 64: two rotations and two scales a vector.
            raise Unsupported(f"{what} is rotated in several blocks; m 2^k with m in 1, 12, 20, 28 is rotated whole")
        self.side, self.bits, self.head_dim = side, bits, head_dim
        self.padded = -(-head_dim // 32) * 32
        """Channels of a stored vector: MLX's groups hold at least 32."""
        self.group = next(g for g in (128, 64, 32) if self.padded % g == 0)
        self.words = self.padded * bits // 32
        self.step = 2 * levels[1 << (bits - 1)]
        self.middle = 0.5 * ((1 << bits) - 1)
        # Only powers of two go to MLX's transform, which is wrong for some other sizes.
        self._fast = head_dim & (head_dim - 1) == 0
        # The first row of a Walsh matrix is ones: that of the rotation is its signs over sqrt(D).
        self._turn = mx.array(rotation[:head_dim] if self._fast else rotation)
        if not self._fast:
            self._turn = self._turn.reshape(head_dim, head_dim)
        self._places = mx.array([i * bits for i in range(8)], dtype=mx.uint64)
        mx.eval(self._turn, self._places)

    def __deepcopy__(self, _):
        return self

    def rotate(self, x: mx.array) -> mx.array:
        """R x, of f32."""
        return mx.hadamard_transform(x * self._turn, scale=1.0) if self._fast else x @ self._turn.T

    def unrotate(self, y: mx.array) -> mx.array:
        """R^T y, of f32."""
        return mx.hadamard_transform(y, scale=1.0) * self._turn if self._fast else y @ self._turn

    def encode(self, x: mx.array, centre: Optional[mx.array] = None) -> tuple[mx.array, mx.array]:
        """Words (B, H, T, W) and half-precision scales (B, H, T) of vectors (B, H, T, D).

        A vector with NaN or infinity has the scale NaN; scales beyond half precision are its largest value.
        """
        x = x.astype(mx.float32)
        if centre is not None:
            x = x - centre
        # Divided by a power of two near its largest channel, which is exact, a row of any size has a finite norm.
        exponent = mx.abs(x).max(-1, keepdims=True).view(mx.uint32) & 0x7F800000
        unit = mx.where(exponent == 0, 0x3F800000, exponent).view(mx.float32)
        y = self.rotate(x / unit)
        yy = (y * y).sum(-1, keepdims=True)
        good = (yy > 0) & (yy < float("inf"))
        place = y * mx.sqrt(self.head_dim / yy) * (1 / self.step) + (self.middle + 0.5)
        codes = mx.where(good, mx.clip(place, 0, 2 * self.middle).astype(mx.uint32), 0)
        c = (codes.astype(mx.float32) - self.middle) * self.step
        cc = (c * c).sum(-1, keepdims=True)
        # No level is zero and each has the sign of its coordinate, so neither cc nor <c, y> can vanish. Keys keep their norm,
        # values have the scale of least error.
        scale = mx.sqrt(yy / cc) if self.side == KEY else (c * y).sum(-1, keepdims=True) / cc
        scale = mx.where(good, mx.minimum(scale * unit, MOST), mx.where(yy == 0, 0.0, float("nan")))
        return self._pack(codes), scale.squeeze(-1).astype(mx.float16)

    def _pack(self, codes: mx.array) -> mx.array:
        """Eight codes fill `bits` bytes."""
        *lead, n = codes.shape
        if n < self.padded:
            codes = mx.pad(codes, [(0, 0)] * len(lead) + [(0, self.padded - n)])
        eights = codes.astype(mx.uint64).reshape(*lead, self.padded // 8, 8)
        folded = mx.left_shift(eights, self._places).sum(-1, keepdims=True)
        used = folded.view(mx.uint8)[..., : self.bits].reshape(*lead, 4 * self.words)
        return mx.contiguous(used).view(mx.uint32)

    def _grid(self, words: mx.array) -> tuple[mx.array, mx.array]:
        shape = (*words.shape[:-1], self.padded // self.group)
        return _filled(self.step, shape), _filled(-self.step * self.middle, shape)

    def _product(self, x: mx.array, words: mx.array, transpose: bool) -> mx.array:
        return mx.quantized_matmul(
            x, words, *self._grid(words), transpose=transpose, group_size=self.group, bits=self.bits
        )

    def levels(self, words: mx.array, scales: mx.array) -> mx.array:
        """Vectors (B, H, T, D) in the rotated domain, f32."""
        c = mx.dequantize(words, *self._grid(words), group_size=self.group, bits=self.bits)
        return c[..., : self.head_dim] * scales[..., None].astype(mx.float32)

    def decode(self, words: mx.array, scales: mx.array, centre: Optional[mx.array] = None) -> mx.array:
        """Vectors (B, H, T, D), f32."""
        x = self.unrotate(self.levels(words, scales))
        return x if centre is None else x + centre

    def scores(self, rotated: mx.array, words: mx.array, scales: mx.array, tokens: int) -> mx.array:
        """Inner products (B, H, M, T) of rotated queries (B, H, M, D) with the first `tokens` vectors of a buffer.

        The whole buffer goes to the kernel, whose words would be copied if they were cut.
        """
        if self.padded > self.head_dim:
            rotated = mx.pad(rotated, [(0, 0)] * 3 + [(0, self.padded - self.head_dim)])
        product = self._product(rotated, words, True)[..., :tokens]
        return product * scales[:, :, None, :tokens].astype(mx.float32)

    def weighted_sum(self, weights: mx.array, words: mx.array, scales: mx.array) -> mx.array:
        """Sums (B, H, M, D) in the rotated domain of the first T vectors of a buffer with weights (B, H, M, T)."""
        tokens = weights.shape[-1]
        weights = mx.where(weights == 0, 0.0, weights * scales[:, :, None, :tokens].astype(mx.float32))
        if tokens < words.shape[2]:
            weights = mx.pad(weights, [(0, 0)] * 3 + [(0, words.shape[2] - tokens)])
        return self._product(weights, words, False)[..., : self.head_dim]
