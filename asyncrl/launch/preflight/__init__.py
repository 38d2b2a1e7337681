"""The checks that `asyncrl train` makes, and the files that it prepares, before it starts any role. A run that is
refused here has cost little.

`preflight.py` has the list of all checks. `tasks/row_checks.py` has the part of this list that reads all rows. The
user's own code runs in child processes: first `importing.py` imports the user's modules, then `trial.py` starts the
program `trying.py`, which calls them. `problems.py` collects the problems that checks find.

Each other file or folder has the checks of one topic. A check takes sections of the configuration:

- The configuration: `paths.py` (names of files, folders and code), `algorithm.py`, `learning.py`, `epochs.py`, and
  `settled.py` (after the placement).
- Models and machines: `models.py`, `hub.py`, `machine.py`, `servers.py`.
- Settings without an effect: `unused.py`.
- `tasks/`: the tasks, and files for the roles.
- `episodes/`: tools, environments and agents, and one whole episode.
"""
