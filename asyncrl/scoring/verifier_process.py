"""The process in which rules run: answers each episode from its pipe with a verdict, and ends with the pipe.

`verifier.py` alone starts it, with the arguments FD TIMEOUT_S RULE RULES_BY_DATA_SOURCE_AS_JSON. A rule that overruns
ends the process, with its traceback on stderr, even if the parent is no longer there to see to it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.rules.registry import RuleBook, load_rules
from asyncrl.wire import Buffer, Message, decode, encode, join, read_task, read_trajectory, split

logger = logging.getLogger(__name__)


def main(fd: int, timeout_s: float, rule: str, rules: Mapping[str, str]) -> None:
    # Ctrl-C reaches the whole process group; this process ends when its parent does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(fd)
    try:
        book = load_rules(rule, rules)
    except ConfigError as error:
        _send(pipe, _failed(str(error)))
        return
    _send(pipe, Message("ready"))
    with contextlib.suppress(EOFError):
        while True:
            request = pipe.recv_bytes()
            faulthandler.dump_traceback_later(timeout_s, exit=True)
            reply = _judge(book, request)
            faulthandler.cancel_dump_traceback_later()
            _send(pipe, reply)


def _judge(book: RuleBook, request: Buffer) -> Message:
    message = decode(split(request))
    task, trajectory = read_task(message.body["row"]), read_trajectory(message)
    try:
        verdict = book.judge(task, message.body["answer"], trajectory)
    except ScoringError as error:
        return _failed(str(error))
    except Exception as error:
        logger.exception("the rule failed on trajectory %s", trajectory.id)
        return _failed(f"the rule raised {type(error).__name__}: {error}")
    return Message("verdict", body={"outcome": verdict.outcome, "extra": dict(verdict.extra)})


def _failed(reason: str) -> Message:
    return Message("failed", body={"reason": reason})


def _send(pipe: Connection, message: Message) -> None:
    pipe.send_bytes(join(encode(message)))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
