"""The hub of a run: it hands out tickets (permissions to play an episode), stores trajectories and labels, and plans
the learner's batches.

This package keeps five of the promises in docs/concepts.md:

- 1, exactly once: `store.py` and `committer.py` (each change is one transaction), `server.py` (no answer before the
  commit), `link.py` (requests are repeated until they are answered), `leases.py`.
- 2, bounded age: `admission.py` computes the bound, and `planning.py` evicts groups that are too old. `fresh_starts.py`
  has episodes start with the newest version, `old_groups.py` makes steps wait for groups that would become too old, and
  `old_tokens.py` masks tokens that are.
- 3, same batch after a crash: `planning.py` records each plan before the learner gets the plan.
- 4, a failure is never a reward of zero: `dead_letters.py`, `failure_limit.py`, `backoff.py`. `filter_limit.py` ends a
  run whose filters refuse every group.
- 5, groups are whole: `groups.py`, and `units.py` for groups that are scored as a whole.

It also keeps a part of promise 7, back-pressure: `admission.py` and `pacing.py` limit the episodes, `link.py` the
unanswered requests of a client, and `server.py` the requests that it receives.

In reading order: `admission.py`, `protocol.py` (the requests), `service.py` (what each request does), `tickets.py`,
`labelling.py`, `groups.py`, `planning.py`, `sampling.py`, `fresh_starts.py`, `old_groups.py`, `old_tokens.py`, then
`store.py`, `transaction.py` and `records.py`, then `messages.py`, `committer.py`, `server.py`, `link.py` and
`client.py`. `selection.py` and `cohorts.py` compare what is trained with what was sampled. Only `from_config.py` and
`__main__.py` read the configuration.

You can freely change samplers and filters (`sampling.py`), counters (`counters.py`) and time limits. A change of tables
or records needs a new `FORMAT` in `store.py`, except for new last fields with a default, which older stores lack. A
change of requests needs a new `PROTOCOL` in `wire.py`.
"""
