"""`RecipeCache` and `BatchRecipeCache` with the real mlx-lm, see cache_contract.py: any recipe, one sequence or several that come and go."""

import copy
import warnings

import mlx.core as mx
import mlx_lm
import numpy as np
from architectures import MODELS, logits, tiny
from cache_contract import OLD, error, numbers, refused, rows, same
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models import base
from mlx_lm.models import cache as C
from turbomoq_mlx import BatchRecipeCache, RecipeCache, Unsupported, install, make_turbomoq_cache, uninstall
from turbomoq_mlx.convert import leaves

RECIPES = ("best@3,window=32", "turbomoq@4/2,sinks=2,window=0", "turboquant-prod@3,window=16", "kivi@2,window=32", "mlx-affine@4", "uniform@8")
TOKENS = [int(t) for t in np.random.default_rng(5).integers(1, 96, 400)]


def attend(cache, pair, queries, mask="causal"):
    return base.scaled_dot_product_attention(queries, *cache.update_and_fetch(*pair), cache=cache, scale=0.125, mask=mask)


def one_layer(_):
    """Attention on the packed form is that on the rows it unpacks to, whatever the calls; bytes are the library's."""
    install()
    pair, queries = rows(300, 1), rows(300, 2, heads=4)[0]
    for recipe in RECIPES:
        whole, pieces = RecipeCache(recipe), RecipeCache(recipe)
        outs = [attend(whole, pair, queries)]
        at, parts = 0, []
        for n in (1, 130, 1, 1, 64, 103):
            part = tuple(a[:, :, at : at + n] for a in pair)
            parts.append(attend(pieces, part, queries[:, :, at : at + n], None if n == 1 else "causal"))
            at += n
        outs.append(mx.concatenate(parts, axis=2))
        assert error(outs[1], outs[0]) < 0.02, (recipe, error(outs[1], outs[0]))
        assert same(numbers_of(whole.state), numbers_of(pieces.state)), recipe
        # A query of the newest token, on both roads.
        new, q = rows(1, 3), rows(1, 4, heads=4)[0]
        dense = copy.deepcopy(whole)
        got = attend(whole, new, q, None)
        dense.update_and_fetch(*new)
        keys, values = dense.keys_and_values()
        want = mx.fast.scaled_dot_product_attention(q.astype(mx.float32), keys.astype(mx.float32), values.astype(mx.float32), scale=0.125, mask=None)
        if not recipe.startswith("turboquant-prod"):
            # With a residual, scores are estimates that no unpacked row gives.
            assert error(got, want) < 0.02, (recipe, error(got, want))
        assert whole.offset == 301 and whole.nbytes == dense.nbytes > 0
        assert whole.packed_tokens >= 128 and "C library" in whole.road, (recipe, whole.packed_tokens, whole.road)
        assert whole.trim(1000) == 301 and whole.offset == 0 and whole.empty()
    uninstall()
    print(f"mlx-lm {mlx_lm.__version__}: one layer by {len(RECIPES)} recipes")


def numbers_of(state):
    return [numbers(a) for a in state]


def refusals(_):
    """What cannot be is refused by name, and nothing has changed."""
    refused(Unsupported, "bits = 99", lambda: make_turbomoq_cache(tiny("llama"), "best@99"))
    refused(Unsupported, "key_bits beside a recipe", lambda: make_turbomoq_cache(tiny("llama"), "best@3", key_bits=3))
    refused(Unsupported, "exempt layer 9", lambda: make_turbomoq_cache(tiny("llama"), "best@3", exempt=[9]))
    refused(Unsupported, "max_kv_size 64", lambda: make_turbomoq_cache(tiny("llama"), "best@3", max_kv_size=64))
    cache = RecipeCache("best@3,window=16")
    cache.update_and_fetch(*rows(200, 1))
    before = numbers_of(cache.state)
    refused(ValueError, "float32, float16 or bfloat16", lambda: cache.update_and_fetch(*(a.astype(mx.int32) for a in rows(3, 1))))
    refused(ValueError, "do not fit", lambda: cache.update_and_fetch(*rows(3, 1, heads=3)))
    refused(ValueError, "are needed", lambda: cache.update_and_fetch(*(a[0] for a in rows(3, 1))))
    assert same(numbers_of(cache.state), before)
    header, data = cache.state
    for i, bad in enumerate(([header[:5], data], [header], [header, data[:40]])):
        try:
            RecipeCache.from_state(bad)
        except ValueError:
            continue
        raise AssertionError(f"state {i} is not one and was taken")
    refused(ValueError, "several recipes", lambda: BatchRecipeCache.merge([RecipeCache("best@3"), RecipeCache("best@2")]))


def says(model, prompt, cache, n=8):
    return [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=n, prompt_cache=cache, prefill_step_size=128)]


def model_wide(folder):
    """A model's caches: plans by layer and head, exempt layers, files, copies, speculative decoding."""
    model = tiny("llama")
    install()
    plain = says(model, TOKENS, C.make_prompt_cache(model))
    assert says(model, TOKENS, make_turbomoq_cache(model, "uniform@8,window=64")) == plain, "8 bits say what floats say"
    # Widths of two layers' two heads; the others keep their bits.
    plan = "turbomoq@4,window=0,key-bits=4.2-3.8-4.4-2.2,value-bits=2.2-2.4-4.4-8.2"
    caches = {name: make_turbomoq_cache(model, name) for name in ("best@3,window=32", "turbomoq@4,window=0", plan)}
    for name, cache in caches.items():
        first = says(model, TOKENS, cache)
        again = says(model, TOKENS, make_turbomoq_cache(model, name))
        assert first == again, name
    assert caches[plan][0].nbytes != caches["turbomoq@4,window=0"][0].nbytes
    exempt = make_turbomoq_cache(model, "best@2", exempt=[0], exact_last=True)
    assert [type(c) for c in exempt] == [C.KVCache, RecipeCache, RecipeCache, C.KVCache]
    says(model, TOKENS, exempt)
    # A copy goes on by itself; files bring back the same state.
    cache = caches["best@3,window=32"]
    twin = copy.deepcopy(cache)
    ours = says(model, TOKENS[:9], cache)
    C.save_prompt_cache(f"{folder}/recipe.safetensors", twin, {"text": "é"})
    loaded, metadata = C.load_prompt_cache(f"{folder}/recipe.safetensors", return_metadata=True)
    assert metadata == {"text": "é"} and all(same(numbers_of(a.state), numbers_of(b.state)) for a, b in zip(loaded, twin))
    assert says(model, TOKENS[:9], twin) == ours == says(model, TOKENS[:9], loaded)
    # Drafts that are rejected leave no trace in what is said.
    both = lambda: make_turbomoq_cache(model, "best@4,window=64,draft=16") + make_turbomoq_cache(draft, "best@4,window=64,draft=16")
    draft = tiny("llama")
    draft.update({"lm_head": draft["lm_head"]})
    draft.lm_head.weight = draft.lm_head.weight + 0.05 * mx.random.normal(draft.lm_head.weight.shape, key=mx.random.key(3))
    drafted = [int(t) for t, *_ in speculative_generate_step(mx.array(TOKENS), model, draft, num_draft_tokens=3, max_tokens=24, prompt_cache=both())]
    alone = says(model, TOKENS, make_turbomoq_cache(model, "best@4,window=64,draft=16"), 24)
    assert drafted == alone, (drafted, alone)
    uninstall()
    # Without install() each step unpacks, and says so.
    cache = make_turbomoq_cache(model, "uniform@8,window=64")
    assert says(model, TOKENS, cache) == plain
    print(f"mlx-lm {mlx_lm.__version__}: a model by plans, files, copies and drafts; {cache[0].road}")


def batches(_):
    """Sequences of a batch hold and say what each holds and says alone, while others come and go."""
    model = tiny("llama")
    install()
    recipe = "best@3,window=32"
    prompts = [TOKENS[:n] for n in (7, 300, 161, 40, 200)]
    alone = {i: make_turbomoq_cache(model, recipe) for i in range(len(prompts))}
    want = {i: says(model, p, alone[i], 20) for i, p in enumerate(prompts)}
    new = lambda: [make_turbomoq_cache(model, recipe) for _ in prompts]
    # Two of five at a time, so that rows come and go.
    options = dict(max_tokens=[20] * 5, prefill_batch_size=2, completion_batch_size=3, prefill_step_size=128)
    got = run(model, prompts, new(), **options)
    for i, (tokens, cache) in enumerate(zip(*got)):
        assert tokens == want[i], (i, tokens, want[i])
        assert all(isinstance(c, RecipeCache) for c in cache)
        assert cache[0].offset == alone[i][0].offset, (cache[0].offset, alone[i][0].offset)
        # The first layer's rows do not depend on rounding inside the model.
        assert same(numbers_of(cache[0].state), numbers_of(alone[i][0].state)), i
    # Turns of conversations that go on from what came back, in another company.
    more = [TOKENS[50:53], TOKENS[100:240], TOKENS[9:10]]
    caches = [copy.deepcopy(got[1][i]) for i in (1, 0, 3)]
    after = [says(model, m, copy.deepcopy(c), 12) for m, c in zip(more, caches)]
    assert run(model, more, caches, max_tokens=[12] * 3, prefill_step_size=64)[0] == after
    uninstall()
    print(f"mlx-lm {mlx_lm.__version__}: five sequences in batches of up to three, and three conversations that go on")


def run(model, prompts, caches, max_tokens, **options):
    """Tokens and caches of a batched generation."""
    generator = BatchGenerator(model, stop_tokens=[], **options)
    uids = generator.insert(prompts, max_tokens, caches=caches)
    tokens, held = {uid: [] for uid in uids}, {}
    while responses := generator.next_generated():
        for response in responses:
            tokens[response.uid].append(int(response.token))
            if response.finish_reason is not None:
                held[response.uid] = response.prompt_cache
    generator.close()
    return [tokens[uid] for uid in uids], [held[uid] for uid in uids]


def every_architecture(_):
    """Each model of random weights runs by a recipe: packed, passed through, or refused by name."""
    table = []
    for name in MODELS:
        model = tiny(name)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                cache = make_turbomoq_cache(model, "uniform@8,window=32")
            except Unsupported as e:
                table.append((name, f"refused: {e}"))
                continue
        install()
        off = error(logits(model, cache), logits(model, C.make_prompt_cache(model)))
        uninstall()
        packed = sum(isinstance(part, RecipeCache) and part.packed_tokens > 0 for entry in cache for part in leaves(entry))
        assert packed or any("nothing is packed" in str(w.message) for w in said), name
        # Eight bits lose some thousandths of a row; a recurrence or a router of random weights may amplify them.
        assert off < 0.05, (name, off)
        table.append((name, f"{packed} layers packed" if packed else "passed through"))
    print("\n".join(f"| {name} | {what} |" for name, what in table))


def saved_recipes(folder):
    """Leaves recipe caches in a file: one with tokens, one of two sequences, an empty one; and what they unpack to."""
    caches = [RecipeCache("best@3,window=16", 0), RecipeCache("turbomoq@4,sinks=2,window=0", 1), RecipeCache("best@2", 2)]
    caches[0].update_and_fetch(*rows(300, 1))
    caches[1].update_and_fetch(*rows(300, 2, batch=2, dtype=mx.float32))
    kept = caches if not OLD else caches[:2]
    C.save_prompt_cache(f"{folder}/recipes.safetensors", kept, {"text": "é"})
    np.savez(f"{folder}/recipes.npz", *(numbers(a) for c in caches[:2] for a in c.keys_and_values()))


def carried_recipes(folder):
    """The file in this release's layout: the same caches, which go on."""
    caches, metadata = C.load_prompt_cache(f"{folder}/recipes.safetensors", return_metadata=True)
    assert metadata == {"text": "é"} and all(type(c) is RecipeCache for c in caches)
    held = [numbers(a) for c in caches[:2] for a in c.keys_and_values()]
    assert same(held, np.load(f"{folder}/recipes.npz").values())
    caches[0].update_and_fetch(*rows(5, 3))
    assert caches[0].offset == 305


def unpacked_recipes(folder):
    """The rows as plain caches, as this package unpacks them itself."""
    caches = C.load_prompt_cache(f"{folder}/plain.safetensors")
    held = [numbers(a) for c in caches[:2] for a in (c.keys[:, :, : c.offset], c.values[:, :, : c.offset])]
    assert all(type(c) is C.KVCache for c in caches) and same(held, np.load(f"{folder}/recipes.npz").values())
