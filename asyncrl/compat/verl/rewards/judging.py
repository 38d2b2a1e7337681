"""The process that scores whole groups by reward managers: `python -m asyncrl.compat.verl.rewards.judging FD SETTINGS`.

A call of a manager gets a DataProto in verl's layout, with a row for each member of one or several complete groups. The
field `uid` is the group's id. As in verl, there is one manager for training and one for evaluations, and `validate` in
`meta_info` is true for evaluations.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from asyncrl import wire
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.batches.to_batch import from_trajectories
from asyncrl.compat.verl.rewards.loading import find_reward_manager, load_reward_manager
from asyncrl.compat.verl.rewards.loop_managers import LOOP_MANAGERS
from asyncrl.compat.verl.rewards.reward_loop import judges_rows, settings_of
from asyncrl.compat.verl.rewards.reward_managers import wrong_parameters
from asyncrl.compat.verl.rewards.rewarding import LARGEST_REWARD
from asyncrl.config.keys import did_you_mean
from asyncrl.config.load import log_to_stderr
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.network.throttle import ErrorLogger
from asyncrl.scoring.judge_program import Answer, failed, serve
from asyncrl.scoring.rules.base import ACC, NOT_FINITE, completed, plain, read_reason
from asyncrl.scoring.rules.verl import call_options
from asyncrl.scoring.rules.votes import vote
from asyncrl.scoring.verifier import policy_tokenizer
from asyncrl.text import reason_of
from asyncrl.types import Task, Trajectory
from asyncrl.wire import Message

logger = logging.getLogger(__name__)

Score = tuple[float, float, Mapping[str, float], str, str]
"""The fields of `ManagerScore`: reward, outcome, further numbers by name, short answer, reason."""


def check(settings: Mapping[str, Any], key: str) -> None:
    """Raises ConfigError: the manager or function does not exist, or does not take these parameters.

    `key` is the configuration key for the message.
    """
    name, params = settings["name"], settings["params"]
    made, given = find_reward_manager(name, settings["compute_score"], settings["compute_score_params"])
    function = given.get("compute_score")
    if function is not None and (wrong := wrong_parameters(name, function, params)):
        raise ConfigError(f"{key}.compute_score={settings['compute_score']}: {wrong}")
    if name in LOOP_MANAGERS:
        known = (*LOOP_MANAGERS[name].keys, "config")
        if unknown := next((each for each in params if each not in known), None):
            raise ConfigError(f"{key}.params: {name} has no {unknown}{did_you_mean(unknown, known)}")
    if judges_rows(made):
        first, own = "config", {"compute_score": None, **settings_of(made, params)}
    else:
        first, own = "num_examine", {"num_examine": 0, **params}
    try:
        inspect.signature(made).bind(**{"tokenizer": None, **own, **given})
    except TypeError as error:
        raise ConfigError(f"{key}: {name} cannot be made with tokenizer, {first} and its params: {error}") from error
    except ValueError:
        logger.debug("the parameters of %s cannot be read", settings["name"])


def load(settings: Mapping[str, Any]) -> Answer:
    """Return the function that answers requests. Before that, make the managers for training, so that an error in them
    prevents the start of the run."""
    log_to_stderr()
    tokenizer = policy_tokenizer(settings)
    judges = _Judges(tokenizer, settings["managers"])
    for source, manager in settings["managers"].items():
        if manager is not None:
            judges.of(source, evaluation=False)
    pad = next((each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id) if each is not None), 0)
    error_logger = ErrorLogger(logger)
    return lambda messages, _: _answer(judges, pad, messages, error_logger)


def _answer(judges: _Judges, pad: int, messages: Sequence[Message], error_logger: ErrorLogger) -> Message:
    asked, members = messages[0].body, messages[1:]
    tasks = [wire.read_task(each.body["row"]) for each in members]
    trajectories = [wire.read_trajectory(each) for each in members]
    try:
        judge = judges.of(tasks[0].data_source, asked["evaluation"])
        scores = judge.scores(as_batch(trajectories, tasks, pad, asked["evaluation"]), asked["version"])
    except ScoringError as error:
        return failed(str(error))
    except Exception as error:
        reason = f"the reward manager raised {reason_of(error)}"
        error_logger.exception(f"group {trajectories[0].group_id}: {reason}", error)
        return failed(reason)
    return Message("scores", 0, {"scores": scores})


def as_batch(trajectories: Sequence[Trajectory], tasks: Sequence[Task], pad: int, evaluation: bool) -> DataProto:
    """A batch with one row for each trajectory, in order. The row is the trajectory's last branch, which contains the
    answer."""
    data = from_trajectories(trajectories, pad, tasks={task.id: task for task in tasks})
    last = {name: row for row, name in enumerate(data.non_tensor_batch["trajectory_id"])}
    batch = data if len(last) == len(data) else data.select_idxs(list(last.values()))
    batch.meta_info["validate"] = evaluation
    return batch


class _Judges:
    """The managers by data source; the source "" means all others. Sources with equal settings share a manager."""

    def __init__(self, tokenizer: Any, managers: Mapping[str, Mapping[str, Any] | None]) -> None:
        self._tokenizer = tokenizer
        self._managers = managers
        self._made: dict[tuple[str, bool], Judge] = {}

    def of(self, source: str, evaluation: bool) -> Judge:
        """The manager of a data source. Raises ScoringError: it has none. Passes on errors of the manager's class."""
        settings = self._managers.get(source, self._managers[""])
        if settings is None:
            raise ScoringError(f"the data source {source} has no manager: see scoring.manager.sources")
        key = json.dumps(settings, sort_keys=True), evaluation
        if key not in self._made:
            num_examine = settings["val_num_examine" if evaluation else "num_examine"]
            given = {name: settings[name] for name in ("compute_score", "compute_score_params")}
            manager = load_reward_manager(settings["name"], self._tokenizer, num_examine, **given, **settings["params"])
            self._made[key] = Judge(manager, num_examine)
        return self._made[key]


class Judge:
    """A manager that prints `num_examine` samples once for each data source and policy version."""

    # In verl, a manager prints samples in each call, which has the whole batch of a step. Here a step has many calls.

    def __init__(self, manager: Callable[..., Any], num_examine: int) -> None:
        self._manager = manager
        self._options = call_options(manager)
        self._num_examine = num_examine
        self._examined: dict[str, int] = {}

    def scores(self, data: DataProto, version: int) -> list[Score]:
        """The score of each row of a batch, in order. `version` is the newest policy version in the batch.

        Raises ScoringError: a reward is not finite, there are more or fewer values than rows, or the manager removed
        rows. Passes on the manager's own errors.
        """
        names = data.non_tensor_batch["trajectory_id"].tolist()
        fresh = {each for each in data.non_tensor_batch["data_source"] if self._examined.get(each, -1) < version}
        self._examined |= dict.fromkeys(fresh, version)
        if hasattr(self._manager, "num_examine"):
            self._manager.num_examine = self._num_examine if fresh else 0
        result = completed(self._manager(data, **self._options))
        # A manager may reorder the batch. Its rewards are then in the new order.
        ordered = [str(name) for name in data.non_tensor_batch.get("trajectory_id", names)]
        if sorted(ordered) != sorted(names):
            raise ScoringError(f"the reward manager changed the rows {names!r:.200} to {ordered!r:.200}")
        by_name = dict(zip(ordered, _scores(result, ordered), strict=True))
        return [by_name[name] for name in names]


def _scores(result: Any, names: Sequence[str]) -> list[Score]:
    given = result if isinstance(result, Mapping) else {"reward_tensor": result}
    rewards, extra = given.get("reward_tensor"), given.get("reward_extra_info") or {}
    if not isinstance(rewards, Tensor):
        raise ScoringError(f"the reward manager returned {type(result).__name__} without `reward_tensor`")
    if rewards.shape[:1] != (len(names),) or not rewards.numel():
        raise ScoringError(f"the reward manager returned rewards {list(rewards.shape)} for {len(names)} rows")
    for name, values in extra.items():
        if len(values) != len(names):
            raise ScoringError(f"the reward manager returned {len(values)} values of {name} for {len(names)} rows")
    sums = rewards.detach().double().reshape(len(names), -1).sum(-1).tolist()
    return [
        _row(f"row {row} ({name})", reward, {key: values[row] for key, values in extra.items()})
        for row, (name, reward) in enumerate(zip(names, sums, strict=True))
    ]


def _row(name: str, reward: float, extra: Mapping[str, Any]) -> Score:
    """The score of one row. Extra values that are not finite numbers are left out. If some of them are infinite or nan,
    the extra value NOT_FINITE counts these. Raises ScoringError: the reward or `acc` is infinite or nan."""
    if not abs(reward) <= LARGEST_REWARD:
        raise ScoringError(f"the reward manager gave {name} the reward {reward}; it must be a finite number")
    numbers = {str(key): float(plain(value)) for key, value in extra.items() if isinstance(plain(value), Real)}
    finite = {key: value for key, value in numbers.items() if abs(value) <= LARGEST_REWARD}
    if ACC in numbers.keys() - finite.keys():
        raise ScoringError(f"the reward manager gave {name} the acc {numbers[ACC]}; it must be a finite number")
    counted = {NOT_FINITE: float(len(numbers) - len(finite))} if len(finite) < len(numbers) else {}
    # As in verl's validation, the outcome is `acc` if there is one, else the reward.
    return reward, finite.get(ACC, reward), finite | counted, vote(extra, lambda _: None, ""), read_reason(extra)


if __name__ == "__main__":
    serve(sys.argv[1:], load)
