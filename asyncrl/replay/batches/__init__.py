"""Decides what the learner trains, and when. It keeps its part of promises 2 and 3.

In reading order:

- `planning.py` makes and records plans, and evicts what is too old. `sampling.py` chooses groups, and `members.py`
  reads their trajectories.
- `old_groups.py` lets the learner wait for groups that would become too old, and `old_tokens.py` masks old tokens.
- `learner_waits.py` measures the waits. `selection.py` and `cohorts.py` compare what is trained with what was sampled.
"""
