"""`mlx_lm.chat` on packed caches: python -m turbomoq_mlx.chat --kv best@3 ..., see `commands`."""

from .commands import main

if __name__ == "__main__":
    main("chat")
