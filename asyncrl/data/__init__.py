"""Task files: reading them into tasks, checking every row, and writing them from published data sets.

This package keeps no promise of its own, but helps with promise 3 of docs/concepts.md (same batch after a crash): all
roles and every restart see the same tasks in the same order (`opening.py`). Rows travel between processes as messages.
A row with values that a message cannot contain is refused before a run starts (`table_checks.py`, `sendable.py`).

In reading order:

- `from_config.py`, `opening.py`: the tasks of a run; `rendered.py`: its demonstrations as tokens.
- `reading.py`: files as a sequence of tasks; `row_tasks.py`: a row as a task; `layout.py`: files whose columns have
  other names.
- `tables.py`, `json_rows.py`: files as rows; `sources.py`: sources that are not files.
- `command.py`: the command `asyncrl data`, with one file per data set in `converters/`; `writing.py`: tasks as Parquet.

Supporting files:

- `facts.py`: facts about tasks, and their ids; `columns.py`: types of columns; `recognised.py`: columns of other names;
  `query.py`: the texts that name sources.
- `rows.py`, `made_rows.py`: access to single rows; `row_images.py`: the images of a row.
- `demonstrations.py`: demonstrations from files.

Converters, sources and file types may be added freely. The ids of tasks and the order of rows must not change, because
stored episodes refer to them.
"""
