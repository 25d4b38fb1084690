"""Packed caches for a whole model: from nothing, or from a prompt cache that is in use."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from typing import Any, Iterable, Iterator, Optional

from mlx_lm.models import base
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from .cache import TurboMoqCache
from .library import Unsupported
from .native import Native
from .recipe_cache import RecipeCache


ROWS = (KVCache, RotatingKVCache, ChunkedKVCache, QuantizedKVCache, TurboMoqCache, RecipeCache)
"""Caches that hold keys and values: layers are counted over these."""


def convert(
    cache: list[Any], recipe: Optional[str] = None, *, exact_last: bool = False, exempt: Iterable[int] = (), **options: int
) -> list[Any]:
    """A prompt cache whose plain layers are packed, with what they hold: by a recipe, or by `options`, those of `TurboMoqCache`.

    Only layers that are exactly mlx-lm's `KVCache` change, and the one in a `CacheList` that has no other rows; all others are the same objects. `exempt` leaves out
    plain layers by their ordinal among layers with keys and values (from 0), `exact_last` the last of them. Warns if there is no plain
    layer. A recipe's plan by layer counts those ordinals too.
    """
    if recipe is not None and options:
        raise Unsupported(f"{', '.join(sorted(options))} beside a recipe: the recipe says it, as in best@3,sinks=4,window=128")
    parts = [part for entry in cache for part in leaves(entry)]
    plain = [part for entry in cache for part in _plain(entry)]
    if cache and not plain and not any(isinstance(part, (TurboMoqCache, RecipeCache)) for part in parts):
        kinds = ", ".join(sorted({type(entry).__name__ for entry in cache}))
        warnings.warn(f"nothing is packed: no layer is a KVCache, only {kinds}", stacklevel=2)
    ordinals, count = {}, 0
    for part in parts:
        if isinstance(part, ROWS):
            ordinals[id(part)], count = count, count + 1
    left_out = {*exempt}
    if bad := [n for n in left_out if not 0 <= n < count]:
        raise Unsupported(f"exempt layer {bad[0]}: the model has {count} layers with keys and values")
    left_out |= {ordinals[id(plain[-1])]} if exact_last and plain else set()
    chosen = {id(part) for part in plain if ordinals[id(part)] not in left_out}

    def packed(part: Any, layer: int) -> Any:
        if isinstance(part, CacheList) and any(id(inner) in chosen for inner in part.caches):
            return CacheList(*(packed(inner, layer) for inner in part.caches))
        if id(part) not in chosen:
            return part
        new = TurboMoqCache(layer=layer, **options) if recipe is None else RecipeCache(recipe, ordinals[id(part)])
        if part.offset:
            new.update_and_fetch(part.keys[:, :, : part.offset], part.values[:, :, : part.offset])
        return new

    return [packed(entry, layer) for layer, entry in enumerate(cache)]


def _plain(entry: Any) -> list[Any]:
    """The caches of a layer that can be packed. Models with several caches of rows in a layer, such as an indexer, reach into them."""
    inner = entry.caches if isinstance(entry, CacheList) else (entry,)
    return [part for part in inner if type(part) is KVCache] if sum(isinstance(part, ROWS) for part in inner) == 1 else []


def leaves(entry: Any) -> Iterator[Any]:
    """The caches of a `CacheList`, at any depth, or the cache itself."""
    if isinstance(entry, CacheList):
        for part in entry.caches:
            yield from leaves(part)
    else:
        yield entry


def make_turbomoq_cache(
    model: Any,
    recipe: Optional[str] = None,
    *,
    max_kv_size: Optional[int] = None,
    exact_last: bool = False,
    exempt: Iterable[int] = (),
    **options: int,
) -> list[Any]:
    """An empty prompt cache for a model, as `mlx_lm.models.cache.make_prompt_cache` with plain layers packed, see `convert`.

    `recipe` is a text of the command line, such as "best@3", "turbomoq@4/2,window=64" or one with a plan by layer and head. Without it
    `options` choose a uniform grid that MLX's own kernels read. `Unsupported` for a recipe that cannot be read, for a `max_kv_size`, and
    for a model of mlx-lm 0.31 that needs `install()` first, or with a recipe mlx-lm 0.32.

        cache = make_turbomoq_cache(model, "best@3", exempt=[0])
        print(cache[1].road)
    """
    if max_kv_size is not None:
        # mlx-lm gives rotating caches for it, or ignores it: nothing would be packed, or nothing bounded.
        raise Unsupported(f"max_kv_size {max_kv_size}: a packed cache holds all tokens; leave it out, or use make_prompt_cache")
    installed = hasattr(base.scaled_dot_product_attention, "turbomoq_stock")
    if (name := _reads_state(model)) and (recipe is not None or not installed):
        cure = "use mlx-lm 0.32" if recipe is not None else "call turbomoq_mlx.install() first, or use mlx-lm 0.32"
        raise Unsupported(f"{name} takes the state of a cache for its rows: {cure}")
    if recipe is not None and "-bits=" not in recipe:
        # A text that cannot be read is refused here, not at the first token.
        Native(recipe, 0, 128, 128)
    return convert(make_prompt_cache(model), recipe, exact_last=exact_last, exempt=exempt, **options)


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
