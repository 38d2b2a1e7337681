"""msgpack from strangers costs no more than it has bytes, and is never deep."""

from __future__ import annotations

import contextlib
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WireError
from asyncrl.unpacking import MAX_DEPTH, unpack


def nested(depth: int, leaf: Any = None) -> Any:
    return [nested(depth - 1, leaf)] if depth else leaf


@pytest.mark.parametrize(
    "packed",
    [
        (b"\xdd" + (500_000).to_bytes(4, "big")) * 500 + b"\xc0" * 500_000,
        (b"\xdc\xff\xff") * 900 + b"\xc0" * 70_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\xa1a",
        b"\xdb\xff\xff\xff\xffabc",
        b"\xc6\xff\xff\xff\xffabc",
    ],
)
def test_memory_is_taken_for_what_came_and_not_for_what_is_announced(packed: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            unpack(packed)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(packed) + 100_000


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 500, 1000, 1020, 5000])
def test_what_is_too_deep_to_be_shown_or_stored_is_refused(depth: int) -> None:
    with pytest.raises(WireError):
        unpack(b"\x91" * depth + b"\xc0")
    with pytest.raises(WireError):
        unpack(b"\x81\xa1a" * depth + b"\xc0")


def test_what_is_wide_or_has_bytes_of_containers_in_its_text_is_taken() -> None:
    wide = [{"a": [index, {}]} for index in range(1000)]
    assert unpack(msgpack.packb(wide)) == wide
    assert unpack(msgpack.packb(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    assert unpack(msgpack.packb("\u0708" * 1000)) == "\u0708" * 1000


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\x90\x90", b"\xa1\xff", b"\x81\x01\x02", b"\xc7\x05\x05aaaaa"])
def test_what_is_not_one_plain_value_is_refused(packed: bytes) -> None:
    with pytest.raises(WireError):
        unpack(packed)


@given(st.binary(max_size=60))
def test_noise_is_a_value_or_refused(noise: bytes) -> None:
    with contextlib.suppress(WireError):
        unpack(noise)
