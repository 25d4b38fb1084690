"""`TurboMoqCache` with the real mlx-lm (tests/python/cache.rs). TURBOMOQ_LIBRARY names the C library.

contract FOLDER    one contract, kept by mlx-lm's own caches and by ours; leaves saved caches in FOLDER
again FOLDER       a new process loads them: same contents, same continuation
PART FOLDER        a part of cache_packed.py, cache_edges.py, architectures.py, recipes.py or commands.py
"""

import copy
import os
import pathlib
import sys
import warnings

os.environ.setdefault("OPENBLAS_CORETYPE", "Haswell")  # MLX's matrix products on Linux

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models import base
from mlx_lm.models import cache as C

root = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(root / "mlx/python"), str(root / "mlx/python/examples")]
OLD = not mlx_lm.__version__.startswith("0.32")
STOCK = base.scaled_dot_product_attention
HEADS, DIM = 2, 64


def rows(tokens, seed=0, heads=HEADS, dim=DIM, dtype=mx.float16, batch=1):
    """Keys with channels of different sizes and a mean, and values."""
    rng = np.random.default_rng(seed)
    sizes = 0.3 + 2 * ((np.arange(dim) * 7) % 13) / 13
    keys = rng.standard_normal((batch, heads, tokens, dim)) * sizes + 3 * (np.arange(dim) % 9 == 0)
    values = rng.standard_normal((batch, heads, tokens, dim))
    return mx.array(keys.astype(np.float32)).astype(dtype), mx.array(values.astype(np.float32)).astype(dtype)


def cut(pair, start, end):
    return tuple(a[:, :, start:end] for a in pair)


def numbers(a):
    """A NumPy array, of floats as f32."""
    if isinstance(a, mx.array):
        a = np.array(a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a)
    return a


def error(got, want):
    """Relative error of arrays."""
    got, want = numbers(got), numbers(want)
    assert got.shape == want.shape, (got.shape, want.shape)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def dense(cache, pair):
    """What a cache gives, as float arrays; mlx-lm's quantized cache gives triples."""
    if hasattr(cache, "bits"):
        group, bits = cache.group_size, cache.bits
        return tuple(mx.dequantize(*side, group_size=group, bits=bits).astype(mx.float16) for side in pair)
    return pair


def append(cache, pair):
    return dense(cache, cache.update_and_fetch(*pair))


def held(cache):
    """All keys and values, and one more token that a copy has been given: every release's way to ask for them."""
    return [numbers(a) for a in append(copy.deepcopy(cache), rows(1, 99))]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b))


def fill(cache, tokens, seed=0):
    cache.update_and_fetch(*rows(tokens, seed))
    return cache


def contract(folder):
    from turbomoq_mlx import TurboMoqCache, Unsupported, convert, make_turbomoq_cache

    caches = {
        "plain": C.KVCache,
        "quantized": lambda: C.QuantizedKVCache(64, 8),
        "packed": lambda: TurboMoqCache(key_bits=8, value_bits=8),
        "narrow": lambda: TurboMoqCache(key_bits=8, value_bits=6, sinks=0, window=0, layer=3),
    }
    for name, make in caches.items():
        keeps_contract(name, make, folder)
    for cache in (TurboMoqCache(), fill(TurboMoqCache(), 300)):
        assert not any(hasattr(cache, a) for a in ("bits", "group_size", "merge")), "not what it is"
        layers = [cache, C.KVCache()]
        maybe_quantize_kv_cache(layers, 0, 64, None)
        # Refused by the first step, not by the one where mlx-lm would quantize.
        refused(Unsupported, "kv_bits", lambda: maybe_quantize_kv_cache(layers, 5000, 64, 8))
        assert layers[0] is cache and type(layers[1]) is C.KVCache
    crosses_the_border(TurboMoqCache)
    leaves_others_alone(TurboMoqCache, Unsupported, convert, make_turbomoq_cache)
    for options, what in (({"key_bits": 7}, "key_bits 7"), ({"value_bits": 16}, "value_bits 16")):
        refused(Unsupported, what, lambda: TurboMoqCache(**options))
    refused(ValueError, "sinks -1", lambda: TurboMoqCache(sinks=-1))
    cache = fill(TurboMoqCache(), 5)
    refused(ValueError, "do not fit", lambda: cache.update_and_fetch(*rows(1, heads=3)))
    refused(ValueError, "needed", lambda: cache.update_and_fetch(rows(1)[0], rows(2)[1]))
    assert cache.offset == 5, "a refusal changes nothing"
    # Saved beside a class of mlx-lm, with and without tokens.
    mixed = [fill(TurboMoqCache(4, 3, layer=0), 700), fill(C.KVCache(), 9), TurboMoqCache(layer=2), fill(TurboMoqCache(layer=3), 3)]
    C.save_prompt_cache(f"{folder}/mixed.safetensors", mixed, {"text": "é"})
    np.savez(f"{folder}/mixed.npz", *[a for c in mixed for a in held(c)])
    print(f"mlx-lm {mlx_lm.__version__}: KVCache, QuantizedKVCache and TurboMoqCache keep one contract")


def mask(cache, n, array=False, window=None):
    return cache.make_mask(n, return_array=array, window_size=window)


def keeps_contract(name, make, folder):
    """What mlx-lm asks of a cache (of its own ones, `size` and `nbytes` where they have them)."""
    quantized, ours = name == "quantized", name in ("packed", "narrow")
    loss = {"plain": 0, "quantized": 0.01, "packed": 0.01, "narrow": 0.05}[name]
    kv, cache = rows(301), make()
    assert cache.empty() and cache.offset == 0 and cache.is_trimmable() and cache.trim(3) == 0
    if not quantized:
        assert cache.size() == 0 and cache.nbytes == 0
    assert mask(cache, 1) is None and mask(cache, 5) == "causal"
    # Empty, then one token, then 300.
    for start, end in ((0, 1), (1, 301)):
        got = append(cache, cut(kv, start, end))
        assert cache.offset == end and not cache.empty() and cache.nbytes > 0
        assert quantized or cache.size() == end
        assert all(error(a, b) <= loss for a, b in zip(got, cut(kv, 0, end))), name
        assert all(a.dtype == mx.float16 for a in got)
    if ours:
        before = held(cache)
        append(cache, cut(kv, 0, 0))
        assert cache.offset == 301 and same(held(cache), before), "nothing more"
    if not OLD or ours:
        pair = dense(cache, cache.keys_and_values())
        assert all(error(a, b) <= loss for a, b in zip(pair, kv)) and cache.offset == 301
    # Masks of what comes next.
    assert mask(cache, 1) is None and mask(cache, 7) == "causal"
    for n, window in ((7, None), (7, 16), (1, 16)):
        got = mask(cache, n, True, window)
        query, key = np.arange(301, 301 + n)[:, None], np.arange(301 + n)[None]
        assert np.array_equal(np.array(got), (key <= query) & (query < key + (window or 1000))), (name, n, window)
    # Attention by mlx-lm's own function on what the cache gives.
    q = rows(1, 7, heads=3 * HEADS)[0]
    copied = copy.deepcopy(cache)
    out = STOCK(q * 1, *copied.update_and_fetch(*rows(1, 8)), cache=copied, scale=DIM**-0.5, mask=None)
    want = [mx.concatenate([a, b], axis=2) for a, b in zip(kv, rows(1, 8))]
    assert error(out, STOCK(q, *want, cache=None, scale=DIM**-0.5, mask=None)) <= 5 * loss + 2e-3, name
    # A copy and the original go their own ways.
    before = held(cache)
    assert copied.offset == 302 and cache.offset == 301
    append(copied, rows(200, 9))
    assert same(held(cache), before), f"{name}: the copy wrote into the original"
    apart = copy.deepcopy(cache)
    append(cache, rows(5, 10))
    assert same(held(apart), before), f"{name}: the original wrote into the copy"
    # Dropped tokens that come again are as if they had stayed.
    whole = held(cache)
    assert C.can_trim_prompt_cache([cache]) and C.trim_prompt_cache([cache], 5) == 5 and cache.offset == 301
    append(cache, rows(5, 10))
    assert same(held(cache), whole), name
    # Saved and loaded, it is the same and goes on the same.
    mx.eval([cache.state])
    C.save_prompt_cache(f"{folder}/{name}.safetensors", [cache, cache], {"of": name})
    loaded, metadata = C.load_prompt_cache(f"{folder}/{name}.safetensors", return_metadata=True)
    assert [type(c) for c in loaded] == [type(cache)] * 2 and metadata == {"of": name}
    assert loaded[0].offset == cache.offset and same(held(loaded[0]), whole), name
    state = cache.state
    args = (state, cache.meta_state) if OLD else (state,)
    assert same(held(type(cache).from_state(*args)), whole), name
    append(loaded[1], rows(400, 11)), append(cache, rows(400, 11))
    assert same(held(loaded[1]), held(cache)), f"{name}: loaded, it goes on in another way"
    np.savez(f"{folder}/{name}.npz", *held(cache))
    # Everything dropped, it begins anew.
    assert cache.trim(10**6) == 706 and cache.offset == 0
    got = append(cache, cut(kv, 0, 300))
    assert cache.offset == 300 and all(error(a, b) <= loss for a, b in zip(got, cut(kv, 0, 300))), name


def crosses_the_border(TurboMoqCache):
    """Tokens are dropped across the border between exact and packed."""
    kv = rows(700)
    for sinks, window in ((4, 128), (0, 0), (200, 64)):
        for n in (1, 250, 256, 300, 601, 697, 699):
            cache = TurboMoqCache(sinks=sinks, window=window)
            cache.update_and_fetch(*kv)
            before = [numbers(a) for a in cache.keys_and_values()]
            assert cache.packed_tokens >= 128 and cache.trim(n) == n and cache.offset == 700 - n
            got = [numbers(a) for a in cache.keys_and_values()]
            assert same(got, [a[:, :, : 700 - n] for a in before]), (sinks, window, n)
            # With other tokens it goes on as its saved form does.
            loaded = TurboMoqCache.from_state(cache.state)
            for c in (cache, loaded):
                c.update_and_fetch(*rows(500, 4))
            assert cache.offset == 1200 - n and same(held(cache), held(loaded)), (sinks, window, n)
            fresh = [numbers(a)[:, :, 700 - n :] for a in cache.keys_and_values()]
            assert all(error(a, b) < 0.2 for a, b in zip(fresh, rows(500, 4)))


def leaves_others_alone(TurboMoqCache, Unsupported, convert, make_turbomoq_cache):
    """Only layers that are exactly KVCache change, whenever that is."""

    class Indexed(C.KVCache):
        pass

    for tokens in (0, 300):
        layers = [C.KVCache(), C.ArraysCache(2), C.RotatingKVCache(64), C.CacheList(C.KVCache(), C.KVCache()), Indexed(), C.KVCache()]
        if tokens:
            fill(layers[0], tokens), fill(layers[2], tokens), fill(layers[5], tokens)
        out = convert(layers, key_bits=8, value_bits=8)
        assert [type(c) for c in out] == [TurboMoqCache, *map(type, layers[1:5]), TurboMoqCache]
        assert all(a is b for a, b in zip(out[1:5], layers[1:5])) and type(layers[0]) is C.KVCache
        assert out[0].offset == tokens and all(error(a, b) < 0.01 for a, b in zip(held(out[0]), held(layers[0])))
        last = convert(layers, exact_last=True)
        assert last[5] is layers[5] and type(last[0]) is TurboMoqCache

    class Model:
        layers = [0] * 3

    refused(Unsupported, "max_kv_size 4096", lambda: make_turbomoq_cache(Model, max_kv_size=4096))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert [type(c) for c in convert(C.make_prompt_cache(Model, 4096))] == [C.RotatingKVCache] * 3
    assert "only RotatingKVCache" in str(said[0].message), "what is not packed says so"
    assert [c._options for c in make_turbomoq_cache(Model, key_bits=3, window=64)] == [(3, 4, 4, 64, i) for i in range(3)]


def refused(kind, what, call):
    try:
        call()
    except kind as e:
        assert what in str(e), e
        return
    raise AssertionError(f"{kind.__name__} with {what!r} was expected")


def again(folder):
    # Without this package mlx-lm does not know the class, and says its name.
    refused(KeyError, "TurboMoqCache", lambda: C.load_prompt_cache(f"{folder}/mixed.safetensors"))
    import turbomoq_mlx

    for name in ("plain", "quantized", "packed", "narrow"):
        cache = C.load_prompt_cache(f"{folder}/{name}.safetensors")[1]
        append(cache, rows(400, 11))
        assert same(held(cache), np.load(f"{folder}/{name}.npz").values()), name
    mixed, metadata = C.load_prompt_cache(f"{folder}/mixed.safetensors", return_metadata=True)
    assert metadata == {"text": "é"} and [c.offset for c in mixed] == [700, 9, 0, 3]
    assert same([a for c in mixed for a in held(c)], np.load(f"{folder}/mixed.npz").values())
    print(f"mlx-lm {mlx_lm.__version__}: a new process goes on with the saved caches")


if __name__ == "__main__":
    if sys.argv[1] in ("contract", "again"):
        {"contract": contract, "again": again}[sys.argv[1]](sys.argv[2])
    else:
        import architectures
        import cache_edges
        import cache_packed
        import commands
        import recipes

        parts = {name: part for module in (cache_packed, cache_edges, architectures, recipes, commands) for name, part in vars(module).items()}
        parts[sys.argv[1]](sys.argv[2])
