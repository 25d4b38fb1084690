"""The real mlx-lm on the other side of `turbomoq serve` (tests/python_pool.rs).

classes FOLDER        parks and resumes caches of every kind, exactly: same contents, same continuation
start FOLDER OUT      generates 64 tokens, parks, and leaves in OUT the plain cache and the last token
go_on FOLDER OUT      a new process: resumes and goes on as from OUT/restored.safetensors, packed without the server
"""

import pathlib
import sys

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as C

root = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(root / "mlx/python"), str(root / "tests/interop")]

import check
from turbomoq_mlx import Pool, PoolError

PROMPT = mx.array(np.random.default_rng(21).integers(0, 97, (300,)))


def tokens(model, cache, first, count):
    """Greedy tokens and their distributions."""
    out = [(int(t), np.array(p.astype(mx.float32))) for t, p in generate_step(first, model, max_tokens=count, prompt_cache=cache)]
    return [t for t, _ in out], np.stack([p for _, p in out])


def refused(code, call):
    try:
        call()
    except PoolError as error:
        assert error.code == code, error
        return str(error)
    raise AssertionError(f"{code} was expected")


def classes(folder):
    model, pool = check.tiny_model(), Pool(folder)
    caches = check.model_caches(model) | check.other_caches()
    count = 0
    for name, cache in caches.items():
        try:
            # The layers of these caches are of every class, not of one model.
            pool.park(name, cache, recipe="uniform@16/16", metadata=check.META, uneven=True)
        except ValueError as error:  # mlx-lm 0.31 saves no cache without tokens
            assert check.OLD and name == "model_trimmed" and "empty array" in str(error), error
            continue
        resumed, metadata = pool.resume(name, return_metadata=True)
        assert metadata == check.META
        held, back = check.content(cache), check.content(resumed)
        if any(isinstance(part, C.QuantizedKVCache) for _, part in check.parts(cache)):
            # Unpacked and quantized again by the other side: the same classes and counters, other codes.
            held, back = ({k: v for k, v in x.items() if k.count("/") == 1} for x in (held, back))
            check.same(name, held, back)
        else:
            check.same(name, held, back)
            check.same(name, check.go_on(name, cache, model), check.go_on(name, resumed, model))
        count += 1
    assert count >= 12, count

    batch = C.BatchKVCache([0, 1])
    batch.update_and_fetch(mx.zeros((2, 1, 3, 8)), mx.zeros((2, 1, 3, 8)))
    message = refused("batch-cache", lambda: pool.park("b", [C.KVCache(), batch]))
    assert "layer 1 is a BatchKVCache" in message, message
    refused("not-held", lambda: pool.resume("nobody"))
    refused("not-held", lambda: pool.pin("nobody"))

    # Two turns in sessions are two turns on one cache, at a recipe that loses nothing.
    alone = C.make_prompt_cache(model)
    want = [tokens(model, alone, PROMPT[:200], 8)[0], tokens(model, alone, PROMPT[200:], 8)[0]]
    got = []
    for part in (PROMPT[:200], PROMPT[200:]):
        with pool.session("turns", model, kind="chat", recipe="uniform@16/16") as cache:
            got.append(tokens(model, cache, part, 8)[0])
    assert got == want, (got, want)
    try:
        with pool.session("turns", model) as cache:
            tokens(model, cache, PROMPT[:5], 2)
            raise KeyError("a turn that fails is not parked")
    except KeyError:
        pass
    assert pool.resume("turns")[0].offset == alone[0].offset
    pool.fork("turns", "other")
    agents = {a["id"]: a for a in pool.stats()["agents"]}
    assert agents["other"]["kind"] == "chat" and agents["other"]["bytes"] == agents["turns"]["bytes"]
    pool.drop("other")
    refused("not-held", lambda: pool.resume("other"))
    assert not list(pathlib.Path(pool._folder).iterdir()), "no segment is left"
    print(f"mlx-lm {mlx_lm.__version__}: {count} caches of all classes come back from the pool as they were")


def start(folder, out):
    model, cache = check.tiny_model(), None
    cache = C.make_prompt_cache(model)
    last = tokens(model, cache, PROMPT, 64)[0][-1]
    # The generator has computed one token more than it gave.
    C.save_prompt_cache(f"{out}/plain.safetensors", cache)
    parked = Pool(folder).park("agent", cache)
    assert parked.bytes < parked.fp16_bytes, parked
    pathlib.Path(f"{out}/last").write_text(str(last))


def go_on(folder, out):
    model = check.tiny_model()
    first = mx.array([int(pathlib.Path(f"{out}/last").read_text())])
    resumed = Pool(folder).resume("agent")
    restored = C.load_prompt_cache(f"{out}/restored.safetensors")
    check.same("resumed", check.content(restored), check.content(resumed))
    (mine, p), (theirs, _) = tokens(model, resumed, first, 64), tokens(model, restored, first, 64)
    assert mine == theirs, (mine, theirs)
    # Against the float run, along its own tokens: what this recipe costs this (random) model.
    plain, packed = C.load_prompt_cache(f"{out}/plain.safetensors"), Pool(folder).resume("agent")
    kl, token = [], first
    for _ in range(64):
        a, b = (np.array(model(token[None], cache=c)[0, -1].astype(mx.float32)).astype(np.float64) for c in (plain, packed))
        a, b = a - np.logaddexp.reduce(a), b - np.logaddexp.reduce(b)
        kl.append(float(np.sum(np.exp(a) * (a - b))))
        token = mx.array([int(a.argmax())])
    assert 0 < np.mean(kl) < 1, kl
    print(f"mlx-lm {mlx_lm.__version__}: 64 tokens after a resume in a new process are those of a saved cache; mean KL {np.mean(kl):.1e}")


if __name__ == "__main__":
    {"classes": classes, "start": start, "go_on": go_on}[sys.argv[1]](*sys.argv[2:])
