"""The ranks of the learner: processes that start together, compute together, and end together.

This package keeps its part of two promises in docs/concepts.md:

- The learner's math is exact: sums over ranks do not depend on their number (`ranks.py`).
- Closed by default: hosts connect with the run's keys, and nothing is unpickled (`rendezvous.py`, `host_store.py`).

Files in reading order:

- `ranks.py`: the collective operations. `joining.py`: how ranks connect and form groups.
- `launcher.py`: starts and watches the ranks of one machine. `activity.py` finds a stuck rank.
- `stopping.py`: a stop in the middle of a long pass.
- `hosts.py` and `rendezvous.py`: several machines.
- `determinism.py`: training that repeats bit for bit. `failures.py`: the failures of a step, over restarts.

You may change limits, texts and heartbeats freely. All ranks must call the methods of `Ranks` in the same order: an
additional call on one rank is a deadlock.
"""
