"""Judges the health of a run, in sentences that all views show.

In reading order:
- `evidence.py`: the rows of metrics by which a run is judged
- `trends.py`: changes that are larger than the noise
- `health.py`: the rules
"""
