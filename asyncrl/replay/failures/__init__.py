"""Handles attempts that fail. It keeps its part of promise 4: a failure is never a reward of zero.

In reading order: `dead_letters.py` keeps failed attempts, and `backoff.py` slows down while everything fails.
`failure_limit.py` ends a run in which too much fails, and `filter_limit.py` a run whose filters refuse every group.
"""
