"""Runs all checks before anything starts: one list, in order, of all that the roles will load or need."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config import locations
from asyncrl.config.refusals import missing_data
from asyncrl.config.schema import ActorConfig, AlgorithmConfig, ScoringConfig, TrainConfig
from asyncrl.config.schema.tools import SandboxConfig
from asyncrl.errors import (
    AsyncrlError,
    ConfigError,
    DataError,
    InteractionError,
    StoppedError,
    StoreError,
    ToolError,
    UnavailableError,
)
from asyncrl.launch.preflight.algorithm import check_algorithm
from asyncrl.launch.preflight.demonstrations import check_group_demonstrations
from asyncrl.launch.preflight.episode import EpisodeJudge, TrialStage, check_episodes, notice, try_ticket
from asyncrl.launch.preflight.grammars import check_grammars
from asyncrl.launch.preflight.learning import check_learning
from asyncrl.launch.preflight.machine import check_devices, check_disk, check_ports, free_bytes
from asyncrl.launch.preflight.models import (
    check_adapters,
    check_existence,
    check_freezing,
    check_length,
    check_tokenizer,
    policy_size,
)
from asyncrl.launch.preflight.prompts import check_prompts, prompt_lengths
from asyncrl.launch.preflight.truths import check_truths
from asyncrl.network.keys import check_keys
from asyncrl.text import reason_of
from asyncrl.types import Ticket

if TYPE_CHECKING:
    from asyncrl.chat.chat import Chat
    from asyncrl.data.opening import RunTasks
    from asyncrl.data.reading import TaskFile

log = logging.getLogger("asyncrl.train")


def preflight(
    config: TrainConfig,
    *more: Callable[[], None],
    stop: threading.Event | None = None,
    read: Mapping[str, TaskFile] | None = None,
) -> None:
    """Run the `more` checks, and then check everything that the roles will load or need. `read` has the result of
    `read_files`, which is then not read again.

    It checks keys, ports, devices, data, models, tools, the chat template, rules and the parts of the algorithm, such
    as its loss. A check is left out if one of its inputs was refused. Checks that read all rows take long, so they run
    only if all others have passed.

    Raises ConfigError, DataError or UnavailableError with one line for each problem; StoppedError: `stop` was set
    meanwhile.
    """
    from asyncrl.actor.from_config import open_runner
    from asyncrl.chat.from_config import open_chat
    from asyncrl.data.from_config import run_tasks
    from asyncrl.episode.from_config import prepare_demonstrations
    from asyncrl.launch.preflight.datasets import make_tasks
    from asyncrl.modelling.opening import reads_images
    from asyncrl.modelling.tokenizer import open_tokenizer
    from asyncrl.scoring.verifier import Verifier

    actor, scoring, learner, found = config.actor, config.scoring, config.learner, Problems(stop)
    is_local, plays = config.cluster.launcher == "local", not actor.played_by
    missing = missing_data(config.data, config.algorithm.sft.path)
    found.extend(map(DataError, missing.values()))
    found.check(*more)
    files = _task_files(run_tasks(config), partial(make_tasks, config), read or {}, missing, found)
    if config.replay.source is not None:
        found.check(partial(_check_source, Path(config.replay.source)))
    found.check(partial(check_keys, config.network.keys))
    if is_local:  # Other hosts cannot be checked here. The placement checks their devices.
        found.check(partial(check_ports, config.network, learner, config.replay.shards))
        found.check(partial(check_devices, config))
    found.check(partial(_check_optimizer, learner.optimizer), partial(_check_scoring, scoring, actor.sandbox))
    with found.collected():
        check_algorithm(config)
        _probe_parts(config.algorithm, learner.group_size)
    trains = learner.epochs is not None or learner.total_steps > 0
    found.check(partial(_check_play, actor, files, trains))
    with found.collected():
        check_existence(config.model, config.critic, config.implicit, scoring)
        found.check(partial(_check_policy, config))
        if plays:
            found.check(partial(check_grammars, config.engine.kind, actor, files))
            with found.collected():
                _check_template(open_chat(config), actor, reads_images(config.engine.kind, config.model), files)
        found.check(partial(check_truths, scoring, config.model, actor.sandbox, files))
    if not found.any:
        with (
            found.collected(),
            closing(EpisodeJudge(scoring, partial(Verifier, scoring, config.model, actor.sandbox))) as judge,
        ):
            chat, tokenizer = cache(partial(open_chat, config)), cache(partial(open_tokenizer, config.model))
            check_episodes(actor, files, TrialStage(tokenizer, chat, partial(open_runner, config)), judge)
        if shown := config.algorithm.sft.path:
            found.check(partial(prepare_demonstrations, config, shown, stop))
        if plays:
            measure = partial(prompt_lengths, config, stop)
            with found.collected():
                for file in files:
                    check_prompts(config.data, file, measure)
            found.check(
                partial(
                    check_group_demonstrations,
                    run_tasks(config),
                    config.actor,
                    partial(open_chat, config),
                    files[:1],
                    stop,
                )
            )
    found.raise_all()


class Problems:
    """The problems that the checks have found. No check begins once `stop` is set."""

    def __init__(self, stop: threading.Event | None) -> None:
        self._found: list[AsyncrlError] = []
        self._stop = stop

    @property
    def any(self) -> bool:
        return bool(self._found)

    def extend(self, problems: Iterable[AsyncrlError]) -> None:
        self._found.extend(problems)

    def check(self, *checks: Callable[[], object]) -> None:
        """Run each check, and keep its problem if it has one. Raises StoppedError: `stop` was set."""
        for each in checks:
            with self.collected():
                each()

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep the problem that the block raises. Raises StoppedError: `stop` was set."""
        if self._stop is not None and self._stop.is_set():
            raise StoppedError("stopped while the configuration was checked; nothing was started")
        try:
            yield
        except (ConfigError, DataError, UnavailableError) as error:
            self._found.append(error)

    def raise_all(self) -> None:
        """Raise the first problem with the messages of all, if there are any."""
        if self._found:
            first = self._found[0]
            raise type(first)("\n".join(dict.fromkeys(map(str, self._found)))) from first


def _task_files(
    tasks: RunTasks,
    make: Callable[[Sequence[str]], None],
    read: Mapping[str, TaskFile],
    missing: Collection[str],
    found: Problems,
) -> list[TaskFile]:
    """Return the tasks of data.train and data.eval that can be read. If both are the same files, they are returned only
    once.

    `make` makes the tasks of sources that roles cannot read themselves. `read` has the tasks that were read before.
    """
    files: list[TaskFile] = []
    for key, sources in {"data.train": tasks.data.train, "data.eval": tasks.data.eval}.items():
        with found.collected():
            if key in read:
                files.append(read[key])
            elif sources and key not in missing and not (files and sources == tasks.data.train):
                if found.any and tasks.made_file(sources) is not None:
                    continue
                make(sources)
                files.append(tasks.all(sources))
    return files


def _check_source(folder: Path) -> None:
    """Raises ConfigError: the folder that `replay.source` names has no whole store."""
    from asyncrl.replay.stored import shard_paths

    try:
        shard_paths(folder)
    except StoreError as error:
        raise ConfigError(f"replay.source={folder}: {error}, such as runs/NAME/replay") from error


def _check_optimizer(name: str) -> None:
    from asyncrl.learner.model.optimizer import check_optimizer

    check_optimizer(name)


def _check_policy(config: TrainConfig) -> None:
    from asyncrl.engine.sglang.families import check_family

    model, critic, implicit = config.model, config.critic, config.implicit
    check_family(config.engine, model)
    size = policy_size(model)
    check_tokenizer(model)
    check_length(model, config.actor, config.engine)
    check_freezing(model, critic, implicit)
    check_learning(model, critic, config.learner, config.algorithm)
    adapters = check_adapters(model, critic, implicit)
    check_disk(config.run, config.learner, config.replay, size, free_bytes(locations.run_dir(config.run)), adapters)


def _check_play(actor: ActorConfig, files: Sequence[TaskFile], trains: bool) -> None:
    """Raises ConfigError: the tools, environments, simulated users or the agent of the episodes cannot be used."""
    from asyncrl.agents.chat_api.agent import load_agent
    from asyncrl.agents.chat_api.program import check_command
    from asyncrl.episode.steps import find_split
    from asyncrl.tools.interactions.registry import load_interactions
    from asyncrl.tools.offered import Offer

    find_split(actor.step_split)
    load_interactions(actor.interactions)
    Offer(actor)
    if actor.agent is not None:
        load_agent(actor.agent, actor.agent_options)
    if actor.agent_command:
        check_command(actor.agent_command)
    if not actor.played_by:
        _check_creation(actor, files)
        _warn_of_missing_tools(actor, files)
        _check_users(actor, files, trains)


def _check_scoring(scoring: ScoringConfig, sandbox: SandboxConfig) -> None:
    from asyncrl.sandbox.sandboxes import open_sandbox
    from asyncrl.scoring.managers import check_managers
    from asyncrl.scoring.models.registry import check_models
    from asyncrl.scoring.rules.registry import load_rules
    from asyncrl.scoring.step_rewards import StepFunction

    load_rules(scoring, sandbox=open_sandbox(sandbox))
    check_managers(scoring)
    check_models(scoring.prm, scoring.outcome_model)
    if scoring.steps is not None:
        StepFunction(scoring.steps)


def _probe_parts(algorithm: AlgorithmConfig, group_size: int) -> None:
    from asyncrl.algorithms.probe import probe_parts

    probe_parts(algorithm, group_size)


def _check_template(chat: Chat, actor: ActorConfig, reads: bool, files: Sequence[TaskFile]) -> None:
    """Raises ConfigError: the model's chat template refuses the tools or the data; a prompt ends with a message of the
    assistant; or a row has images that the model or the engine cannot read."""
    from asyncrl.chat.chat_checks import check_tasks, check_tools
    from asyncrl.chat.image_blocks import image_blocks
    from asyncrl.episode.images import READS_NONE
    from asyncrl.tools.offered import Offer

    offer = Offer(actor)
    for functions in offer.every:
        check_tools(chat, functions)
    for file in files:
        for row, task in file.by_roles().items():
            if task.messages[-1]["role"] == "assistant":
                raise ConfigError(
                    f"{file.place(row)} has a prompt that ends with a message of the assistant, and chat templates "
                    "close that message before the policy's turn: end the prompt with a message of the user"
                )
            if image_blocks(task.messages) and not reads:
                raise ConfigError(f"{file.place(row)}: {READS_NONE}")
            with suppress(ToolError):  # Another check refuses the task's environment.
                check_tasks(chat, {file.place(row): task}, offer.functions(task))


def _check_creation(actor: ActorConfig, files: Sequence[TaskFile]) -> None:
    """Create the tools of one row of each kind, or reset its environment, and release them again. Raises ConfigError: a
    tool cannot be created, an environment cannot be reset, or a row names a tool that the run does not offer."""
    from asyncrl.actor.from_config import open_toolbox
    from asyncrl.tools.toolbox import Toolbox

    toolbox = open_toolbox(actor)
    is_tools = isinstance(toolbox, Toolbox)

    async def create(ticket: Ticket) -> None:
        try:
            async with toolbox.open(ticket):
                pass
        finally:
            await toolbox.close()

    for file in files:
        for row, task in (file.by_roles() | file.by_environment()).items():
            place = file.place(row)
            # A call of `create` that blocks cannot be interrupted. The first call may take minutes, such as for a
            # download.
            what = "`create` of actor.tools" if is_tools else "`reset` of an environment"
            try:
                with notice(f"{what} has not finished yet, for {place}"):
                    asyncio.run(create(try_ticket(task)))
            except Exception as error:
                reason = error if isinstance(error, ToolError) else reason_of(error)
                if not isinstance(toolbox, Toolbox):
                    raise ConfigError(
                        f"with {place}, {reason}; `reset` gets the task's row as keywords (docs/environments.md)"
                    ) from error
                given = ", ".join(name for name, kwargs in task.tools_kwargs.items() if kwargs) or "none"
                raise ConfigError(
                    f"actor.tools: with {place}, {reason}; `create` gets the row's "
                    "extra_info.tools_kwargs[NAME] as keywords, where NAME is the name in the tool's `schema` "
                    f"(on offer: {', '.join(toolbox.functions)}; the row has: {given}; docs/tools.md)"
                ) from error


def _warn_of_missing_tools(actor: ActorConfig, files: Sequence[TaskFile]) -> None:
    """Warn if a row has arguments for tools that the run does not offer."""
    from asyncrl.tools.offered import Offer

    if actor.has_environments:
        return
    offered = Offer(actor).always
    for file in files:
        for row, task in file.by_roles().items():
            named = [name for name, kwargs in task.tools_kwargs.items() if kwargs is not None and name not in offered]
            if named:
                log.warning(
                    "actor.tools offers %s, but %s has tools_kwargs for %s: calls of a tool that is not on offer fail. "
                    "Add it to actor.tools (docs/tools.md), unless episodes should do without it",
                    *(", ".join(offered) or "no tools", file.place(row), ", ".join(named)),
                )
                return


def _check_users(actor: ActorConfig, files: Sequence[TaskFile], trains: bool) -> None:
    """Start each simulated user with the first row that names it, and finalize it again. Raises ConfigError: a user
    cannot start, no row names a user, or a row names an unknown user."""
    from asyncrl.tools.interactions.registry import load_interactions
    from asyncrl.tools.interactions.users import InteractionLimits, Interactions

    if not actor.interactions or not files:
        return
    limits = InteractionLimits(actor.interaction_timeout_s)
    users = Interactions(load_interactions(actor.interactions), limits)

    async def start(ticket: Ticket) -> None:
        async with users.open(ticket):
            pass

    named = [(file.place(row), task) for file in files for row, task in file.by_user().items()]
    if not named and trains:  # An evaluation may be on tasks without a user.
        raise ConfigError(
            "actor.interactions: no task names one of the users in extra_info.interaction_kwargs.name "
            "(docs/environments.md); add it to the data, or leave actor.interactions empty"
        )
    for place, task in named:
        try:
            asyncio.run(start(try_ticket(task)))
        except InteractionError as error:
            raise ConfigError(
                f"actor.interactions: with {place}, {error}; `start_interaction` gets the row's "
                "extra_info.interaction_kwargs as keywords (docs/environments.md)"
            ) from error
