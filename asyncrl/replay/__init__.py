"""The hub of a run: it hands out tickets (permissions to play an episode), stores trajectories and labels, and plans
the learner's batches.

This package keeps five of the promises in docs/concepts.md:

- 1, exactly once: `tickets.py` takes each trajectory once, by its id. In `store/` each change is one transaction.
  `committer.py` and `server.py` commit before they answer, `client/link.py` repeats a request until it is answered, and
  `labels/leases.py` gives work to one worker at a time.
- 2, bounded age: `starts/admission.py` computes the bound, and `batches/planning.py` evicts groups that are too old.
  `starts/fresh_starts.py` has episodes start with the newest version, `batches/old_groups.py` makes steps wait for
  groups that would become too old, and `batches/old_tokens.py` masks tokens that are too old.
- 3, same batch after a crash: `batches/planning.py` records each plan before the learner gets the plan.
- 4, a failure is never a reward of zero: `failures/`.
- 5, groups are whole: `groups.py`, and `labels/units.py` for groups that are scored as a whole.

It also keeps a part of promise 7, back-pressure: `starts/` limits the episodes. `client/link.py` limits the unanswered
requests of a client, and `server.py` limits the requests that it receives.

In reading order: `starts/admission.py`, `protocol.py` (the requests), `service.py` (what each request does),
`tickets.py`, `groups.py`, `labels/`, `batches/`, `store/`, then `messages.py`, `server.py`, `committer.py`,
`call_thread.py` and `client/`. The rest are `failures/`, `held_out/`, `stages.py` (spans), `counters.py` and
`stored.py` (reads all shards of a run). `settings.py` has the settings of a shard. Only `from_config.py` and
`__main__.py` read the configuration.

You can freely change samplers and filters (`batches/sampling.py`), counters (`counters.py`) and time limits. A change
of tables or records needs a new `FORMAT` in `store/store.py`. A field that is added at the end of a record, with a
default, needs none: records of older stores get the default. A change of requests needs a new `PROTOCOL` in `wire.py`.
"""
