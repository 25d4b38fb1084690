"""The real mlx-lm on both sides of the Rust reader and writer (tests/python/prompt_caches.rs).

make DIR         saves caches of every kind with this release, and beside each what it holds and how it goes on
verify DIR OUT   loads OUT/*.safetensors (rewritten by Rust) with this release: same contents, same continuation
agree DIR OUT    loads OUT/*.safetensors (restored from compressed files): the next token's logits agree with DIR's cache
quantize DIR     compares what Rust quantized (DIR/ours.safetensors) with mx.quantize of DIR/floats.safetensors
"""

import copy
import os
import pathlib
import sys

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import cache as C
from mlx_lm.models import llama

OLD = not mlx_lm.__version__.startswith("0.32")
META = {"model": "tiny", "note": "x=y\n", "uni": "é漢"}


def tiny_model():
    args = dict(model_type="llama", hidden_size=128, num_hidden_layers=13, intermediate_size=96, num_attention_heads=4)
    args |= dict(num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-5, vocab_size=97, tie_word_embeddings=False)
    model = llama.Model(llama.ModelArgs(**args))
    rng = np.random.default_rng(3)
    weights = [
        (k, mx.array((rng.standard_normal(v.shape) * 0.2).astype(np.float32)).astype(mx.float16))
        for k, v in sorted(tree_flatten(model.parameters()))
    ]
    model.update(tree_unflatten(weights))
    return model


def model_caches(model):
    tokens = mx.array(np.random.default_rng(5).integers(0, 97, (1, 300)))
    out = {}
    for length in (1, 20, 255, 256, 257):
        caches = [C.KVCache() for _ in model.layers]
        model(tokens[:, :length], cache=caches)
        out[f"model_plain{length}"] = caches
    out["model_quant"] = [c.to_quantized(32, 4) for c in out["model_plain20"]]
    out["model_quant8"] = [c.to_quantized(32, 8) for c in out["model_plain257"]]
    for name, count, step in (("wrapped", 40, 1), ("short", 9, 1), ("prefilled", 40, 40), ("mixed", 33, 8)):
        caches = [C.RotatingKVCache(16, keep=2) for _ in model.layers]
        for t in range(0, count, step):
            model(tokens[:, t : min(t + step, count)], cache=caches)
        out[f"model_rotating_{name}"] = caches
    mixed = [C.KVCache() if i % 2 else C.RotatingKVCache(16, keep=0) for i in range(len(model.layers))]
    for t in range(25):
        model(tokens[:, t : t + 1], cache=mixed)
    out["model_hybrid"] = mixed
    trimmed = [C.KVCache() for _ in model.layers]
    model(tokens[:, :20], cache=trimmed)
    C.trim_prompt_cache(trimmed, 20)
    out["model_trimmed"] = trimmed
    if not OLD:
        out["new_empty"] = [C.KVCache(), C.QuantizedKVCache(32, 4), C.RotatingKVCache(8, 2), C.KVCache()]
    return out


RNG = np.random.default_rng(11)


def rand(tokens, dim, dtype):
    return mx.array(RNG.standard_normal((1, 2, tokens, dim)).astype(np.float32)).astype(dtype)


def other_caches():
    def fill(cache, n, k=32, v=32, dtype=mx.float16):
        cache.update_and_fetch(rand(n, k, dtype), rand(n, v, dtype))
        return cache

    arrays = C.ArraysCache(2)
    arrays[0], arrays[1] = rand(3, 5, mx.float32), rand(2, 7, mx.bfloat16)
    nested = C.CacheList(C.CacheList(fill(C.KVCache(), 3), arrays), fill(C.QuantizedKVCache(32, 3), 4, 64, 32))
    dims = [fill(C.KVCache(), n, d, 16, mx.bfloat16) for n, d in ((257, 80), (1, 96), (255, 112), (256, 576))]
    return {
        "other_lists": [nested, fill(C.ConcatenateKVCache(), 4), fill(C.ChunkedKVCache(64), 6), arrays],
        "other_dims": dims,
    }


def parts(cache, prefix=""):
    """Name and cache of every part, lists opened."""
    for i, c in enumerate(cache):
        if isinstance(c, C.CacheList):
            yield from parts(c.caches, f"{prefix}{i}.")
        else:
            yield f"{prefix}{i}", c


def content(cache):
    """What a cache holds, without unused rows; class and counters too."""
    out = {}
    for name, c in parts(cache):
        state = [c.cache] if isinstance(c, C.ArraysCache) else [c.keys, c.values]
        rows = c.offset if hasattr(c, "offset") and not isinstance(c, C.ArraysCache) else None
        for path, x in tree_flatten(state if getattr(c, "keys", 0) is not None else []):
            x = x if rows is None or isinstance(c, C.ArraysCache) else x[..., :rows, :]
            out[f"{name}/{path}/{x.dtype}"] = np.array(x if x.dtype == mx.uint32 else x.astype(mx.float32))
        numbers = [getattr(c, f, -1) for f in ("offset", "keep", "max_size", "_idx", "group_size", "bits", "chunk_size")]
        out[f"{name}/{type(c).__name__}"] = np.array(numbers)
    return out


def go_on(name, cache, model):
    """What comes out when the cache is used further."""
    out = {}
    if name.startswith("model"):
        tokens = mx.array(np.random.default_rng(9).integers(0, 97, (1, 300)))
        # llama takes the mask of its first layer for all: a hybrid goes on one token at a time.
        block = 3 if "hybrid" in name else 7
        for i, (start, end) in enumerate([(0, 1), (1, 2), (2, block)] + [(t, t + 1) for t in range(block, 20)]):
            out[f"logits{i}"] = np.array(model(tokens[:, start:end], cache=cache)[:, -1].astype(mx.float32))
        return out
    rng = np.random.default_rng(13)
    for path, c in parts(cache):
        if isinstance(c, C.ArraysCache):
            continue
        for i, n in enumerate((1, 5, 1)):
            dims = [64, 64] if c.keys is None else [
                x[1].shape[-1] * c.group_size if hasattr(c, "bits") else x.shape[-1] for x in (c.keys, c.values)
            ]
            # In the dtype of the cache: appending f16 to a bf16 cache gives f32 if the buffer is full, else bf16.
            held = [x for _, x in tree_flatten([c.keys] if c.keys is not None else [])]
            dtype = held[-1].dtype if held else mx.float16
            k, v = (mx.array(rng.standard_normal((1, 2, n, d)).astype(np.float32)).astype(dtype) for d in dims)
            for leaf, x in tree_flatten(list(c.update_and_fetch(k, v))):
                out[f"{path}/{i}/{leaf}"] = np.array(x if x.dtype == mx.uint32 else x.astype(mx.float32))
    return out


def same(what, a, b):
    assert sorted(a) == sorted(b), f"{what}: {sorted(set(a) ^ set(b))[:6]}"
    for key in a:
        assert a[key].shape == b[key].shape, f"{what} {key}: {a[key].shape} {b[key].shape}"
        assert np.array_equal(a[key], b[key]), f"{what} {key}: max difference {np.abs(a[key] - b[key]).max()}"


def make(folder):
    model = tiny_model()
    for name, cache in (model_caches(model) | other_caches()).items():
        try:
            C.save_prompt_cache(f"{folder}/{name}.safetensors", cache, META)
        except ValueError as error:  # MLX before 0.32
            assert name == "model_trimmed" and "empty array" in str(error), f"{name}: {error}"
            pathlib.Path(f"{folder}/{name}.safetensors").unlink(missing_ok=True)
            continue
        np.savez(f"{folder}/{name}.holds.npz", **content(cache))
        loaded = C.load_prompt_cache(f"{folder}/{name}.safetensors")
        np.savez(f"{folder}/{name}.goes.npz", **go_on(name, loaded, model))


def verify(folder, rewritten):
    model, count = tiny_model(), 0
    for path in sorted(pathlib.Path(rewritten).glob("*.safetensors")):
        cache, meta = C.load_prompt_cache(str(path), return_metadata=True)
        assert meta == META, f"{path}: {meta}"
        same(f"{path} holds", dict(np.load(f"{folder}/{path.stem}.holds.npz")), content(cache))
        same(f"{path} goes on", dict(np.load(f"{folder}/{path.stem}.goes.npz")), go_on(path.stem, cache, model))
        count += 1
    print(f"mlx-lm {mlx_lm.__version__}: {count} rewritten caches hold and continue the same")
    assert count >= 14, count


def rows(c):
    """Keys and values of a cache as f32 rows, and a cache of floats of the same state to put others in."""
    if isinstance(c, C.QuantizedKVCache):
        n = c.offset
        k, v = (mx.dequantize(*(a[..., :n, :] for a in x), c.group_size, c.bits) for x in (c.keys, c.values))
        twin = C.KVCache()
        twin.offset = n
    else:
        n = min(c.offset, c.keys.shape[2])
        k, v = c.keys[..., :n, :], c.values[..., :n, :]
        twin = copy.copy(c)
    return k.astype(mx.float32), v.astype(mx.float32), twin


def noisy(cache, other, rng, shared):
    """The cache with noise whose rows are as long as the differences to `other`, in random directions: one for each row, or
    one shared by all rows of a head."""
    out = []
    for c, o in zip(cache, other):
        (k, v, twin), (ok, ov, _) = rows(c), rows(o)
        both = []
        for x, y in ((k, ok), (v, ov)):
            shape = (*x.shape[:2], 1, x.shape[3]) if shared else x.shape
            noise = mx.array(rng.standard_normal(shape).astype(np.float32))
            size = mx.linalg.norm(x - y, axis=-1, keepdims=True) / mx.linalg.norm(noise, axis=-1, keepdims=True)
            both.append((x + size * noise).astype(mx.float16))
        twin.keys, twin.values = both
        out.append(twin)
    return out


# D(b) of each recipe with a margin for single layers; affine at 4 bits has steps of about a fifth of a standard deviation.
LOST = {"best": 0.012, "b4": 0.014, "b8": 6e-5, "affine": 0.012}


def agree(folder, restored):
    """A codec's bound, in two steps: its errors are no larger than its distortion law says (LOST), and they move the logits no
    further than errors of that size in random directions do, of every row for itself plus shared by the rows of a head (rows
    that are alike have errors that are alike, which attention does not average out). Means of three draws. Zero where
    nothing was lost.
    """
    model, count, sums = tiny_model(), 0, {}
    token = mx.array([[5]])
    go = lambda cache: np.array(model(token, cache=copy.deepcopy(cache))[0, -1].astype(mx.float32))
    for path in sorted(pathlib.Path(restored).glob("*.safetensors")):
        name, recipe = path.stem.split("@", 1)
        if not name.startswith("model"):
            a, b = (content(C.load_prompt_cache(p)) for p in (f"{folder}/{name}.safetensors", str(path)))
            assert sorted(a) == sorted(b), f"{path}: {set(a) ^ set(b)}"
            continue
        before, after = C.load_prompt_cache(f"{folder}/{name}.safetensors"), C.load_prompt_cache(str(path))
        assert [type(c) for c in before] == [type(c) for c in after]
        assert [c.offset for c in before] == [c.offset for c in after]
        want, got = go(before), go(after)
        assert np.isfinite(got).all()
        distance, rng = np.linalg.norm(got - want), np.random.default_rng(1)
        if recipe == "exact":
            assert "quant" in name or distance == 0, f"{path}: {distance}"
            continue
        lost = max(float(mx.sum((x - y) ** 2) / mx.sum(x**2)) for c, o in zip(before, after) for x, y in zip(rows(c)[:2], rows(o)[:2]))
        # A quantized layer is quantized again on top.
        assert lost <= LOST[recipe] + 0.02 * ("quant" in name), f"{path}: {lost} of the squared norm was lost"
        noise = lambda shared: np.mean(
            [np.linalg.norm(go(noisy(before, after, rng, shared)) - want) for _ in range(3)]
        )
        bound = noise(False) + noise(True)
        if "VERBOSE" in os.environ:
            print(f"{path.stem}: lost {lost:.5f}, moved {distance / np.linalg.norm(want):.4f} of {bound / np.linalg.norm(want):.4f}")
        assert distance <= bound + 1e-3, f"{path}: logits moved by {distance}, noise of the same size by {bound}"
        sums[recipe] = sums.get(recipe, 0) + distance / np.linalg.norm(want)
        count += 1
    assert count >= 20, count
    assert sums["b8"] < 0.5 * sums["b4"], f"more bits move the logits less: {sums}"
    print(f"mlx-lm {mlx_lm.__version__}: {count} restored caches give the logits within their codec's bound")


def floats(folder):
    rng, caches = np.random.default_rng(17), []
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        x = rng.standard_normal((1, 1, 1024, 256)) * np.exp(np.clip(rng.standard_normal((1, 1, 1024, 1)) * 3, -9, 9))
        x = np.clip(x.astype(np.float32), -6e4, 6e4)
        x[0, 0, :16], x[0, 0, 16:32], x[0, 0, 32:48] = 0, rng.standard_normal((16, 1)), np.abs(x[0, 0, 32:48])
        x[0, 0, 48:64], x[0, 0, 64:80], x[0, 0, 80:96] = -np.abs(x[0, 0, 48:64]), x[0, 0, 64:80] * 1e-7, 1 + x[0, 0, 80:96] * 1e-4
        x[0, 0, 96:128] = np.round(x[0, 0, 96:128])
        caches.append(C.KVCache())
        caches[-1].update_and_fetch(mx.array(x).astype(dtype), mx.array(-x).astype(dtype))
    C.save_prompt_cache(f"{folder}/floats.safetensors", caches)


def quantize(folder):
    plain = C.load_prompt_cache(f"{folder}/floats.safetensors")
    ours = iter(C.load_prompt_cache(f"{folder}/ours.safetensors"))
    total = differ = 0
    for c in plain:
        for bits in (2, 3, 4, 5, 6, 8):
            for group in (32, 64, 128):
                mine = next(ours)
                assert (mine.bits, mine.group_size) == (bits, group)
                for x, packed in ((c.keys, mine.keys), (c.values, mine.values)):
                    for a, b in zip(mx.quantize(x, group, bits), packed):
                        assert a.dtype == b.dtype
                        bad = int((a != b[..., : c.offset, :]).sum())
                        total, differ = total + a.size, differ + bad
    print(f"mx.quantize: {differ} of {total} words, scales and biases differ")
    assert differ == 0


if __name__ == "__main__":
    {"make": make, "verify": verify, "agree": agree, "floats": floats, "quantize": quantize}[sys.argv[1]](*sys.argv[2:])
