"""The releases of mlx-lm that this package is tested with; others keep caches in other ways, and are refused by name."""

import mlx_lm

KNOWN = ("0.31", "0.32")

if not mlx_lm.__version__.startswith(tuple(f"{known}." for known in KNOWN)):
    raise ImportError(f"turbomoq_mlx works with mlx-lm {' and '.join(KNOWN)}, not with {mlx_lm.__version__}")
