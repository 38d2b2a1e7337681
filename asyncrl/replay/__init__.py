"""The hub of a run: it hands out tickets, stores trajectories and labels, and plans the learner's batches.

This room keeps five promises:

- 1, exactly once: `store.py` (one transaction for all of a change), `server.py` (no answer before the commit),
  `link.py` (requests are sent again until they are answered), `leases.py`.
- 2, bounded age: `admission.py` is the bound, and `planning.py` evicts groups that are too old.
- 3, same batch after a crash: `planning.py` records a plan before it hands it out.
- 4, a failure is never a zero: `dead_letters.py`, `failure_limit.py`, `backoff.py`.
- 5, groups are whole: `groups.py`, and `units.py` where a group is scored as a whole.

Its part of promise 7, back-pressure: `admission.py`, `pacing.py`, the credits of `link.py`, the bounds of `server.py`.

In reading order: `admission.py`, `protocol.py`, `service.py` (what each request does), `tickets.py`, `labelling.py`,
`groups.py`, `planning.py`, `sampling.py`, then `store.py`, `transaction.py` and `records.py`, then `server.py`,
`link.py` and `client.py`. `from_config.py` is the door.

May be changed without asking: a sampler or a filter (`sampling.py`), what is counted (`counters.py`), time limits. A
change of tables or records needs a new `FORMAT` in `store.py`, and a change of requests a new `PROTOCOL` in `wire.py`.
"""
