"""Makes a model folder that mlx-lm loads from the GGUF that examples/smollm2/setup.sh fetches.

    python smollm2_folder.py SmolLM2-135M-Instruct.Q4_1.gguf FOLDER

The 4-bit groups of a GGUF are MLX's own quantization with groups of 32, so those weights stay as they are; the others become f16.
"""

import json
import pathlib
import sys

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # tokens of this type come from no text


def name(key: str) -> str:
    """The name in mlx-lm of a tensor of the GGUF."""
    parts = key.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{NAMES[parts[2]]}.{parts[3]}"
    return {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]] + "." + parts[1]


def convert(gguf: str, folder: pathlib.Path) -> None:
    """Writes weights, config and tokenizer."""
    if tuple(map(int, mx.__version__.split(".")[:2])) < (0, 32):
        raise SystemExit(f"MLX {mx.__version__} reads 4-bit weights of a GGUF one byte off: make the folder with 0.32 or later")
    weights, meta = mx.load(gguf, return_metadata=True)
    number = lambda key: meta[f"llama.{key}"].item()
    if meta["tokenizer.ggml.pre"] != "smollm":
        raise SystemExit(f"{gguf}: the tokenizer splits like {meta['tokenizer.ggml.pre']!r}, this script knows 'smollm'")
    folder.mkdir(parents=True, exist_ok=True)
    # Norms are f32 in a GGUF: with them a model computes in f32, and its caches hold f32.
    weights = {name(k): v.astype(mx.float16) if v.dtype == mx.float32 else v for k, v in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    # Words of 32 bits and groups of 32 tell the width of each: the embedding has 8 bits.
    widths = {k[: -len(".scales")]: weights[k.replace(".scales", ".weight")].shape[1] // v.shape[1] for k, v in weights.items() if k.endswith(".scales")}
    others = {k: {"group_size": 32, "bits": bits} for k, bits in widths.items() if bits != 4}
    config = {
        "model_type": "llama",
        "hidden_size": number("embedding_length"),
        "num_hidden_layers": number("block_count"),
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "vocab_size": number("vocab_size"),
        "rope_theta": number("rope.freq_base"),
        "rope_traditional": True,  # llama.cpp orders the rows of queries and keys for this form
        "tie_word_embeddings": True,
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"].item(),
        "quantization": {"group_size": 32, "bits": 4, **others},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t, kind in zip(tokens, kinds) if kind == CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokens[config["eos_token_id"]]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "chat_template": meta["tokenizer.chat_template"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    convert(sys.argv[1], pathlib.Path(sys.argv[2]))
