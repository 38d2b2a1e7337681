"""Imports the user's own modules in a child process, before this process does: a module may crash, end its process, or
never end its import. This file has the code that starts the child process, and the program of the child."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.config.imports import MEND, file_of, imported, is_new_module, module_of
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.launch.preflight.trial import answered
from asyncrl.machine.slow_code import watched_code
from asyncrl.scoring.judge_program import Answer, failed, serve
from asyncrl.scoring.judges import START_TIMEOUT_S, EndedError, JudgePool, Limits
from asyncrl.text import reason_of
from asyncrl.wire import Message

PROGRAM = "asyncrl.launch.preflight.importing"


@dataclass(frozen=True)
class NamedCode:
    """A class or function that the configuration names.

    - `setting`: the option with its value, such as `scoring.rule=a.b`
    - `path`: the path of the object
    - `loads`: set if the module of the object may need names of verl. It is the function of asyncrl that later imports
      the object, called with `arguments`, and that gives the reasons of refusals
    """

    setting: str
    path: str
    loads: str = ""
    arguments: tuple[Any, ...] = ()


def refused_imports(
    named: Sequence[NamedCode], stop: threading.Event | None = None, limit_s: float = START_TIMEOUT_S
) -> list[str]:
    """Import the objects, and return a line for each one that cannot be imported.

    Modules of the user's own that this process has not imported yet are imported in a child process. Each import may
    take `limit_s`. Raises StoppedError: `stop` was set.
    """
    if not any(is_new_module(each.path) for each in named):
        return [line for each in named if not each.loads and (line := _refusal_here(each))]
    lines, ended = list[str](), set[str]()
    limits = Limits("the module", limit_s, "the limit", None, stacks_level=logging.DEBUG)
    with closing(JudgePool(PROGRAM, {"timeout_s": limit_s}, 1, limits, starts_later=True)) as pool:
        for each in named:
            module = module_of(each.path)
            if not is_new_module(each.path):
                lines.append("" if each.loads else _refusal_here(each))
            elif module not in ended:  # It would end the next process in the same way.
                try:
                    lines.append(_refusal(pool, each, stop))
                except EndedError as error:
                    ended.add(module)
                    lines.append(_refusal_of_end(each, limit_s, error))
    return [line for line in lines if line]


def _refusal_here(code: NamedCode) -> str:
    """The reason for which this process cannot import the object; empty if it can."""
    try:
        imported(code.path, code.setting)
    except ConfigError as error:
        return str(error)
    return ""


def _refusal(pool: JudgePool, code: NamedCode, stop: threading.Event | None) -> str:
    """The reason for which the child process cannot import the object; empty if it can. Raises EndedError: the module
    ended the process; StoppedError."""
    try:
        answered(pool.submit([Message("import", 0, asdict(code))], _itself), stop)
    except EndedError:
        raise
    except (ConfigError, ScoringError) as error:
        return str(error)
    return ""


def _refusal_of_end(code: NamedCode, limit_s: float, error: EndedError) -> str:
    at = error.line or file_of(code.path)
    if error.overran:
        return f"{code.setting} cannot be imported: the import did not end within {limit_s:g} s (at {at}): {MEND}"
    end = str(error) if error.line else f"{error} ({at})"
    return f"{code.setting} cannot be imported: {end} when it was imported: {MEND}"


def _itself(message: Message) -> Message:
    return message


def _load(settings: Mapping[str, Any]) -> Answer:
    """Make the function that answers requests in the child process."""
    return _answer


def _answer(messages: Sequence[Message], deadline: float) -> Message:
    (message,) = messages
    code = NamedCode(**message.body)
    try:
        with watched_code():
            if code.loads:
                imported(code.loads, code.loads)(*code.arguments)
            else:
                imported(code.path, code.setting)
    except ConfigError as error:
        return Message("done") if code.loads else failed(str(error))
    except BaseException as error:  # noqa: BLE001 - a module may raise anything, such as SystemExit
        return failed(f"{code.setting} cannot be imported ({reason_of(error)}): {MEND}")
    return Message("done")


def main(arguments: Sequence[str]) -> None:
    """Answer requests until the starter ends."""
    # `log_to_stderr` has imports that a child does not need if it only imports a small module.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    serve(arguments, _load)


if __name__ == "__main__":
    main(sys.argv[1:])
