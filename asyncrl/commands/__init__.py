"""The commands that need several rooms: evaluate, export, merge, push-to-hub, sft, try, demo and keys.

Each is a function `main(argv)`, named in `config/commands.py`. It returns its exit status and raises its errors;
`config/exits.py` turns them into messages and statuses. Only `__main__.py` and `from_config.py` take the whole
configuration. None of the nine promises is kept here: an evaluation runs the roles of a run, with the replay's.

In reading order: `evaluate/__main__.py` (a run without training), `sft/__main__.py` (training without a run),
`trial/__main__.py` (one episode in this process), `export.py` and `merge/merge.py` (models out of checkpoints), then
`demo/__main__.py`.

May be changed without asking: options, output for people, the demo and its ladder. `export` and `merge` write formats
that other programs read, and `--json` of `evaluate` is read by programs, too.
"""
