import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WeightsError, WireError
from asyncrl.weights.manifest import (
    DTYPES,
    MAX_TOGETHER,
    Manifest,
    TensorSpec,
    chunks,
    read_manifest,
    take_snapshot,
    together,
)
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


@given(MANIFESTS)
def test_chunks_cover_every_byte_once_in_order_and_none_is_too_large(manifest):
    found = list(chunks((spec.nbytes for spec in manifest.tensors), manifest.chunk_bytes))
    covered = [(c.part, byte) for c in found for byte in range(c.start, c.stop)]
    assert covered == [(i, byte) for i, spec in enumerate(manifest.tensors) for byte in range(spec.nbytes)]
    assert all(0 < c.stop - c.start <= manifest.chunk_bytes for c in found)


@given(MANIFESTS, st.lists(st.integers(0, 3), max_size=200))
def test_chunks_are_asked_for_together_in_order_and_as_many_as_may(manifest, sizes):
    limit = manifest.chunk_bytes
    pieces = list(chunks([*sizes, *(spec.nbytes for spec in manifest.tensors)], limit))
    groups = list(together(pieces, limit))
    assert [piece for group in groups for piece in group] == pieces
    size = [sum(piece.stop - piece.start for piece in group) for group in groups]
    assert all(each <= limit and 0 < len(group) <= MAX_TOGETHER for each, group in zip(size, groups, strict=True))
    for (each, group), after in zip(zip(size, groups, strict=True), groups[1:], strict=False):
        assert len(group) == MAX_TOGETHER or each + after[0].stop - after[0].start > limit


@given(MANIFESTS)
def test_a_manifest_survives_its_message(manifest):
    assert read_manifest(manifest.body()) == manifest


JUNK = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries({"version": JUNK, "chunk_bytes": JUNK, "tensors": st.lists(JUNK, min_size=1) | JUNK}) | JUNK
)
def test_a_malformed_manifest_is_a_wire_error_and_nothing_else(body):
    try:
        read_manifest(body)
    except WireError:
        pass
    else:
        assert body["tensors"] == []


def test_a_manifest_that_names_a_tensor_twice_is_refused():
    spec = TensorSpec("a", "float32", (2,), 0)
    with pytest.raises(WireError, match="twice"):
        read_manifest(Manifest(1, 10, (spec, spec)).body())


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
