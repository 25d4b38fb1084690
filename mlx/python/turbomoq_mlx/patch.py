"""Attention of mlx-lm's models on the packed form.

Models import `scaled_dot_product_attention` by value, so it is replaced in `mlx_lm.models.base`, from where models that are loaded
later take it, and in every model that is loaded.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable, Optional

import mlx.core as mx
from mlx_lm.models import base

from .cache import TurboMoqCache
from .fetched import Fetched, unpacked
from .sequences import Sequences
from .state import Held

NAME = "scaled_dot_product_attention"


def replace(name: str, old: Callable, new: Callable) -> None:
    """Puts `new` in the place of `old` in every module of mlx-lm that has it by this name: they import by value."""
    for module_name, module in list(sys.modules.items()):
        if f"{module_name}.".startswith("mlx_lm.") and getattr(module, name, None) is old:
            setattr(module, name, new)


def install() -> None:
    """Lets mlx-lm's models attend on the packed form of a `TurboMoqCache` or a `RecipeCache`. Others go to mlx-lm's own attention.

    Without it a packed cache works as well, but every step unpacks it as a whole. Calling it again does nothing.
    """
    stock = base.scaled_dot_product_attention
    if hasattr(stock, "turbomoq_stock"):
        return

    @functools.wraps(stock)
    def attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any = None,
        sinks: Optional[mx.array] = None,
    ) -> mx.array:
        if isinstance(keys, Held):
            # `keys, values = cache.state` of a layer whose rows this one shares: what that layer holds now.
            cache = keys.cache
            keys, values = cache.keys_and_values()
        if isinstance(keys, Fetched) and isinstance(values, Fetched) and (keys.call, keys.side, values.side) == (values.call, 0, 1):
            # Of this layer, or of the one whose rows it shares.
            return keys.call.newest().attend(keys.call, queries, scale, mask, sinks)
        keys, values = unpacked(keys), unpacked(values)
        if isinstance(cache, Sequences) and (call := cache.known(keys, values)):
            return cache.attend(call, queries, scale, mask, sinks)
        if isinstance(cache, TurboMoqCache):
            out = cache.attend(queries, keys, values, scale, mask, sinks)
            if out is not None:
                return out
        return stock(queries, keys, values, cache, scale, mask, sinks)

    attention.turbomoq_stock = stock
    replace(NAME, stock, attention)


def uninstall() -> None:
    """Undoes `install`."""
    ours = base.scaled_dot_product_attention
    if stock := getattr(ours, "turbomoq_stock", None):
        replace(NAME, ours, stock)
