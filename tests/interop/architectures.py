"""Packed caches in one tiny model of random weights of each kind that mlx-lm caches in its own way, see cache_contract.py."""

import importlib
import pathlib
import re

import mlx.core as mx
import mlx_lm
import numpy as np
from cache_contract import OLD, refused
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import cache as C
from turbomoq_mlx.convert import leaves
from turbomoq_mlx import TurboMoqCache, Unsupported, install, make_turbomoq_cache, uninstall

COMMON = dict(
    hidden_size=128, num_hidden_layers=4, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=97,
    rms_norm_eps=1e-5, layer_norm_eps=1e-5, layer_norm_epsilon=1e-5, norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=4096,
    tie_word_embeddings=False, attention_bias=False, mlp_bias=False, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
    num_local_experts=4, n_routed_experts=4, n_shared_experts=1, sliding_window=64, q_lora_rank=64, kv_lora_rank=64,
    qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32, mamba_d_state=16, mamba_d_conv=4,
)  # fmt: skip
GEMMA3N = dict(
    num_hidden_layers=6, num_kv_shared_layers=2, vocab_size_per_layer_input=97, rope_local_base_freq=1e4, final_logit_softcapping=30.0,
    layer_types=["sliding_attention", "full_attention"] * 3, activation_sparsity_pattern=[0.0] * 6, hidden_size_per_layer_input=16,
    altup_num_inputs=2, altup_coef_clip=120.0, altup_correct_scale=True, altup_active_idx=0, laurel_rank=8,
)  # fmt: skip
YARN = dict(type="yarn", factor=2.0, original_max_position_embeddings=2048, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)
MODELS = {
    "afm7": dict(hidden_dim=128, num_layers=4, num_kv_reuse_layers=2, num_heads=4, num_kv_heads=2),
    "cohere2": dict(sliding_window_pattern=2),
    "deepseek_v2": dict(rope_scaling=YARN),
    "deepseek_v3": {},
    "deepseek_v32": dict(index_head_dim=32, index_n_heads=2, index_topk=64),
    "falcon_h1": dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, tie_word_embeddings=True),
    "gemma2": {},
    "gemma3_text": dict(sliding_window_pattern=2, query_pre_attn_scalar=32),
    "gemma3n": dict(text_config=COMMON | GEMMA3N | {"model_type": "gemma3n_text"}),
    "gpt_oss": dict(layer_types=["sliding_attention", "full_attention"] * 2),
    "granitemoehybrid": dict(
        embedding_multiplier=1.0, attention_multiplier=0.2, logits_scaling=1.0, residual_multiplier=0.5, mamba_n_heads=4, mamba_d_head=64,
        layer_types=["mamba", "attention"] * 2, mamba_proj_bias=False, mamba_n_groups=1, mamba_conv_bias=True, shared_intermediate_size=64,
    ),  # fmt: skip
    "jamba": dict(attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1, expert_layer_period=2, mamba_expand=2),
    "lfm2": dict(
        conv_bias=True, conv_L_cache=3, block_dim=128, block_ff_dim=96, block_multiple_of=32, block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False, full_attn_idxs=[1, 3],
    ),  # fmt: skip
    "llama": {},
    "llama4_text": dict(intermediate_size_mlp=96, no_rope_layers=[1, 1, 1, 0], use_qk_norm=True),
    "longcat_flash": dict(
        attention_method="MLA", zero_expert_type="identity", ffn_hidden_size=96, moe_topk=2, expert_ffn_hidden_size=64, zero_expert_num=2,
        num_layers=2, routed_scaling_factor=1.0, mla_scale_q_lora=True, mla_scale_kv_lora=True,
    ),  # fmt: skip
    "mamba": dict(state_size=16, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=8),
    "minicpm3": dict(dim_model_base=64, scale_depth=1.0, scale_emb=1.0, rope_scaling=YARN | {"short_factor": [1.0] * 16, "long_factor": [1.0] * 16}),
    "mixtral": dict(num_experts_per_tok=4),
    "nemotron_h": dict(
        mamba_num_heads=4, mamba_head_dim=16, mamba_proj_bias=False, ssm_state_size=16, conv_kernel=4, n_groups=1, use_bias=False,
        use_conv_bias=True, hybrid_override_pattern=["M", "*", "-", "*"], time_step_limit=(0.001, 100.0),
    ),  # fmt: skip
    "phi3": {},
    "qwen3": {},
    "qwen3_next": dict(
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4,
        decoder_sparse_step=1, shared_expert_intermediate_size=64, mlp_only_layers=[], partial_rotary_factor=0.5, full_attention_interval=2,
    ),  # fmt: skip
    "recurrent_gemma": dict(
        conv1d_width=4, logits_soft_cap=30.0, attention_window_size=64, block_types=["recurrent", "attention"], embeddings_scale_by_sqrt_dim=True
    ),
}
UNPACKED = {"mamba", "deepseek_v32", "longcat_flash", "recurrent_gemma"}
"""Those without a layer whose rows are in one `KVCache`: nothing is packed, and that is said."""


def tiny(name):
    """The model with weights from a seed, small enough that no layer saturates."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(COMMON | MODELS[name] | {"model_type": name}))
    rng = np.random.default_rng(17)
    weights = []
    for key, x in sorted(tree_flatten(model.parameters())):
        new = rng.standard_normal(x.shape).astype(np.float32) * 0.1
        # Norms stay near one, and the decay of a recurrence where the model wants it.
        weights.append((key, x.astype(mx.float32) if x.ndim == 1 else mx.array(new)))
    model.update(tree_unflatten(weights))
    return model


def logits(model, cache):
    """After a prompt in two calls and some steps, all tokens given."""
    tokens = mx.array(np.random.default_rng(23).integers(0, 97, (1, 194)))
    out = []
    for start, end in ((0, 150), (150, 190), *((t, t + 1) for t in range(190, 194))):
        out.append(model(tokens[:, start:end], cache=cache)[:, -1].astype(mx.float32))
        mx.eval(out[-1])
    return mx.concatenate(out)


def architectures(folder):
    readers = set()
    for path in (pathlib.Path(mlx_lm.__file__).parent / "models").glob("*.py"):
        if path.stem != "cache" and re.search(r"= cache(\[.*\])?\.state", path.read_text()):
            readers.add(path.stem)
    assert readers == ({"afm7", "gemma3n"} if OLD else set()), readers
    kinds, worst = 0, 0.0
    for name in MODELS:
        model = tiny(name)
        if name in readers:
            refused(Unsupported, f"mlx_lm.models.{name} takes the state", lambda: make_turbomoq_cache(model))
        install()
        packed = make_turbomoq_cache(model, key_bits=8, value_bits=8, sinks=0, window=0)
        plain = C.make_prompt_cache(model)
        want, got = np.array(logits(model, plain)), np.array(logits(model, packed))
        held = [c for entry in packed for c in leaves(entry) if isinstance(c, TurboMoqCache)]
        count = len(held)
        assert (count == 0) == (name in UNPACKED), (name, count)
        assert count in (0, sum(type(c) is C.KVCache for entry in plain for c in leaves(entry))), (name, count)
        assert all(c.packed_tokens >= 128 for c in held), name
        off = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        # Eight bits lose some thousandths of a row; a recurrence or a router of random weights may amplify them.
        assert np.isfinite(got).all() and np.std(want) > 0 and off < 0.05, (name, off)
        worst, kinds = max(worst, off), kinds + (count > 0)
        if count:
            C.save_prompt_cache(f"{folder}/{name}.safetensors", packed)
            loaded = C.load_prompt_cache(f"{folder}/{name}.safetensors")
            step = lambda cache: np.array(model(mx.array([[5]]), cache=cache).astype(mx.float32))
            assert np.array_equal(step(loaded), step(packed)), f"{name}: loaded, it goes on in another way"
        uninstall()
    print(f"mlx-lm {mlx_lm.__version__}: {kinds} of {len(MODELS)} architectures on packed caches of 8 bits, at most {worst:.1e} off")
