"""Task files: reading them into tasks, checking every row, and writing them from published data sets.

None of the nine promises is this room's own. It helps with the third (same batch after a crash): all roles and every
restart see the same tasks in the same order (`opening.py`), and a row that no message can carry is refused before a run
starts (`table_checks.py`, `sendable.py`).

In reading order:

- `from_config.py`, `opening.py`: the tasks of a run, and `rendered.py`: its demonstrations as tokens.
- `reading.py`: files as a sequence of tasks, `row_tasks.py`: a row as a task, `layout.py`: columns of other names.
- `tables.py`, `json_rows.py`: files as rows, `sources.py`: sources that are no files.
- `command.py`: the command `asyncrl data`, with one file a data set in `converters/`.

May be changed without asking: a converter, a further source or file type. The id of a task and the order of rows may
not change: stored episodes name tasks by them.
"""
