#!/usr/bin/env python3
"""A model of decode attention on packed rows against fp16 rows: nothing here is a measurement.

    benches/roofline.py [COUNTS]

COUNTS is the output of `.ci/kernels/run`, whose table has machine instructions for each token and KV head; without it the ceilings
of `.ci/kernels/ceilings.json` are taken. Prints Markdown: how often the time of fp16 attention fits into that of packed attention.

Assumptions, all of them in favour of fp16 or neutral:
- fp16 attention moves its rows at the full bandwidth of the chip, in two launches.
- Packed attention takes the longer of its bytes at full bandwidth and its instructions at one for each scheduler and cycle, each of
  which serves 32 lanes; nothing overlaps launches.
- Apple's compiler needs as many instructions as NVIDIA's for sm_90a. Nobody has seen its code: the ranking is what this is for.
- A launch costs 1.5 microseconds on Apple's GPUs, 1.3 in a CUDA graph. A step has LAUNCHES of them, MLX's own operations included:
  the query scaled and converted, rotated, three segments (exact sinks, packed rows, exact window), and one that joins them and leaves
  the rotated domain.
- One sequence, 8 KV heads, 32 query heads, head dim 128; the exact rows of a recipe are not counted.
"""

import json
import pathlib
import re
import sys

LAUNCHES = 7

# Bandwidth in GB/s, schedulers, GHz, microseconds a launch. Apple: bandwidth and cores from apple.com/newsroom (M1 Max 2021-10, M1
# Ultra 2022-03, M2 Max 2023-01, M2 Ultra 2023-06, M3 Max 2023-10, M4 Max 2024-10, M3 Ultra 2025-03), four schedulers a core and
# clocks from github.com/philipturner/metal-benchmarks and public TFLOPS figures. NVIDIA: H100 and H200 data sheets (SXM), 132 SMs of
# four schedulers; 1.755 GHz under load.
CHIPS = {
    "M1 Max": (400, 32 * 4, 1.296, 1.5),
    "M1 Ultra": (800, 64 * 4, 1.296, 1.5),
    "M2 Max": (400, 38 * 4, 1.398, 1.5),
    "M2 Ultra": (800, 76 * 4, 1.398, 1.5),
    "M3 Max": (400, 40 * 4, 1.380, 1.5),
    "M3 Ultra": (819, 80 * 4, 1.380, 1.5),
    "M4 Max": (546, 40 * 4, 1.578, 1.5),
    "H100": (3350, 132 * 4, 1.755, 1.3),
    "H200": (4800, 132 * 4, 1.755, 1.3),
}

HEADS = 8
FP16 = 2 * 2 * 128
# Bytes of keys and values of a token and KV head, scales included.
FORMS = {
    "uniform 4 bits": ("attend uniform 4 bits d 128 / uniform 4 bits d 128 gqa 4", 2 * (64 + 2)),
    "trellis 4 bits": ("attend trellis8 4 bits d 128 / trellis8 4 bits d 128 gqa 4", 2 * (64 + 2)),
    "trellis 3 bits": ("attend trellis8 3 bits d 128 / trellis8 3 bits d 128 gqa 4", 2 * (48 + 2)),
    "best@3": ("attend trellis8 4 bits d 64 + 2 bits d 64 / trellis8 3 bits d 128 gqa 4", (48 + 2) + (48 + 1)),
}


def counts(path):
    known = json.loads((pathlib.Path(__file__).parent.parent / ".ci/kernels/ceilings.json").read_text())
    if path:
        known.update({form: float(count) for form, count in re.findall(r"^\| (attend [^|]+?) \| ([\d.]+) \|", path.read_text(), re.M)})
    return known


def times(chip, tokens, instructions, size):
    """Microseconds of fp16 and of packed attention."""
    bandwidth, schedulers, clock, launch = chip
    work = tokens * HEADS
    exact = work * FP16 / bandwidth / 1e3 + 2 * launch
    packed = max(work * size / bandwidth, work * instructions / schedulers / clock) / 1e3
    return exact, packed + LAUNCHES * launch


def main():
    known = counts(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    lengths = [1 << k for k in range(11, 18)]
    for form, (name, size) in FORMS.items():
        print(f"{form}: {known[name]:.0f} instructions and {size} bytes a token and KV head\n")
        print("| chip | " + " | ".join(f"{n // 1024}K" for n in lengths) + " | without launches |")
        print("|---" * (len(lengths) + 2) + "|")
        for chip, facts in CHIPS.items():
            row = [exact / packed for exact, packed in (times(facts, n, known[name], size) for n in lengths)]
            whole = (FP16 / facts[0]) / max(size / facts[0], known[name] / facts[1] / facts[2])
            print(f"| {chip} | " + " | ".join(f"{x:.2f}" for x in row) + f" | {whole:.2f} |")
        print()


if __name__ == "__main__":
    main()
