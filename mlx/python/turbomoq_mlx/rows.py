"""Rows of keys and values, (B, H, T, D): buffers that own their memory, casts that saturate, means of finite rows."""

from __future__ import annotations

from typing import Optional

import mlx.core as mx

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
"""Element types of rows; a saved cache names them by their place here."""


def put(buffer: Optional[mx.array], start: int, rows: mx.array, room: int) -> mx.array:
    """The buffer with rows written from token `start` on; one that is too short is replaced by one of `room` tokens or more.

    A buffer that one write would cover as a whole gets one token more: MLX would keep the rows themselves in its place, and with
    them the whole array that they were cut from, such as the keys of a long prompt.
    """
    end = start + rows.shape[2]
    if buffer is None or end > buffer.shape[2] or (start == 0 and end == buffer.shape[2]):
        room = max(room, end)
        if start == 0 and room == end > 0:
            room += 1
        grown = mx.zeros((*rows.shape[:2], room, *rows.shape[3:]), rows.dtype)
        if start:
            grown[:, :, :start] = buffer[:, :, :start]
        buffer = grown
    if end > start:
        buffer[:, :, start:end] = rows
    return buffer


def cast(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """`x` in another float type: finite values beyond its range become its largest finite value; NaN and infinity stay."""
    if x.dtype == dtype:
        return x
    most = mx.finfo(dtype).max
    if mx.finfo(x.dtype).max > most:
        # In f32: the limit of half floats is none of the numbers of bfloat16.
        x = x.astype(mx.float32)
        x = mx.where(mx.isinf(x), x, mx.clip(x, -most, most))
    return x.astype(dtype)


def finite_mean(x: mx.array) -> mx.array:
    """The mean (B, H, 1, D) over tokens of f32 rows, of those that are finite in all channels; zeros if none is."""
    good = mx.isfinite(x).all(-1, keepdims=True)
    count = mx.maximum(good.sum(2, keepdims=True), 1)
    # Divided before they are added: sums of large rows may be infinite, their mean is not.
    return (mx.where(good, x, 0.0) * (1 / count)).sum(2, keepdims=True)
