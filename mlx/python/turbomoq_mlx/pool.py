"""The client of `turbomoq serve`: requests are lines of JSON, caches are mlx-lm's own prompt-cache files on a memory file system."""

from __future__ import annotations

import json
import os
import pathlib
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Iterator, Optional

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

VERSION = 1
LAYOUT = "0.31" if tuple(map(int, mlx_lm.__version__.split(".")[:2])) < (0, 32) else "0.32"


def default_folder() -> pathlib.Path:
    """The folder that server and clients use if none is given."""
    if folder := os.environ.get("TURBOMOQ_FOLDER"):
        return pathlib.Path(folder)
    if run := os.environ.get("XDG_RUNTIME_DIR"):
        return pathlib.Path(run) / "turbomoq"
    return pathlib.Path(f"/tmp/turbomoq-{os.geteuid()}")


class PoolError(RuntimeError):
    """The server has refused; `code` tells the kinds apart: `over-budget`, `not-held`, `evicted`, `batch-cache` and others."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Parked:
    """What parking a cache has done."""

    bytes: int
    """Bytes of the packed cache in the pool if nothing is shared."""
    added: int
    """Bytes that the pool grew by."""
    fp16_bytes: int
    """Bytes of the same keys and values in half precision."""
    bits: tuple[float, float]
    """Stored bits a key scalar and a value scalar, everything counted."""
    spilled: list[str]
    """Agents that went to the disk for it."""
    evicted: list[str]
    """Agents whose caches are lost for it."""


class Pool:
    """A connection to a server. Not for several threads at a time; a connection each costs little."""

    def __init__(self, folder: Optional[os.PathLike | str] = None):
        self.path = pathlib.Path(folder) if folder is not None else default_folder()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(self.path / "socket"))
        except OSError as error:
            self._socket.close()
            raise ConnectionError(f"no server in {self.path}: turbomoq serve --folder {self.path}") from error
        self._lines = self._socket.makefile("r", encoding="utf-8")
        self._count = 0
        hello = self._reply()
        if hello.get("version") != VERSION:
            raise PoolError("version", f"the server speaks version {hello.get('version')}, this package {VERSION}")
        self._folder = pathlib.Path(hello["folder"])

    def park(
        self,
        id: str,
        cache: list[Any],
        *,
        kind: str = "",
        priority: float = 1.0,
        recipe: Optional[str] = None,
        metadata: Optional[dict[str, str]] = None,
        uneven: bool = False,
    ) -> Parked:
        """Packs a prompt cache and holds it for the agent `id`, in place of what it had. The cache itself is not changed.

        Layers that stand at different tokens are refused, unless `uneven` says that it is meant.
        """
        for layer, entry in enumerate(cache):
            if type(entry).__name__.startswith("Batch"):
                name = type(entry).__name__
                raise PoolError("batch-cache", f"layer {layer} is a {name} of several sequences: extract one of them and park that")
        held = sum(a.nbytes for _, a in tree_flatten([c.state for c in cache]) if isinstance(a, mx.array))
        room = os.statvfs(self._folder)
        if held > room.f_bavail * room.f_frsize:
            raise PoolError("io", f"{held} bytes do not fit into {self._folder}: {room.f_bavail * room.f_frsize} are free")
        self._count += 1
        segment = f"p{self._count}.safetensors"
        path = self._folder / segment
        try:
            save_prompt_cache(str(path), cache, metadata or {})
            request = {"op": "park", "id": id, "segment": segment, "kind": kind, "priority": priority, "recipe": recipe}
            if uneven:
                request["uneven"] = True
            reply = self._call(request)
        finally:
            path.unlink(missing_ok=True)
        fields = ("bytes", "added", "fp16_bytes", "spilled", "evicted")
        return Parked(bits=tuple(reply["bits"]), **{name: reply[name] for name in fields})

    def resume(self, id: str, return_metadata: bool = False) -> Any:
        """The prompt cache of an agent, as mlx-lm loads it. The pool keeps its copy until the next park or `drop`."""
        reply = self._call({"op": "resume", "id": id, "layout": LAYOUT})
        path = self._folder / reply["segment"]
        try:
            cache, metadata = load_prompt_cache(str(path), return_metadata=True)
            # Loading is lazy: the arrays have to be there before the file goes.
            mx.eval([c.state for c in cache])
        finally:
            path.unlink(missing_ok=True)
        return (cache, metadata) if return_metadata else cache

    @contextmanager
    def session(
        self,
        id: str,
        model: Any,
        *,
        max_kv_size: Optional[int] = None,
        kind: str = "",
        priority: float = 1.0,
        recipe: Optional[str] = None,
    ) -> Iterator[list[Any]]:
        """The agent's cache, or a new one for the model if the agent is new; parked when the block ends without an error.

        An agent whose cache was lost to others raises `PoolError` of code `evicted`: its past has to be said again, or `drop` it.
        """
        try:
            cache = self.resume(id)
        except PoolError as error:
            if error.code != "not-held":
                raise
            cache = make_prompt_cache(model, max_kv_size)
        yield cache
        if any(getattr(entry, "offset", 1) != 0 for entry in cache):
            self.park(id, cache, kind=kind, priority=priority, recipe=recipe)

    def fork(self, source: str, target: str) -> None:
        """Gives `target` the cache of `source`; what is packed is shared until one of them parks something else."""
        self._call({"op": "fork", "from": source, "to": target})

    def pin(self, id: str) -> None:
        """Keeps an agent's cache in memory."""
        self._call({"op": "pin", "id": id})

    def unpin(self, id: str) -> None:
        """Undoes `pin`."""
        self._call({"op": "unpin", "id": id})

    def spill(self, id: str) -> None:
        """Moves an agent's cache to the disk; when this returns, it survives the server."""
        self._call({"op": "spill", "id": id})

    def drop(self, id: str) -> None:
        """Forgets an agent."""
        self._call({"op": "drop", "id": id})

    def stats(self) -> dict[str, Any]:
        """Figures: `pool`, a dictionary, and `agents`, a list of them."""
        return self._call({"op": "stats"})

    def close(self) -> None:
        """Ends the connection."""
        self._lines.close()
        self._socket.close()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise ConnectionError(f"the server in {self.path} is gone")
        reply = json.loads(line)
        if reply["reply"] == "error":
            raise PoolError(reply["code"], reply["message"])
        return reply
