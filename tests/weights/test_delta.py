import itertools
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncrl.errors import WeightsError, WireError
from asyncrl.weights.delta import SHARED_BYTES, Delta, apply, diff
from asyncrl.weights.manifest import DTYPES, WHOLE, DeltaHeader, Patch, bytes_of, take_snapshot
from tests.weights.fakes import same_bits, some_tensors

pytestmark = pytest.mark.slow

SPECIAL = {"float32": [0x80000000, 0x7FC00001, 0xFFFFFFFF], "bfloat16": [0x8000, 0x7FC1, 0xFFFF]}


@st.composite
def histories(draw):
    """Some versions of the same tensors of any dtypes: any bits, changed nowhere, here and there, or all over."""
    layout = draw(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(0, 700)), max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    versions = [{f"t{i}": _any_bits(rng, dtype, size) for i, (dtype, size) in enumerate(layout)}]
    for density in draw(st.lists(st.sampled_from([0.0, 0.003, 0.1, 0.3, 1.0]), min_size=1, max_size=3)):
        versions.append({name: _changed(rng, tensor, density) for name, tensor in versions[-1].items()})
    return versions


def _any_bits(rng, dtype, size):
    if dtype == "bool":
        return torch.from_numpy(rng.random(size) < 0.5)
    raw = rng.integers(0, 256, size * DTYPES[dtype].itemsize, dtype=np.uint8)
    words = raw.view(f"u{DTYPES[dtype].itemsize}")
    for special in SPECIAL.get(dtype, []):
        words[rng.random(size) < 0.1] = special
    tensor = torch.empty(size, dtype=DTYPES[dtype])
    bytes_of(tensor)[:] = raw
    return tensor


def _changed(rng, tensor, density):
    other = _any_bits(rng, str(tensor.dtype).removeprefix("torch."), len(tensor))
    return torch.where(torch.from_numpy(rng.random(len(tensor)) < density), _bits(other), _bits(tensor)).view(
        tensor.dtype
    )


def _bits(tensor):
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


@given(histories())
def test_any_two_states_round_trip_bit_for_bit_in_one_step_or_in_a_chain(versions):
    before = {name: tensor.clone() for name, tensor in versions[0].items()}
    snapshots = [take_snapshot(i, tensors, 64) for i, tensors in enumerate(versions)]
    first, last = snapshots[0].manifest, snapshots[-1].manifest
    direct = diff(snapshots[0], snapshots[-1])
    assert same_bits(apply(versions[0], first, last, [direct]), versions[-1])
    chain = [diff(old, new) for old, new in itertools.pairwise(snapshots)]
    assert same_bits(apply(versions[0], first, last, chain), versions[-1])
    assert same_bits(versions[0], before), "the base stays as it is"


def two_versions(density=0.01):
    rng = np.random.default_rng(0)
    old = {
        **some_tensors(0),
        "big": _any_bits(rng, "bfloat16", 100_000),
        "same": torch.ones(1 << 20),
    }
    new = {**old, "big": _changed(rng, old["big"], density)}
    return old, take_snapshot(0, old, 64), new, take_snapshot(1, new, 64)


def test_few_changes_are_few_bytes_and_a_large_tensor_that_stays_is_shared():
    old, first, new, second = two_versions()
    step = diff(first, second)
    assert len(step.payload) < 0.05 * old["big"].nbytes
    got = apply(old, first.manifest, second.manifest, [step])
    assert got["same"] is old["same"]
    assert got["scale"] is not old["scale"]
    assert same_bits(got, new)


def test_many_changes_travel_as_they_are():
    old, first, new, second = two_versions(density=0.5)
    step = diff(first, second)
    assert [patch.gap for patch in step.header.patches] == [WHOLE]
    assert len(step.payload) == 200_000
    assert same_bits(apply(old, first.manifest, second.manifest, [step]), new)


def test_a_gap_wider_than_a_block_or_a_byte_is_kept():
    end, block = 1 << 20, 1 << 18
    old = {"a": torch.zeros(end, dtype=torch.int64)}
    for places in ([end - 1], [0, 70_000, end - 1], [block - 1, block, block + 255, block + 511, 3 * block, end - 2]):
        new = {"a": old["a"].clone()}
        new["a"][places] = torch.arange(1, len(places) + 1) - 2
        first, second = take_snapshot(0, old, 64), take_snapshot(1, new, 64)
        assert same_bits(apply(old, first.manifest, second.manifest, [diff(first, second)]), new)


@pytest.mark.parametrize("density", [0.24, 0.26, 1.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_dense_change_takes_less_memory_than_twice_the_tensor(dtype, density):
    elements = 4_000_000
    rng = np.random.default_rng(1)
    old = {"a": _any_bits(rng, dtype, elements)}
    new = {"a": _changed(rng, old["a"], density)}
    first, second = take_snapshot(0, old, 64), take_snapshot(1, new, 64)
    size = first.manifest.nbytes
    step, made = peak_of(lambda: diff(first, second))
    got, applied = peak_of(lambda: apply(old, first.manifest, second.manifest, [step]))
    # A block of 2^18 elements takes up to 10 MB for tensors of any size.
    assert made < 1.2 * size + (10 << 20)
    assert applied < 1.2 * size + (10 << 20)
    assert same_bits(got, new)


def peak_of(call):
    """The result of a call, and the most bytes that Python and NumPy had allocated in it."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4, 8]), st.lists(st.floats(0, 0.6), min_size=1, max_size=4))
@settings(max_examples=20)
def test_changes_of_any_density_over_several_blocks_round_trip(seed, size, densities):
    """Each stretch of half a block has a density of its own, so that counts cross the limit anywhere."""
    rng, stretch = np.random.default_rng(seed), (1 << 17) + 11
    dtype = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}[size]
    old = {"a": _any_bits(rng, dtype, stretch * len(densities))}
    pieces = [_changed(rng, piece, density) for piece, density in zip(old["a"].split(stretch), densities, strict=True)]
    new = {"a": torch.cat([_bits(piece) for piece in pieces]).view(old["a"].dtype)}
    first, second = take_snapshot(0, old, 64), take_snapshot(1, new, 64)
    step = diff(first, second)
    assert step.header.changed == int((_bits(old["a"]) != _bits(new["a"])).sum())
    assert same_bits(apply(old, first.manifest, second.manifest, [step]), new)


def test_a_wrong_base_is_refused():
    old, first, _, second = two_versions()
    step = diff(first, second)
    other = {**old, "scale": old["scale"] + 1}
    with pytest.raises(WeightsError, match="do not lead from the weights here"):
        apply(other, take_snapshot(0, other, 64).manifest, second.manifest, [step])
    with pytest.raises(WeightsError, match="do not lead from the weights here"):
        apply(old, first.manifest, second.manifest, [])


def test_a_base_that_changed_since_is_found_out_by_the_result():
    old, first, _, second = two_versions()
    step = diff(first, second)
    old["big"].view(torch.int16)[5] ^= 1
    with pytest.raises(WeightsError, match="checksum of big"):
        apply(old, first.manifest, second.manifest, [step])


def test_there_is_no_delta_between_other_tensors():
    _, first, new, _ = two_versions()
    del new["scale"]
    with pytest.raises(WeightsError, match="different tensors"):
        diff(first, take_snapshot(1, new, 64))


@given(st.data())
def test_damage_is_an_error_and_never_a_wrong_result(data):
    old, first, new, second = two_versions()
    step = diff(first, second)
    payload, patch = step.payload.copy(), step.header.patches[0]
    fault = data.draw(st.sampled_from(["flip", "count", "gap", "tensor", "nbytes"]))
    if fault == "flip":
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        patch = replace(patch, **{fault: data.draw(st.sampled_from([0, 1, 2, 4, 7, 10**6, 10**12]))})
    damaged = Delta(replace(step.header, patches=(patch,)), payload)
    try:
        got = apply(old, first.manifest, second.manifest, [damaged])
    except (WeightsError, WireError):
        return
    assert same_bits(got, new), "what is let through is right"


def test_a_large_tensor_that_no_patch_changes_must_be_the_one_of_the_version():
    """Such a tensor is shared with the base, and only the manifest says that it changed."""
    large = torch.zeros(SHARED_BYTES, dtype=torch.uint8)
    old, new = take_snapshot(1, {"large": large}, 64), take_snapshot(2, {"large": large + 1}, 64)
    nothing = Delta(DeltaHeader(old.manifest.digest, new.manifest.digest, ()), np.zeros(0, np.uint8))
    with pytest.raises(WeightsError, match="wrong result: the checksum of large differs"):
        apply({"large": large}, old.manifest, new.manifest, [nothing])


def test_a_patch_that_ends_one_element_behind_its_tensor_is_malformed():
    old = take_snapshot(1, {"a": torch.zeros(10, dtype=torch.uint8)}, 64)
    # The first change comes after a gap of 10 elements, which are all that there are.
    data = np.frombuffer(pa.compress(bytes([10, 1]), codec="zstd"), np.uint8)
    target = replace(old.manifest, version=2)
    delta = Delta(DeltaHeader(old.manifest.digest, target.digest, (Patch(0, 1, 1, len(data)),)), data)
    with pytest.raises(WireError, match="reaches element 10 of a, which has 10"):
        apply({"a": torch.zeros(10, dtype=torch.uint8)}, old.manifest, target, [delta])


def test_a_gap_that_one_more_byte_is_needed_for_is_kept():
    for gap in (255, 256, 65_535, 65_536):
        old = {"a": torch.zeros(1 << 17, dtype=torch.uint8)}
        new = {"a": old["a"].clone()}
        new["a"][[0, gap + 1]] = 1
        first, second = take_snapshot(0, old, 64), take_snapshot(1, new, 64)
        assert same_bits(apply(old, first.manifest, second.manifest, [diff(first, second)]), new)
