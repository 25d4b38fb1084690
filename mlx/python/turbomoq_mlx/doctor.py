"""`python -m turbomoq_mlx doctor`: what is found, what is missing, and what is slow."""

from __future__ import annotations

import platform
import sys
import time

import mlx.core as mx
import mlx_lm
import numpy as np

from . import library


def doctor() -> int:
    """Prints a line for each finding, and gives the exit code: 1 if packed caches cannot work."""
    say = lambda mark, text: print(f"{mark:<5} {text}")
    say("ok", f"Python {platform.python_version()}, mlx-lm {mlx_lm.__version__}, {mx.default_device()} on {platform.system()} {platform.machine()}")
    try:
        path = library.load()._name
    except library.LibraryNotFound as error:
        say("bad", f"{error}")
        return 1
    say("ok", f"C library {path}, version {library.load().tmq_version()} of its API")
    for recipe in ("turbomoq@4", "best@3"):
        float_ms, packed_ms = _step(recipe)
        mark = "ok" if packed_ms < float_ms else "slow"
        say(mark, f"a step of attention over 4,096 tokens, 8 query heads on 2 of 128: {recipe} {packed_ms:.2f} ms, float {float_ms:.2f} ms")
    if sys.platform == "linux" and mx.default_device() == mx.cpu:
        rate = _matmul()
        mark = "ok" if rate > 15 else "slow"
        say(mark, f"matrix products of MLX: {rate:.0f} GFLOP/s" + ("" if mark == "ok" else "; OpenBLAS is many times faster: apt install libopenblas0, then LD_PRELOAD=libopenblas.so.0 python ..."))
    return 0


def _least(call, times: int = 5) -> float:
    """The least milliseconds of some calls."""
    least = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - start)
    return 1e3 * least


def _step(recipe: str) -> tuple[float, float]:
    from mlx_lm.models import base
    from mlx_lm.models.cache import KVCache

    from .patch import install, uninstall
    from .recipe_cache import RecipeCache

    rng = np.random.default_rng(1)
    rows = lambda heads, tokens: mx.array(rng.standard_normal((1, heads, tokens, 128)).astype(np.float32)).astype(mx.float16)
    installed = hasattr(base.scaled_dot_product_attention, "turbomoq_stock")
    install()
    times = []
    for cache in (KVCache(), RecipeCache(recipe)):
        cache.update_and_fetch(rows(2, 4096), rows(2, 4096))

        def step():
            keys, values = cache.update_and_fetch(rows(2, 1), rows(2, 1))
            mx.eval(base.scaled_dot_product_attention(rows(8, 1), keys, values, cache=cache, scale=0.09, mask=None))

        times.append(_least(step))
    if not installed:
        uninstall()
    return times[0], times[1]


def _matmul() -> float:
    n = 768
    a = mx.ones((n, n), dtype=mx.float32)
    mx.eval(a)
    return 2e-6 * n**3 / _least(lambda: mx.eval(a @ a))
