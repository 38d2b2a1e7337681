"""Turns a recorded plan into a batch, and a batch into the packed forward passes of one rank.

This package keeps its part of two promises in docs/concepts.md:

- The learner's math is exact: packed sequences give the same results as unpacked ones (`packing.py`, `prefixes.py`),
  and losses are divided by the counts of all ranks together (`minibatch.py`).
- Same batch after a crash: a batch follows the recorded plan, even if it is fetched ahead (`fetching.py`).

Files in reading order:

- `batches.py`: the sources of plans. `fetching.py`: a plan becomes a batch.
- `local_batch.py` and `packing.py`: the tensors of a batch and of a pass.
- `schedule.py`, `bins.py`, `bundles.py`: assign sequences to ranks and passes.
- `prefixes.py` and `images.py`: shared prompts and images. `keeping.py`: episodes that are kept for people to read.
- `entropy_sample.py`: the tokens whose entropy is measured.

You may change the schedule and the choice of kept episodes freely. After a change of `packing.py`, the parity tests in
tests/learner must still pass: they compare packed with unpacked sequences.
"""
