"""Three agents chat in turn with SmolLM2 under a budget that holds the fp16 cache of one of them.

    examples/smollm2/setup.sh && cargo build --release
    mlx/.runtime/venv-0.32/bin/python mlx/python/examples/three_agents.py target/release/turbomoq

Each agent has a long briefing of its own and is asked twice. Between its turns its cache lies packed in the server.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

root = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(root / "mlx/python"), str(root / "mlx/python/examples")]

from mlx_lm import load, stream_generate
from smollm2_folder import convert
from turbomoq_mlx import Pool

GGUF = root / "mlx/.runtime/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BRIEFINGS = {
    "gardener": "You look after a garden. Roses stand by the wall, tomatoes in the glass house, and the pond has frogs.",
    "sailor": "You sail a small boat. The harbour lies to the north, the wind comes from the west, and the tide turns at noon.",
    "baker": "You run a bakery. Bread goes in at four, the oven is old, and on Sundays there is a plum cake.",
}
QUESTIONS = ("Who are you and what do you do?", "What should I remember about you? One sentence.")


def answer(model, tokenizer, cache, text, tokens):
    """The answer to a text that goes on where the cache ends."""
    prompt = tokenizer.encode(text, add_special_tokens=False)
    return "".join(r.text for r in stream_generate(model, tokenizer, prompt, max_tokens=tokens, prompt_cache=cache)).strip()


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("turbomoq", nargs="?", default=str(root / "target/release/turbomoq"))
    arguments.add_argument("--recipe", default="best@3,window=0")
    arguments.add_argument("--tokens", type=int, default=16, help="tokens of an answer")
    arguments.add_argument("--briefing", type=int, default=8, help="times that a briefing is said")
    options = arguments.parse_args()

    folder = root / "mlx/.runtime/smollm2/mlx-lm"
    if not (folder / "tokenizer_config.json").exists():
        convert(str(GGUF), folder)
    model, tokenizer = load(str(folder))
    args = model.args
    # Half floats of keys and values of the longest briefing and both turns.
    longest = max(len(tokenizer.encode(b + " ")) for b in BRIEFINGS.values()) * options.briefing + 2 * (options.tokens + 40)
    head_dim = args.hidden_size // args.num_attention_heads
    budget = args.num_hidden_layers * args.num_key_value_heads * head_dim * 2 * 2 * longest
    with tempfile.TemporaryDirectory() as home:
        server = subprocess.Popen(
            [options.turbomoq, "serve", "--folder", home, "--budget", str(budget), "--recipe", options.recipe],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            first = server.stdout.readline().strip()
            if not first.startswith("serving"):
                raise SystemExit(f"{options.turbomoq} does not serve: build it with cargo build --release")
            print(first)
            pool = Pool(home)
            for turn, question in enumerate(QUESTIONS):
                for agent, briefing in BRIEFINGS.items():
                    with pool.session(agent, model, kind="chat") as cache:
                        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
                        if turn == 0:
                            text = f"<|im_start|>system\n{(briefing + ' ') * options.briefing}<|im_end|>\n" + text
                        else:
                            text = "<|im_end|>\n" + text
                        print(f"{agent} ({cache[0].offset} tokens of memory): {answer(model, tokenizer, cache, text, options.tokens)}")
            stats = pool.stats()["pool"]
            held = {a["id"]: a["bytes"] for a in pool.stats()["agents"]}
            print(f"budget {budget} bytes, one fp16 cache; in use {stats['used']} for {stats['in_memory']} agents: {held}")
            if stats["in_memory"] != len(BRIEFINGS):
                raise SystemExit("the budget should have held all three")
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
