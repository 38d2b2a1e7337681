"""The start of a run: checks before anything starts, the placement of processes, their launch and supervision.

This package helps to keep these promises:

- 1, nothing lost, nothing trained twice: `supervisor.py` starts killed roles again, `ownership.py` lets only one
  process own a run's folder, and `survivors.py` ends the processes that an earlier launcher of the run left running.
- 3, the same batch after a crash: `claim.py` refuses to resume a run if an option that a run must keep has another
  value, and `preflight/tasks/same_tasks.py` does so if the tasks have changed.
- 8, closed by default: `addresses.py` makes keys for a run that other machines can reach.

In reading order: `local.py` (`asyncrl train`, from the checks to the end), `claim.py` (whether a run may resume);
`preflight/preflight.py` (all checks, one list), `placement/placement.py` (which process has which GPUs), `launcher.py`
with `hosts/`, `ray/` and `slurm/`, `addresses.py`, `supervisor.py`. `autoscale.py` and `scaling.py` change a running
run, and `doctor/` checks a host.

Supporting files:

- `plan.py`, `resume.py`, `stop.py`: `asyncrl train --plan`, `asyncrl resume` and `asyncrl stop`.
- `processes.py`, `role_process.py`, `process_records.py`: the commands of roles, their processes, and the file
  `processes.json`.
- `run_folder.py`, `start_warnings.py`: the folder that an earlier start left, and the warnings of the present start.

You can freely change a check of `preflight/`, a rule of `autoscale.py`, or a diagnosis of `doctor/`. Be careful with
the rules of the placement: all launchers use them, and a run that resumes is placed again. So a change of these rules
moves its processes.
"""
