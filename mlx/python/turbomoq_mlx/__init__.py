"""Prompt caches of mlx-lm, parked in a turbomoq server: many agents, one memory.

    from turbomoq_mlx import Pool

    pool = Pool()                                     # the server of `turbomoq serve --budget 8GiB`
    with pool.session("agent-1", model) as cache:     # what the agent had, or a new cache
        generate(model, tokenizer, prompt, prompt_cache=cache)
"""

from .pool import Parked, Pool, PoolError, default_folder

__all__ = ["Parked", "Pool", "PoolError", "default_folder"]
