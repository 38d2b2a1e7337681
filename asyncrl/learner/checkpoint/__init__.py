"""Checkpoints and exports: writes the weights of sharded models to disk, and gathers whole weights on rank 0.

This package keeps its part of two promises in docs/concepts.md:

- Same batch after a crash: a run resumes with exactly the saved weights, moments and counts (`checkpoint.py`,
  `state.py`). A checkpoint appears whole or not at all, and checksums show damage (`files.py`).
- A weight update is all or nothing: a published version has every tensor (`gathering.py`).

Files in reading order:

- `checkpoint.py`: the checkpoints that are kept, restored and removed.
- `progress.py`: the counts and states of a checkpoint that are not tensors.
- `files.py`: writes the files of one checkpoint, and finds damaged files.
- `state.py`: writes and reads tensors, for any number of ranks.
- `gathering.py`: whole tensors for a publish.
- `export.py` and `critic_export.py`: Hugging Face folders. `rounded_adapters.py`: how much of the adapters' change
  rounding leaves in published weights.

You may change threads and the choice of kept checkpoints freely. A change of the files' form needs a new `FORMAT`.
"""
