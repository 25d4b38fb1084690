"""A long text and a question to SmolLM2, on mlx-lm's cache and on packed ones: bytes, active memory and the answers.

    examples/smollm2/setup.sh && cargo build --release -p turbomoq-c
    TURBOMOQ_LIBRARY=target/release/libturbomoq_c.so mlx/.runtime/venv-0.32/bin/python mlx/python/examples/long_chat.py
"""

import argparse
import pathlib
import sys

root = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(root / "mlx/python"), str(root / "mlx/python/examples")]

import mlx.core as mx
from mlx_lm import load, stream_generate
from mlx_lm.models.cache import make_prompt_cache
from smollm2_folder import convert
from turbomoq_mlx import install, make_turbomoq_cache

GGUF = root / "mlx/.runtime/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--text", type=pathlib.Path, default=root / "README.md")
    arguments.add_argument("--question", default="What is this text about? One sentence.")
    arguments.add_argument("--context", type=int, default=1536, help="tokens of the text")
    arguments.add_argument("--tokens", type=int, default=32, help="tokens of the answer")
    arguments.add_argument("--bits", nargs="*", type=int, default=[8, 4])
    options = arguments.parse_args()

    folder = root / "mlx/.runtime/smollm2/mlx-lm"
    if not (folder / "tokenizer_config.json").exists():
        convert(str(GGUF), folder)
    model, tokenizer = load(str(folder))
    mx.eval(model.parameters())
    install()
    text = tokenizer.encode(options.text.read_text())[: options.context]
    before, after = "<|im_start|>user\n", f"\n{options.question}<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(before) + text + tokenizer.encode(after)
    for bits in [16, *options.bits]:
        mx.clear_cache()
        idle = mx.get_active_memory()
        cache = make_prompt_cache(model) if bits == 16 else make_turbomoq_cache(model, key_bits=bits, value_bits=bits)
        answer = "".join(r.text for r in stream_generate(model, tokenizer, prompt, max_tokens=options.tokens, prompt_cache=cache))
        held, active = sum(layer.nbytes for layer in cache), mx.get_active_memory() - idle
        dtype = str(cache[0].keys.dtype).removeprefix("mlx.core.")
        kind = f"mlx-lm's cache of {dtype}" if bits == 16 else f"{bits} bits"
        print(f"{kind}, {cache[0].offset} tokens: {held / 2**20:.1f} MiB by nbytes, {active / 2**20:.1f} MiB active: {answer.strip()}")
        del cache


if __name__ == "__main__":
    main()
