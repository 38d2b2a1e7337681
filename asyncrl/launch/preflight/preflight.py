"""Checks before anything starts that every name in the configuration stands for something that can be used."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.config import locations
from asyncrl.config.refusals import missing_data
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import (
    AsyncrlError,
    ConfigError,
    DataError,
    InteractionError,
    ScoringError,
    StoppedError,
    ToolError,
    UnavailableError,
)
from asyncrl.launch.preflight.algorithm import check_algorithm
from asyncrl.launch.preflight.demonstrations import check_demonstrations, check_group_demonstrations
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
from asyncrl.launch.preflight.prompts import check_prompts
from asyncrl.text import reason_of
from asyncrl.types import NO_VERSION, Finish, Purpose, Role, Task, Ticket, Trajectory, Turn

if TYPE_CHECKING:
    from asyncrl.data.reading import TaskFile

log = logging.getLogger("asyncrl.train")

CREATION_NOTICE_S = 10.0
RULE_S = 120.0
"""For a rule that is tried: the first use of one may load libraries on a cold disk."""

_EPISODE = Trajectory(
    id="preflight",
    task_id="preflight",
    group_id="preflight",
    member=0,
    tokens=np.zeros(2, np.int32),
    logprobs=np.zeros(2, np.float32),
    version_runs=np.array([[0, NO_VERSION], [1, 0]], np.int32),
    turns=(Turn(0, 1, Role.PROMPT), Turn(1, 2, Role.ASSISTANT, "stop")),
    steps=(),
    finish=Finish.COMPLETED,
)
"""An episode whose answer is empty."""


def preflight(config: TrainConfig, *more: Callable[[TrainConfig], None], stop: threading.Event | None = None) -> None:
    """Try all that the roles will load or need: keys, ports, devices, data, models, tools, chat template, rules and the
    algorithm's parts; and `more` checks, which come first. A check that needs what another one refused is left out.
    What goes through all rows and may take long is not begun for a start that is refused anyway.

    Raises ConfigError, DataError or UnavailableError with one line for each problem; StoppedError: `stop` was set
    meanwhile.
    """
    from asyncrl.data.from_config import run_tasks
    from asyncrl.launch.preflight.datasets import make_tasks

    problems: list[AsyncrlError] = []
    files: list[TaskFile] = []
    missing = missing_data(config)
    problems.extend(map(DataError, missing.values()))
    for check in more:
        with _collected(problems, stop):
            check(config)
    for key, sources in {"data.train": config.data.train, "data.eval": config.data.eval}.items():
        with _collected(problems, stop):
            if sources and key not in missing and not (files and sources == config.data.train):
                if problems and run_tasks(config).made_file(sources) is not None:
                    continue
                make_tasks(config, sources)
                files.append(run_tasks(config).all(sources))
    for check in (_check_keys, check_ports, _check_devices, _check_optimizer, _check_scoring, _check_algorithm):
        with _collected(problems, stop):
            check(config)
    with _collected(problems, stop):
        _check_tools(config)
        if not config.actor.played_by:
            _check_creation(config, files)
            _check_users(config, files)
    with _collected(problems, stop):
        check_existence(config)
        with _collected(problems, stop):
            _check_policy(config)
        if not config.actor.played_by:
            with _collected(problems, stop):
                check_grammars(config, files)
            with _collected(problems, stop):
                _check_template(config, files)
        with _collected(problems, stop):
            _check_truths(config, files)
    if not problems:
        with _collected(problems, stop):
            check_demonstrations(config, stop)
        if not config.actor.played_by:
            with _collected(problems, stop):
                for file in files:
                    check_prompts(config, file, stop)
                check_group_demonstrations(config, files[:1], stop)
    if problems:
        raise type(problems[0])("\n".join(dict.fromkeys(map(str, problems)))) from problems[0]


@contextmanager
def _collected(problems: list[AsyncrlError], stop: threading.Event | None) -> Iterator[None]:
    if stop is not None and stop.is_set():
        raise StoppedError("stopped while the configuration was checked; nothing was started")
    try:
        yield
    except (ConfigError, DataError, UnavailableError) as error:
        problems.append(error)


def _check_keys(config: TrainConfig) -> None:
    from asyncrl.network.keys import check_keys

    check_keys(config.network.keys)


def _check_devices(config: TrainConfig) -> None:
    if config.cluster.launcher != "local":
        return  # The placement checks what its hosts have.
    import torch

    check_devices(config, torch.cuda.device_count())


def _check_optimizer(config: TrainConfig) -> None:
    from asyncrl.learner.model.optimizer import check_optimizer

    check_optimizer(config.learner.optimizer)


def _check_policy(config: TrainConfig) -> None:
    from asyncrl.engine.sglang.families import check_family

    check_family(config.engine, config.model)
    size = policy_size(config)
    check_tokenizer(config)
    check_length(config)
    check_freezing(config)
    check_learning(config)
    adapters = check_adapters(config)
    check_disk(config, size, free_bytes(locations.run_dir(config.run)), adapters)


def _check_tools(config: TrainConfig) -> None:
    from asyncrl.agents.chat_api.agent import load_agent
    from asyncrl.agents.chat_api.program import check_command
    from asyncrl.episode.steps import find_split
    from asyncrl.tools.interactions.registry import load_interactions
    from asyncrl.tools.offered import Offer

    find_split(config.actor.step_split)
    load_interactions(config.actor.interactions)
    Offer(config.actor)
    if config.actor.agent is not None:
        load_agent(config.actor.agent, config.actor.agent_options)
    if config.actor.agent_command:
        check_command(config.actor.agent_command)


def _check_scoring(config: TrainConfig) -> None:
    from asyncrl.sandbox.sandboxes import open_sandbox
    from asyncrl.scoring.managers import check_managers
    from asyncrl.scoring.models.registry import check_models
    from asyncrl.scoring.rules.registry import load_rules

    load_rules(config.scoring, sandbox=open_sandbox(config.actor.sandbox))
    check_managers(config.scoring)
    check_models(config.scoring.prm, config.scoring.outcome_model)


def _check_algorithm(config: TrainConfig) -> None:
    from asyncrl.algorithms.probe import probe_parts

    check_algorithm(config)
    probe_parts(config.algorithm, config.learner.group_size)


def _check_template(config: TrainConfig, files: Sequence[TaskFile]) -> None:
    """Raises ConfigError: the model's chat template does not take the tools or the data, or a row shows images that
    nothing reads."""
    from asyncrl.chat.chat_checks import check_tasks, check_tools
    from asyncrl.chat.from_config import open_chat
    from asyncrl.chat.image_blocks import image_blocks
    from asyncrl.episode.images import READS_NONE
    from asyncrl.modelling.opening import reads_images
    from asyncrl.tools.offered import Offer

    chat, offer, reads = open_chat(config), Offer(config.actor), reads_images(config.engine.kind, config.model)
    for functions in offer.every:
        check_tools(chat, functions)
    for file in files:
        for row, task in file.by_roles().items():
            if image_blocks(task.messages) and not reads:
                raise ConfigError(f"{file.place(row)}: {READS_NONE}")
            with suppress(ToolError):  # Another check refuses the task's environment.
                check_tasks(chat, {file.place(row): task}, offer.functions(task))


def _check_creation(config: TrainConfig, files: Sequence[TaskFile]) -> None:
    """Raises ConfigError: the tools of a row cannot be created, or are not all on offer. They are released again."""
    from asyncrl.actor.from_config import open_toolbox
    from asyncrl.tools.toolbox import Toolbox

    toolbox = open_toolbox(config.actor)
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
            # A `create` that blocks cannot be interrupted; one that makes much for the first time may take minutes.
            what = "`create` of actor.tools" if is_tools else "`reset` of an environment"
            waits = f"{what} has not ended yet with {place}; Ctrl-C twice ends the start"
            notice = threading.Timer(CREATION_NOTICE_S, log.warning, (waits,))
            notice.daemon = True
            notice.start()
            try:
                asyncio.run(create(_try_out(task)))
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
            finally:
                notice.cancel()


def _check_users(config: TrainConfig, files: Sequence[TaskFile]) -> None:
    """Raises ConfigError: a simulated user cannot start with the first row that names it, no row names one, or a row
    names another one. Those that started are finalized again."""
    from asyncrl.tools.interactions.registry import load_interactions
    from asyncrl.tools.interactions.users import InteractionLimits, Interactions

    if not config.actor.interactions or not files:
        return
    limits = InteractionLimits(config.actor.interaction_timeout_s)
    users = Interactions(load_interactions(config.actor.interactions), limits)

    async def start(ticket: Ticket) -> None:
        async with users.open(ticket):
            pass

    # An evaluation may be on tasks without a user.
    trains = config.learner.epochs is not None or config.learner.total_steps > 0
    named = [(file.place(row), task) for file in files for row, task in file.by_user().items()]
    if not named and trains:
        raise ConfigError(
            "actor.interactions: no task names one of the users in extra_info.interaction_kwargs.name "
            "(docs/environments.md); add it to the data, or leave actor.interactions empty"
        )
    for place, task in named:
        try:
            asyncio.run(start(_try_out(task)))
        except InteractionError as error:
            raise ConfigError(
                f"actor.interactions: with {place}, {error}; `start_interaction` gets the row's "
                "extra_info.interaction_kwargs as keywords (docs/environments.md)"
            ) from error


def _try_out(task: Task) -> Ticket:
    return Ticket("preflight", task, "preflight", 0, Purpose.TRAIN, 1.0, 0)


def _check_truths(config: TrainConfig, files: Sequence[TaskFile]) -> None:
    """Raises DataError: a built-in rule cannot use the ground truth of the first row of a data source."""
    from asyncrl.config.schema.scoring import needs
    from asyncrl.sandbox.sandboxes import open_sandbox
    from asyncrl.scoring.rules.base import RuleInput
    from asyncrl.scoring.rules.registry import BUILT_IN, load_rules, rule_names
    from asyncrl.scoring.verifier import Verifier

    load_rules(config.scoring, sandbox=open_sandbox(config.actor.sandbox))
    lines = []
    patient = replace(config.scoring, timeout_s=max(config.scoring.timeout_s, RULE_S))
    with closing(Verifier(patient, config.model, config.actor.sandbox)) as verifier:
        for file in files:
            for row, task in file.by_source().items():
                names = rule_names(config.scoring, task.data_source)
                # A rule of the user's may need a real episode.
                if "rules" not in needs(config.scoring, task.data_source) or not set(names.split(",")) <= set(BUILT_IN):
                    continue
                try:
                    verifier.score(RuleInput(task, _EPISODE, answer="", response=""))
                except ScoringError as error:
                    lines.append(f"{file.place(row)} has a ground truth that the rule {names} cannot use: {error}")
    if lines:
        raise DataError("\n".join(lines))
