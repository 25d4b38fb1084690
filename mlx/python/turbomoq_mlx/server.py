"""`mlx_lm.server` on packed caches: python -m turbomoq_mlx.server --kv best@3 ..., see `commands`."""

from .commands import main

if __name__ == "__main__":
    main("server")
