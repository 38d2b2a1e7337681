"""The `asyncrl` command: one name for everything that a person starts."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "train": ("asyncrl.launch.local", "run everything on this machine: replay, actors, scorers, learner"),
    "demo": ("asyncrl.demo.command", "train a tiny calculator policy from nothing, and show what happened"),
    "replay": (
        "asyncrl.replay.__main__",
        "serve the replay of a run, or look into it: status, show, export, import, dead-letters",
    ),
    "actor": ("asyncrl.actor.__main__", "run episodes"),
    "scoring": ("asyncrl.scoring.__main__", "verify and score trajectories"),
    "learner": ("asyncrl.learner.__main__", "train"),
    "keys": ("asyncrl.network.command", "make keys that close a run to strangers: `asyncrl keys --out DIR`"),
    "data": ("asyncrl.data.command", "make task files: `asyncrl data gsm8k --source DIR --out FILE`"),
    "algorithms": ("asyncrl.algorithms.listing", "list every advantage, loss, correction, KL form and aggregation"),
}


def usage() -> str:
    """The help text."""
    lines = [f"  {name:<11} {meaning}" for name, (_, meaning) in COMMANDS.items()]
    return "usage: asyncrl COMMAND [--help] [KEY=VALUE ...]\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Hand over to the command; its own `--help` says more."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write(usage())
        return
    if name not in COMMANDS:
        sys.stderr.write(f"asyncrl: there is no command {name!r}\n\n{usage()}")
        sys.exit(2)
    sys.argv = [f"asyncrl {name}", *sys.argv[2:]]
    # As with `python -m`, so that a tool or rule of the user's own is found in the working directory.
    sys.path.insert(0, "")
    importlib.import_module(COMMANDS[name][0]).main()


if __name__ == "__main__":
    main()
