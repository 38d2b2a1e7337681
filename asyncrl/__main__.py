"""The `asyncrl` command: one name for everything that a person starts."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress

import asyncrl
from asyncrl.config.commands import COMMANDS, SLOW, show_role_help, usage
from asyncrl.config.exits import end_quickly
from asyncrl.config.keys import did_you_mean

SHOWS = ("-h", "--help", "-c", "--cfg", "--plan")
"""What these options print is all that their commands do."""


def main() -> None:
    """Hand over to the command. A command is imported only when it runs, so that help comes at once."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name == "replay" and rest and _is_subcommand(rest[0]):
        name = "inspect"
    if name in ("-h", "--help"):
        sys.stdout.write(usage())
    elif name == "--version":
        sys.stdout.write(f"asyncrl {asyncrl.__version__}\n")
    elif name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f"; use one of {', '.join(COMMANDS)}"
        sys.stderr.write(f"asyncrl: there is no command {name!r}{hint}\n")
        sys.exit(2)
    else:
        # `asyncrl status` is a subcommand of `inspect` whose help and errors have the shorter name.
        sys.argv = ["asyncrl", name, *rest] if name == "status" else [f"asyncrl {name}", *rest]
        if COMMANDS[name].is_role and {"-h", "--help"} & set(rest):
            show_role_help(rest)
            return
        end_quickly()
        if name in SLOW and not any(word.startswith(SHOWS) for word in rest):
            with suppress(OSError):  # The disk of a log may be full.
                os.write(2, f"asyncrl {name}: loading\n".encode())
        # As with `python -m`: a tool or a rule of the user's own is found in the working directory.
        sys.path.insert(0, "")
        importlib.import_module(COMMANDS[name].module).main()


def _is_subcommand(word: str) -> bool:
    """Whether this is a bare word. An option begins with a sign, and a key has a "="."""
    return word[:1].isalpha() and "=" not in word


if __name__ == "__main__":
    main()
