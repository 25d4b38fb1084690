"""Arrays of MLX as the C library reads them: in place, where their last axis has no gaps."""

from __future__ import annotations

import ctypes
from typing import Any

import mlx.core as mx

from .library import Rows

CODES = {mx.float32: 0, mx.float16: 1, mx.bfloat16: 2}
"""Element types by their numbers in the C library."""


class _Buffer(ctypes.Structure):
    """`Py_buffer`."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    ]


_STRIDED = 0x18  # PyBUF_STRIDES: NumPy's and ctypes' own ways have no bfloat16
_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = [ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int]
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = [ctypes.POINTER(_Buffer)]
_release.restype = None


class Memory:
    """The buffer of an evaluated array. The array must outlive what is made of the address."""

    def __init__(self, array: mx.array):
        view = _Buffer()
        _get(array, view, _STRIDED)
        self.address, item = view.buf, view.itemsize
        self.strides = [view.strides[i] // item for i in range(view.ndim)]
        """In elements."""
        self.item = item
        self._array = array
        # MLX's memory does not move: the array alone keeps it.
        _release(view)


class Tensor:
    """Rows (B, H, L, D) of one side, evaluated, for the C library."""

    def __init__(self, array: mx.array):
        memory = Memory(array)
        if memory.strides[3] != 1 and array.shape[3] > 1:
            array = mx.contiguous(array)
            mx.eval(array)
            memory = Memory(array)
        self.shape, self._memory, self._code = array.shape, memory, CODES[array.dtype]

    def rows(self, row: int, start: int, end: int) -> Rows:
        """Tokens `start` to `end` of one sequence."""
        _, heads, _, dim = self.shape
        by_row, by_head, by_token, _ = self._memory.strides
        address = self._memory.address + (row * by_row + start * by_token) * self._memory.item
        return Rows(ctypes.sizeof(Rows), address, self._code, heads, end - start, dim, by_token, by_head)


def address(array: Any) -> int:
    """Where a NumPy array begins."""
    return array.ctypes.data
