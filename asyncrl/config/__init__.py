"""The configuration of a run, and how commands begin and end.

The whole configuration stays at the doors: a room takes `TrainConfig` in its `from_config.py`, its `__main__.py` or
nowhere, and `tests/test_architecture.py` counts. The room's part of the promises:

- 3, the same batch after a crash: `changes.py` says which keys a resumed run must keep, and which value a key has at a
  learner step.
- 8, closed by default: `bind.py` and `checks/deployment.py` refuse open addresses without keys; `secrets.py` hides the
  values of secret keys.

In reading order: `option.py` (the declaration of a key), `schema/` (one typed section a file), `compose.py` (words and
files to a checked configuration). Then `checks/` (combinations that cannot work), `refusals.py`, `load.py` (the start
of every role). Then `exits.py` (the end of every command), `commands.py` (the table of commands), `changes.py`.

May be changed without asking: texts of options, defaults that no stored run depends on (not `fixed`), checks and their
messages. `make docs` writes docs/configuration.md from the schema. Help loads nothing but the standard library.
"""
