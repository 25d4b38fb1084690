"""Makes tests/fixtures/pc*.safetensors with the real mlx-lm. Run once with each release:

    /path/to/venv-0.31/bin/python tests/interop/make_fixtures.py tests/fixtures
    /path/to/venv-0.32/bin/python tests/interop/make_fixtures.py tests/fixtures

Contents are the same in both releases. `step` is lowered so that the padded buffers of 0.32 stay small.
"""

import sys

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.models import cache as C

OLD = not mlx_lm.__version__.startswith("0.32")
NAME = "pc031" if OLD else "pc032"
for cls in (C.KVCache, C.QuantizedKVCache, C.RotatingKVCache, C.ChunkedKVCache):
    cls.step = 8
RNG = np.random.default_rng(7)


def rand(tokens, dim, dtype=mx.float16):
    return mx.array(RNG.standard_normal((1, 2, tokens, dim)).astype(np.float32)).astype(dtype)


def fill(cache, tokens, dims=(32, 32), dtype=mx.float16, single=False):
    k, v = rand(tokens, dims[0], dtype), rand(tokens, dims[1], dtype)
    if single:
        for t in range(tokens):
            cache.update_and_fetch(k[:, :, t : t + 1], v[:, :, t : t + 1])
    else:
        cache.update_and_fetch(k, v)
    return cache


def arrays(n):
    cache = C.ArraysCache(n)
    for i in range(n):
        cache[i] = rand(3, 5, mx.float32)
    return cache


def mixed():
    trimmed = fill(C.KVCache(), 3)
    trimmed.trim(3)
    return [
        fill(C.KVCache(), 3),
        fill(C.QuantizedKVCache(32, 4), 3),
        fill(C.RotatingKVCache(8, 2), 23, single=True),
        C.CacheList(fill(C.KVCache(), 3), fill(C.KVCache(), 3, (16, 48))),
        fill(C.KVCache(), 9, dtype=mx.bfloat16),
        arrays(2),
        fill(C.RotatingKVCache(64, 4), 5, single=True),
        C.CacheList(C.CacheList(fill(C.KVCache(), 2), arrays(1)), fill(C.QuantizedKVCache(32, 3), 5, (64, 32))),
        fill(C.ConcatenateKVCache(), 4),
        fill(C.ChunkedKVCache(64), 6),
        fill(C.KVCache(), 11, (8, 24), mx.float32),
        trimmed,
        fill(C.RotatingKVCache(8, 0), 12),
    ]


META = {"a": "1", "note": "x=y\n", "uni": "é漢\u0007", "a.b": "dot", "0": "zero"}


def save(name, caches, meta=META):
    C.save_prompt_cache(f"{sys.argv[1]}/{name}.safetensors", caches, meta)


save(f"{NAME}_mixed", mixed())
save(f"{NAME}_nometa", [fill(C.KVCache(), 3)], {})
batch = C.BatchKVCache([0, 1])
two = mx.zeros((2, 1, 3, 8))
batch.update_and_fetch(two, two)
save(f"{NAME}_batch", [fill(C.KVCache(), 1), batch])
C.FooCache = type("FooCache", (C.KVCache,), {})
save(
    f"{NAME}_unknown",
    [
        fill(C.KVCache(), 3),
        fill(C.QuantizedKVCache(32, 4), 3),
        fill(C.RotatingKVCache(8, 2), 23, single=True),
        C.CacheList(fill(C.KVCache(), 3), fill(C.KVCache(), 3)),
        fill(C.FooCache(), 3),
        fill(C.KVCache(), 2),
    ],
)
chunked = C.ChunkedKVCache(8)
for _ in range(3):
    chunked.maybe_trim_front()
    fill(chunked, 8)
chunked.maybe_trim_front()
fill(chunked, 4)
save(f"{NAME}_chunked", [chunked])
if not OLD:
    half = C.ArraysCache(2)
    half[1] = rand(3, 5)
    padded = C.ArraysCache(1, left_padding=[1, 0])
    padded[0] = mx.zeros((2, 3))
    save(
        f"{NAME}_empty",
        [C.KVCache(), C.QuantizedKVCache(32, 4), C.RotatingKVCache(8, 2), fill(C.KVCache(), 3), half, padded],
    )
    # Pairs (floats, mx.quantize of them) over every width and group, with edge rows.
    pairs, dtypes = [], (mx.float32, mx.float16, mx.bfloat16)
    for i, bits in enumerate((2, 3, 4, 5, 6, 8)):
        for j, group in enumerate((32, 64, 128)):
            x = RNG.standard_normal((1, 1, 4, 128)).astype(np.float32)
            x[0, 0, 0] *= np.exp(RNG.standard_normal() * 4)
            x[0, 0, 1] = [0, 1.5, -2.25][j]
            x[0, 0, 2] = np.abs(x[0, 0, 2]) * [1, -1, 1e-7][i % 3]
            plain = C.ConcatenateKVCache()
            kv = mx.array(x).astype(dtypes[(i + j) % 3])
            plain.update_and_fetch(kv, -kv)
            packed = C.QuantizedKVCache(group, bits)
            packed.keys, packed.values, packed.offset = mx.quantize(kv, group, bits), mx.quantize(-kv, group, bits), 4
            pairs += [plain, packed]
    save("pc_affine", pairs, {})
