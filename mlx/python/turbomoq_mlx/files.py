"""Prompt-cache files with packed layers: mlx-lm loads them once this package is imported, and here an error says what is wrong."""

from __future__ import annotations

import os
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from .cache import TurboMoqCache
from .pool import LAYOUT


def load_prompt_cache(path: str | os.PathLike, return_metadata: bool = False) -> Any:
    """As mlx-lm's function of that name, packed layers too.

    `ValueError` if the file is of another release of mlx-lm or holds a class that is not known here.
    """
    path = os.fspath(path)
    _, metadata = mx.load(path, return_metadata=True)
    # 0.32 begins its table of scalars with an empty string; at that place 0.31 has the name of the first class.
    mark = metadata.get("2.0")
    if mark is None:
        raise ValueError(f"{path} is not a prompt cache of mlx-lm 0.31 or 0.32")
    layout, group = ("0.32", "1.") if mark == "" else ("0.31", "2.")
    if layout != LAYOUT:
        raise ValueError(f"{path} was written by mlx-lm {layout}, this is {LAYOUT}: turbomoq restore {path} --layout {LAYOUT}")
    for key, name in metadata.items():
        if key.startswith(group) and not hasattr(mlx_cache, name):
            raise ValueError(f"{path}: layer {key[2:]} is a {name}, which neither mlx-lm nor this package knows")
    return mlx_cache.load_prompt_cache(path, return_metadata)


# mlx-lm looks the classes of a saved cache up among its own names.
mlx_cache.TurboMoqCache = TurboMoqCache
