"""The planner of `asyncrl plan`: simulates a run at measured rates to forecast its speed on another number of GPUs.

The simulation runs the code of the real replay. So a forecast follows the age bound, chooses batches and evicts groups
exactly as a run does. None of the nine promises of docs/concepts.md depends on this package.

In reading order: `description.py` (rates and sizes), `measured.py` (rates and sizes from a run), `simulation.py` with
`replay.py` and `engines.py`, then `splits.py` (chooses which numbers of GPUs to simulate) and `command.py`.

You can freely change the notes and columns of the table, and the ways to divide the GPUs that are tried. A new rate
needs a default in `description.py`, since the files that users saved earlier lack this rate.
"""
