"""Plain values and typed structs in msgpack, and checks of what another process has sent.

Plain values are text, numbers, bytes, null, lists, and maps whose keys are text. msgpack has no integers of more than
64 bits, so longer integers are encoded as an extension type. Characters that UTF-8 cannot encode are replaced.
"""

from __future__ import annotations

from collections.abc import Collection
from types import NoneType
from typing import Any

import msgspec

from asyncrl.errors import WireError
from asyncrl.text import encodable

MAX_DEPTH = 100
"""The deepest nesting of lists and maps in a body."""
FEW_LISTS = 1000
"""`check_keys` skips a body in which at most this many bytes could be the first byte of a list."""
LARGE_INTEGER = 1
"""The code of msgpack's extension type for an integer of more than 64 bits: two's complement, big endian."""
MAX_INTEGER_BYTES = 1700
"""The bytes of the largest such integer. Python cannot convert integers of more than 4300 digits to text."""
JSON_TYPES = (str, int, float, bool, NoneType)
_SCALARS = (*JSON_TYPES, bytes)
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


def _float(value: Any) -> float:
    """Convert numpy's float64, a subclass of float that msgspec does not accept. Raises TypeError: the value has
    another type."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} {value!r:.50} is not a plain value")


def _large_integer(code: int, data: memoryview) -> int:
    if code != LARGE_INTEGER or len(data) > MAX_INTEGER_BYTES:
        raise ValueError(f"an extension value {code} of {len(data)} bytes is not supported")
    return int.from_bytes(data, "big", signed=True)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder for a type with user values, whose integers may have more than 64 bits."""
    return msgspec.msgpack.Decoder(kind, ext_hook=_large_integer)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_float)
_NODE = msgspec.msgpack.Decoder(dict[str, msgspec.Raw] | list[msgspec.Raw])
_LISTS = {*range(0x90, 0xA0), 0xDC, 0xDD}
_LARGE_MAPS = {0xDE, 0xDF}
_LISTS_AND_MAPS = {*_LISTS, *range(0x80, 0x90), *_LARGE_MAPS}
_NO_LISTS = bytes(set(range(256)) - _LISTS)


def pack(value: Any, what: str) -> bytes:
    """A typed or plain value in msgpack. Raises WireError, which names `what`: the value cannot be encoded."""
    try:
        try:
            return _ENCODER.encode(value)
        except OverflowError:
            return _ENCODER.encode(_with_large_integers(encodable(to_plain(value))))
        except UnicodeEncodeError:
            return _ENCODER.encode(encodable(to_plain(value)))
    except (TypeError, OverflowError, RecursionError) as error:
        raise WireError(f"{what} cannot be encoded: {error}") from error


def _with_large_integers(value: Any) -> Any:
    """The value with large integers as extension values. Raises OverflowError: an integer has too many digits."""
    match value:
        case int() if not -(1 << 63) <= value < 1 << 64:
            if (size := value.bit_length() // 8 + 1) > MAX_INTEGER_BYTES:
                raise OverflowError(f"an integer has {size} bytes; at most {MAX_INTEGER_BYTES} can be sent")
            return msgspec.msgpack.Ext(LARGE_INTEGER, value.to_bytes(size, "big", signed=True))
        case dict():
            return {name: _with_large_integers(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_with_large_integers(inner) for inner in value]
    return value


def check_keys(packed: bytes | msgspec.Raw) -> None:
    """Raises MsgspecError or WireError: a map in `packed` has a key that is not text, or `packed` is nested too deep.

    A malicious sender can give one map thousands of keys that are lists, all with the same hash. Decoding this map
    would take minutes. A few such keys are harmless, and `check_plain` refuses them.
    """
    raw = bytes(packed)
    if len(raw.translate(None, _NO_LISTS)) <= FEW_LISTS or not any(map(raw.__contains__, _LARGE_MAPS)):
        return
    level: list[Any] = [packed]
    for _ in range(MAX_DEPTH + 1):
        nodes = [_NODE.decode(each) for each in level if memoryview(each)[0] in _LISTS_AND_MAPS]
        if not nodes:
            return
        level = [inner for node in nodes for inner in _items(node)]
    raise WireError(f"it is nested more than {MAX_DEPTH} deep")


def check_plain(value: Any, max_depth: int = MAX_DEPTH, scalars: Collection[type] = _SCALARS) -> None:
    """Raises WireError: `value` is not plain, or is nested more than `max_depth` deep.

    Plain values are `scalars` (by default text, numbers, bytes and null), lists, and maps whose keys are text.
    """
    level = [value]
    for _ in range(max_depth + 1):
        level = [inner for node in level if type(node) not in scalars for inner in _items(node)]
        if not level:
            return
    raise WireError(f"it is nested more than {max_depth} deep")


def _items(node: Any) -> Any:
    if isinstance(node, dict):
        if not all(type(name) is str for name in node):
            raise WireError(f"a map has a key that is not a text: {list(node)!r:.100}")
        return node.values()
    if isinstance(node, (list, tuple)):
        return node
    raise WireError(f"{type(node).__name__} {node!r:.50} is not a plain value")


def to_plain(noun: Any) -> Any:
    """A typed struct or data type as plain values."""
    return msgspec.to_builtins(noun, builtin_types=(bytes,), enc_hook=_float)
