"""The part of a replay that is on disk: one LMDB store per shard.

It keeps its part of promise 1, exactly once: each change is one transaction. In reading order:

- `store.py`, `transaction.py` and `records.py`
- `images.py`: images of trajectories
- `changes.py` and `pinned.py`: changes of the configuration, and values that never change
- `readers.py`: other processes that read the store
- `environment.py`: damaged files and full disks
"""
