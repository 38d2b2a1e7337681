"""Plays episodes with agent loops of verl: `actor.agent=verl`.

The policy's turns are recorded while the loop runs. The loop's output is then compared with the record, token by token
(`episode.claims`). So the trajectory marks a token as sampled only if the policy did sample it at that place.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, cast

import numpy as np
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from asyncrl.agents.chat_api.result import MAX_METRICS, METRIC_NAME, AgentError, AgentResult, MetricMeans, checked
from asyncrl.compat.verl.agent_loops.base import DictConfigWrap, ToolListWrap
from asyncrl.compat.verl.agent_loops.policy import EpisodePolicy, read_ids
from asyncrl.compat.verl.agent_loops.settings import loop_config
from asyncrl.compat.verl.batches.to_batch import task_fields
from asyncrl.compat.verl.names import provide_verl
from asyncrl.compat.yaml_files import read_nodes
from asyncrl.config.group_files import FAILURES
from asyncrl.config.imports import imported
from asyncrl.config.keys import did_you_mean
from asyncrl.config.schema import ActorConfig, DataConfig, ModelConfig
from asyncrl.episode.claims import ClaimedSequence, follow
from asyncrl.episode.episode import Episode
from asyncrl.episode.limits import LimitError
from asyncrl.errors import ConfigError, RefusedError
from asyncrl.machine.process import is_ctrl_c
from asyncrl.modelling.opening import open_config
from asyncrl.modelling.tokenizer import open_tokenizer
from asyncrl.text import line_of_function, reason_of
from asyncrl.tools.contained import contained
from asyncrl.types import Task

SETTING = "actor.agent_options"
AGENT_NAME = "agent_name"
"""The column of a row, or the field of its `extra_info`, with the name of the agent loop that plays the row."""
_OF_VERL = ("self", "sampling_params", AGENT_NAME)
MOST_NUMBERS = MAX_METRICS - 2
"""The maximum number of an output's numbers that become metrics. Two further metrics may count the numbers that are
left out, and the sampled turns that the output lacks."""
_VERSIONS = ("global_steps", "min_global_steps", "max_global_steps")


def open_loops(
    actor: ActorConfig,
    data: DataConfig,
    model: ModelConfig,
    default_agent_loop: str = "single_turn_agent",
    agent_loop_config_path: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> VerlAgentLoops:
    """The player of a run. These arguments are the options `actor.agent_options`:

    - `default_agent_loop`: the registered name of a loop, or the dotted path of its class
    - `agent_loop_config_path`: a YAML file with a list of loops, each with `name`, `_target_` and further arguments.
      Hydra makes the arguments, as in verl
    - `config`: keys of verl's configuration for the loops, such as those of `actor_rollout_ref.rollout.multi_turn`

    Raises ConfigError: the default loop does not exist, the file or `config` is malformed, or the tokenizer cannot be
    loaded.
    """
    provide_verl()
    given = read_loops(agent_loop_config_path) if agent_loop_config_path else {}
    loops_config = loop_config(actor, data, model, config or {})
    # The loops get a tokenizer of their own, which they may change. Loops that render by it expect a list of ids, as
    # releases of transformers before 5 returned.
    tokenizer, model_type = open_tokenizer(model), str(open_config(model).model_type)
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, return_dict=False)
    return VerlAgentLoops(default_agent_loop, given, loops_config, tokenizer, model_type)


class VerlAgentLoops:
    """Plays each episode with the agent loop that its row names as `agent_name`. If the row names none, the loop is
    `default`: a registered name, or the dotted path of a class.

    `given` maps the name of each further loop to its arguments, and to the dotted path of its class as `_target_`. The
    loops read `config`, and get `tokenizer` and the `model_type` of the model's configuration.

    Raises ConfigError: a loop or a tool does not exist, or a loop's `run` is not async.
    """

    def __init__(
        self, default: str, given: Mapping[str, Mapping[str, Any]], config: DictConfig, tokenizer: Any, model_type: str
    ) -> None:
        provide_verl()
        # Importing this package of verl registers verl's own loops.
        imported("verl.experimental.agent_loop.AgentLoopBase", "actor.agent=verl")
        self._registry: Mapping[str, Any] = imported(
            "verl.experimental.agent_loop.agent_loop._agent_loop_registry", "actor.agent=verl"
        )
        self._default = default
        self._given = given
        self._config = config
        self._tokenizer = tokenizer
        self._model_type = model_type
        self._tools = _load_tools(config.actor_rollout_ref.rollout.multi_turn)
        self._metrics = MetricMeans()
        for name in dict.fromkeys([default, *given]):
            self._check_class(self._entry(name))

    def refusal_of(self, name: str) -> str:
        """The reason for which a row cannot be played by the loop `name`. Empty if it can."""
        # A row may only name a registered loop, since a dotted path would import any module.
        if name in (self._default, *self._given) or name in self._registry:
            return ""
        known = sorted({*self._given, *self._registry})
        hint = did_you_mean(name, known) or f"; there are: {', '.join(known)}"
        return f"the row's {AGENT_NAME} {name!r:.100} is not registered{hint}"

    def counters(self) -> Mapping[str, float]:
        """The means of the loops' metrics since the last call."""
        return {f"agent/{name}": value for name, value in self._metrics.take().items()}

    async def __call__(self, episode: Episode) -> Mapping[str, float]:
        """Let a loop play one episode. Returns the episode's rewards.

        Raises AgentError: the loop failed, or its output does not agree with what was sampled. If the engine failed on
        a request, raises the engine's error, even if the loop ignored it. If the loop fails because the episode has no
        room for another turn, the trajectory is truncated.
        """
        episode.begin()
        policy, task = EpisodePolicy(episode), episode.ticket.task.copy()
        name = str(task.columns.get(AGENT_NAME) or task.extra_info.get(AGENT_NAME) or self._default)
        try:
            with episode.timed("agent"):
                output = await contained(lambda: self._play(name, policy, episode, task))
            if policy.fault is None:
                result = self._conclude(episode, output)
        except LimitError:
            if policy.fault is None and episode.recorder.completions:
                return {}
            raise
        except RefusedError as error:
            raise policy.fault or AgentError(f"the agent loop {name}: {error}") from error
        except AgentError as error:
            raise policy.fault or error from error.__cause__
        except Exception as error:
            raise policy.fault or AgentError(f"the agent loop {name} failed: {reason_of(error)}") from error
        if policy.fault is not None:
            raise policy.fault
        self._metrics.add(result.metrics)
        return result.rewards

    async def _play(self, name: str, policy: EpisodePolicy, episode: Episode, task: Task) -> Any:
        loop = self._make(name, policy)
        params = {
            **{"temperature": episode.ticket.temperature, "top_p": 1.0, "top_k": -1},
            **{"repetition_penalty": 1.0, "logprobs": True},
        }
        # `run` gets its first parameters by position. A field with the name of one of them would be a second value.
        taken = {*list(inspect.signature(type(loop).run).parameters)[:2], *_OF_VERL}
        row = _row(task, episode.ticket.group_id)
        return await loop.run(params, **{field: value for field, value in row.items() if field not in taken})

    def _make(self, name: str, policy: EpisodePolicy) -> Any:
        """Make the loop of one episode. It gets verl's arguments, except those that its class does not take."""
        if refusal := self.refusal_of(name):
            raise AgentError(refusal)
        entry = self._entry(name)
        cls, arguments = self._class_of(entry), _arguments(entry)
        offered = {
            **{"trainer_config": DictConfigWrap(self._config), "server_manager": policy},
            **{"tokenizer": self._tokenizer, "processor": None, "dataset_cls": None, "hf_model_type": self._model_type},
            **{"data_config": DictConfigWrap(self._config.data), "dataset_config": self._config.data},
            **{"tools": ToolListWrap(self._tools), "name": arguments.pop("name", None)},
        }
        parameters = inspect.signature(cls).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        taken = {key: value for key, value in offered.items() if takes_all or key in parameters}
        return cls(**{**taken, **arguments})

    def _entry(self, name: str) -> DictConfig:
        """The arguments of a loop, with its dotted path as `_target_`."""
        found = self._given.get(name) or self._registry.get(name) or {"_target_": name}
        return found if isinstance(found, DictConfig) else OmegaConf.create(dict(found), flags={"allow_objects": True})

    def _check_class(self, entry: DictConfig) -> None:
        """Raises ConfigError: the class does not exist, or its `run` is not async."""
        run = getattr(self._class_of(entry), "run", None)
        # A function that a decorator returned has another name, or the attribute `__wrapped__`.
        is_own = inspect.isfunction(run) and run.__name__ == "run" and not hasattr(run, "__wrapped__")
        if is_own and not inspect.iscoroutinefunction(run):
            raise ConfigError(
                f"{SETTING}: the agent loop {entry['_target_']} has a plain `def run` ({line_of_function(run)}): write "
                "`async def run(self, sampling_params, **kwargs)`"
            )

    def _class_of(self, entry: Mapping[str, Any]) -> Any:
        path = str(entry["_target_"])
        form = (
            f"a registered name ({', '.join(sorted({*self._given, *self._registry}))}), or the dotted path of a class"
        )
        return imported(path, f"{SETTING}.default_agent_loop={path}", form)

    def _conclude(self, episode: Episode, output: Any) -> AgentResult:
        """Compare a loop's output with the record, and return the output's rewards and metrics. Raises RefusedError:
        output and record do not agree. Raises AgentError: the output is malformed."""
        unreturned = follow(episode.recorder, _claim(output))
        rewards, turns = {}, [float(score) for score in output.extra_fields.get("turn_scores") or ()]
        tools = [float(each) for each in output.extra_fields.get("tool_rewards") or () if each is not None]
        if output.reward_score is not None:
            rewards["reward_score"] = output.reward_score
        elif tools:
            rewards["tool_rewards"] = sum(tools)
        numbers = {
            name: float(value)
            for name, value in {**output.extra_fields, "num_turns": output.num_turns}.items()
            if isinstance(value, Real) and name not in _VERSIONS and METRIC_NAME.fullmatch(name)
        }
        kept = _shown_numbers(numbers)
        if unreturned:
            kept["unreturned_turns"] = float(unreturned)
        each_turn = len(turns) == len(episode.recorder.completions)
        if turns and not each_turn and output.reward_score is None:
            rewards["turn_scores"] = sum(turns)
        result = checked(AgentResult(rewards, kept, turns if each_turn else ()))
        if result.turns:
            episode.recorder.score_all(result.turns)
        tool_s = float(getattr(output.metrics, "tool_calls", 0.0))
        if math.isfinite(tool_s) and tool_s > 0:
            episode.seconds["tools"] += tool_s
        spent = episode.seconds["generate"] + episode.seconds.get("tools", 0.0)
        episode.seconds["agent"] = max(0.0, episode.seconds["agent"] - spent)
        return result


def _row(task: Task, group_id: str) -> dict[str, Any]:
    """The fields of a row, as verl's data set gives them to a loop."""
    extra, columns = dict(task.extra_info), dict(task.columns)
    given = task_fields(task)
    return {
        **{name: value for name, value in extra.items() if name.isidentifier()},
        **columns,
        **given,
        "reward_model": columns.get("reward_model", given["reward_model"]),
        **{"index": extra.get("index", 0), "uid": group_id},
        "interaction_kwargs": extra.get("interaction_kwargs") or {},
    }


def _arguments(entry: DictConfig) -> dict[str, Any]:
    """The arguments of a loop's class. Hydra makes those that have a `_target_` of their own."""
    if entry.keys() <= {"_target_", "name"}:
        return {"name": entry["name"]} if "name" in entry else {}
    made: dict[str, Any] = instantiate(entry, _target_="builtins.dict")
    return made


def _shown_numbers(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers of an output that can be metrics: finite ones, and not too many. `numbers_left_out` counts others."""
    finite = [name for name, value in numbers.items() if math.isfinite(value)]
    if len(finite) == len(numbers) <= MOST_NUMBERS:
        return dict(numbers)
    # `num_turns` comes last, and stays.
    kept = finite if len(finite) <= MOST_NUMBERS else [*finite[: MOST_NUMBERS - 1], finite[-1]]
    return {**{name: numbers[name] for name in kept}, "numbers_left_out": float(len(numbers) - len(kept))}


def _claim(output: Any) -> ClaimedSequence:
    """The tokens of a loop's output, with a mask of the tokens that the output marks as sampled.

    Raises RefusedError: the output is malformed.
    """
    needed = ("prompt_ids", "response_ids", "response_mask", "extra_fields", "metrics")
    if missing := [name for name in needed if not hasattr(output, name)]:
        raise RefusedError(f"it returned {output!r:.100}, which has no {', '.join(missing)}; return an AgentLoopOutput")
    prompt, response = read_ids(output.prompt_ids, "prompt_ids"), read_ids(output.response_ids, "response_ids")
    mask = np.asarray(output.response_mask)
    if mask.shape != response.shape or not np.isin(mask, (0, 1)).all():
        raise RefusedError(f"response_mask must be 0 or 1 for each of {len(response)} response_ids")
    logprobs = None
    if output.response_logprobs is not None:
        given = np.asarray(output.response_logprobs, np.float32)
        if given.shape != response.shape:
            raise RefusedError(f"response_logprobs has {given.size} numbers for {len(response)} response_ids")
        logprobs = np.concatenate([np.zeros(len(prompt), np.float32), given])
    sampled = np.concatenate([np.zeros(len(prompt), np.bool_), mask.astype(np.bool_)])
    return ClaimedSequence(np.concatenate([prompt, response]), sampled, logprobs)


def read_loops(path: str) -> dict[str, Mapping[str, Any]]:
    """The loops of a YAML file, by name. Raises ConfigError: the file cannot be read, or has another form."""
    setting = f"{SETTING}.agent_loop_config_path={path}"
    try:
        entries = read_nodes(Path(path).expanduser())
        OmegaConf.to_container(entries, resolve=True)
    except FAILURES as error:
        raise ConfigError(f"{setting} cannot be read: {reason_of(error)}") from error
    found: dict[str, Mapping[str, Any]] = {}
    for entry in entries if isinstance(entries, ListConfig) and entries else [None]:
        if not isinstance(entry, DictConfig) or not {"name", "_target_"} <= entry.keys():
            raise ConfigError(f"{setting}: it must be a list of loops, each with `name` and `_target_`")
        found[str(entry["name"])] = cast(Mapping[str, Any], entry)
    return found


def import_loop(path: str) -> None:
    """Import a class of loops by its dotted path. Raises ConfigError: it cannot be imported."""
    provide_verl()
    imported(path, f"{SETTING}: {path}", "the dotted path of a class")


def _load_tools(multi_turn: DictConfig) -> list[Any]:
    """The tools of verl that the loops may call. Raises ConfigError: they cannot be loaded."""
    paths = {key: multi_turn.get(key) for key in ("tool_config_path", "function_tool_path")}
    if not any(paths.values()):
        return []
    setting = f"{SETTING}.config: {', '.join(f'{key}={path}' for key, path in paths.items() if path)}"
    load = imported("verl.tools.tool_registry.load_all_tools", setting)
    try:
        tools: list[Any] = load(**paths)
    # The files name the user's own classes and functions, which may raise any exception.
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise ConfigError(f"{setting}: the tools cannot be made: {reason_of(error)}") from error
    return tools
