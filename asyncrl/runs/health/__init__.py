"""Judges the health of a run, in sentences that all views show.

In reading order:
- `evidence.py`: the rows of metrics by which a run is judged
- `trends.py`: changes that are larger than the noise
- `finding.py`: what a rule finds
- `drift.py`: the rules about the distance between policies
- `health.py`: the other rules, and the order of all
"""
