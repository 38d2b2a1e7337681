"""The scoring pool: it leases unlabelled trajectories, verifies and scores them, and returns labels.

This package keeps promise 4 of docs/concepts.md: a failure is never a zero. If a rule, verifier or model fails,
worker.py reports the trajectory and the reason to the replay. The replay leases it again, or after too many failures
sets it aside as a dead letter.

judges.py runs users' code in processes that may be killed, so a rule that hangs disturbs nothing else. Groups that a
manager judges are leased, delivered and failed as a whole (promise 5).

In reading order:
- worker.py: the loop of a scorer; scorer.py: the scores of leased trajectories
- labels.py: labels from scores; shaping.py: rewards from scores; stats.py: metrics, and the alarm on reward hacking
- verifier.py, judges.py: rules in separate processes; rules/: one file for each rule; registry.py finds them
- transcript.py, models/: process reward models and outcome models, one file for each family
- managers.py: verl's reward managers, which judge whole groups

A new rule needs a file in rules/ and its name in rules/registry.py; a new family of models needs a file in models/ and
its name in models/registry.py. Discuss a change of an existing score first, since runs train on it.
"""
