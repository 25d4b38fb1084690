"""The real mlx-lm on the other side of `turbomoq serve` (tests/python/pool.rs).

classes FOLDER        parks and resumes caches of every kind, exactly: same contents, same continuation
start FOLDER OUT      generates 64 tokens, parks, and leaves in OUT the plain cache and the last token
go_on FOLDER OUT      a new process: resumes and goes on as from OUT/restored.safetensors, packed without the server
ends FOLDER PROGRAM   servers that are killed and started again, that are late, and that are strangers; Ctrl-C in the middle of a call
"""

import copy
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as C

root = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(root / "mlx/python"), str(root / "tests/interop")]

import check
from turbomoq_mlx import Pool, PoolError, prefix

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
    interrupted(pool, model)
    pool.fork("turns", "other")
    agents = {a["id"]: a for a in pool.stats()["agents"]}
    assert agents["other"]["kind"] == "chat" and agents["other"]["bytes"] == agents["turns"]["bytes"]
    pool.drop("other")
    refused("not-held", lambda: pool.resume("other"))
    assert not list(pathlib.Path(pool._folder).iterdir()), "no segment is left"
    print(f"mlx-lm {mlx_lm.__version__}: {count} caches of all classes come back from the pool as they were")


def interrupted(pool, model):
    """Ctrl-C while layer 5 of 13 takes up a prompt: the agent has what it had, or the prefix that all layers hold."""
    for before in (40, 0):
        for on_error in ("keep", "park"):
            name = f"interrupted {before} {on_error}"
            if before:
                with pool.session(name, model, recipe="uniform@16/16") as cache:
                    tokens(model, cache, PROMPT[:before], 1)
                had = cache[0].offset
            try:
                with pool.session(name, model, recipe="uniform@16/16", on_error=on_error) as cache:
                    if not before:
                        tokens(model, cache, PROMPT[:40], 1)
                    held = check.content([copy.deepcopy(entry) for entry in cache])
                    cache[5].update_and_fetch = lambda *_: signal.raise_signal(signal.SIGINT)
                    model(PROMPT[None, before : before + 30], cache=cache)
                raise AssertionError("the interrupt goes on")
            except KeyboardInterrupt:
                assert cache[0].offset != cache[12].offset or on_error == "park"
            if before or on_error == "park":
                check.same(name, held, check.content(pool.resume(name)))
                assert not before or pool.resume(name)[0].offset == had
            else:
                refused("not-held", lambda: pool.resume(name))
    # Where there is no common prefix, the agent keeps what it had, and that is said.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with pool.session("turns", model, on_error="park") as cache:
                cache[3] = C.ArraysCache(2)
                raise KeyError("a turn")
        except KeyError:
            pass
    assert "layer 3 is a ArraysCache" in str(said[-1].message), said
    ring = C.RotatingKVCache(8)
    ring.update_and_fetch(*[mx.zeros((1, 2, 12, 8))] * 2)
    longer, caches = C.KVCache(), [C.CacheList(C.KVCache(), ring)]
    longer.update_and_fetch(*[mx.zeros((1, 2, 3, 8))] * 2)
    for cache, what in (([longer, *caches], "layer 1 is a RotatingKVCache that cannot drop its last 12"),):
        try:
            prefix.keep_common_prefix(cache)
            raise AssertionError("a full ring drops nothing")
        except ValueError as error:
            assert what in str(error) and longer.offset == 3, error
    try:
        with pool.session("turns", model, on_error="drop"):
            raise AssertionError("no such way")
    except ValueError as error:
        assert "'drop'" in str(error)


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


def serving(folder, program):
    arguments = [program, "serve", "--budget", "1MiB", "--folder", folder, "--spill", f"{folder}/spill"]
    server = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    assert server.stdout.readline().startswith(b"serving")
    return server


def answering(folder, *connections):
    """A server that is none: each connection is greeted, and after so many seconds each request gets the next reply."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/socket")
    listener.listen()
    heard = []

    def run():
        for greeting, *replies in connections:
            stream, _ = listener.accept()
            lines = stream.makefile("r")
            stream.sendall(json.dumps({"reply": "hello", "version": 1, "server": 1, "folder": greeting}).encode() + b"\n")
            for wait, reply in replies:
                heard.append(lines.readline())
                time.sleep(wait)
                try:
                    stream.sendall(json.dumps(reply).encode() + b"\n")
                except OSError:
                    pass
            heard.extend(lines)
            stream.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread, heard, listener


def raised(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind} was expected")


def ends(folder, program):
    cache = C.make_prompt_cache(model := check.tiny_model())
    tokens(model, cache, PROMPT[:40], 4)
    server, pool = serving(folder, program), Pool(folder)
    pool.park("a", cache)
    pool.spill("a")
    for end in ("kill", "terminate"):
        getattr(server, end)()
        server.wait()
        raised(ConnectionError, pool.stats)
        server = serving(folder, program)
        assert pool.resume("a")[0].offset == cache[0].offset
        pool.park("b", cache)
    assert {a["id"] for a in pool.stats()["agents"]} == {"a", "b"}
    pool.close()
    server.terminate()
    assert server.wait() == 0

    # Ctrl-C between a request and its reply, then a reply that is late: the next call gets its own.
    def interrupt(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    late, done, idle = {"reply": "stats", "agents": "late"}, {"reply": "done"}, {"reply": "error", "code": "idle", "message": ""}
    mine = f"{folder}/mine"
    os.mkdir(mine, 0o700)
    thread, heard, listener = answering(folder, [mine, (0.4, late)], [mine, (0, done), (0.4, late)], [mine, (0, idle)], [mine, (0, done)])
    pool = Pool(folder, timeout=None)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    raised(KeyboardInterrupt, pool.stats)
    assert pool._call({"op": "ping"}) == done
    pool.timeout = 0.1
    assert "no reply from the server" in raised(TimeoutError, pool.stats)
    pool.timeout = 60
    assert pool._call({"op": "ping"}) == done, "sent again after it was hung up on"
    pool.close()
    thread.join()
    listener.close()
    assert len(heard) == 5, heard

    # Folders that are not this user's alone, in the greeting and around the socket: nothing is sent.
    os.mkdir(open_folder := f"{folder}/open")
    os.chmod(open_folder, 0o755)
    os.symlink(mine, f"{folder}/link")
    os.remove(f"{folder}/socket")
    thread, heard, listener = answering(folder, [open_folder], [f"{folder}/link"])
    for name in ("open", "link"):
        assert name in raised(PermissionError, lambda: Pool(folder))
    thread.join()
    listener.close()
    assert not heard, heard
    os.chmod(open_folder, 0o777)
    for name in ("open", "link"):
        assert name in raised(PermissionError, lambda: Pool(f"{folder}/{name}"))
    print(f"mlx-lm {mlx_lm.__version__}: a pool outlives its server, an interrupt and a stranger")


if __name__ == "__main__":
    # A shell that runs the tests in the background has its children ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    {"classes": classes, "start": start, "go_on": go_on, "ends": ends}[sys.argv[1]](*sys.argv[2:])
