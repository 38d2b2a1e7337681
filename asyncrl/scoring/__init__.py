"""The scorers: they lease unlabelled trajectories from the replay, score them, and return labels.

This package keeps promise 4 of docs/concepts.md: a failure is never a zero. If a rule or model fails, worker.py
reports the trajectory and the reason to the replay. The trajectory can then be leased again. After too many failures
the replay sets it aside as a dead letter.

judges.py runs users' code in processes that can be killed, so a rule that hangs disturbs nothing else. A group that a
reward manager judges as a whole is leased as a whole. Either all its members get labels, or all fail (promise 5).

In reading order:
- worker.py: the loop of a scorer; scorer.py: the scores of leased trajectories
- labels.py: labels from scores; shaping.py: rewards from scores; stats.py: metrics, and the alarm on reward hacking
- verifier.py, judges.py, judge_program.py, pipe.py: rules in separate processes; answers.py: the texts that rules read
- rules/: one file for each rule (rules/registry.py finds a rule by its name); asserts/: unit tests of a program
- models/: process reward models and outcome models, one file for each family; transcript.py: the texts that they read
- managers.py: verl's reward managers, which judge whole groups; step_rewards.py: a user's function that rewards steps
- samples.py: scored episodes in the log

A new rule needs a file in rules/ and its name in rules/registry.py; a new family of models needs a file in models/ and
its name in models/registry.py. Discuss a change of an existing score first, since runs train on it.
"""
