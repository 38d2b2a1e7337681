"""msgpack that others wrote: read only where it is whole, plain and not deep, so that reading it is cheap and safe."""

from __future__ import annotations

from typing import Any

import msgpack

from asyncrl.errors import WireError

MAX_DEPTH = 100

_CONTAINERS = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
_OTHERS = bytes(set(range(256)) - set(_CONTAINERS))


def unpack(packed: bytes | bytearray | memoryview) -> Any:
    """The one value in `packed`. Raises WireError with the reason where there is none."""
    raw = bytes(packed)
    try:
        # A walk that builds nothing: what a list announces must have come before memory is taken for it.
        walk = msgpack.Unpacker(max_buffer_size=max(len(raw), 1))
        walk.feed(raw)
        walk.skip()
        value = msgpack.unpackb(raw, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"it is no msgpack: {type(error).__name__}: {error}") from error
    if is_deeper(raw, value, MAX_DEPTH):
        raise WireError(f"it is nested more than {MAX_DEPTH} deep")
    return value


def is_deeper(packed: bytes, value: Any, depth: int) -> bool:
    """Whether `value`, whose msgpack is `packed`, has lists and maps within each other more than `depth` deep."""
    # Only what has so many first bytes of lists and maps can be deep: most need no second look.
    if len(packed.translate(None, _OTHERS)) <= depth:
        return False
    level = [value]
    for _ in range(depth + 1):
        level = [item for node in level if isinstance(node, (list, dict)) for item in _items(node)]
    return bool(level)


def _items(node: list[Any] | dict[Any, Any]) -> Any:
    return node.values() if isinstance(node, dict) else node
