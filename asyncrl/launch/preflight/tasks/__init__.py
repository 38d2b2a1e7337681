"""The checks of a run's tasks, and the files that are written for the roles.

- `task_files.py`: columns, before torch is loaded
- `row_checks.py`: the list of the checks that read all rows
- `datasets.py`: the files for the roles
- `demonstrations.py`, `prompts.py`, `truths.py` (the ground truths that rules need), `grammars.py`: single rows
- `weights.py`, `held_out.py`: the data sources, and held-out tasks that are also training tasks
- `same_tasks.py`, `same_files.py`: a resumed run has the tasks that it began with
"""
