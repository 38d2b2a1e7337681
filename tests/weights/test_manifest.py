import itertools

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WeightsError, WireError
from asyncrl.weights.manifest import (
    DTYPES,
    MAX_CHUNK_BYTES,
    Manifest,
    TensorSpec,
    places,
    take_snapshot,
)
from asyncrl.wire import Message, decode, encode
from tests.weights.fakes import shapes, some_tensors

SPECS = st.builds(
    TensorSpec,
    name=st.text(max_size=8),
    dtype=st.sampled_from(sorted(DTYPES)),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    checksum=st.integers(0, 2**64 - 1),
)
MANIFESTS = st.builds(
    Manifest,
    version=st.integers(0, 100),
    chunk_bytes=st.integers(1, 50),
    tensors=st.lists(SPECS, max_size=6, unique_by=lambda spec: spec.name).map(tuple),
)


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 20))
def test_ranges_of_bytes_cover_every_byte_of_the_arrays_once_in_order(sizes, chunk_bytes):
    edges, covered = list(itertools.accumulate(sizes, initial=0)), []
    for start in range(0, edges[-1], chunk_bytes):
        found = list(places(edges, start, min(start + chunk_bytes, edges[-1])))
        assert all(0 <= where.start < where.stop <= sizes[index] for index, where in found)
        covered += [(index, byte) for index, where in found for byte in range(where.start, where.stop)]
    assert covered == [(index, byte) for index, size in enumerate(sizes) for byte in range(size)]


def received(body):
    """A manifest as a receiver reads it."""
    return decode(encode(Message("manifest", 1, body))).read(msgspec.msgpack.Decoder(Manifest))


@pytest.mark.slow
@given(MANIFESTS)
def test_a_manifest_survives_its_message(manifest):
    assert received(manifest) == manifest
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest) == manifest


JUNK = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.fixed_dictionaries({"version": JUNK, "chunk_bytes": JUNK, "tensors": st.lists(JUNK, min_size=1)}) | JUNK)
def test_a_malformed_manifest_is_a_wire_error_and_nothing_else(body):
    with pytest.raises(WireError):
        received(body)


SPEC, PATCH = ["a", "float32", [2], 0], [0, 1, 1, 5]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tensors": [SPEC, SPEC]},
        {"tensors": [["a", "float33", [2], 0]]},
        {"tensors": [["a", "float32", [-1], 0]]},
        {"chunk_bytes": 0},
        {"chunk_bytes": MAX_CHUNK_BYTES + 1},
        {"deltas": [{"base": "a", "result": "b"}]},
        {"deltas": [{"base": 1, "result": "b", "patches": []}]},
        *(
            {"deltas": [{"base": "a", "result": "b", "patches": [patch]}]}
            for patch in ([0, 1, 3, 5], [0, -1, 1, 5], ["0", 1, 1, 5], [0, 1, 1, 9])
        ),
    ],
)
def test_what_no_publisher_of_ours_offers_is_a_wire_error(wrong):
    right = {"version": 1, "chunk_bytes": 8, "tensors": [SPEC]}
    right["deltas"] = [{"base": "a", "result": "b", "patches": [PATCH]}]
    assert received(right).nbytes == 8
    with pytest.raises(WireError):
        received(right | wrong)


@pytest.mark.parametrize("fault", ["missing", "unknown", "misshapen"])
def test_names_and_shapes_must_be_exactly_those_of_the_engine(fault):
    manifest = take_snapshot(3, some_tensors(), 64).manifest
    expected = shapes(some_tensors())
    manifest.check_covers(expected)
    match fault:
        case "missing":
            expected["another"] = (2,)
        case "unknown":
            del expected["scale"]
        case "misshapen":
            expected["layer.weight"] = (7, 13)
    with pytest.raises(WeightsError, match=f"version 3 .* 1 {fault}"):
        manifest.check_covers(expected)


def test_a_snapshot_shares_the_memory_of_contiguous_tensors():
    tensor = torch.zeros(6)
    snapshot = take_snapshot(0, {"a": tensor}, 64)
    tensor[0] = 1.0
    assert snapshot.buffers[0].any()
