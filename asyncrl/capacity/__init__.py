"""The planner of `asyncrl plan`: simulates a run at measured rates to forecast its speed on other GPUs.

The simulation contains the real replay, so that a forecast has the age bound, the samplers and the eviction of a run.
None of the nine promises of docs/concepts.md depends on this package.

In reading order: `description.py` (rates and sizes), `measured.py` (rates and sizes from a run), `simulation.py` with
`replay.py` and `engines.py`, then `splits.py` (chooses which numbers of GPUs to simulate) and `command.py`.

You can freely change the notes and columns of the table, and the divisions of GPUs that are tried. A new rate needs a
default in `description.py`, since users keep descriptions in files.
"""
