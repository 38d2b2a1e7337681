"""The ranks of the learner: processes that start together, compute together, and end together.

This room keeps two promises' share of the learner. The sums over ranks are exact (`ranks.py`), and a rank that dies,
hangs or is stuck ends all ranks with a reason, so that a restart resumes (`launcher.py`, `activity.py`). Messages
between hosts need the run's keys, and nothing is unpickled (`rendezvous.py`, `host_store.py`).

Read `ranks.py` (the collective operations), `launcher.py` (starts and watches the ranks of one machine), `activity.py`
(which rank is stuck), `stopping.py` (a stop in the middle of a long pass), then `hosts.py` and `rendezvous.py` (several
machines). `failures.py` counts failures of a step, and `from_config.py` reads the configuration of hosts.

Limits, texts and heartbeats may change freely. Every method of `Ranks` is called by all ranks alike: one call more on
one rank is a deadlock.
"""
