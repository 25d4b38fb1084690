"""`mlx_lm.generate` on packed caches: python -m turbomoq_mlx.generate --kv best@3 ..., see `commands`."""

from .commands import main

if __name__ == "__main__":
    main("generate")
