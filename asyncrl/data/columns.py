"""Examines the types of Arrow columns."""

from __future__ import annotations

import pyarrow as pa

_PLAIN = {
    kind.id
    for kind in (
        *(pa.null(), pa.bool_(), pa.string(), pa.large_string(), pa.binary()),
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        *(pa.float32(), pa.float64()),
    )
}


def fields(kind: pa.DataType) -> list[str]:
    """The names of the fields of a struct; empty for other types."""
    return [kind.field(index).name for index in range(kind.num_fields)] if pa.types.is_struct(kind) else []


def is_struct(kind: pa.DataType) -> bool:
    """True for a struct type, and for the type of a column that has only nulls."""
    return bool(pa.types.is_struct(kind) or pa.types.is_null(kind))


def is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def is_plain(kind: pa.DataType) -> bool:
    """True if a message can carry the Python values of a column of this type unchanged."""
    level = [kind]
    while level:
        nested = [each for each in level if pa.types.is_struct(each) or is_list(each)]
        if any(each.id not in _PLAIN for each in level if each not in nested):
            return False
        level = [each.field(index).type for each in nested for index in range(each.num_fields)]
    return True


def depth(kind: pa.DataType) -> int:
    """The nesting depth of a type. A plain type has depth 1."""
    found, level = 0, [kind]
    while level:  # Not recursive: a file may be nested deeper than Python's stack.
        found, level = found + 1, [each.field(index).type for each in level for index in range(each.num_fields)]
    return found
