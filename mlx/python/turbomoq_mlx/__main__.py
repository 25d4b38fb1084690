"""A command of mlx-lm that knows packed caches: python -m turbomoq_mlx generate --prompt-cache-file FILE --prompt ..."""

import runpy
import sys

from . import install

if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    install()
    command = sys.argv[1]
    del sys.argv[0]
    runpy.run_module(f"mlx_lm.{command}", run_name="__main__", alter_sys=True)
