"""The actor: takes tickets (permissions to play an episode) from the replay, runs their episodes on an engine with
tools, and delivers trajectories.

This package keeps these promises (the numbers are those of docs/concepts.md):

- 1, nothing lost, nothing trained twice (exactly once): a worker holds a ticket until the replay has acknowledged the
  ticket's outcome, which is then durable (`held_tickets.py`, `worker.py`).
- 4, a failure is never a reward of zero: an episode that fails is reported with its reason (`worker.py`,
  `delivery.py`).
- 7, back-pressure: a worker requests no more tickets than it has free slots (`worker.py`).

Files in reading order: `worker.py` follows a ticket from arrival to acknowledgement, with `held_tickets.py` and
`delivery.py`. `__main__.py` opens a whole actor, and `from_config.py` the runner of its episodes. `rollout_metrics.py`
counts and logs.

The metrics and the scheduling of episodes may change. The order of delivery and acknowledgement may not: promise 1
depends on it.
"""
