"""The prefix of tokens that all layers of a prompt cache hold, when a call was interrupted between two of them."""

from __future__ import annotations

from typing import Any, Iterator


def keep_common_prefix(cache: list[Any]) -> int:
    """Drops the newest tokens of layers that hold more than others; gives the tokens that all hold then.

    `ValueError`, and nothing has changed, if a layer does not say how many tokens it holds (recurrent state) or can drop none (a
    sliding window that is full).
    """
    parts = [(layer, part) for layer, entry in enumerate(cache) for part in _parts(entry)]
    for layer, part in parts:
        if not isinstance(getattr(part, "offset", None), int):
            raise ValueError(f"layer {layer} is a {type(part).__name__}, which does not say how many tokens it holds")
    tokens = min((part.offset for _, part in parts), default=0)
    longer = [(layer, part) for layer, part in parts if part.offset > tokens]
    for layer, part in longer:
        if not part.is_trimmable():
            raise ValueError(f"layer {layer} is a {type(part).__name__} that cannot drop its last {part.offset - tokens} tokens")
    for _, part in longer:
        part.trim(part.offset - tokens)
    return tokens


def _parts(entry: Any) -> Iterator[Any]:
    """The caches of a `CacheList`, at any depth, or the cache itself."""
    if isinstance(nested := getattr(entry, "caches", None), (list, tuple)):
        for part in nested:
            yield from _parts(part)
    else:
        yield entry
