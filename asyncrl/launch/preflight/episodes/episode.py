"""Plays and scores one episode before anything starts. It finds code of the user's own that always fails: the start is
then refused with the file and line of this code.

It tries tools, environments, simulated users, rules, `scoring.steps`, small models and reward managers. Asyncrl's own
parts are not tried.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as replaced

from asyncrl.config.schema import ActorConfig, ModelConfig, ScoringConfig
from asyncrl.config.schema.scoring import GROUP_KIND
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.ids import TRIAL_GROUP, ticket_id
from asyncrl.launch.preflight.episodes.own_code import OwnCode, own_rules, own_scorers, with_place
from asyncrl.launch.preflight.trial import TRIAL_S, WORDS, TrialProcess, answered, warn_of_slow_code
from asyncrl.scoring.judges import EndedError, SlowStartError
from asyncrl.types import Lease, Task, Trajectory

if TYPE_CHECKING:
    from asyncrl.data.reading import TaskFile
    from asyncrl.scoring.managers import Managers

log = logging.getLogger("asyncrl.train")

MANAGER_START_S = 60.0
"""A reward manager is not tried if its start takes longer than this, for example because it loads a large model."""
FOUND = "an episode that was played before the start found this"


def check_episodes(
    actor: ActorConfig, scoring: ScoringConfig, files: Sequence[TaskFile], trial: TrialProcess, judges: ManagerTrial
) -> None:
    """Play and score the first task of each data source, environment and simulated user. After about TRIAL_S, no
    further task begins.

    Raises ConfigError: the user's own code fails; StoppedError.
    """
    if actor.played_by:
        log.debug("no episode is played before the start: an agent needs a served model")
        return
    silence = _Silence()
    for episode, scorers in _played(actor, scoring, files, trial):
        _score(episode, scorers, scoring, silence, trial, judges)
    silence.warn()


@dataclass(frozen=True)
class _Episode:
    task: Task
    place: str
    trajectory: Trajectory


def _played(
    actor: ActorConfig, scoring: ScoringConfig, files: Sequence[TaskFile], trial: TrialProcess
) -> Iterator[tuple[_Episode, dict[str, str]]]:
    """Yield each episode that is played, with the user's scorers of its task."""
    own, until = OwnCode.of(actor), time.monotonic() + TRIAL_S
    for file in files:
        for row, task in (file.by_source() | file.by_environment() | file.by_user()).items():
            scorers = own_scorers(scoring, task)
            if not (own.any or scorers):
                continue
            if time.monotonic() >= until:
                log.debug("no further episode is played before the start: %g s have passed", TRIAL_S)
                return
            place = file.place(row)
            if (trajectory := trial.play(own.opened(), task, place)) is not None:
                yield _Episode(task, place, trajectory), scorers


class _Silence:
    """Finds the user's own rules that give no reward to any episode. A rule may return None for tasks that it should
    not judge, but if it never returns a number, this may be a mistake."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._gave: set[str] = set()

    def add(self, place: str, rules: Mapping[str, str], gave: Collection[str]) -> None:
        """Add an episode of the row `place`, scored by `rules`: dotted paths by name. `gave` has the names of the
        rules that returned a number."""
        for name, path in rules.items():
            self._first.setdefault(path, place)
            if name in gave:
                self._gave.add(path)

    def warn(self) -> None:
        for path, place in self._first.items():
            if path not in self._gave:
                log.warning(
                    "scoring.rule: %s returned None for all episodes that were tried before the start, first with %s. "
                    "None means that a rule does not apply, so it adds nothing to the reward: return a number, such as "
                    "0 for a wrong answer, or take the rule out of scoring.rule (docs/scoring.md)",
                    *(with_place(path), place),
                )


def _score(
    episode: _Episode,
    scorers: dict[str, str],
    scoring: ScoringConfig,
    silence: _Silence,
    trial: TrialProcess,
    judges: ManagerTrial,
) -> None:
    """Score the episode by each of the user's `scorers`, whose keys are kinds of scores."""
    task, place, trajectory = episode.task, episode.place, episode.trajectory
    for kind, what in scorers.items():
        if kind == "rules":
            gave = _judge(episode, what, partial(trial.score, kind, what, task, place, trajectory))
            if gave is not None:
                silence.add(place, own_rules(scoring, task), gave)
            continue
        if kind != GROUP_KIND and not trajectory.steps:
            continue
        try:
            if kind == GROUP_KIND:
                judges.judge(what, task, place, trajectory)
            else:
                trial.score(kind, what, task, place, trajectory)
        except ScoringError as error:
            raise ConfigError(f"{what}: with {place}, {error}; {FOUND}: mend your code") from error


def _judge(episode: _Episode, what: str, score: Callable[..., Any]) -> set[str] | None:
    """Judge the episode with its own answer, and with another answer. Return the names of the rules that gave a number,
    or None if a rule took too long.

    Raises ConfigError: the rules fail for both. A warning says if they fail for only one of the two answers, or do not
    give the ground truth the higher score.
    """
    place, results, gave = episode.place, dict[str, float | str](), set[str]()
    for answer in (None, WORDS):
        if answer in results:
            continue
        if (reply := score(answer=answer)) is None:
            return None
        total = reply.body["total"]
        gave |= set(reply.body.get("gave", ()))
        results[reply.body["answer"]] = reply.body["reason"] if total is None else total
    failures = {text: each for text, each in results.items() if isinstance(each, str)}
    if len(failures) == len(results):
        raise ConfigError(
            f"{what}: with {place}, {next(iter(failures.values()))}; {FOUND}: it failed for the answers "
            f"{' and '.join(map(_shown, results))}"
        )
    for text, reason in failures.items():
        log.warning(
            "%s: with %s, for the answer %s %s; an episode that a rule fails for has no reward, so return 0 for a "
            "wrong answer (docs/scoring.md)",
            *(what, place, _shown(text), reason),
        )
    if (doubt := _doubt(*results.items())) and episode.task.truth_text:
        log.warning("%s: with %s, %s", what, place, doubt)
    return gave


def _doubt(right: tuple[str, float | str], *others: tuple[str, float | str]) -> str:
    """Return a sentence if another answer has the reward of the ground truth or a higher one, else an empty text. Each
    argument is an answer with its reward, or with the reason why its scoring failed."""
    truth, reward = right
    for text, other in others:
        if isinstance(reward, str) or isinstance(other, str) or reward > other:
            continue
        said = f"for the ground truth {_shown(truth)} the reward is {reward:g}, and for {_shown(text)} it is"
        if reward < other:
            return f"{said} higher, {other:g}: mend the rule if it should reward right answers"
        return (
            f"{said} {other:g} too: a rule that scores all answers alike teaches nothing. This is not a mistake if a "
            "right answer needs more than the ground truth, such as \\boxed{}, or if the rule judges something else"
        )
    return ""


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


class ManagerTrial:
    """Lets the reward managers judge a group. They run in a process of their own, as they do for scorers. `close` ends
    the process."""

    def __init__(self, scoring: ScoringConfig, policy: ModelConfig, stop: threading.Event | None) -> None:
        limit_s = min(scoring.manager.timeout_s, TRIAL_S)
        self._scoring = replace(scoring, manager=replace(scoring.manager, timeout_s=limit_s))
        self._policy = policy
        self._stop = stop
        self._managers: Managers | None = None

    def judge(self, what: str, task: Task, place: str, trajectory: Trajectory) -> None:
        """Judge a group of two copies of the episode. Raises ScoringError: the manager failed, or ended its process, or
        cannot be made; StoppedError."""
        members = [replaced(trajectory, id=ticket_id(TRIAL_GROUP, 1, each), member=each) for each in range(2)]
        group = [Lease(task, each, (GROUP_KIND,), None, False) for each in members]
        try:
            [[first, _]] = self._opened().submit([group])
            answered(first, self._stop)
        except SlowStartError as error:
            log.info("%s is not tried before the start: %s", what, error)
        except ConfigError as error:
            raise ScoringError(f"it cannot be made: {error}") from error
        except EndedError as error:
            if not error.overran:
                raise
            warn_of_slow_code(place, self._scoring.manager.timeout_s, what, error.line)

    def _opened(self) -> Managers:
        from asyncrl.scoring.managers import Managers

        if self._managers is None:
            self._managers = Managers(
                self._scoring, self._policy, MANAGER_START_S, starts_later=True, stacks_level=logging.DEBUG
            )
        return self._managers

    def close(self) -> None:
        if self._managers is not None:
            self._managers.close()
