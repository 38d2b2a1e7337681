"""Decides which episodes may start, and when. It keeps its part of promise 2, bounded age, and of promise 7.

In reading order: `admission.py` (the age bound), `pacing.py` (no further ahead of the learner than useful),
`fresh_starts.py` (the version with which an episode starts), `feed.py` (the next task) and `ending.py` (the last step).
"""
