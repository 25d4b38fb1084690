"""The C library (mlx/include/turbomoq.h) through ctypes: rotations and levels of codecs, and whole caches."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import sys

VERSION = 3
"""The least `TMQ_VERSION` that has what is called here."""
NAME = "libturbomoq_c.dylib" if sys.platform == "darwin" else "libturbomoq_c.so"
START = pathlib.Path.cwd()
"""The folder that a relative TURBOMOQ_LIBRARY is meant from: a program may change its own later."""
KEY, VALUE = 0, 1


class LibraryNotFound(ImportError):
    """The C library is not there, or too old; the message says how to build it."""


class Unsupported(ValueError):
    """A head dim or width that a packed cache has no form for."""


class Rows(ctypes.Structure):
    """`tmq_rows`: vectors of one sequence, by head and token."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("data", ctypes.c_void_p), ("dtype", ctypes.c_uint32)]
    _fields_ += [(name, ctypes.c_size_t) for name in ("heads", "tokens", "head_dim", "token_stride", "head_stride")]


class Rules(ctypes.Structure):
    """`tmq_rules`: which tokens queries see."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("scale", ctypes.c_float),
        ("causal", ctypes.c_int32),
        ("sliding_window", ctypes.c_size_t),
        ("soft_cap", ctypes.c_float),
        ("sink_logits", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("mask_heads", ctypes.c_size_t),
    ]


class CacheInfo(ctypes.Structure):
    """`tmq_cache_info`."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("struct_size", "tokens", "offset", "bytes", "packed")]


class _Info(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("head_dim", ctypes.c_size_t),
        ("row_bytes", ctypes.c_size_t),
        ("tile", ctypes.c_size_t),
        ("bits", ctypes.c_float),
    ]


@functools.lru_cache(maxsize=None)
def load() -> ctypes.CDLL:
    """The library: `TURBOMOQ_LIBRARY`, else the file in this package's folder, else wherever the loader finds it."""
    inside = pathlib.Path(__file__).with_name(NAME)
    if named := os.environ.get("TURBOMOQ_LIBRARY"):
        path = str(START / named)
    else:
        path = str(inside) if inside.exists() else NAME
    how = f"build it with `cargo build --release -p turbomoq-c` and set TURBOMOQ_LIBRARY to target/release/{NAME}"
    try:
        library = ctypes.CDLL(path)
        library.tmq_version.restype = ctypes.c_uint32
        version = library.tmq_version()
    except (OSError, AttributeError) as error:
        raise LibraryNotFound(f"turbomoq's C library cannot be loaded from {path}: {error}; {how}") from error
    if version < VERSION:
        raise LibraryNotFound(f"{path} has version {version} of the C API, {VERSION} is needed; {how}")
    library.tmq_last_error.restype = ctypes.c_char_p
    # The addresses of handles need their whole width.
    floats, handle = ctypes.POINTER(ctypes.c_float), ctypes.c_void_p
    library.tmq_codec_of_recipe.argtypes = [
        ctypes.c_char_p,
        ctypes.c_uint32,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.POINTER(handle),
    ]
    library.tmq_codec_get_info.argtypes = [handle, ctypes.POINTER(_Info)]
    library.tmq_codec_rotation.argtypes = [handle, floats, ctypes.c_size_t]
    library.tmq_codec_levels.argtypes = [handle, floats, ctypes.c_size_t]
    library.tmq_codec_free.argtypes = [handle]
    library.tmq_codec_free.restype = None
    size, rows, rules = ctypes.c_size_t, ctypes.POINTER(Rows), ctypes.POINTER(Rules)
    out = ctypes.POINTER(handle)
    library.tmq_cache_new.argtypes = [ctypes.c_char_p, size, size, size, out]
    library.tmq_cache_extend.argtypes = [handle, rows, rows]
    library.tmq_caches_update_and_attend.argtypes = [out, size, rows, rows, rows, rules, out, ctypes.POINTER(size)]
    library.tmq_cache_attend_by_rules.argtypes = [handle, rows, rules, handle, size]
    library.tmq_cache_fetch.argtypes = [handle, handle, size, handle, size]
    library.tmq_cache_trim.argtypes = [handle, size, ctypes.POINTER(size)]
    library.tmq_cache_copy.argtypes = [handle, out]
    library.tmq_cache_save.argtypes = [handle, out]
    library.tmq_bytes_len.argtypes = [handle, ctypes.POINTER(size)]
    library.tmq_bytes_copy.argtypes = [handle, handle, size]
    library.tmq_cache_load.argtypes = [handle, size, out]
    library.tmq_cache_get_info.argtypes = [handle, ctypes.POINTER(CacheInfo)]
    for name in ("tmq_cache_free", "tmq_bytes_free"):
        getattr(library, name).argtypes = [handle]
        getattr(library, name).restype = None
    return library


def check(status: int) -> None:
    """Raises what the last call of this thread has failed with."""
    if status != 0:
        raise Unsupported(load().tmq_last_error().decode())


@functools.lru_cache(maxsize=None)
def tables(recipe: str, side: int, layer: int, head_dim: int, bits: int) -> tuple[list[float], list[float], int]:
    """The rotation of a side's codec, row-major, its levels, and the bytes of a packed vector."""
    library, codec = load(), ctypes.c_void_p()
    check(library.tmq_codec_of_recipe(recipe.encode(), side, layer, head_dim, ctypes.byref(codec)))
    try:
        info = _Info(struct_size=ctypes.sizeof(_Info))
        check(library.tmq_codec_get_info(codec, ctypes.byref(info)))
        rotation, levels = (ctypes.c_float * (head_dim * head_dim))(), (ctypes.c_float * (1 << bits))()
        check(library.tmq_codec_rotation(codec, rotation, len(rotation)))
        check(library.tmq_codec_levels(codec, levels, len(levels)))
        return list(rotation), list(levels), info.row_bytes
    finally:
        library.tmq_codec_free(codec)
