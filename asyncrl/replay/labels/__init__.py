"""Gets labels for trajectories. It keeps its part of promises 1 and 5.

In reading order: `labelling.py`, `leases.py` (a silent worker loses its work), `units.py` (what is scored together) and
`label_needs.py` (the scores that the algorithm needs).
"""
