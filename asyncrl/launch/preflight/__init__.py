"""The checks of `asyncrl train`, and the files that it prepares, before it starts any process. A run that is refused
here has cost little.

`preflight.py` has the list of all checks, and `row_checks.py` the part of it that reads all rows. The user's own code
runs in a child process: `trial.py` is the starter's side, and `trying.py` the program. Before that, `importing.py`
imports the user's modules in a child process. `problems.py` collects the problems that checks find.

Each other file has the checks of one topic, which take sections of the configuration:

- Before torch is loaded: `paths.py` (names of files, folders and code), `task_files.py` (columns).
- The algorithm and the learner: `algorithm.py`, `learning.py`, `epochs.py`, `settled.py` (after the placement).
- Models and machines: `models.py`, `hub.py`, `machine.py`, `servers.py`.
- Tasks: `datasets.py` and `demonstrations.py` (files for the roles), `prompts.py`, `weights.py`, `held_out.py`,
  `same_tasks.py`, `same_files.py`, `truths.py` (of rules), `grammars.py`.
- Episodes: `play.py`, `creation.py` (tools and environments), `episode.py` (one whole episode), `made_up.py` (arguments
  of calls), `own_code.py` (the user's code that failed).
"""
