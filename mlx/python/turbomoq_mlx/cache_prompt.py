"""`mlx_lm.cache_prompt` on packed caches: python -m turbomoq_mlx.cache_prompt --kv best@3 ..., see `commands`."""

from .commands import main

if __name__ == "__main__":
    main("cache_prompt")
