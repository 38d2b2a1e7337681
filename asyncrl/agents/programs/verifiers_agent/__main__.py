"""Plays tasks of environments for the package `verifiers`, release 0.4 or 0.3. The Python that runs this file needs
`verifiers`, and does not need asyncrl.

    PYTHON verifiers_agent tasks ENV_ID [--args JSON] [--split train] [--limit 1000]     writes tasks as JSON lines
    PYTHON verifiers_agent                                     plays episodes, as the program of `actor.agent_command`

A row of a task file has the environment's whole task, so that no data set is needed to play it. The rewards of an
episode have the names that the rubric gives. They are weighted, so their sum is the reward that verifiers computes.
Metrics are unweighted.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import inspect
import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Any, Protocol

FIELD = "verifiers"
"""The field of a task's `extra_info` that names its environment: JSON text with `env`, `args` and `task`."""

MODEL = "policy"
MAX_METRICS = 32
"""The maximum number of metrics of an episode. Further metrics are left out, and `metrics_left_out` counts them."""

NO_MORE_TURNS = "actor.max_turns"
"""A text in the endpoint's refusal after the last turn. verifiers itself recognises only the refusal of a conversation
that is too long."""

NO_HARNESS = "bash"
"""The name of the harness that verifiers uses for a taskset that names no harness. A harness is the program that leads
the conversation."""

KEY_VARIABLE = "ASYNCRL_VERIFIERS_KEY"


class PlayError(Exception):
    """The environment cannot be played, or an episode failed and has no reward."""


class Playable(Protocol):
    def tasks(self, split: str, limit: int | None) -> Iterator[dict[str, Any]]:
        """Yield a mapping for each task, with `task` for `play`, and `prompt` and `answer` for people to read. Raises
        PlayError: the tasks cannot be listed."""

    async def play(self, task: Any, base_url: str, key: str) -> tuple[dict[str, float], dict[str, float]]:
        """Play one episode. Returns its rewards and its metrics. Raises PlayError: the episode failed."""

    async def close(self) -> None: ...


class ClassicEnvironment:
    """An environment of verifiers 0.3, made by its `load_environment`."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        import verifiers
        from openai import DefaultAsyncHttpxClient

        self._environment = verifiers.load_environment(name, **arguments)
        self._faults: list[str] = []
        self._http = DefaultAsyncHttpxClient(timeout=None)
        for environment in (self._environment, *getattr(self._environment, "envs", ())):
            rubric = environment.rubric
            if rubric.has_group_rewards or rubric.has_advantages:
                raise PlayError(
                    f"{name} scores the episodes of a task together, but this program plays them one by one: use an "
                    "environment whose reward functions score one episode"
                )
            self._watch(rubric)

    def tasks(self, split: str, limit: int | None) -> Iterator[dict[str, Any]]:
        dataset = self._environment.get_dataset() if split == "train" else self._environment.get_eval_dataset()
        for row in itertools.islice(dataset, limit):
            yield {"task": row, "prompt": row["prompt"], "answer": row.get("answer")}

    async def play(self, task: Any, base_url: str, key: str) -> tuple[dict[str, float], dict[str, float]]:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        self._faults.clear()
        # The client must not retry: a repeated request would be a second completion of the episode.
        openai = AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=None, http_client=self._http)
        output = await self._environment.run_rollout(task, OpenAIChatCompletionsClient(openai), MODEL, {})
        error = output.get("error")
        if error and NO_MORE_TURNS not in str(error):
            raise PlayError(f"the rollout failed: {json.dumps(error, default=str)[:1000]}")
        if self._faults:
            raise PlayError(f"a reward function failed: {self._faults[0]}")
        return self._named(output["reward"], output["metrics"])

    async def close(self) -> None:
        await self._http.aclose()

    def _named(self, reward: float, metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
        """Return the rewards by the names that the rubric gives, and the metrics. If the rewards do not add up to
        `reward`, `reward` is returned alone instead of them."""
        rubric = self._environment.rubric
        rewards: dict[str, float] = {}
        for name, weight in zip(rubric._get_reward_func_names(), rubric._get_reward_weights(), strict=False):
            if weight and name in metrics:
                rewards[name] = metrics[name] * weight
        if abs(sum(rewards.values()) - reward) > 1e-6 * max(1.0, abs(reward)):
            rewards = {"reward": reward}
        return rewards, {name: value for name, value in metrics.items() if rewards.get(name) != value}

    def _watch(self, rubric: Any) -> None:
        """Record the failures of reward functions."""
        # For a failed function, verifiers records the score 0, as if the episode were bad.
        for part in getattr(rubric, "rubrics", ()):
            self._watch(part)
        rubric.funcs = [self._watched(function) for function in rubric.funcs]

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def call(*arguments: Any, **named: Any) -> Any:
            try:
                result = function(*arguments, **named)
                return await result if inspect.isawaitable(result) else result
            except Exception as error:
                self._faults.append(f"{getattr(function, '__name__', function)}: {type(error).__name__}: {error}")
                raise

        return call


class TasksetEnvironment:
    """An environment of verifiers 0.4: a taskset, played by one agent.

    The agent's harness is the taskset's own one, or `asyncrl_chat` if the taskset has none.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        import verifiers.v1 as vf

        self._name = name
        config = vf.env_config_type(name)
        roles = [role for role, field in config.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
        if len(roles) != 1:
            raise PlayError(
                f"{name} has the agents {', '.join(roles)}; only environments with one agent can be trained"
            )
        own = vf.default_harness_id(name)
        self._chats = own == NO_HARNESS
        agent = {"harness": {"id": "asyncrl_chat" if self._chats else own}, "runtime": {"type": "subprocess"}}
        given = {"taskset": {"id": name, **arguments}, roles[0]: agent}
        self._environment = vf.load_environment(vf.resolve_env_config(given))
        self._taskset = self._environment.taskset
        self._task_type = type(self._taskset).task_type()
        self._shared = self._in_process(self._taskset)
        self._stack = AsyncExitStack()
        self._servers: list[Any] | None = None
        self._known: dict[type, list[Any]] = {}

    async def close(self) -> None:
        await self._stack.aclose()

    def tasks(self, split: str, limit: int | None) -> Iterator[dict[str, Any]]:
        if split != "train":
            raise PlayError(f"a taskset has no splits; choose its tasks by --args (fields of {self._name}'s config)")
        if limit is None and not self._taskset.bounded:
            raise PlayError(f"{self._name} makes tasks without end; set their number by --limit")
        for task in itertools.islice(self._taskset, limit):
            data = task.data
            messages = data.prompt if isinstance(data.prompt, list) else []
            prompt = [{"role": message.role, "content": message.content} for message in messages]
            if isinstance(data.prompt, str):
                prompt = [{"role": "user", "content": data.prompt}]
            if data.system_prompt:
                prompt = [{"role": "system", "content": data.system_prompt}, *prompt]
            yield {
                "task": data.model_dump(mode="json", exclude_unset=True),
                "prompt": prompt,
                "answer": getattr(data, "answer", None),
            }

    async def play(self, task: Any, base_url: str, key: str) -> tuple[dict[str, float], dict[str, float]]:
        import asyncrl_chat
        import verifiers.v1 as vf

        if self._servers is None:
            await self._serve()
        data = self._task_type.data_type().model_validate(task)
        one = self._task_type(data, self._environment.config.taskset.task)
        asyncrl_chat.LOCAL_TOOLS.set(asyncrl_chat.LocalTools(self._in_process(one), self._servers or (), self._known))
        os.environ[KEY_VARIABLE] = key
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=KEY_VARIABLE)
        episode = await self._environment.run_episode(one, vf.ModelContext(MODEL, client, vf.SamplingConfig()))
        traces = episode.traces
        if not episode.ok:
            errors = [f"{error.type}: {error.message}" for each in (episode, *traces) for error in each.errors]
            raise PlayError("the rollout failed: " + "; ".join(errors)[:1000])
        if len(traces) != 1:
            raise PlayError(f"{self._name} let its agent run {len(traces)} times; an episode must have one run")
        rewards = traces[0].rewards
        if missing := [name for name, reward in rewards.items() if reward is None]:
            raise PlayError(f"{', '.join(missing)} gave no score (perhaps the scoring's time limit was reached)")
        weighted = {name: reward.value for name, reward in rewards.items()}
        scores = {name: reward.score for name, reward in rewards.items() if reward.weight != 1}
        return weighted, {**scores, **{name: value for name, value in traces[0].metrics.items() if value is not None}}

    async def _serve(self) -> None:
        """Open the environment's resources and the taskset's tools. They stay open until `close`."""
        from asyncrl_chat import OwnInterception, ToolServer

        environment = self._environment
        await self._stack.enter_async_context(environment.serving())
        elsewhere = environment._shared_tools
        environment._interception = None  # If a tunnel is needed, each rollout makes its own interception.
        if not environment._requires_tunnel(elsewhere):
            secrets = tuple(each.state_secret for each in elsewhere.values() if each.state_secret)
            own = OwnInterception(state_service_secrets=secrets)
            environment._interception = await self._stack.enter_async_context(own)
        self._servers = [ToolServer(toolset) for toolset in self._shared()]
        for server in self._servers:
            await server.open(self._stack, self._known)

    def _in_process(self, owner: Any) -> Callable[[], list[Any]]:
        """Take from `owner` the toolsets that can run in this process, and return a function that makes them.

        `owner`, a task or a taskset, keeps all other toolsets.
        """
        make = type(owner).toolsets

        def elsewhere(toolset: Any) -> bool:
            return not self._chats or bool(toolset.config.url) or toolset.config.runtime.type != "subprocess"

        owner.toolsets = lambda config: [each for each in make(config) if elsewhere(each)]
        return lambda: [each for each in make(owner.config) if not elsewhere(each)]


def open_environment(name: str, arguments: Mapping[str, Any]) -> Playable:
    """Load an environment. Raises PlayError: it cannot be loaded."""
    try:
        if version("verifiers").startswith("0.3."):
            return ClassicEnvironment(name, arguments)
        if version("verifiers").startswith("0.4."):
            return TasksetEnvironment(name, arguments)
    except PlayError:
        raise
    except Exception as error:
        raise PlayError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    raise PlayError(f"verifiers {version('verifiers')} is not supported; use release 0.3 or 0.4")


def rows(name: str, arguments: str, split: str, limit: int | None) -> Iterator[dict[str, Any]]:
    """Yield the tasks as rows of a task file. Raises PlayError: the tasks cannot be listed or written."""
    for number, found in enumerate(open_environment(name, json.loads(arguments)).tasks(split, limit)):
        answer = found["answer"]
        try:
            text = json.dumps({"env": name, "args": json.loads(arguments), "task": found["task"]})
        except (TypeError, ValueError) as error:
            raise PlayError(f"task {number} of {name} cannot be kept as JSON: {error}") from error
        yield {
            "prompt": [{"role": each["role"], "content": _text(each["content"])} for each in found["prompt"]],
            "data_source": f"{FIELD}/{name}",
            "reward_model": {"ground_truth": "" if answer is None else str(answer)},
            "extra_info": {"index": number, "split": split, FIELD: text},
        }


def _text(content: Any) -> str:
    """The text of a message, shown to people. The environment's task has the whole message."""
    if isinstance(content, str) or content is None:
        return content or ""
    parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
    return "\n".join(part["text"] if part.get("type") == "text" else f"({part.get('type')})" for part in parts)


class EpisodePlayer:
    """Plays episodes of tasks from `rows`. Each environment is loaded once."""

    def __init__(self) -> None:
        self._environments: dict[str, Playable] = {}

    async def play(self, extra_info: Mapping[str, Any], base_url: str, key: str) -> dict[str, Any]:
        """Play one episode. Returns its rewards and metrics. Raises PlayError: the episode failed."""
        try:
            given = json.loads(extra_info[FIELD])
        except (KeyError, TypeError, ValueError):
            raise PlayError(f"the task is not from `asyncrl data verifiers`: extra_info.{FIELD} is missing") from None
        name, arguments = given["env"], given["args"]
        at = json.dumps([name, arguments], sort_keys=True)
        if at not in self._environments:
            self._environments[at] = open_environment(name, arguments)
        rewards, metrics = await self._environments[at].play(given["task"], base_url, key)
        named = {re.sub(r"[^A-Za-z0-9_.-]", "_", metric)[:64]: float(value) for metric, value in metrics.items()}
        if len(named) > MAX_METRICS:
            kept = dict(itertools.islice(named.items(), MAX_METRICS - 1))
            named = {**kept, "metrics_left_out": float(len(named) - len(kept))}
        return {"rewards": {reward: float(value) for reward, value in rewards.items()}, "metrics": named}

    async def close(self) -> None:
        for environment in self._environments.values():
            await environment.close()


def _own_stdout() -> Any:
    """Keep stdout for this program. Environments print to stderr from now on."""
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return own


async def _serve_episodes(out: Any) -> None:
    """Play the episode of each line of stdin, one after another, and write its outcome as a line."""
    player = EpisodePlayer()
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        try:
            outcome = await player.play(request["task"]["extra_info"], request["base_url"], request["api_key"])
        except Exception as error:  # noqa: BLE001 - one episode fails alone
            outcome = {"error": str(error) if isinstance(error, PlayError) else f"{type(error).__name__}: {error}"}
        out.write(json.dumps(outcome) + "\n")
    await player.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="verifiers_agent", description=__doc__.split("\n\n")[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command")
    tasks = commands.add_parser("tasks", help="write the tasks of an environment as JSON lines")
    tasks.add_argument("environment")
    tasks.add_argument("--args", default="{}")
    tasks.add_argument("--split", default="train")
    tasks.add_argument("--limit", type=int)
    given = parser.parse_args()
    # Logging is set up here, before MCP sets it up: MCP would log each request.
    logging.basicConfig(level=logging.WARNING)
    out = _own_stdout()
    if given.command is None:
        asyncio.run(_serve_episodes(out))
        return
    try:
        for row in rows(given.environment, given.args, given.split, given.limit):
            out.write(json.dumps(row) + "\n")
    except PlayError as error:
        out.write(json.dumps({"error": str(error)}) + "\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
