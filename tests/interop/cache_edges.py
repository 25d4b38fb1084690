"""Where a `TurboMoqCache` once went wrong: what it keeps of prompts, rows that are not finite or too large, files, see cache_contract.py."""

import copy
import gc
import os
import pathlib
import subprocess
import sys

import mlx.core as mx
import mlx_lm
import numpy as np
from cache_contract import OLD, STOCK, append, error, fill, held, numbers, refused, root, rows, same
from mlx_lm.models import base
from mlx_lm.models import cache as C
from turbomoq_mlx import TurboMoqCache, convert, install, load_prompt_cache, uninstall

NAN = float("nan")


def prompts(_):
    """Prompts that come at once are not kept: active memory is what `nbytes` says, after any calls."""
    heads, dim = 8, 128
    rng = np.random.default_rng(7)
    TurboMoqCache(layer=0).update_and_fetch(*rows(1, 0, 1, dim))
    for options in ({}, {"sinks": 0, "window": 0}, {"sinks": 128, "window": 256, "exact_call": False}):
        for dtype, other in ((mx.float16, mx.float16), (mx.float16, mx.float32))[: 1 if options else 2]:
            cache = TurboMoqCache(**options)
            gc.collect(), mx.clear_cache()
            idle, tokens = mx.get_active_memory(), 0
            for count in (2052, 1, 128, 512, 3, 128 + int(rng.integers(1, 300))):
                # What it is given is of another type at times, which the cache takes up in its own.
                kv = rows(count, count, heads, dim, dtype if tokens == 0 else other)
                cache.update_and_fetch(*kv)
                del kv
                mx.eval(cache.state)
                tokens += count
                close_to_nbytes(cache, idle, (options, tokens))
            for dropped in (5, 300, 1000):
                cache.trim(dropped)
                append(cache, rows(dropped // 2, 3, heads, dim, dtype))
                mx.eval(cache.state)
                close_to_nbytes(cache, idle, (options, "trim", dropped))
            state = cache.state
            cache = TurboMoqCache.from_state(state)
            del state
            close_to_nbytes(cache, idle, (options, "loaded"))
            del cache
    floats = C.KVCache()
    floats.update_and_fetch(*rows(2052, 1, heads, dim))
    mx.eval(floats.keys, floats.values)
    gc.collect(), mx.clear_cache()
    before = mx.get_active_memory()
    cache, wanted = convert([floats])[0], floats.nbytes
    mx.eval(cache.state)
    del floats
    gc.collect()
    assert mx.get_active_memory() - before < cache.nbytes - wanted + (1 << 20), "the float cache is gone"
    print(f"mlx-lm {mlx_lm.__version__}: no call keeps a prompt alive")


def close_to_nbytes(cache, idle, what):
    gc.collect(), mx.clear_cache()
    grown = mx.get_active_memory() - idle
    # Some kilobytes of rounding for each of ten buffers, and constants that all layers share.
    assert abs(grown - cache.nbytes) < 300_000, (what, grown, cache.nbytes)


def odd_rows(_):
    """A row that is not finite is itself NaN and changes no other; a weight of zero hides it; large values are cut, not infinite."""
    install()
    for bad in (NAN, float("inf"), -float("inf")):
        for options in ({"sinks": 0, "window": 0}, {"sinks": 0, "window": 0, "key_bits": 2, "value_bits": 3}, {}):
            frames_from_finite_rows(bad, options)
            zero_weight_hides(bad, options)
    for first, later in ((mx.float16, mx.bfloat16), (mx.float16, mx.float32), (mx.bfloat16, mx.float32)):
        cache = TurboMoqCache(sinks=2)
        cache.update_and_fetch(*rows(1, dtype=first))
        large = mx.array([1e30, -1e30, 1e6, NAN, 3e38, 1.0] + [0.0] * 58).astype(later)
        got = append(cache, (mx.broadcast_to(large, (1, 2, 1, 64)),) * 2)[0][0, 0, 1]
        most = mx.finfo(first).max
        kept = [float(np.clip(x, -most, most)) for x in numbers(large)]
        assert got.dtype == first and np.allclose(numbers(got), kept, rtol=1e-2, equal_nan=True), (first, later, got)
    # Packed, rows of any size are finite; beyond what a scale holds values keep their direction.
    for size in (1e-6, 1e-3, 6e4, 1e15, 1e25, 1e37):
        kv = tuple(a * (size / 10) for a in rows(200, 5, dtype=mx.float32))
        cache = TurboMoqCache(8, 8, sinks=0, window=0)
        cache.update_and_fetch(*kv)
        for i, (got, want) in enumerate(zip(cache.keys_and_values(), kv)):
            got, want = numbers(got)[:, :, :128].astype(np.float64), numbers(want)[:, :, :128].astype(np.float64)
            assert np.isfinite(got).all(), size
            cosine = (got * want).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(want, axis=-1)
            if i == 1 or size < 1e5:
                assert cosine.min() > (0.99 if size >= 1e-3 else 0.9), (size, cosine.min())
    uninstall()
    print(f"mlx-lm {mlx_lm.__version__}: rows that are not finite or too large stay alone")


def frames_from_finite_rows(bad, options):
    clean = [numbers(a) for a in rows(300, 1, dtype=mx.float32)]
    dirty = [a.copy() for a in clean]
    dirty[0][0, 1, 5, 7] = dirty[1][0, 1, 9, 3] = bad
    caches = [fill_with(options, kv) for kv in (clean, dirty)]
    (keys, values), (k, v) = ([numbers(a) for a in c.keys_and_values()] for c in caches)
    packed = caches[0]._held[0] + caches[0].packed_tokens
    for whole, got, row, heads in ((keys, k, 5, 1), (values, v, 9, 1)):
        if packed and row < packed and row >= caches[0]._held[0]:
            assert np.isnan(got[0, heads, row]).all(), "the row itself is known to be bad"
        assert np.isfinite(np.delete(got[0, heads], row, 0)).all() and np.isfinite(got[0, 0]).all(), "the other rows"
        # The centre lacks one of 128 rows: a small change of rounding, no more.
        assert error(np.delete(got[0, heads], row, 0), np.delete(whole[0, heads], row, 0)) < 0.25
        assert same([got[0, 0]], [whole[0, 0]]), "another head"
    # After a trim to before the block, clean tokens are clean.
    caches[1].trim(300)
    caches[1].update_and_fetch(*map(mx.array, clean))
    assert same([numbers(a) for a in caches[1].keys_and_values()], [keys, values])


def fill_with(options, kv):
    cache = TurboMoqCache(**options)
    cache.update_and_fetch(*map(mx.array, kv))
    return cache


def zero_weight_hides(bad, options):
    """In the packed part, among the sinks and in the window."""
    for row in (1, 50, 298):
        clean = [numbers(a) for a in rows(300, 1, dtype=mx.float32)]
        dirty = [a.copy() for a in clean]
        for a, b in zip(clean, dirty):
            # The rest of the row is what a bad row is packed as.
            b[0, :, row] = bad
        q = rows(3, 4, heads=4, dtype=mx.float32)[0]
        seen = np.ones((3, 300), bool)
        seen[:, row] = False
        seen[0, :] = np.arange(300) < 100
        seen[0, row] = False
        for mask in (mx.array(seen), mx.array(np.where(seen, 0, -np.inf).astype(np.float32))):
            outs = []
            for kv in (clean, dirty):
                cache = fill_with(options, kv)
                k, v = cache.keys_and_values()
                out = base.scaled_dot_product_attention(q, k, v, cache=cache, scale=0.125, mask=mask)
                outs.append(numbers(out))
            assert np.isfinite(outs[1]).all(), (bad, options, row)
            assert error(outs[1], outs[0]) < 0.25, (bad, options, row, error(*outs))
        # Seen, it shows.
        seen[2, row] = True
        out = numbers(base.scaled_dot_product_attention(q, *cache.keys_and_values(), cache=cache, scale=0.125, mask=mx.array(seen)))
        assert np.isfinite(out[:, :, :2]).all() and not np.isfinite(out[:, :, 2]).any(), (bad, row)


def files(folder):
    """A file may be replaced by what was loaded from it; what is damaged is refused by name, and the cache is as it was."""
    path = f"{folder}/again.safetensors"
    alone = fill(TurboMoqCache(3, 5, layer=1), 700)
    C.save_prompt_cache(path, [alone])
    for count in (1, 200, 64):
        loaded = C.load_prompt_cache(path)
        append(loaded[0], rows(count, count)), append(alone, rows(count, count))
        C.save_prompt_cache(path, loaded)
        assert same(held(C.load_prompt_cache(path)[0]), held(alone)), f"{count} more tokens"
    # exact_call and all other options come back.
    other = TurboMoqCache(5, 6, sinks=7, window=64, layer=9, exact_call=False)
    back = TurboMoqCache.from_state(fill(other, 300).state)
    assert back.recipe == other.recipe and back._options == other._options and back._exact_call is False
    assert same(held(back), held(other)) and [type(part) for part in alone.state] == [type(part) for part in back.state]
    # Every number of a header, and every array, is checked.
    refused(ValueError, "version 1", lambda: TurboMoqCache.from_state([mx.zeros(13, mx.int32), mx.zeros(3)]))
    for side, name in ((0, "keys"), (1, "values")):
        for at, value in ((0, 3), (5, 7), (6, 128), (7, 3), (8, 5), (9, 3), (9, -1), (10, 1), (1, 4)):
            state = [list(part) for part in alone.state]
            header = state[side][0].tolist()
            header[at] = value
            state[side][0] = mx.array(header, dtype=mx.int32)
            before = held(alone)
            refused(ValueError, "", lambda: setattr(alone, "state", state))
            assert same(held(alone), before), "a refusal changes nothing"
        for at in range(1, len(alone.state[side])):
            state = [list(part) for part in alone.state]
            state[side][at] = state[side][at][:, :1]
            refused(ValueError, name, lambda: TurboMoqCache.from_state(state))
            state[side].pop(at)
            refused(ValueError, name, lambda: TurboMoqCache.from_state(state))
    attends_to_the_packed_form()
    says_what_cannot_be_loaded(folder)
    print(f"mlx-lm {mlx_lm.__version__}: files are loaded at once and checked")


def says_what_cannot_be_loaded(folder):
    """By this package's function; and commands of mlx-lm know packed caches if this package runs them."""
    path = f"{folder}/named.safetensors"
    C.save_prompt_cache(path, [fill(TurboMoqCache(), 5), fill(C.KVCache(), 3)], {"a": "b"})
    cache, metadata = load_prompt_cache(pathlib.Path(path), return_metadata=True)
    assert metadata == {"a": "b"} and [type(c) for c in cache] == [TurboMoqCache, C.KVCache]
    arrays, metadata = mx.load(path, return_metadata=True)
    place = "2.1" if OLD else "1.1"
    for change, what in (
        ({place: "OtherCache"}, "layer 1 is a OtherCache"),
        ({"2.0": "" if OLD else "KVCache"}, "written by mlx-lm 0.3"),
        (None, "not a prompt cache"),
    ):
        mx.save_safetensors(f"{folder}/other.safetensors", arrays, {} if change is None else metadata | change)
        refused(ValueError, what, lambda: load_prompt_cache(f"{folder}/other.safetensors"))
    command = [sys.executable, "-m", "turbomoq_mlx", "generate", "--help"]
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(root / "mlx/python")}, capture_output=True, text=True)
    assert run.returncode == 0 and "--prompt-cache-file" in run.stdout, run


def attends_to_the_packed_form():
    """`exact_call=False`: a call gives what is held after it. Words are the same; chunks change what a call sees, and by how much is known."""
    kv = rows(700, 3, dtype=mx.float32)
    now, exact = TurboMoqCache(exact_call=False), TurboMoqCache()
    got, dense = append(now, kv), append(exact, kv)
    assert same([numbers(a) for a in got], [numbers(a) for a in now.keys_and_values()]), "what is held"
    assert same([numbers(a) for a in dense], [numbers(a) for a in kv]), "exact rows"
    assert all(same(map(numbers, a), map(numbers, b)) for a, b in zip([p[1:] for p in now.state], [p[1:] for p in exact.state])), "same words"
    install()
    q = rows(700, 8, heads=4, dtype=mx.float32)[0]
    attention = lambda cache, pair: base.scaled_dot_product_attention(q, *pair, cache=cache, scale=0.125, mask="causal")
    now = TurboMoqCache(exact_call=False)
    out = attention(now, append(now, kv))
    want = STOCK(q, *got, cache=None, scale=0.125, mask="causal")
    assert error(out, want) < 2e-3, (error(out, want), "attention on the packed form at once")
    whole, loss = numbers(STOCK(q, *kv, cache=None, scale=0.125, mask="causal")), error(want, STOCK(q, *kv, cache=None, scale=0.125, mask="causal"))
    for chunk in (100, 350):
        cache, outs = TurboMoqCache(), []
        for start in range(0, 700, chunk):
            part = tuple(a[:, :, start : start + chunk] for a in kv)
            outs.append(base.scaled_dot_product_attention(q[:, :, start : start + chunk], *append(cache, part), cache=cache, scale=0.125, mask="causal"))
        # No chunking is farther from exact attention than attention that is packed at once.
        assert error(np.concatenate([numbers(o) for o in outs], 2), whole) <= 1.1 * loss, (chunk, loss)
    uninstall()


def saved(folder):
    """Files with packed layers, for the Rust crate to carry and to unpack (tests/python/cache.rs)."""
    full = [fill(TurboMoqCache(4, 3, layer=0), 700), fill(C.KVCache(), 9), fill(TurboMoqCache(8, 5, sinks=0, window=0, layer=2), 250)]
    wide = TurboMoqCache(6, 2, layer=3, exact_call=False)
    wide.update_and_fetch(rows(500, 6, dim=80, dtype=mx.bfloat16)[0], rows(500, 6, dim=64, dtype=mx.bfloat16)[1])
    wide.trim(300)
    full += [wide, fill(TurboMoqCache(layer=4), 3), C.CacheList(fill(TurboMoqCache(layer=5), 300), fill(C.KVCache(), 4))]
    C.save_prompt_cache(f"{folder}/full.safetensors", full, {"text": "é"})
    C.save_prompt_cache(f"{folder}/empty.safetensors", [TurboMoqCache(), TurboMoqCache(layer=1)])
    np.savez(f"{folder}/full.npz", *[a for c in flat(full) for a in held_and_next(c)])


def flat(cache):
    return [part for c in cache for part in (c.caches if isinstance(c, C.CacheList) else [c])]


def held_and_next(cache):
    """Rows, and rows after 200 tokens more; keys and values of a width each."""
    c = copy.deepcopy(cache)
    dims = (c.keys.shape[-1], c.values.shape[-1])
    more = lambda n: c.update_and_fetch(*(rows(n, 31, dim=d)[i].astype(c.keys.dtype) for i, d in enumerate(dims)))
    return [numbers(a) for n in (1, 200, 1) for a in more(n)]


def carried(folder):
    """Written again by the Rust crate, for this release: the same caches, which go on in the same way."""
    cache, metadata = C.load_prompt_cache(f"{folder}/full.safetensors", return_metadata=True)
    packed = sum(isinstance(c, TurboMoqCache) for c in flat(cache))
    assert metadata == {"text": "é"} and packed == 5 and [c.offset for c in flat(cache)] == [700, 9, 250, 200, 3, 300, 4]
    assert same([a for c in flat(cache) for a in held_and_next(c)], np.load(f"{folder}/full.npz").values())
    empty = C.load_prompt_cache(f"{folder}/empty.safetensors")
    assert [c.offset for c in empty] == [0, 0] and [c._options[4] for c in empty] == [0, 1]


def unpacked(folder):
    """Unpacked by the Rust crate: mlx-lm's own class with the rows that the codes decode to."""
    want = [a[:, :, :-1] for i, a in enumerate(np.load(f"{folder}/full.npz").values()) if i % 6 < 2]
    cache = C.load_prompt_cache(f"{folder}/plain.safetensors")
    assert {type(c) for c in flat(cache)} == {C.KVCache}
    got = [numbers(a)[:, :, : c.offset] for c in flat(cache) for a in (c.keys, c.values)]
    assert [c.offset for c in flat(cache)] == [700, 9, 250, 200, 3, 300, 4]
    assert all(error(a, b) < 1e-3 for a, b in zip(got, want)), [error(a, b) for a, b in zip(got, want)]
