"""mlx-lm's own commands with our caches, started as a user does, see cache_contract.py: a tiny model of random weights in a folder."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import mlx_lm
import numpy as np
from mlx_lm import load
from mlx_lm.models import cache as C
from recipes import says
from turbomoq_mlx import RecipeCache, Unsupported, install, make_turbomoq_cache
from turbomoq_mlx.commands import Choice, Settings
from architectures import COMMON, MODELS, tiny
from cache_contract import refused, root
from mlx.utils import tree_flatten

ENVIRONMENT = os.environ | {"PYTHONPATH": str(root / "mlx/python"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def folder_of(name, folder):
    """The model in a folder that `mlx_lm.load` takes, with a tokenizer of one token per word."""
    import mlx.core as mx
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = pathlib.Path(folder) / name
    folder.mkdir(exist_ok=True)
    config = COMMON | MODELS[name] | {"model_type": name, "eos_token_id": 96}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(tiny(name).parameters())), metadata={"format": "mlx"})
    words = {f"w{i}": i for i in range(95)} | {"<unk>": 95, "</s>": 96}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(str(folder))
    return folder


def words(n, seed):
    return " ".join(f"w{i}" for i in np.random.default_rng(seed).integers(0, 95, n))


@contextlib.contextmanager
def server(model, *options):
    """The server of mlx-lm as a process of its own; gives what asks it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "turbomoq_mlx.server", "--model", str(model), "--port", str(port), "--log-level", "WARNING", *options]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ask(prompt, tokens=24):
        body = {"model": "default_model", "prompt": prompt, "max_tokens": tokens, "temperature": 0.0}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)

    try:
        for _ in range(600):
            if process.poll() is not None:
                raise AssertionError(f"the server ended: {process.stdout.read()[-2000:]}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.1)
        yield ask
    finally:
        process.terminate()
        process.wait()


def serve(folder):
    """Eight requests at once, of different lengths, get the answers that they get one by one; a prompt that goes on is found again."""
    model = folder_of("llama", folder)
    prompts = [words(n, n) for n in (3, 20, 64, 130, 150, 210, 260, 300)]
    said = lambda reply: reply["choices"][0]["text"]
    with server(model, "--kv", "best@3,window=32") as ask:
        alone = [said(ask(prompt)) for prompt in prompts]
        assert len(set(alone)) > 4, alone
    with server(model, "--kv", "best@3,window=32") as ask, concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, prompts))
        assert [said(reply) for reply in together] == alone
        more = prompts[-1] + " " + alone[-1] + " " + words(5, 9)
        reply = ask(more)
        cached = reply["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
        assert cached >= 300, (cached, reply["usage"])
    print(f"mlx-lm {mlx_lm.__version__}: 8 requests at once are answered as one by one; {cached} of {reply['usage']['prompt_tokens']} tokens were found")


def commands(folder):
    """generate and cache_prompt by a recipe, and by the settings of a model; a bad recipe is refused."""
    model = folder_of("llama", folder)

    def run(command, *options, fails=False):
        done = subprocess.run([sys.executable, "-m", f"turbomoq_mlx.{command}", *options], env=ENVIRONMENT, capture_output=True, text=True)
        assert (done.returncode != 0) == fails, (done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout + done.stderr

    text = words(200, 5)
    generate = ["--model", str(model), "--prompt", text, "--max-tokens", "12", "--temp", "0", "--ignore-chat-template"]
    answer = lambda out: out.split("==========")[1].split()
    install()
    network, tokens = load(str(model))[0], [int(w[1:]) for w in text.split()]
    want = lambda cache: [f"w{t}" for t in says(network, tokens, cache, 12)]
    floats, packed = want(C.make_prompt_cache(network)), want(make_turbomoq_cache(network, "best@2,window=0"))
    assert floats != packed, "two bits of random weights say other things than floats"
    assert answer(run("generate", *generate, "--kv", "best@2,window=0")) == packed
    file = f"{folder}/prompt.safetensors"
    run("cache_prompt", "--model", str(model), "--prompt", text, "--prompt-cache-file", file, "--kv", "best@3,window=32")
    assert {type(c) for c in C.load_prompt_cache(file)} == {RecipeCache}
    settings = pathlib.Path(folder) / "kv.toml"
    settings.write_text('kv = "best@2"\n[models."*llama*"]\nkv = "float"\n')
    assert answer(run("generate", *generate, "--kv-settings", str(settings))) == floats
    assert "bits = 77" in run("generate", *generate, "--kv", "best@77", fails=True)
    print(f"mlx-lm {mlx_lm.__version__}: generate, cache_prompt, settings by model")


def settings(folder):
    """A recipe for each model; what is unknown is refused by name."""
    path = pathlib.Path(folder) / "some.toml"

    def load(text, default=None):
        path.write_text(text)
        return Settings.load(str(path), default)

    some = load('kv = "best@2"\n[models."*Qwen3*"]\nkv = "best@3"\nexempt = [0]\nexact-last = true\n[models."*"]\nkv = "turbomoq@4"\n')
    assert some.of("org/Qwen3-4B") == Choice("best@3", (0,), True) and some.of("org/other").kv == "turbomoq@4"
    assert load('kv = "best@2"', Choice("best@4")).of("any").kv == "best@4", "an option counts before the file"
    assert load("").of("any").kv == "float"
    refused(Unsupported, "sinks = 4: known are kv, exempt, exact-last", lambda: load("sinks = 4"))
    refused(Unsupported, "models.a: kv = 3: known are", lambda: load("[models.a]\nkv = 3"))
    refused(Unsupported, "ordinals of layers", lambda: load('exempt = ["a"]'))
    refused(Unsupported, "a section for each", lambda: load("[models]\na = 1"))
    refused(Unsupported, "some.toml: ", lambda: load("kv = "))
