"""The command `asyncrl`. Its first argument names the subcommand to run."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from asyncrl.config.commands import COMMANDS, SLOW, show_role_help, usage
from asyncrl.config.exits import EXIT_USAGE, end_quickly, exit_status
from asyncrl.config.keys import did_you_mean
from asyncrl.config.quiet import quiet_imports
from asyncrl.version import VERSION

SHOWS = ("-h", "--help", "-c", "--cfg", "--plan")
"""Options with which a command only prints something."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (None: `sys.argv`), and return its exit status."""
    return exit_status(partial(_main, argv), "asyncrl")


def _main(argv: Sequence[str] | None) -> int:
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name == "replay" and rest and _is_subcommand(rest[0]):
        name = "inspect"
    if name in ("-h", "--help"):
        sys.stdout.write(usage())
    elif name == "--version":
        sys.stdout.write(f"asyncrl {VERSION}\n")
    elif name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f"; use one of {', '.join(COMMANDS)}"
        sys.stderr.write(f"asyncrl: unknown command {name!r}{hint}\n")
        return EXIT_USAGE
    else:
        # The help of a command shows sys.argv[0]. `status` is a subcommand of `inspect`, whose parser adds "status".
        sys.argv = ["asyncrl", name, *rest] if name == "status" else [f"asyncrl {name}", *rest]
        if COMMANDS[name].is_role and {"-h", "--help"} & set(rest):
            return show_role_help(rest)
        end_quickly()
        quiet_imports()
        if name in SLOW and not any(word.startswith(SHOWS) for word in rest):
            with suppress(OSError):  # stderr may be a log on a full disk.
                os.write(2, f"asyncrl {name}: loading\n".encode())
        # Lets Python import the user's tools and rules from the working directory, as with `python -m`.
        sys.path.insert(0, "")
        return run_command(name, rest)
    return 0


def run_command(name: str, argv: Sequence[str]) -> int:
    """Run a command with the words that follow its name, and return its exit status.

    Expected errors show no traceback. `exit_status` lists the statuses.
    """

    def run() -> int | None:
        # Commands are imported only here, so that `asyncrl --help` need not wait for their imports.
        module = importlib.import_module(COMMANDS[name].module)
        status: int | None = module.main([name, *argv] if name == "status" else argv)
        return status

    return exit_status(run, f"asyncrl {name}")


def _is_subcommand(word: str) -> bool:
    """True if the word is neither an option nor KEY=VALUE."""
    return word[:1].isalpha() and "=" not in word


if __name__ == "__main__":
    sys.exit(main())
