"""The configuration of a run, and how commands begin and end.

Except in `config` and `launch`, only the functions in a `from_config.py` or `__main__.py` take `TrainConfig`.
`tests/test_architecture.py` checks this. The promises that this package keeps:

- 3, the same batch after a crash: `changes.py` decides which keys a resumed run must keep, and which value a key has at
  a learner step.
- 8, closed by default: `bind.py` and `checks/deployment.py` refuse addresses that other machines can reach, unless keys
  protect them; `secrets.py` hides the values of secret keys.

In reading order: `option.py` (the declaration of a key), `schema/` (one typed section per file), `compose.py` (makes a
checked configuration from KEY=VALUE words and files). Then `checks/` (combinations that cannot work), `refusals.py`,
`load.py` (the start of every role). Then `exits.py` (the end of every command), `commands.py` (the table of commands),
`changes.py`.

Supporting files:

- `keys.py`: all keys; `setting.py`: sets one key; `other_words.py`: words of other programs; `quoting.py`: values as
  words of a command line.
- `files.py`, `group_files.py`: the files that a run chooses; `variables.py`: environment variables in them.
- `imports.py`, `extensions.py`: objects by their dotted paths, and the paths of extensions.
- `locations.py`: the paths of a run's files; `unread.py`: scores that change nothing.
- `completion.py`, `docs.py`: completion in a shell, and docs/configuration.md; `quiet.py`: silences libraries.

You can freely change the texts of options, and checks with their messages. You can also change the default of an option
that is not `fixed`: a resumed run must keep the values of `fixed` options. `make docs` writes docs/configuration.md
from the schema. `--help` must load only the standard library, to stay fast.
"""
