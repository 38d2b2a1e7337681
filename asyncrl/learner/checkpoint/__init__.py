"""Checkpoints and exports: the weights of sharded models on disk, and whole on rank 0.

This room keeps a part of two promises. A run that resumes continues with exactly the saved weights, moments and counts
(`checkpoint.py`, `state.py`), and a published version has every tensor (`gathering.py`). A checkpoint or an export
appears whole or not at all, and damage is found by checksums (`files.py`).

Read `checkpoint.py` (what is kept, restored and removed), `files.py` (one checkpoint on its way to the disk),
`state.py` (tensors to files and back, for any number of ranks), `gathering.py` (whole tensors for a publish), and
`export.py` with `critic_export.py` (Hugging Face folders).

Times, threads and which checkpoints are kept may change freely. A change of the files needs a new `FORMAT`.
"""
