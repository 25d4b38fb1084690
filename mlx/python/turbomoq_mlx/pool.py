"""The client of `turbomoq serve`: requests are lines of JSON, caches are mlx-lm's own prompt-cache files on a memory file system.

A client believes nobody but a server of its own user. A connection whose request was interrupted, timed out or failed is given up, so
no request ever reads the reply to another; the next call connects again. A request is sent a second time only if the server has
certainly not seen the first.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import stat
import struct
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from .prefix import keep_common_prefix

VERSION = 1
LAYOUT = "0.31" if tuple(map(int, mlx_lm.__version__.split(".")[:2])) < (0, 32) else "0.32"


def default_folder() -> pathlib.Path:
    """The folder that server and clients use if none is given."""
    if folder := os.environ.get("TURBOMOQ_FOLDER"):
        return pathlib.Path(folder)
    if run := os.environ.get("XDG_RUNTIME_DIR"):
        return pathlib.Path(run) / "turbomoq"
    if sys.platform == "darwin" and (home := os.environ.get("HOME")):
        return pathlib.Path(home) / "Library/Caches/turbomoq"
    return pathlib.Path(f"/tmp/turbomoq-{os.geteuid()}")


def _check_folder(path: pathlib.Path, bits: int) -> None:
    """Refuses what is no real folder of this user, or has any of these bits in its mode."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & bits:
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(f"{path} (user {found.st_uid}, mode {mode:o}) is no folder that is user {os.geteuid()}'s alone")


def _user_of(peer: socket.socket) -> int:
    """The user at the other end."""
    if sys.platform == "darwin":  # struct xucred, by getsockopt(SOL_LOCAL, LOCAL_PEERCRED)
        return struct.unpack_from("=II", peer.getsockopt(0, 1, 76))[1]
    return struct.unpack("iII", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]


class _Unseen(Exception):
    """The server has not seen a request."""


class _Link:
    """One connection."""

    GREETING = 30.0
    """Seconds that the greeting may take, and a request to be taken."""

    def __init__(self, path: pathlib.Path):
        self.path, self.rest = path, b""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.settimeout(self.GREETING)
            try:
                _check_folder(path, 0o022)
                self.socket.connect(str(path / "socket"))
            except PermissionError:
                raise
            except OSError as error:
                raise ConnectionError(f"no server in {path}: turbomoq serve --folder {path}") from error
            if (user := _user_of(self.socket)) != os.geteuid():
                raise PermissionError(f"the server in {path} is user {user}'s, not user {os.geteuid()}'s")
            hello = self.reply(self.GREETING)
            if hello.get("version") != VERSION:
                raise PoolError("version", f"the server speaks version {hello.get('version')}, this package {VERSION}")
            self.folder = pathlib.Path(hello["folder"])
            _check_folder(self.folder, 0o077)
        except BaseException:
            self.socket.close()
            raise

    def fresh(self) -> bool:
        """Whether it is open and nothing lies in it that no request has asked for."""
        self.socket.settimeout(0)
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return not self.rest
        except OSError:
            pass
        return False

    def send(self, request: dict[str, Any]) -> None:
        self.socket.settimeout(self.GREETING)
        try:
            self.socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:  # a line that was not written to its end is none to the server
            raise _Unseen from error

    def reply(self, timeout: Optional[float]) -> dict[str, Any]:
        self.socket.settimeout(timeout)
        while b"\n" not in self.rest:
            try:
                part = self.socket.recv(1 << 16)
            except TimeoutError as error:
                text = f"no reply from the server in {self.path} within {timeout} s; whether the request was done is not known"
                raise TimeoutError(text) from error
            if not part:
                raise ConnectionError(f"the server in {self.path} is gone; whether the request was done is not known")
            self.rest += part
        line, self.rest = self.rest.split(b"\n", 1)
        reply = json.loads(line)
        if reply["reply"] == "error":
            if reply["code"] == "idle":
                raise _Unseen
            raise PoolError(reply["code"], reply["message"])
        return reply


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
    """A client of a server, which may be started again meanwhile. Not for several threads at a time; one for each costs little.

    `timeout` bounds the seconds of a reply; packing a long cache of a large model takes minutes. `None` waits for ever. A call that is
    interrupted (Ctrl-C), times out or loses the server may have been done or not; the calls after it are not touched by that.
    """

    def __init__(self, folder: Optional[os.PathLike | str] = None, timeout: Optional[float] = 600.0):
        self.path = pathlib.Path(folder) if folder is not None else default_folder()
        self.timeout = timeout
        self._count = 0
        self._link: Optional[_Link] = _Link(self.path)

    @property
    def _folder(self) -> pathlib.Path:
        return self._connected().folder

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
        self._count += 1
        segment = f"p{self._count}.safetensors"
        request = {"op": "park", "id": id, "segment": segment, "kind": kind, "priority": priority, "recipe": recipe}
        path = None

        def save(folder: pathlib.Path) -> None:
            nonlocal path
            room = os.statvfs(folder)
            if held > room.f_bavail * room.f_frsize:
                raise PoolError("io", f"{held} bytes do not fit into {folder}: {room.f_bavail * room.f_frsize} are free")
            path = folder / segment
            save_prompt_cache(str(path), cache, metadata or {})

        if uneven:
            request["uneven"] = True
        try:
            reply = self._call(request, save)
        finally:
            if path is not None:
                path.unlink(missing_ok=True)
        fields = ("bytes", "added", "fp16_bytes", "spilled", "evicted")
        return Parked(bits=tuple(reply["bits"]), **{name: reply[name] for name in fields})

    def resume(self, id: str, return_metadata: bool = False) -> Any:
        """The prompt cache of an agent, as mlx-lm loads it. The pool keeps its copy until the next park or `drop`."""
        reply = self._call({"op": "resume", "id": id, "layout": LAYOUT})
        path = self._link.folder / reply["segment"]
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
        on_error: str = "keep",
    ) -> Iterator[list[Any]]:
        """The agent's cache, or a new one for the model if the agent is new; parked when the block ends without an error.

        After an error, Ctrl-C among them, the agent keeps what it had before the block. With `on_error="park"` it gets the prefix
        of tokens that all layers hold, what was generated included: `resume` says by its offset how far that goes. Where there is
        no such prefix (recurrent state, a full sliding window) it keeps what it had, and a warning says why. The error goes on.

        An agent whose cache was lost to others raises `PoolError` of code `evicted`: its past has to be said again, or `drop` it.
        """
        if on_error not in ("keep", "park"):
            raise ValueError(f'on_error {on_error!r}: neither "keep" nor "park"')
        try:
            cache = self.resume(id)
        except PoolError as error:
            if error.code != "not-held":
                raise
            cache = make_prompt_cache(model, max_kv_size)
        try:
            yield cache
        except BaseException:
            if on_error == "park":
                try:
                    if keep_common_prefix(cache):
                        self.park(id, cache, kind=kind, priority=priority, recipe=recipe)
                except Exception as reason:
                    warnings.warn(f"{id} keeps what it had before the session: {reason}", stacklevel=3)
            raise
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
        link, self._link = self._link, None
        if link is not None:
            link.socket.close()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _connected(self) -> _Link:
        if self._link is None or not self._link.fresh():
            self.close()
            self._link = _Link(self.path)
        return self._link

    def _call(self, request: dict[str, Any], before: Callable[[pathlib.Path], None] = lambda folder: None) -> dict[str, Any]:
        """Sends a request, after `before` has put its file into the connection's folder, and waits for the reply."""
        for last in (False, True):
            link = self._connected()
            before(link.folder)
            try:
                link.send(request)
                return link.reply(self.timeout)
            except PoolError:
                raise
            except _Unseen as error:
                self.close()
                if last:
                    raise ConnectionError(f"the server in {self.path} takes no requests") from error.__cause__
            except BaseException:  # a reply may be on its way that belongs to no later request
                self.close()
                raise
        raise AssertionError("unreachable")
