"""Three peers and turbomoq in one run: quantize and dequantize of one layer's keys, (1, 8, 2048, 128) in fp16, and with
`--decode` one step of attention, 32 query heads on 8 KV heads of 128 channels at 4 bits.

    python3 -m venv peers && peers/bin/pip install mlx-lm==0.32.2 mlx-vlm==0.7.10 turboquant-mlx-full==0.30.0
    cargo build --release && peers/bin/python benches/peers.py
    peers/bin/python benches/peers.py --decode 2048

On Linux add `mlx[cpu]` to the packages. Prints a Markdown table: bytes an element with everything that is stored, mean cosine of a
vector, best time of several runs, and the time as a multiple of turbomoq's CPU engine at the same bits (above 1: slower).
turbomoq is timed through its program (`verify --json`) over LAYERS layers of keys and values, divided by their number; it
needs no warm-up but gets none either. Peers are timed inside Python, evaluated, after one warm-up run.
"""

import argparse
import json
import os
import pathlib
import subprocess
import tempfile
import time
from importlib.metadata import version

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, save_prompt_cache

SHAPE = (1, 8, 2048, 128)
LAYERS = 8


def best(step, seconds=1.5):
    """Shortest time of a step in ms, and its result."""
    result = step()
    mx.eval(result)
    shortest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        result = step()
        mx.eval(result)
        shortest = min(shortest, time.perf_counter() - start)
    return 1e3 * shortest, result


def nbytes(tree):
    if isinstance(tree, mx.array):
        return tree.nbytes
    return sum(nbytes(part) for part in tree)


def cosine(x, y):
    x, y = (np.array(a.astype(mx.float32)).reshape(-1, SHAPE[-1]).astype(np.float64) for a in (x, y))
    return float(np.mean((x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)))


def mlx_lm(x, bits):
    # QuantizedKVCache.update_and_fetch and what stock attention on a dense copy needs.
    group = 64
    return (lambda: mx.quantize(x, group_size=group, bits=bits)), (
        lambda packed: mx.dequantize(*packed, group_size=group, bits=bits)
    )


def mlx_vlm(x, bits):
    from mlx_vlm.turboquant import _TurboQuantMSECodec

    codec = _TurboQuantMSECodec(SHAPE[-1], bits, 0)
    return (lambda: codec.quantize(x)), codec.dequantize


def tq_full(x, bits):
    from turboquant_mlx.layers.polar_kv_cache import TurboQuantKVCache

    cache = TurboQuantKVCache(tq_bits=bits)
    cache._ensure_rotation(SHAPE[-1], SHAPE[-1])
    place = (cache._k_signs, cache._k_block_size, cache._k_gs, SHAPE[-1])
    boundaries, levels = cache._k_boundaries_f32, cache._k_codebook_f16
    return (lambda: cache._tq_quantize(x, *place, bits, boundaries, cache._k_max_centroid)), (
        lambda packed: cache._tq_dequantize(*packed, *place, bits, levels)
    )


PEERS = {"mlx-lm": mlx_lm, "mlx-vlm": mlx_vlm, "turboquant-mlx-full": tq_full}


def peer(name, x, bits):
    encode, decode = PEERS[name](x, bits)
    encode_ms, packed = best(encode)
    decode_ms, back = best(lambda: decode(packed))
    return encode_ms, decode_ms, nbytes(packed) / x.size, cosine(x, back)


def ours(binary, file, recipe, engine, runs=5):
    """Best of several runs of the program, for one tensor."""
    command = [binary, "verify", file, "--json", "--engine", engine, "--sinks", "0", "--window", "0", "--recipe", recipe]
    # The MLX runtime of the build is not that of this environment.
    env = {k: v for k, v in os.environ.items() if not k.startswith("LD_")}
    reports = []
    for _ in range(runs):
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}: {done.stderr}")
        reports.append(json.loads(done.stdout))
    tensors = 2 * LAYERS
    encode, decode = (min(r[key] for r in reports) / tensors for key in ("encode_ms", "decode_ms"))
    size = reports[0]["reported_bytes"] / (tensors * np.prod(SHAPE))
    return encode, decode, size, float(np.mean([row["cosine"] for row in reports[0]["layers"]]))


def peer_steps(tokens, bits=4):
    """Attention of one token: MLX on fp16 rows, mlx-lm on its quantized cache, mlx-vlm on its packed one."""
    from mlx_lm.models.base import scaled_dot_product_attention
    from mlx_lm.models.cache import QuantizedKVCache
    from mlx_vlm.turboquant import TurboQuantKVCache

    rng = np.random.default_rng(0)
    array = lambda heads, n: mx.array(rng.standard_normal((1, heads, n, 128)).astype(np.float16))
    q, k, v = array(32, 1), array(8, tokens), array(8, tokens)
    scale = 128**-0.5
    mx.eval(q, k, v)
    quantized = QuantizedKVCache(group_size=64, bits=bits)
    keys, values = quantized.update_and_fetch(k, v)
    mx.eval(keys, values)
    packed = TurboQuantKVCache(bits=float(bits))
    packed.update_and_fetch(k, v)
    mx.eval(packed.state)
    return {
        f"MLX {version('mlx')} fp16": lambda: mx.fast.scaled_dot_product_attention(q, k, v, scale=scale),
        f"mlx-lm {version('mlx-lm')} quantized": lambda: scaled_dot_product_attention(
            q, keys, values, quantized, scale=scale, mask=None
        ),
        f"mlx-vlm {version('mlx-vlm')} packed": lambda: packed.decode_attention(q, scale=scale),
    }


def attention(root, lengths):
    """Steps of ours before and after those of the peers; the shorter counts."""
    command = ["cargo", "bench", "-q", "--bench", "decode_step", "--", "--json"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("LD_")}

    def ours():
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=root)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}: {done.stderr}")
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    first = ours()
    times = {n: {name: best(step, 3.0)[0] for name, step in peer_steps(n).items()} for n in lengths}
    mine = [a if a["ms"] < b["ms"] else b for a, b in zip(first, ours())]
    for n in lengths:
        mlx, quantized, packed = times[n].values()
        print(f"\nOne step at {n} tokens, {os.cpu_count()} CPUs, {mx.default_device()}; columns: times slower than ours\n")
        print("| what | ms | ns a key | bandwidth limit | MLX fp16 | mlx-lm quantized | mlx-vlm packed |")
        print("|---|---|---|---|---|---|---|")
        for row in (r for r in mine if r["tokens"] == n):
            ratios = " | ".join(f"{t / row['ms']:.1f}" for t in (mlx, quantized, packed))
            print(f"| {row['engine']} {row['name']} | {row['ms']:.3f} | {row['ns']:.1f} | {row['limit']:.1f} | {ratios} |")
        for name, ms in times[n].items():
            print(f"| {name} | {ms:.1f} | {1e6 * ms / (8 * n):.0f} | | | | |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = pathlib.Path(__file__).resolve().parent.parent
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
    parser.add_argument("--binary", default=str(target / "release/turbomoq"))
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--engines", nargs="+", default=["cpu"], help="cpu, mlx; the first is what ratios refer to")
    parser.add_argument("--decode", type=int, nargs="+", metavar="T", help="one step of attention at 2048 or 32768 tokens instead")
    arguments = parser.parse_args()
    if arguments.decode:
        return attention(root, arguments.decode)

    x = mx.array(np.random.default_rng(0).standard_normal(SHAPE).astype(np.float16))
    mx.eval(x)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/cache.safetensors"
        caches = [KVCache() for _ in range(LAYERS)]
        for cache in caches:
            cache.update_and_fetch(x, x)
        save_prompt_cache(file, caches)
        for bits in arguments.bits:
            mine = []
            for engine in arguments.engines:
                for recipe in ("turboquant-mse", "mlx-affine", "best"):
                    mine.append((f"turbomoq {recipe}, {engine}", ours(arguments.binary, file, f"{recipe}@{bits}", engine)))
            base = mine[0][1]
            theirs = [(f"{name} {version(name)}", peer(name, x, bits)) for name in PEERS]
            rows += [(bits, name, *figures, figures[0] / base[0], figures[1] / base[1]) for name, figures in mine + theirs]

    print(f"\n{SHAPE} fp16, {os.cpu_count()} CPUs, MLX {version('mlx')} on {mx.default_device()}\n")
    print("| bits | what | bytes/element | cosine | quantize ms | dequantize ms | quantize ratio | dequantize ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for bits, name, encode, decode, size, similar, slower, slower_back in rows:
        print(f"| {bits} | {name} | {size:.4f} | {similar:.4f} | {encode:.1f} | {decode:.1f} | {slower:.1f} | {slower_back:.1f} |")


if __name__ == "__main__":
    main()
