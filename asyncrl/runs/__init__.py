"""Everything that is read of a run: one reader of its folder, and one view a file.

`run.py` is the only reader, and `finding.py` the only finder: a view that needs more of a run gets it there. A run may
be running, have ended, or be a copy. None of the nine promises is kept here. The views show whether they hold, and only
three subcommands of `asyncrl inspect` change a run, through its replay.

In reading order:

- `run.py`, `finding.py`, `lines.py`, `kept.py`: the reader, the finder, rows of growing files, kept episodes.
- `from_config.py`, `settings.py`: the door to a run's configuration, and the values that views get of it.
- `status.py`, `situation.py`, `stalls.py`, `advice.py`, `watch.py`: the state of a run now, its chain of waits (such as
  for staleness, or for back-pressure), and what to change.
- `progress.py`, `warnings.py`, `standstill.py`, `terminal.py`: the table of a run on its own terminal.
- `summary.py`, `card.py`, `environment.py`: what stays of a run at its end.
- `inspect/`, `report/`, `trace/`: a command each, with `compare` in `report/`.

Texts, tables and plots may change without asking anyone. Programs read the keys of `--json` and of `summary.json`, and
people the columns of the exported Parquet files: those change only with a line in CHANGELOG.md.
"""

from asyncrl.runs.kept import KeptEpisodes

__all__ = ["KeptEpisodes"]
