"""The CUDA texts under NVIDIA's own compiler, which needs no GPU: NVRTC, cuobjdump and nvdisasm from PyPI.

Texts are compiled with the options of MLX's jit_module.cpp. Held to: an empty log, no stack and no local memory, at most 32 KB of
shared memory, registers that the largest block of a launch finds in 65,536, and for the forms of `ceilings.json` how many
instructions the loop over tokens has for each token of a KV head.
"""

import ctypes
import json
import multiprocessing
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

STUBS = {
    # What the texts use of MLX's own header.
    b"mlx/backend/cuda/device/utils.cuh": b"""#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/array>
#include <cuda/std/cstdint>
#include <cuda/std/limits>
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 8>;
using Strides = cuda::std::array<int64_t, 8>;
}
""",
}


def toolkit():
    root = pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    found = sorted(root.glob("cu1*/lib/libnvrtc.so.*"))
    if not found:
        sys.exit(f"no NVRTC in {root}")
    return found[0].parent.parent, found[0]


class Nvrtc:
    def __init__(self):
        self.home, library = toolkit()
        for builtins in library.parent.glob("libnvrtc-builtins*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self.lib = ctypes.CDLL(str(library))

    def compile(self, text, architecture):
        """The machine code, or None, and the log."""
        lib, program = self.lib, ctypes.c_void_p()
        sources = (ctypes.c_char_p * len(STUBS))(*STUBS.values())
        names = (ctypes.c_char_p * len(STUBS))(*STUBS)
        lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"text.cu", len(STUBS), sources, names)
        options = [
            f"--gpu-architecture={architecture}",
            f"--include-path={self.home / 'include' / 'cccl'}",
            f"--include-path={self.home / 'include'}",
        ]
        array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        status = lib.nvrtcCompileProgram(program, len(options), array)
        size = ctypes.c_size_t()
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        code = None
        if status == 0:
            lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
            code = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetCUBIN(program, code)
        lib.nvrtcDestroyProgram(ctypes.byref(program))
        return code.raw if code else None, log.value.decode()


def usage(home, cubin):
    """REG, STACK, SHARED, LOCAL of the kernel."""
    out = subprocess.run([home / "bin/cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True)
    text = out.stdout + out.stderr
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    missing = {"REG", "STACK", "SHARED", "LOCAL"} - found.keys()
    if missing:
        sys.exit(f"cuobjdump does not say {missing}: {text}")
    return found


def loops(home, cubin):
    """Every loop of the machine code as (first, last, instructions) by their numbers, and the names of all instructions."""
    out = subprocess.run([home / "bin/nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    names, labels, branches = [], {}, []
    for line in out.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)", line):
            if code[1].startswith("BRA") and (target := re.search(r"\.L_x_\d+", code[2])):
                branches.append((len(names), target[0]))
            names.append(code[1])
    found = {}
    skipped = []
    for at, target in branches:
        if labels[target] > at:
            skipped.append((at + 1, labels[target]))
        # What the compiler puts behind the end of the program are paths that are hardly ever taken.
        elif "EXIT" not in names[labels[target] : at]:
            found[labels[target]] = max(at, found.get(labels[target], 0))
    return sorted(found.items()), skipped, names


def per_token(home, cubin, gqa):
    """Instructions of the loop over tiles for each token.

    Not counted are the parts that a branch jumps over when there is no mask, no soft cap and no new greatest score (at most 80
    instructions each). Of two loops the cheaper one counts: the other is for channels that do not lie side by side.
    """
    heads = 1 << max(gqa - 1, 0).bit_length()
    tile = 32 // heads
    blocks = tile // min(tile, 8)
    spans, skipped, names = loops(home, cubin)

    def shuffles(span):
        return sum(name.startswith("SHFL") for name in names[span[0] : span[1] + 1])

    counts = []
    outer = [s for s in spans if shuffles(s) >= 16 and not any(o != s and o[0] <= s[0] and s[1] <= o[1] for o in spans)]
    for span in outer:
        trips = dict.fromkeys(range(span[0], span[1] + 1), 1)
        for s in spans:
            if s != span and span[0] <= s[0] and s[1] <= span[1] and shuffles(s) >= 7:
                trips.update(dict.fromkeys(range(s[0], s[1] + 1), blocks))
        for first, end in skipped:
            if span[0] <= first and end <= span[1] and end - first <= 80:
                trips.update(dict.fromkeys(range(first, end), 0))
        counts.append(sum(trips.values()) / tile)
    return min(counts) if counts else None


def check(folder, text, architecture, ceiling):
    """What is wrong with a text, and of a form with a ceiling its count, registers and shared bytes."""
    nvrtc, where = Nvrtc(), f"{text['what']} on {architecture} ({text['file']})"
    code, log = nvrtc.compile((folder / text["file"]).read_text(), architecture)
    if code is None or log.strip():
        return [f"{where}: {log.strip()[:2000]}"], None
    wrong = []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        used = usage(nvrtc.home, file.name)
        count = per_token(nvrtc.home, file.name, text["gqa"]) if ceiling and architecture == "sm_90a" else None
    if used["STACK"] or used["LOCAL"]:
        wrong.append(f"{where}: stack {used['STACK']}, local memory {used['LOCAL']} bytes")
    # CUDA has 48 KB without asking for more, Metal 32 KB.
    if used["SHARED"] > 32 * 1024:
        wrong.append(f"{where}: {used['SHARED']} bytes of shared memory")
    # Registers are given to a warp in steps of 256.
    if -(-used["REG"] * 32 // 256) * 256 * (text["threads"] // 32) > 65536:
        wrong.append(f"{where}: {used['REG']} registers x {text['threads']} threads")
    if not ceiling or architecture != "sm_90a":
        return wrong, None
    if count is None or count > ceiling:
        wrong.append(f"{where}: {count} instructions a token, the ceiling is {ceiling}")
    return wrong, (text["what"], count, used["REG"], used["SHARED"])


def main(folder, architectures, ceilings):
    texts = json.loads((folder / "list.json").read_text())
    jobs = []
    for n, text in enumerate(texts):
        ceiling = ceilings.get(text["what"])
        # Every text on one architecture by turns, those with a ceiling on that of the ceiling too.
        by_turns = architectures[n % len(architectures)]
        for architecture in sorted({by_turns, "sm_90a"}) if ceiling else [by_turns]:
            jobs.append((folder, text, architecture, ceiling))
    with multiprocessing.get_context("spawn").Pool() as pool:
        results = pool.starmap(check, jobs, chunksize=1)
    wrong = [line for lines, _ in results for line in lines]
    wrong += [f"no text is called {what}" for what in ceilings.keys() - {t["what"] for t in texts}]
    print(f"{len(texts)} CUDA texts, {len(jobs)} compilations for {', '.join(architectures)}, {len(wrong)} wrong")
    print("| form, sm_90a | instructions a token and KV head | ceiling | registers | shared bytes | warps on an SM |")
    print("|---|---|---|---|---|---|")
    for what, count, registers, shared in filter(None, (row for _, row in results)):
        print(f"| {what} | {count} | {ceilings[what]} | {registers} | {shared} | {warps_of(registers, shared)} |")
    for line in wrong:
        print(line, file=sys.stderr)
    return not wrong


def warps_of(registers, shared):
    """Warps in flight on an SM of sm_90: blocks of eight that registers and shared memory (228 KB, 1 KB a block its own) allow."""
    by_registers = 65536 // (-(-registers * 32 // 256) * 256 * 8)
    by_shared = 228 * 1024 // (shared + 1024)
    return 8 * min(by_registers, by_shared, 8)


if __name__ == "__main__":
    here = pathlib.Path(__file__).parent
    known = json.loads((here / "ceilings.json").read_text())
    sys.exit(not main(pathlib.Path(sys.argv[1]) / "cuda", ["sm_80", "sm_90a", "sm_100a"], known))
