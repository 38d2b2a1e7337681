"""Plays and judges one episode before anything starts, so that a tool, environment, user or rule of the user's own that
always fails is refused with its file and line.

No model is loaded, because a script replaces the policy: it calls each tool of the user's own once, with made-up
arguments, and then answers with the ground truth. Asyncrl's own tools and rules are not tried.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, chdir, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from asyncrl.config.imports import imported
from asyncrl.config.schema import ActorConfig, ScoringConfig
from asyncrl.config.schema.scoring import needs
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
from asyncrl.ids import TRIAL_GROUP, ticket_id
from asyncrl.launch.preflight.made_up import made_up_arguments
from asyncrl.machine.blocked_loop import watched_loop
from asyncrl.text import line_of, reason_of
from asyncrl.types import Purpose, Task, Ticket, Trajectory

if TYPE_CHECKING:
    from asyncrl.chat.chat import Chat
    from asyncrl.data.reading import TaskFile
    from asyncrl.episode.episode import EpisodeRunner
    from asyncrl.scoring.rules.base import RuleInput
    from asyncrl.scoring.verifier import Verifier

log = logging.getLogger("asyncrl.train")

NOTICE_S = 10.0
TRIAL_S = 10.0
"""The seconds after which the check of one task is left out, and no check of another task begins."""
ROOM = 1 << 20
"""The limits on the tokens of an episode and of each of its turns: more than a script needs."""
WORDS = "I do not know."
"""An answer that a rule should score as wrong."""
NOT_OF_THE_USER = (RefusedError, EngineError, BusyError, UnavailableError)
"""Errors of an episode for which other checks or the actor give the reason."""


@dataclass(frozen=True)
class TrialStage:
    """Opens what an episode needs. `runner` takes an engine, an AsyncExitStack, `chat` and `watch`."""

    tokenizer: Callable[[], Any]
    chat: Callable[[], Chat]
    runner: Callable[..., Awaitable[EpisodeRunner]]


def try_ticket(task: Task) -> Ticket:
    """The ticket (the task and its settings) of an episode that only a check plays. Its id has the form of a run's ids,
    which a rule may read."""
    return Ticket(ticket_id(TRIAL_GROUP, 1, 0), task, TRIAL_GROUP, 1, Purpose.TRAIN, 1.0, 0)


@contextmanager
def notice(text: str) -> Iterator[None]:
    """Log `text` if the block takes longer than NOTICE_S. Code that blocks cannot be interrupted."""
    timer = threading.Timer(NOTICE_S, log.warning, (f"{text}; press Ctrl-C twice to end the start",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(frozen=True)
class OwnCode:
    """The code that the user has written and that episodes run.

    - `tools`: the names of tools
    - `environments`: true if the environments are the user's own
    - `others`: true if simulated users, or the function that splits episodes into steps, are the user's own
    """

    tools: frozenset[str]
    environments: bool
    others: bool

    @classmethod
    def of(cls, actor: ActorConfig) -> OwnCode:
        """Raises ConfigError: a tool or an environment cannot be used."""
        from asyncrl.tools.environments.classes import environment_classes
        from asyncrl.tools.registry import tool_classes

        tools = {} if actor.has_environments else tool_classes(actor)
        own = frozenset(name for name, tool in tools.items() if _is_own(tool))
        environments = any(_is_own(each.make) for each in environment_classes(actor).values())
        return cls(own, environments, bool(actor.interactions) or "." in str(actor.step_split))

    @property
    def any(self) -> bool:
        return bool(self.tools) or self.environments or self.others

    def calls(self, functions: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A call of each function that is the user's own and for which arguments can be made up."""
        chosen = {name: each for name, each in functions.items() if self.environments or name in self.tools}
        made = {name: made_up_arguments(each) for name, each in chosen.items()}
        return [{"name": name, "arguments": each} for name, each in made.items() if each is not None]


def _is_own(code: Any) -> bool:
    return not str(getattr(code, "__module__", "")).startswith("asyncrl.")


def check_episodes(actor: ActorConfig, files: Sequence[TaskFile], stage: TrialStage, judge: EpisodeJudge) -> None:
    """Play and judge the first task of each data source, environment and simulated user, for about TRIAL_S in all.

    Raises ConfigError: the user's own code fails.
    """
    if actor.played_by:
        log.debug("no episode is played before the start: an agent needs a served model")
        return
    own, until = OwnCode.of(actor), time.monotonic() + TRIAL_S
    for file in files:
        for row, task in (file.by_source() | file.by_environment() | file.by_user()).items():
            if time.monotonic() >= until:
                log.debug("no further episode is played before the start: %g s have passed", TRIAL_S)
                return
            if own.any or judge.judges(task):
                # The user's code may change the working directory, to which the run's own paths are relative.
                with notice(f"an episode that tries your own code still runs with {file.place(row)}"), chdir("."):
                    _check(_Trial(task, file.place(row), actor, own), stage, judge)


def _check(trial: _Trial, stage: TrialStage, judge: EpisodeJudge) -> None:
    try:
        trajectory = asyncio.run(trial.play(stage))
        if judge.judges(trial.task):
            trial.called_last = "the rule"
            judge(trial.task, trial.place, trajectory, stage.tokenizer())
    except TimeoutError:
        log.info(
            "with %s, the episode that tries your own code took over %g s, so it is left out of the checks; %s was "
            "called last and may be slow",
            *(trial.place, TRIAL_S, trial.called_last),
        )
    except NOT_OF_THE_USER as error:
        log.debug("no episode of %s was played before the start: %s", trial.place, error)


class _Trial:
    """An episode of `task` under a script. For messages, `place` is its row, and `called_last` is its latest call."""

    def __init__(self, task: Task, place: str, actor: ActorConfig, own: OwnCode) -> None:
        self.task, self.place = task, place
        self.called_last = "your own code"
        self._actor, self._own = actor, own
        self._last: Mapping[str, Any] = {}

    async def play(self, stage: TrialStage) -> Trajectory:
        """Play the episode. Raises ConfigError: the user's own code failed; TimeoutError: it took over TRIAL_S."""
        from asyncrl.engine.scripted import Answer, ScriptedEngine
        from asyncrl.tools.environments.environments import Environments
        from asyncrl.tools.offered import Offer

        functions = {each["name"]: each for each in (tool.get("function", tool) for tool in self.task.tools)}
        calls = self._own.calls(functions or Offer(self._actor).functions(self.task))
        turns: list[Answer] = [{"content": "", "tool_calls": [call]} for call in calls]
        turns.append(self.task.truth_text or WORDS)
        async with AsyncExitStack() as stack:
            stack.enter_context(_quiet("asyncrl.tools", "asyncrl.chat"))
            stack.enter_context(watched_loop())
            chat = stage.chat()
            engine = ScriptedEngine(chat, stage.tokenizer(), turns)
            runner = await stage.runner(engine, stack, chat=chat, watch=self._saw)
            if isinstance(tools := getattr(runner.player, "toolbox", None), Environments):
                tools.faults += (AttributeError, TypeError)
            limits = replace(
                runner.limits, max_turns=len(turns), max_turn_tokens=ROOM, max_tokens=ROOM, max_total_tokens=ROOM
            )
            limit = asyncio.timeout(TRIAL_S)
            try:
                async with limit:
                    return await replace(runner, limits=limits).run(try_ticket(self.task), lambda: None)
            except NOT_OF_THE_USER:
                raise
            except Exception as error:
                if limit.expired():
                    raise
                raise ConfigError(self._refusal(error)) from error

    def _saw(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._last = messages[-1] if messages else {}
        if calls := self._last.get("tool_calls"):
            self.called_last = f"the tool {calls[0]['function']['name']}"

    def _refusal(self, error: Exception) -> str:
        key = "actor.environment" if self._own.environments else "actor.tools"
        reason = f"with {self.place}, {error if isinstance(error, AsyncrlError) else reason_of(error)}"
        if not (isinstance(error, ToolError) and (calls := self._last.get("tool_calls"))):
            return f"{reason}; an episode that was played before the start found this: mend your code"
        call = calls[0]["function"]
        refuse = "raise ToolRefusal (asyncrl.tools) for a call that it cannot answer (docs/tools.md)"
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
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


class EpisodeJudge:
    """Judges episodes with rules of the user's own. `open_verifier` is called at the first episode. `close` ends the
    verifier."""

    def __init__(self, scoring: ScoringConfig, open_verifier: Callable[[], Verifier]) -> None:
        self._scoring = scoring
        self._open_verifier = open_verifier
        self._verifier: Verifier | None = None

    def judges(self, task: Task) -> bool:
        """True if a rule of the user's own scores the task."""
        return "rules" in needs(self._scoring, task.data_source) and bool(self._own(task))

    def _own(self, task: Task) -> list[str]:
        from asyncrl.scoring.rules.registry import BUILT_IN, rule_names

        return [name for name in rule_names(self._scoring, task.data_source).split(",") if name not in BUILT_IN]

    def __call__(self, task: Task, place: str, trajectory: Trajectory, tokenizer: Any) -> None:
        """Judge the episode with its own answer, and with another answer.

        Raises ConfigError: the rules fail for both; TimeoutError: they took over TRIAL_S. A warning says if they fail
        for only one of the two answers, or do not give the ground truth the higher score.
        """
        from asyncrl.scoring.answers import rule_input

        given = rule_input(task, trajectory, tokenizer, self._scoring.strip_thoughts)
        turns = [*given.turn_texts[:-1], WORDS]
        wrong = replace(given, answer=WORDS, full_answer=WORDS, response=WORDS, turn_texts=turns)
        inputs = {given.answer: given}
        inputs.setdefault(WORDS, wrong)
        results = {text: self._result(each) for text, each in inputs.items()}
        failures = {text: each for text, each in results.items() if isinstance(each, str)}
        what = f"scoring.rule: {', '.join(map(_with_place, self._own(task)))}"
        if len(failures) == len(inputs):
            raise ConfigError(
                f"{what}: with {place}, {failures[given.answer]}; an episode that was played before the start found "
                f"this: it failed for the answers {' and '.join(map(_shown, inputs))}"
            )
        for text, reason in failures.items():
            log.warning(
                "%s: with %s, for the answer %s %s; an episode that a rule fails for has no reward, so return 0 for a "
                "wrong answer (docs/scoring.md)",
                *(what, place, _shown(text), reason),
            )

        if (doubt := _doubt(*results.items())) and task.truth_text:
            log.warning("%s: with %s, %s", what, place, doubt)

    def _result(self, given: RuleInput) -> float | str:
        """The reward, or the reason of the rules' failure."""
        self._verifier = self._verifier or self._open_verifier()
        try:
            return self._verifier.submit(given).result(TRIAL_S).total
        except ScoringError as error:
            return str(error)

    def close(self) -> None:
        if self._verifier is not None:
            self._verifier.close()


def _doubt(right: tuple[str, float | str], *others: tuple[str, float | str]) -> str:
    """A sentence if the ground truth has no higher reward than another answer. Each answer has its reward, or the
    reason of a failure."""
    truth, reward = right
    for text, other in others:
        if isinstance(reward, str) or isinstance(other, str) or reward > other:
            continue
        said = f"for the ground truth {_shown(truth)} the reward is {reward:g}, and for {_shown(text)} it is"
        if reward < other:
            return f"{said} higher, {other:g}: mend the rule if it should reward right answers"
        return (
            f"{said} {other:g} too: a rule that scores all answers alike teaches nothing. This is no mistake if a "
            "right answer needs more than the ground truth, such as \\boxed{}, or if the rule judges something else"
        )
    return ""


def _with_place(name: str) -> str:
    """A rule's name with the line of its definition."""
    try:
        found = inspect.unwrap(imported(name, name))
        return f"{name} ({line_of(inspect.getfile(found), inspect.getsourcelines(found)[1])})"
    except (ConfigError, TypeError, OSError):
        return name


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
