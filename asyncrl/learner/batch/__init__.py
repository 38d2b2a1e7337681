"""Batches: from a recorded plan to the packed forward passes of one rank.

This room keeps a part of one promise: packed sequences compute the same as single ones, and counts are global, so that
any split into passes and ranks gives the same loss (`packing.py`, `prefixes.py`, `minibatch.py`). Groups stay whole,
since a plan has whole groups and the schedule leaves none out (`schedule.py`).

Read `batches.py` (the sources of plans), `fetching.py` (a plan becomes a batch, one step ahead), `local_batch.py` and
`packing.py` (the tensors), `schedule.py` with `bins.py` and `bundles.py` (which rank computes which sequences),
`prefixes.py` (shared prompts), `images.py`, and `keeping.py` (episodes for people to read).

A faster schedule, other heuristics of bins, and the choice of kept episodes may change freely: the tests of
`schedule.py` list its properties. Changes of `packing.py` must keep the parity tests of tests/learner.
"""
