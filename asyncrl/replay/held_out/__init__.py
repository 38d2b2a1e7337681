"""Evaluations on the held-out tasks: `evaluation.py` has their episodes, `tally.py` their sums, and `estimates.py`
pass@k."""
