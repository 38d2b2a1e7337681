import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.weights.buckets import flatten, plan_buckets, tight_buckets
from asyncrl.weights.manifest import DTYPES, TensorSpec

ENTRIES = st.lists(
    st.builds(
        TensorSpec,
        name=st.text(max_size=3),
        dtype=st.sampled_from(sorted(DTYPES)),
        shape=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    ),
    max_size=12,
    unique_by=lambda entry: entry.name,
)


@pytest.mark.slow
@given(ENTRIES, st.integers(1, 2000))
def test_buckets_hold_every_tensor_once_in_order_without_overlap_and_within_the_bound(entries, bucket_bytes):
    buckets = plan_buckets(entries, bucket_bytes)
    assert [entry for bucket in buckets for entry in bucket.entries] == entries
    for bucket in buckets:
        assert bucket.nbytes <= bucket_bytes or len(bucket.entries) == 1
        flat = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        views = bucket.views(flat)
        assert [(n, t.dtype, tuple(t.shape)) for n, t in views.items()] == [
            (entry.name, DTYPES[entry.dtype], entry.shape) for entry in bucket.entries
        ]
        for tensor in views.values():
            tensor.view(-1).view(torch.uint8).add_(1) if tensor.numel() else None
        assert int(flat.sum()) == sum(entry.nbytes for entry in bucket.entries)
        assert int(flat.max() if len(flat) else 0) <= 1


@pytest.mark.slow
@given(ENTRIES, st.integers(1, 2000))
def test_tight_buckets_have_no_gaps_and_every_tensor_lies_where_its_dtype_may_begin(entries, bucket_bytes):
    tensors = {entry.name: torch.ones(entry.shape, dtype=DTYPES[entry.dtype]) for entry in entries}
    buckets = tight_buckets(entries, bucket_bytes)
    assert sorted(entry.name for bucket in buckets for entry in bucket.entries) == sorted(tensors)
    for bucket in buckets:
        start = 0
        for entry, place in bucket.placed():
            assert place == start
            assert start % DTYPES[entry.dtype].itemsize == 0
            start += entry.nbytes
        assert start == bucket.nbytes
        assert all(torch.equal(view, tensors[name]) for name, view in bucket.views(flatten(bucket, tensors)).items())


@pytest.mark.slow
@given(ENTRIES, st.integers(1, 2000))
def test_tensors_of_one_dtype_and_group_share_a_bucket(entries, bucket_bytes):
    tensors = {entry.name: torch.ones(entry.shape, dtype=DTYPES[entry.dtype]) for entry in entries}
    buckets = tight_buckets(entries, bucket_bytes, lambda name: name[:1])
    groups = [{(entry.dtype, entry.name[:1]) for entry in bucket.entries} for bucket in buckets]
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert sorted(entry.name for bucket in buckets for entry in bucket.entries) == sorted(tensors)
    assert all(bucket.nbytes <= bucket_bytes or len(group) == 1 for bucket, group in zip(buckets, groups, strict=True))


def test_tensors_that_fill_a_bucket_to_the_last_byte_share_it():
    entries = [TensorSpec(name, "uint8", (64,)) for name in "abc"]
    assert [len(bucket.entries) for bucket in plan_buckets(entries, 128)] == [2, 1]
