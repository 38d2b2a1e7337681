"""`asyncrl completion SHELL`: print the script that completes commands, keys and values in bash or zsh.

The scripts run `asyncrl completion words -- WORD ...`, which prints the completions of the last word.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence

from asyncrl.config.commands import COMMANDS
from asyncrl.config.files import GROUPS, choices
from asyncrl.config.keys import OPTIONS

SCRIPTS = {
    # bash completes only the text after "=", so a completion must leave out what comes before it.
    "bash": """_asyncrl() {
    local line=${COMP_LINE:0:COMP_POINT} before
    local current=${line##*[[:space:]]}
    read -ra before <<< "${line%"$current"}"
    mapfile -t COMPREPLY < <(asyncrl completion words -- "${before[@]:1}" "$current" 2>/dev/null)
    COMPREPLY=("${COMPREPLY[@]#"${current%"${current##*=}"}"}")
}
complete -o default -o nospace -F _asyncrl asyncrl
""",
    "zsh": """_asyncrl() {
    local -a found
    found=("${(@f)$(asyncrl completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$found" ]]; then compadd -Q -S '' -- "${found[@]}"; else _files; fi
}
compdef _asyncrl asyncrl
""",
}

INSTALL = """to turn completion on, add the line of your shell to ~/.bashrc, or to ~/.zshrc below `compinit`:
  eval "$(asyncrl completion bash)"
  eval "$(asyncrl completion zsh)"
"""


def candidates(words: Sequence[str]) -> Iterator[str]:
    """The completions of the last word of a command line of `asyncrl`. If the word is complete, its completion ends
    with a space."""
    *before, current = words
    current = current.lstrip("+")
    return (word for word in _known(before, current) if word.startswith(current))


def _known(before: Sequence[str], current: str) -> Iterator[str]:
    if not before:
        yield from (f"{word} " for word in [*COMMANDS, "--help", "--version"])
    command = COMMANDS.get(before[0]) if before else None
    if command and len(before) == 1:
        yield from (f"{word} " for word in command.subcommands)
    if command and command.is_role:
        key, is_value, _ = current.partition("=")
        yield from (f"{key}={value} " for value in _values(key)) if is_value else _keys(current)


def _keys(current: str) -> Iterator[str]:
    yield from ("--help ", "--cfg job ", "--config-dir ")
    yield from (f"{group}=" for group in GROUPS)
    if "." in current:
        yield from (f"{key}=" for key in OPTIONS)
    else:
        yield from dict.fromkeys(f"{key.partition('.')[0]}." for key in OPTIONS)


def _values(key: str) -> Iterable[str]:
    if key in GROUPS:
        return choices(key)
    option = OPTIONS.get(key)
    return () if option is None else ("true", "false") if option.type is bool else option.choices


def main(argv: Sequence[str]) -> None:
    """The command's entry point."""
    parser = argparse.ArgumentParser(
        description="Print the script that completes commands, keys and values in a shell.",
        epilog=INSTALL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=[*SCRIPTS, "words"])
    parser.add_argument(
        "words", nargs="*", help="used by the scripts: the words of the command line, the last of which is completed"
    )
    given = parser.parse_args(argv)
    text = SCRIPTS.get(given.shell) or "".join(f"{word}\n" for word in candidates(given.words or [""]))
    sys.stdout.write(text)
