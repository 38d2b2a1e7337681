"""The combinations of options that cannot work.

`conflicts.py` runs all checks. Every other file has the checks of one section or topic: `actor.py`, `data.py`,
`engine.py`, `learner.py`, `ranks.py`, `replay.py`, `scoring.py` and `deployment.py` (hosts and addresses).

A check gets the sections and values that it compares, and yields `KEY [KEY ...]: FIX`. The first KEY is the one that
the user should change.

`config/refusals.py` adds the values, so that a refusal names the keys, their values, and the fix.
"""
