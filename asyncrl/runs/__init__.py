"""Reads and shows runs: one reader of a run's folder, and one file for each view.

Views read a run's folder through `run.py`, and only this file opens a run's stores. They look for a run through
`finding.py`. The run may be running or have ended, and its folder may be a copy. No promise of docs/concepts.md depends
on this package, but its views show whether the promises hold.

Only `requeue`, `discard` and `skip-plan` of `asyncrl inspect` change a run.

In reading order:

- `run.py`: the reader of a run. `finding.py`: the search for a run. `lines.py`: the reader of files that grow.
  `kept.py`: the reader of kept episodes. `processes.py`: the file `processes.json`.
- `from_config.py`, `settings.py`: the reader of a run's configuration, and the values that views need from it.
- `state/`: the state of a run now, its chain of waits (which role waits for which), and what to change.
- `health/`: rules that judge the health of a run, in sentences that all views show.
- `progress.py`, `standstill.py`, `terminal.py`: the table of a run on its own terminal. `live_rows.py`: rows that
  change in place.
- `table.py`: many runs in one table, with the keys in which they differ.
- `summary.py`, `summary_text.py`: the summary of a run, and its lines for people.
- `card.py`, `environment.py`: the model card, and the hardware and versions of a run.
- `fine_tuning.py`: the same views for a run of `asyncrl sft`.
- `inspect/`, `report/`, `trace/`: each of them is a command. The command `compare` is in `report/`.

Facts that several views show:

- `pace.py`, `elapsed.py`: how many steps are done, and for how long a run has run.
- `shares.py`: the shares of idle time. `scorers.py`: the scorers to which metrics of workers belong.
- `failures.py`, `role_errors.py`: failures by their reasons, and the errors in logs.
- `decoding.py`: token ids as text.

Texts, tables and plots may change without asking. The keys of `--json` and of `summary.json`, and the columns of the
exported Parquet files, change only with a line in CHANGELOG.md.
"""

from asyncrl.runs.kept import KeptEpisodes

__all__ = ["KeptEpisodes"]
