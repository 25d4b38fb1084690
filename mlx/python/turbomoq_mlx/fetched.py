"""What `update_and_fetch` gives to a model that hands it straight to attention: keys and values that are unpacked only if they are used.

Attention by `install()` knows them. Whatever else touches them (a shape, an index, an operator) sees the unpacked array. A function
of MLX that insists on an array raises `TypeError`: nothing is ever computed on something else.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx


class Fetched:
    """Keys (`side` 0) or values (`side` 1) of all tokens after one call."""

    def __init__(self, call: Any, side: int, shape: tuple[int, ...], dtype: mx.Dtype):
        self.call, self.side, self.shape, self.dtype, self.ndim = call, side, shape, dtype, len(shape)

    def dense(self) -> mx.array:
        """The array (B, H, T, D)."""
        return self.call.dense()[self.side]

    __mlx_array__ = dense

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> mx.array:
        return self.dense()[index]


def _operator(name: str) -> Any:
    return lambda self, *others: getattr(self.dense(), name)(*map(unpacked, others))


for _name in "add radd sub rsub mul rmul truediv rtruediv matmul neg eq ne lt le gt ge pow".split():
    setattr(Fetched, f"__{_name}__", _operator(f"__{_name}__"))
Fetched.__hash__ = object.__hash__


def unpacked(x: Any) -> Any:
    """The array, if it is one that was not unpacked yet."""
    return x.dense() if isinstance(x, Fetched) else x
