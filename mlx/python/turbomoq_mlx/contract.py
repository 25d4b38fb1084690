"""What all packed caches answer alike to mlx-lm."""

from __future__ import annotations

from typing import Any, Iterable, NoReturn

import mlx.core as mx

from .library import Unsupported, load


class Contract:
    """Base of packed caches, whose `state` alone says everything."""

    @property
    def to_quantized(self) -> NoReturn:
        """mlx-lm asks for this only if it was told `kv_bits`, which would do nothing here: the first step refuses it."""
        raise Unsupported("kv_bits quantizes mlx-lm's own caches and this one is packed: leave kv_bits out, or make_prompt_cache")

    @property
    def meta_state(self) -> str:
        """Nothing, for mlx-lm 0.31: `state` has it all."""
        return ""

    @meta_state.setter
    def meta_state(self, _: Any) -> None:
        pass

    @classmethod
    def from_state(cls, state: Iterable[mx.array], meta_state: Any = None) -> "Contract":
        """A cache from what `state` gave; `meta_state` is of mlx-lm 0.31 and holds nothing."""
        load()
        cache = cls.__new__(cls)
        cache.state = state
        return cache
