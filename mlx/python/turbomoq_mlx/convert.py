"""Packed caches for a whole model: from nothing, or from a prompt cache that is in use."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from typing import Any, Optional

from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, make_prompt_cache

from .cache import TurboMoqCache
from .library import Unsupported


def convert(cache: list[Any], *, exact_last: bool = False, **options: int) -> list[Any]:
    """A prompt cache whose plain layers are packed, with what they hold; `options` are those of `TurboMoqCache`.

    Only layers that are exactly mlx-lm's `KVCache` change; all others are the same objects. `exact_last` leaves out the last of them.
    Warns if there is no plain layer.
    """
    plain = [i for i, entry in enumerate(cache) if type(entry) is KVCache]
    if cache and not plain and not any(isinstance(entry, TurboMoqCache) for entry in cache):
        kinds = ", ".join(sorted({type(entry).__name__ for entry in cache}))
        warnings.warn(f"nothing is packed: no layer is a KVCache, only {kinds}", stacklevel=2)
    out = list(cache)
    for i in plain[:-1] if exact_last else plain:
        out[i] = TurboMoqCache(layer=i, **options)
        if cache[i].offset:
            out[i].update_and_fetch(cache[i].keys[:, :, : cache[i].offset], cache[i].values[:, :, : cache[i].offset])
    return out


def make_turbomoq_cache(model: Any, *, max_kv_size: Optional[int] = None, exact_last: bool = False, **options: int) -> list[Any]:
    """An empty prompt cache for a model, as `mlx_lm.models.cache.make_prompt_cache` with plain layers packed, see `convert`.

    `Unsupported` for a `max_kv_size`, and for a model of mlx-lm 0.31 that needs `install()` first.
    """
    if max_kv_size is not None:
        # mlx-lm gives rotating caches for it, or ignores it: nothing would be packed, or nothing bounded.
        raise Unsupported(f"max_kv_size {max_kv_size}: a packed cache holds all tokens; leave it out, or use make_prompt_cache")
    if (name := _reads_state(model)) and not hasattr(base.scaled_dot_product_attention, "turbomoq_stock"):
        raise Unsupported(f"{name} takes the state of a cache for its rows: call turbomoq_mlx.install() first, or use mlx-lm 0.32")
    return convert(make_prompt_cache(model), exact_last=exact_last, **options)


def _reads_state(model: Any) -> Optional[str]:
    """The module of a model that does `keys, values = cache.state`, as gemma3n and afm7 of mlx-lm 0.31."""
    for name in sorted({type(part).__module__ for part in getattr(model, "modules", list)()}):
        if not name.startswith("mlx.") and re.search(r"cache(\[-?\w+\])?\.state\b", _source(name)):
            return name
    return None


@functools.lru_cache(maxsize=None)
def _source(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ""
