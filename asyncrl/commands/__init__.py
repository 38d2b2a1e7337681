"""The commands that need several packages: evaluate, export, merge, push-to-hub, sft, try, demo and keys.

Each command is a function `main(argv)`, named in `config/commands.py`. It returns its exit status or raises an error,
which `config/exits.py` turns into a message and a status. Only `__main__.py` and `from_config.py` take the whole
configuration. This package keeps no promise of its own: an evaluation relies on the replay's promises.

In reading order: `evaluate/__main__.py` (a run without training), `sft/__main__.py` (training without episodes),
`trial/__main__.py` (one episode in this process), `export.py` and `merge/merge.py` (models from checkpoints), then
`demo/__main__.py`. `keys.py` makes CURVE keys, `checkpoints.py` finds the checkpoint that a command needs, and
`from_python.py` has the commands for scripts and notebooks.

Options, output for people, the demo and its ladder may change freely. Other programs read the files of `export` and
`merge` and the output of `evaluate --json`, so these formats are stable.
"""
