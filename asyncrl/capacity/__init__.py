"""The planner of `asyncrl plan`: a simulation of a run at measured rates forecasts its speed on other GPUs.

This room keeps none of the nine promises. It simulates the real replay, so that a forecast has the age bound, the
samplers and the eviction of a run.

In reading order: `description.py` (rates and sizes), `measured.py` (both, read out of a run), `simulation.py` with
`replay.py` and `engines.py`, then `splits.py` (numbers of GPUs worth a try) and `command.py`.

May be changed without asking: the notes and columns of the table, and which splits are tried. A rate that is added
needs a default in `description.py`, since people keep descriptions in files.
"""
