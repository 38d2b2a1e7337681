"""Runs the user's own code once, before a run starts. This is the program of the child process that tries the code.

The program plays an episode and scores it. No model is loaded, because a script replaces the policy. The script calls
each tool of the user's own once, with made-up arguments, and then answers with the ground truth. `trial.py` starts this
process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, chdir, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

from asyncrl import wire
from asyncrl.actor.from_config import open_runner
from asyncrl.chat.chat import Chat
from asyncrl.chat.from_config import open_chat
from asyncrl.config.changes import with_values
from asyncrl.config.imports import imported
from asyncrl.config.load import log_to_stderr
from asyncrl.config.schema import ActorConfig, ScoringConfig, TrainConfig
from asyncrl.engine.scripted import Answer, ScriptedEngine
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.errors import (
    AsyncrlError,
    BusyError,
    ConfigError,
    EngineError,
    RefusedError,
    ScoringError,
    ToolError,
    UnavailableError,
)
from asyncrl.launch.preflight.episodes.creation import create, start_user, try_ticket
from asyncrl.launch.preflight.episodes.own_code import OwnCode, own_paths
from asyncrl.launch.preflight.trial import WORDS, Note
from asyncrl.machine.blocked_loop import running_line, watched_loop
from asyncrl.modelling.tokenizer import open_tokenizer
from asyncrl.sandbox.sandboxes import Sandbox, open_sandbox
from asyncrl.scoring.answers import answer_texts, rule_input, texts_of_steps
from asyncrl.scoring.judge_program import Answer as Answering
from asyncrl.scoring.judge_program import failed, serve
from asyncrl.scoring.models.registry import load_outcome_model, load_prm
from asyncrl.scoring.rules.registry import load_rules
from asyncrl.scoring.scorer import KindUnavailableError, Scorer
from asyncrl.scoring.step_rewards import StepFunction, StepInput
from asyncrl.text import own_line, reason_of
from asyncrl.tools.environments.environments import Environments
from asyncrl.tools.interactions.registry import load_interactions
from asyncrl.tools.offered import Offer
from asyncrl.types import Lease, Task, Trajectory
from asyncrl.wire import Message

T = TypeVar("T")

ROOM = 1 << 20
"""The limits on the tokens of an episode and of each of its turns: more than a script needs."""
NOT_OF_THE_USER = (RefusedError, EngineError, BusyError, UnavailableError)
"""Errors of an episode that are not caused by the user's code. Other checks, or the actor, give their reasons."""


@dataclass(frozen=True)
class TrialStage:
    """Opens what an episode needs. `runner` takes an engine, an AsyncExitStack, `chat` and `watch`."""

    tokenizer: Callable[[], Any]
    chat: Callable[[], Chat]
    runner: Callable[..., Awaitable[EpisodeRunner]]


class SlowError(Exception):
    """The user's code took too long. `line` is the line that ran, or is empty."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.line = line


class Trying:
    """Answers the requests of a `TrialProcess`. The user's code of an episode may take `limit_s` seconds. `tell` is
    given the name of each tool before it is called."""

    def __init__(
        self,
        stage: TrialStage,
        actor: ActorConfig,
        scoring: ScoringConfig,
        sandbox: Sandbox,
        limit_s: float,
        tell: Callable[[str], object],
    ) -> None:
        self._stage, self._actor, self._scoring, self._sandbox = stage, actor, scoring, sandbox
        self._limit_s, self._tell = limit_s, tell
        self._own = cache(partial(OwnCode.of, actor))
        self._rules = cache(partial(load_rules, scoring, stage.tokenizer, sandbox))
        self._models: Mapping[str, Callable[[], Any]] = {
            "prm": cache(partial(load_prm, scoring.prm)),
            "outcome_model": cache(partial(load_outcome_model, scoring.outcome_model)),
        }

    def __call__(self, messages: Sequence[Message], deadline: float) -> Message:
        """The answer to a request, which is one message: `failed`, `slow` with the line that ran, `left_out` if the
        user's code is not at fault, or the result."""
        (message,) = messages
        if message.kind == "start":
            return Message("started")
        task, place = wire.read_task(message.body["row"]), message.body["place"]
        try:
            # The user's code may change the working directory, to which the paths of the configuration are relative.
            with chdir("."), _quiet("asyncrl.tools", "asyncrl.chat"):
                return self._answer(message, task, place, deadline)
        except SlowError as slow:
            return Message("slow", 0, {"line": slow.line})
        except (*NOT_OF_THE_USER, KindUnavailableError) as error:
            return Message("left_out", 0, {"reason": str(error)})
        except AsyncrlError as error:
            return failed(str(error))
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            return failed(f"with {place}, it raised {reason_of(error)}")

    def _answer(self, message: Message, task: Task, place: str, deadline: float) -> Message:
        match message.kind:
            case "create":
                self._run(create(self._actor, task, place))
                return Message("done")
            case "user":
                self._run(start_user(self._actor, task, place))
                return Message("done")
            case "play":
                return wire.trajectory_message(self._run(self._play(task, place)))
        trajectory = wire.read_trajectory(message)
        match message.kind:
            case "rules":
                return self._by_rules(task, trajectory, message.body["answer"], deadline)
            case "steps":
                self._by_function(task, trajectory, deadline)
            case kind:
                self._by_model(kind, task, trajectory)
        return Message("done")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the user's code in a loop. Raises SlowError: it took over `limit_s`."""

        async def limited() -> T:
            limit = asyncio.timeout(self._limit_s)
            try:
                with watched_loop():
                    async with limit:
                        return await work
            except Exception as error:
                if not limit.expired():
                    raise
                # The cause was raised at the line that was interrupted. An environment runs in a thread of its own,
                # whose line `running_line` finds.
                raise SlowError(own_line(error.__cause__ or error) or running_line()) from error

        return asyncio.run(limited())

    async def _play(self, task: Task, place: str) -> Trajectory:
        """Play the episode. Raises ConfigError: the user's own code failed."""
        own, shown = self._own(), list[Mapping[str, Any]]()

        def watch(messages: Sequence[Mapping[str, Any]]) -> None:
            shown[:] = messages[-1:]
            if calls := _calls(shown):
                self._tell(own.called(calls[0]["name"]))

        functions = {each["name"]: each for each in (tool.get("function", tool) for tool in task.tools)}
        calls = own.calls(functions or Offer(self._actor).functions(task))
        turns: list[Answer] = [{"content": "", "tool_calls": [call]} for call in calls]
        turns.append(task.truth_text or WORDS)
        async with AsyncExitStack() as stack:
            chat = self._stage.chat()
            engine = ScriptedEngine(chat, self._stage.tokenizer(), turns)
            runner = await self._stage.runner(engine, stack, chat=chat, watch=watch)
            if isinstance(tools := getattr(runner.player, "toolbox", None), Environments):
                tools.faults += (AttributeError, TypeError)
            limits = replace(
                runner.limits, max_turns=len(turns), max_turn_tokens=ROOM, max_tokens=ROOM, max_total_tokens=ROOM
            )
            try:
                return await replace(runner, limits=limits).run(try_ticket(task), lambda: None)
            except NOT_OF_THE_USER:
                raise
            except Exception as error:
                key = "actor.environment" if own.environments else "actor.tools"
                raise ConfigError(_refusal(key, place, error, _calls(shown))) from error

    def _by_rules(self, task: Task, trajectory: Trajectory, answer: str | None, deadline: float) -> Message:
        """Score the episode by the rules, with its own answer or with another `answer`. The result has the total, and
        the names of the rules that gave a number."""
        plain = rule_input(task, trajectory, self._stage.tokenizer(), self._scoring.strip_thoughts)
        given = replace(plain, sandbox=self._sandbox, deadline=deadline)
        if answer is not None:
            turns = [*given.turn_texts[:-1], answer]
            given = replace(given, answer=answer, full_answer=answer, response=answer, turn_texts=turns)
        try:
            found = self._rules().score(given)
        except ScoringError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - a rule may raise anything
            reason = f"the rule raised {reason_of(error)}"
        else:
            return Message("scored", 0, {"answer": given.answer, "total": found.total, "gave": [*found.scores]})
        return Message("scored", 0, {**failed(reason).body, "answer": given.answer, "total": None})

    def _by_function(self, task: Task, trajectory: Trajectory, deadline: float) -> None:
        assert self._scoring.steps is not None
        tokenizer = self._stage.tokenizer()
        answers = answer_texts(trajectory, tokenizer, self._scoring.strip_thoughts)
        texts = texts_of_steps(trajectory, tokenizer)
        StepFunction(self._scoring.steps)(StepInput(task, trajectory, texts, *answers, deadline))

    def _by_model(self, kind: str, task: Task, trajectory: Trajectory) -> None:
        scorer = Scorer(self._scoring, self._stage.tokenizer(), **{kind: self._models[kind]()})
        for result in scorer.score([Lease(task, trajectory, (kind,), None, final=False)]):
            if isinstance(result, ScoringError):
                raise result


def _calls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [call["function"] for message in messages for call in message.get("tool_calls") or ()]


def _refusal(key: str, place: str, error: Exception, calls: Sequence[Mapping[str, Any]]) -> str:
    """The message about the user's code that raised `error`, after the latest `calls`."""
    reason = f"with {place}, {error if isinstance(error, AsyncrlError) else reason_of(error)}"
    if not (isinstance(error, ToolError) and calls):
        return f"{reason}; an episode that was played before the start found this: mend your code"
    refuse = "raise ToolRefusal (asyncrl.tools) for a call that it cannot answer (docs/tools.md)"
    arguments = json.dumps(calls[0]["arguments"], ensure_ascii=False)
    return (
        f"{key}: {reason}; an episode that was played before the start called it with the made-up arguments "
        f"{arguments}: mend it, or {refuse}"
    )


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Drop the log lines of the packages `names` during the block, since the refusal itself gives the reason."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [each.level for each in loggers]
    try:
        for each in loggers:
            each.setLevel(logging.CRITICAL)
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def load(settings: Mapping[str, Any]) -> Answering:
    """Make the function that answers requests. `settings` has all `values` of the configuration, `limit_s`, and the
    descriptor `running` of the note that gets the name of the running tool."""
    config = with_values(TrainConfig(), settings["values"])
    stage = TrialStage(
        cache(partial(open_tokenizer, config.model)),
        cache(partial(open_chat, config)),
        partial(open_runner, config),
    )
    _import_all(stage, config.actor, config.scoring)
    # Processes that the user's code starts must not inherit this descriptor.
    os.set_inheritable(settings["running"], False)
    sandbox, running = open_sandbox(config.actor.sandbox), Note(settings["running"])
    return Trying(stage, config.actor, config.scoring, sandbox, settings["limit_s"], running.write)


def _import_all(stage: TrialStage, actor: ActorConfig, scoring: ScoringConfig) -> None:
    """Import what requests need. Imports may take long, and that does not count as slow code."""
    own = [partial(imported, path, path) for path in own_paths(actor, scoring)]
    opened: list[Callable[[], object]] = [stage.tokenizer, stage.chat, *own]
    if not actor.played_by:
        opened += [partial(OwnCode.of, actor), partial(load_interactions, actor.interactions)]
    for each in opened:
        # If an import fails, the first request that needs it raises the error again.
        with suppress(Exception):
            each()


def main(arguments: Sequence[str]) -> None:
    """Answer requests until the starter ends."""
    log_to_stderr()
    serve(arguments, load)


if __name__ == "__main__":
    main(sys.argv[1:])
