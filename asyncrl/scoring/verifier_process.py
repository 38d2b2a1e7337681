"""The process in which rules run: answers each episode from its pipe with scores, and ends with the pipe.

`verifier.py` starts it, with the arguments FD SETTINGS_AS_JSON. A rule that takes too long ends the process, with its
traceback on stderr, even if the parent is gone. The process leads a session of its own, and ends it with itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import AsyncrlError, ConfigError, ScoringError, WireError
from asyncrl.scoring.rules.base import RuleInput
from asyncrl.scoring.rules.confined import limit_memory
from asyncrl.scoring.rules.registry import RuleSet, load_rules
from asyncrl.text import reason_of
from asyncrl.wire import (
    MAX_LARGE_HEADER_BYTES,
    Buffer,
    Message,
    decode,
    encode,
    join,
    read_task,
    read_trajectory,
    split,
)

logger = logging.getLogger(__name__)

_BACKSTOP = 8
"""A multiple of the memory limit. The parent kills the process long before, unless it is gone or too slow."""


def main(fd: int, settings: Mapping[str, Any]) -> None:
    # Processes that a rule starts must not hold the pipe open.
    os.set_inheritable(fd, False)
    pipe = Connection(fd)
    try:
        _serve(pipe, settings)
    except Exception:
        logger.exception("the process that runs the rules has failed")
    finally:
        pipe.close()
        os.killpg(0, signal.SIGKILL)


def _serve(pipe: Connection, settings: Mapping[str, Any]) -> None:
    try:
        rules = _load(settings)
    except AsyncrlError as error:
        _send(pipe, _failed(str(error)))
        return
    limit_memory(_BACKSTOP * settings["rule_memory_mb"] << 20)
    _send(pipe, Message("ready"))
    with contextlib.suppress(EOFError):
        while True:
            request = pipe.recv_bytes()
            faulthandler.dump_traceback_later(settings["timeout_s"], exit=True)
            reply = _score(rules, request, time.monotonic() + settings["timeout_s"])
            faulthandler.cancel_dump_traceback_later()
            _send(pipe, reply)


def _load(settings: Mapping[str, Any]) -> RuleSet:
    def tokenizer() -> Any:
        if settings["policy"] is None:
            raise ConfigError("a verl reward manager needs model.path, whose tokenizer it is made with")
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(settings["policy"], trust_remote_code=settings["trust_remote_code"])
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path={settings['policy']} has no tokenizer: {error}") from error

    return load_rules(ScoringConfig(rule=settings["rule"], rules=settings["rules"]), tokenizer)


def _score(rules: RuleSet, request: Buffer, deadline: float) -> Message:
    message = decode(split(request), MAX_LARGE_HEADER_BYTES)
    body, trajectory = message.body, read_trajectory(message)
    texts = body["answer"], body["response"]
    given = RuleInput(read_task(body["row"]), trajectory, *texts, deadline, body["full_answer"])
    try:
        found = rules.score(given)
    except ScoringError as error:
        return _failed(str(error))
    except Exception as error:
        logger.exception("the rule failed on trajectory %s", given.trajectory.id)
        return _failed(f"the rule raised {reason_of(error)}")
    return Message("scores", body={"outcome": found.outcome, "total": found.total, "scores": dict(found.scores)})


def _failed(reason: str) -> Message:
    return Message("failed", body={"reason": reason})


def _send(pipe: Connection, message: Message) -> None:
    try:
        frames = encode(message)
    except WireError as error:
        frames = encode(_failed(f"the rule's scores cannot be sent: {error}"))
    pipe.send_bytes(join(frames))


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
