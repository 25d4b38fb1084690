"""The packed form of a `TurboMoqCache`, see cache_contract.py, which runs these parts.

words FOLDER       words of any chunking are the same, and those of the C library; what has no form is refused
attends FOLDER     attention on the packed form equals that on the fetched arrays, and that of the C library's cache
memory FOLDER      MLX's active memory grows by what the cache reports, and no step copies what is packed
model FOLDER       SmolLM2 through mlx-lm: the distributions and tokens of the float cache
"""

import ctypes
import gc
import os

import mlx.core as mx
import mlx_lm
import numpy as np
from cache_contract import STOCK, error, fill, numbers, refused, root, rows, same
from mlx_lm.generate import generate_step
from mlx_lm.models import base, llama
from mlx_lm.models import cache as C
from turbomoq_mlx import LibraryNotFound, TurboMoqCache, Unsupported, attention, codec, install, library, make_turbomoq_cache, uninstall


class Rows(ctypes.Structure):
    """`tmq_rows` over a NumPy array [tokens, heads, channels]."""

    _fields_ = [("size", ctypes.c_size_t), ("data", ctypes.c_void_p), ("dtype", ctypes.c_uint32)]
    _fields_ += [(n, ctypes.c_size_t) for n in ("heads", "tokens", "head_dim", "token_stride", "head_stride")]

    def __init__(self, x):
        self.kept = np.ascontiguousarray(numbers(x)[0].transpose(1, 0, 2))
        t, h, d = self.kept.shape
        super().__init__(ctypes.sizeof(Rows), self.kept.ctypes.data, 0, h, t, d, h * d, d)


def c(name, *args):
    """A call of the C library that must succeed."""
    f = getattr(library.load(), name)
    f.argtypes = None
    library.check(f(*args))


def words(_):
    kv = rows(700)
    states = []
    for chunk in (1, 7, 128, 700):
        cache = TurboMoqCache(4, 3)
        for start in range(0, 700, chunk):
            cache.update_and_fetch(*(a[:, :, start : start + chunk] for a in kv))
            mx.eval(cache.state)
        states.append([numbers(a) for side in cache.state for a in side])
    assert len(states[0]) == 11 and states[0][0][8:].tolist() == [4, 512, 184], states[0][0]
    assert all(same(state, states[0]) for state in states), "chunks of another size, other words"

    worst = (0, 0)
    for dim in (64, 72, 80, 96, 112, 128, 256):
        for bits in codec.WIDTHS:
            kv = rows(128, dim, dim=dim, dtype=mx.float32)
            for side in (library.KEY, library.VALUE):
                worst = max(worst, against_c_library(side, bits, dim, kv[side]))
    spreads()
    zeros = mx.zeros((1, 1, 3, 64))
    packed, scales = codec.codec(0, 0, 4, 64).encode(zeros + mx.array([0, 1, float("nan")])[:, None])
    scales = numbers(scales)[0, 0]
    assert scales[0] == 0 and 0 < scales[1] < 2 and np.isnan(scales[2]) and not numbers(packed)[0, 0, ::2].any()

    os.environ["TURBOMOQ_LIBRARY"], kept = "/nowhere/lib.so", os.environ["TURBOMOQ_LIBRARY"]
    refused(LibraryNotFound, "cargo build --release -p turbomoq-c", library.load.__wrapped__)
    os.environ["TURBOMOQ_LIBRARY"] = kept
    fill_dim(72)
    refused(Unsupported, "head dim 576 of layer 5's keys", lambda: fill_dim(576))
    print(f"mlx-lm {mlx_lm.__version__}: at most {worst[0]:.1e} of a codec's codes differ from the C library's, by {worst[1]}")


def spreads():
    """Codes spread to a wider word are the same codes, and give the same sums in runs of any length."""
    rng = np.random.default_rng(5)
    for bits, wide in codec.SPREAD.items():
        words = mx.array(rng.integers(0, 1 << 32, (2, 3, 70, 3 * bits), dtype=np.uint32))
        got = codec.spread(words, bits, wide)
        codes = lambda w, b: np.unpackbits(np.array(w).view(np.uint8), axis=-1, bitorder="little").reshape(2, 3, 70, 96, b) @ (1 << np.arange(b))
        assert got.shape == (2, 3, 70, 3 * wide) and np.array_equal(codes(got, wide), codes(words, bits)), bits
        values = rows(300, bits, dim=80, dtype=mx.float32)[1]
        coder, weights = codec.codec(library.VALUE, 0, bits, 80), mx.array(rng.random((1, 2, 5, 290), dtype=np.float32))
        words, scales = coder.encode(values)
        want = weights @ coder.levels(words, scales)[:, :, :290]
        for codec.RUN in (64, 2048):
            assert error(coder.weighted_sum(weights, words, scales), want) < 1e-5, (bits, codec.RUN)


def fill_dim(dim):
    TurboMoqCache(layer=5).update_and_fetch(*rows(1, dim=dim))


def against_c_library(side, bits, dim, x):
    """Share of codes that differ, and by how much at most; scales and decoded rows are compared here."""
    ours = codec.codec(side, 2, bits, dim)
    centre = x.mean(2, keepdims=True) if side == library.KEY else None
    got_words, got_scales = ours.encode(x, centre)
    handle, codes = ctypes.c_void_p(), ctypes.c_void_p()
    c("tmq_codec_of_recipe", codec.recipe(bits, bits, 4, 128).encode(), side, ctypes.c_size_t(2), ctypes.c_size_t(dim), ctypes.byref(handle))
    c("tmq_encode", handle, ctypes.byref(Rows(x)), int(side == library.KEY), ctypes.byref(codes))
    t, h, width = x.shape[2], x.shape[1], -(-dim * bits // 32)
    their_words, their_scales = np.zeros((t, h, width), np.uint32), np.zeros((t, h), np.float32)
    their_rows = np.zeros((t, h, dim), np.float32)
    at = lambda a: (ctypes.c_void_p(a.ctypes.data), ctypes.c_size_t(a.size))
    c("tmq_codes_words", codes, *at(their_words))
    c("tmq_codes_scales", codes, *at(their_scales))
    c("tmq_decode", codes, *at(their_rows))
    library.load().tmq_codes_free(codes), library.load().tmq_codec_free(handle)
    got = numbers(got_words)[0].transpose(1, 0, 2)
    assert not got[..., width:].any(), "only zeros are padding"
    unpack = lambda w: np.unpackbits(np.ascontiguousarray(w).view(np.uint8), axis=-1, bitorder="little")[..., : dim * bits]
    value = lambda w: unpack(w).reshape(t, h, dim, bits) @ (1 << np.arange(bits))
    off = np.abs(value(got[..., :width]).astype(int) - value(their_words))
    assert (off > 0).mean() <= 2e-4 and off.max() <= 1, (side, bits, dim, (off > 0).mean(), off.max())
    alike = ~off.any(-1)
    assert np.allclose(numbers(got_scales)[0].T[alike], their_scales[alike], rtol=1e-3), "scales"
    decoded = numbers(ours.decode(got_words, got_scales, centre))[0].transpose(1, 0, 2)
    assert error(decoded[alike], their_rows[alike]) < 1e-3, (side, bits, dim)
    return (float((off > 0).mean()), int(off.max()))


def attention_cases():
    """Tokens before, new tokens, heads, query heads, channels, mask, extra options."""
    return [
        (700, 1, 2, 6, 64, None, {}),
        (700, 1, 2, 2, 80, "array", {}),
        (700, 5, 1, 4, 96, "causal", {"key_bits": 3, "value_bits": 5}),
        (700, 90, 2, 6, 64, "causal", {"sinks": 0}),
        (1300, 300, 2, 4, 128, "array", {"key_bits": 2, "value_bits": 8}),
        (700, 150, 2, 2, 64, "additive", {"window": 0}),
        (700, 1, 2, 4, 64, "additive", {"key_bits": 6, "sinks": 0}),
        (90, 300, 2, 4, 64, "causal", {}),
        (700, 1, 2, 6, 64, None, {"batch": 2}),
    ]


def attends(_):
    install(), install()
    assert base.scaled_dot_product_attention is not STOCK and llama.scaled_dot_product_attention is base.scaled_dot_product_attention
    rng = np.random.default_rng(3)
    for budget in (200_000, attention.BUDGET):
        attention.BUDGET = budget
        for before, new, heads, query_heads, dim, kind, options in attention_cases():
            batch = options.pop("batch", 1)
            for logits in (None, mx.array(rng.standard_normal(query_heads).astype(np.float32))):
                cache = TurboMoqCache(**options)
                cache.update_and_fetch(*rows(before, 1, heads, dim, mx.float32, batch))
                mask = cache.make_mask(new, return_array=kind != "causal", window_size=None if kind == "causal" else 600)
                if kind is None:
                    mask = None
                elif kind == "additive":
                    mask = mx.where(mask, mx.random.normal(mask.shape), mx.finfo(mx.float32).min)[None, None]
                q = mx.array(rng.standard_normal((batch, query_heads, new, dim)).astype(np.float32))
                k, v = cache.update_and_fetch(*rows(new, 2, heads, dim, mx.float32, batch))
                packed = cache._fetched is not None
                got = base.scaled_dot_product_attention(q, k, v, cache=cache, scale=dim**-0.5, mask=mask, sinks=logits)
                # It was taken from the packed form, unless nothing had been packed before.
                assert cache._fetched is None and packed == (before > 300)
                want = STOCK(q, k, v, cache=None, scale=dim**-0.5, mask=mask, sinks=logits)
                assert error(got, want) < 2e-5, (budget, before, new, heads, dim, kind, error(got, want))
                k, v = cache.keys_and_values()
                assert cache._fetched is not None
                got = base.scaled_dot_product_attention(q, k, v, cache=cache, scale=dim**-0.5, mask=mask, sinks=logits)
                want = STOCK(q, k, v, cache=None, scale=dim**-0.5, mask=mask, sinks=logits)
                assert error(got, want) < 2e-5, ("again", before, new, error(got, want))
    # Arrays that are not what was fetched are meant as they are.
    cache = fill(TurboMoqCache(), 700)
    q = rows(1, 3)[0]
    k, v = cache.update_and_fetch(*rows(1, 2))
    got = base.scaled_dot_product_attention(q, k * 2, v, cache=cache, scale=0.125, mask=None)
    assert same([numbers(got)], [numbers(STOCK(q, k * 2, v, cache=None, scale=0.125, mask=None))])
    # A query that sees nothing gives zeros.
    k, v = cache.update_and_fetch(*rows(1, 2))
    got = base.scaled_dot_product_attention(q, k, v, cache=cache, scale=0.125, mask=mx.zeros((1, 702), mx.bool_))
    assert not numbers(got).any()
    uninstall(), uninstall()
    assert base.scaled_dot_product_attention is STOCK and llama.scaled_dot_product_attention is STOCK
    worst = against_c_cache()
    print(f"mlx-lm {mlx_lm.__version__}: attention on the packed form is that on the fetched arrays; from the C library's cache {worst:.1e}")


def against_c_cache():
    """Decode steps beside `tmq_cache_attend` with the same recipe. Up to 4 bits that engine takes queries to eight bits."""
    errors = {}
    for bits, most in ((8, 1e-3), (6, 1e-3), (4, 0.03)):
        cache, handle = TurboMoqCache(bits, bits, layer=1), ctypes.c_void_p()
        c("tmq_cache_new", cache.recipe.encode(), ctypes.c_size_t(1), ctypes.c_size_t(64), ctypes.c_size_t(64), ctypes.byref(handle))
        for step, tokens in enumerate((700, 1, 1, 130, 1)):
            kv, q = rows(tokens, 20 + step, dtype=mx.float32), rows(1, 40 + step, 6, dtype=mx.float32)[0]
            c("tmq_cache_append", handle, ctypes.byref(Rows(kv[0])), ctypes.byref(Rows(kv[1])))
            k, v = cache.update_and_fetch(*kv)
            if tokens > 1:
                continue
            want = np.zeros((1, 6, 64), np.float32)
            c("tmq_cache_attend", handle, ctypes.byref(Rows(q)), ctypes.c_float(0.125), ctypes.c_void_p(want.ctypes.data), ctypes.c_size_t(want.size))
            got = numbers(cache.attend(q, k, v, 0.125))[0].transpose(1, 0, 2)
            errors[bits] = max(errors.get(bits, 0), error(got, want))
        library.load().tmq_cache_free(handle)
        assert errors[bits] < most, errors
    return errors[8]


def memory(_):
    install()
    heads, dim, tokens = 8, 64, 8192
    kv = rows(tokens, 1, heads, dim)
    mx.eval(kv)
    floats = sum(a.nbytes for a in kv)
    for bits, ratio in ((4, 3.0), (3, 3.5), (2, 5.0)):
        gc.collect(), mx.clear_cache()
        before = mx.get_active_memory()
        layers = [TurboMoqCache(bits, bits, layer=i) for i in range(3)]
        for cache in layers:
            for start in range(0, tokens, 1024):
                cache.update_and_fetch(*(a[:, :, start : start + 1024] for a in kv))
                mx.eval(cache.state)
        reported = sum(cache.nbytes for cache in layers)
        grown = mx.get_active_memory() - before
        # Constants that all layers share are a few hundredths of three layers.
        assert 0.99 * reported <= grown <= 1.05 * reported, (grown, reported)
        assert 3 * floats / grown > ratio, (3 * floats, grown)
        # A step takes room for its scores and for the exact window in f32, not for a copy of what is packed.
        one, q = rows(1, 2, heads, dim), rows(1, 3, heads, dim)[0]
        most = 0
        for step in range(5):
            mx.reset_peak_memory()
            for cache in layers:
                k, v = cache.update_and_fetch(*one)
                mx.eval(base.scaled_dot_product_attention(q, k, v, cache=cache, scale=0.125, mask=None))
                del k, v
            if step > 0:
                most = max(most, mx.get_peak_memory() - before - grown)
        room = 4 * heads * (12 * tokens + 2 * 260 * dim)
        if bits in codec.SPREAD:
            # And for some copies of the words that are spread at a time.
            room += 12 * 4 * heads * codec.RUN * dim // 8
        assert most < room, (most, room)
        # Many queries of a prompt: they go in runs of a few score matrices of the budget.
        attention.BUDGET, length = 4 << 20, 128
        more, q = rows(length, 2, heads, dim), rows(length, 3, 4 * heads, dim)[0]
        mx.eval(more, q)
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        k, v = layers[0].update_and_fetch(*more)
        mx.eval(base.scaled_dot_product_attention(q, k, v, cache=layers[0], scale=0.125, mask="causal"))
        del k, v
        peak = mx.get_peak_memory() - active
        assert peak < 12 * attention.BUDGET, (peak, "all scores at once are", 16 * heads * length * tokens)
        attention.BUDGET = 32 << 20
        print(f"mlx-lm {mlx_lm.__version__}: {bits} bits, {tokens} tokens: active memory {grown} for {reported} reported, fp16 {3 * floats}")
        print(f"  {8 * reported / (3 * floats / 2):.2f} bits a value with room for growth; a step takes {most} more, a prompt's {peak}")
        del layers, cache
    uninstall()


def model(_):
    import smollm2_folder
    from mlx_lm import load

    home = root / "mlx/.runtime/smollm2"
    gguf = home / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not gguf.exists():
        print(f"NOT RUN: {gguf} is missing (examples/smollm2/setup.sh fetches it)")
        return
    if not (home / "mlx-lm/tokenizer_config.json").exists():
        smollm2_folder.convert(str(gguf), home / "mlx-lm")
    network, tokenizer = load(str(home / "mlx-lm"))
    # MLX's CPU device multiplies half floats one by one, some thirty times slower.
    network.set_dtype(mx.float32)
    text = " ".join((root / "README.md").read_text().split())
    tokens = mx.array(tokenizer.encode(text)[:160])
    prompt, steps = 154, 6

    def forced(cache):
        """Log-probabilities after each of the last tokens, whatever the cache would have said."""
        network(tokens[None, :prompt], cache=cache)
        mx.eval([c.state for c in cache])
        logits = [network(tokens[None, i : i + 1], cache=cache)[0, -1].astype(mx.float32) for i in range(prompt, prompt + steps)]
        return np.array(mx.stack([x - mx.logsumexp(x) for x in logits]))

    plain = forced(C.make_prompt_cache(network))
    loss = lambda got: float(np.mean(np.sum(np.exp(plain) * (plain - got), axis=-1)))
    calls = []
    counted = TurboMoqCache.attend
    TurboMoqCache.attend = lambda *a, **k: calls.append(counted(*a, **k)) or calls[-1]
    theirs = loss(forced([C.QuantizedKVCache(group_size=64, bits=4) for _ in network.layers]))
    install()
    cache = make_turbomoq_cache(network, key_bits=4, value_bits=4, window=0)
    ours = loss(forced(cache))
    assert all(c.packed_tokens >= 128 for c in cache)
    # At fewer bits; a few tokens decide, so not more than the order of it is asked for.
    assert ours < theirs, (ours, theirs)
    print(f"mlx-lm {mlx_lm.__version__}: SmolLM2, 4 bits, {steps} tokens after {prompt}: mean KL {ours:.1e}, mlx-lm's own cache {theirs:.1e}")
    assert sum(out is not None for out in calls) >= steps * len(network.layers), "attention was on the packed form"
    # Stock generation goes through it, and 8 bits say what floats say.
    said = lambda cache: [int(t) for t, _ in generate_step(tokens, network, max_tokens=4, prompt_cache=cache, prefill_step_size=150)]
    ours, theirs = said(make_turbomoq_cache(network, key_bits=8, value_bits=8, window=0)), said(C.make_prompt_cache(network))
    assert ours == theirs, (ours, theirs)
    TurboMoqCache.attend = counted
    uninstall()
