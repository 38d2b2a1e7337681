"""Checks, before anything starts, everything that the roles will load or need. The checks are one ordered list."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config import locations
from asyncrl.config.changes import values_of
from asyncrl.config.refusals import missing_data
from asyncrl.config.schema import ActorConfig, AlgorithmConfig, ScoringConfig, TrainConfig
from asyncrl.config.schema.tools import SandboxConfig
from asyncrl.errors import ConfigError, DataError, StoreError, ToolError
from asyncrl.launch.preflight.algorithm import check_algorithm
from asyncrl.launch.preflight.episodes.episode import ManagerTrial
from asyncrl.launch.preflight.episodes.own_code import own_paths
from asyncrl.launch.preflight.episodes.play import check_agent, check_play
from asyncrl.launch.preflight.learning import check_learning, warn_of_large_rates
from asyncrl.launch.preflight.machine import check_devices, check_disk, check_ports, free_bytes
from asyncrl.launch.preflight.models import (
    check_adapters,
    check_existence,
    check_freezing,
    check_length,
    check_tokenizer,
    policy_size,
)
from asyncrl.launch.preflight.problems import Problems
from asyncrl.launch.preflight.servers import warn_of_silent_servers
from asyncrl.launch.preflight.tasks.grammars import check_grammars
from asyncrl.launch.preflight.tasks.held_out import warn_of_shared_tasks
from asyncrl.launch.preflight.tasks.prompts import prompt_lengths
from asyncrl.launch.preflight.tasks.row_checks import RowChecks
from asyncrl.launch.preflight.tasks.truths import check_truths
from asyncrl.launch.preflight.trial import Pool, TrialProcess, open_trial_pool
from asyncrl.launch.preflight.unused import warn_of_unused_scores, warn_of_unused_servers
from asyncrl.network.keys import check_keys

if TYPE_CHECKING:
    from asyncrl.chat.chat import Chat
    from asyncrl.data.opening import RunTasks
    from asyncrl.data.reading import TaskFile


def preflight(
    config: TrainConfig,
    *more: Callable[[], None],
    stop: threading.Event | None = None,
    read: Mapping[str, TaskFile] | None = None,
    open_pool: Callable[[Mapping[str, Any]], Pool] = open_trial_pool,
) -> None:
    """Run the `more` checks, and then check everything that the roles will load or need. `read` has the result of
    `read_files`, so that these tasks are not read again.

    It checks keys, ports, devices, data, models, tools, the chat template, rules and the parts of the algorithm, such
    as its loss. The user's own tools, environments, users and scorers run in a child process, which `open_pool` opens.
    A check is left out if one of its inputs was refused. Checks that read all rows take long, so they run only if all
    others have passed.

    Raises ConfigError, DataError or UnavailableError with one line for each problem; StoppedError: `stop` was set
    meanwhile.
    """
    from asyncrl.chat.from_config import open_chat
    from asyncrl.data.from_config import run_tasks
    from asyncrl.episode.from_config import prepare_demonstrations
    from asyncrl.launch.preflight.tasks.datasets import make_tasks

    actor, scoring, learner, sft = config.actor, config.scoring, config.learner, config.algorithm.sft
    found, missing = Problems(stop), missing_data(config.data, sft.path)
    found.extend(map(DataError, missing.values()))
    found.check(*more)
    tasks = run_tasks(config)
    files = _task_files(tasks, partial(make_tasks, config), read or {}, missing, found)
    open_own_chat = cache(partial(open_chat, config))
    with closing(TrialProcess(values_of(config), stop, open_pool)) as trial:
        if files and own_paths(actor, scoring):
            trial.begin()
        found.check(partial(_check_source, config.replay.source), partial(check_keys, config.network.keys))
        if config.cluster.launcher == "local":
            # Other hosts cannot be checked here. The placement checks their devices.
            ports = partial(check_ports, config.network, learner, config.replay.shards)
            found.check(ports, partial(check_devices, config))
            warn_of_silent_servers(config.engine)
        warn_of_unused_servers(config.engine)
        found.check(partial(_check_optimizer, learner.optimizer), partial(_check_scoring, scoring, actor.sandbox))
        with found.collected():
            check_algorithm(config)
            _probe_parts(config.algorithm, learner.group_size)
        trains = learner.epochs is not None or learner.total_steps > 0
        if trains:
            warn_of_large_rates(config.model, config.critic, config.implicit, learner)
            warn_of_unused_scores(config.replay.filter, scoring.shaping)
        agent = partial(check_agent, actor, config.data, config.model, files)
        found.check(partial(check_play, actor, files, trains, trial), agent)
        found.check(partial(_check_models, config, open_own_chat, files, found))
        if not found.any:
            managers = partial(ManagerTrial, scoring, config.model, stop)
            measure = partial(prompt_lengths, config, stop)
            prepare = partial(prepare_demonstrations, config, sft.path, stop) if sft.path else None
            rows = RowChecks(actor, scoring, tasks, open_own_chat, managers, measure, prepare)
            rows.run(files, trial, found, stop)
        if trains and not found.any:  # An evaluation reads its tasks as training tasks, too.
            warn_of_shared_tasks(config.data.train, config.data.eval, files)
    found.raise_all()


def _task_files(
    tasks: RunTasks,
    make: Callable[[Sequence[str]], None],
    read: Mapping[str, TaskFile],
    missing: Collection[str],
    found: Problems,
) -> list[TaskFile]:
    """Return the tasks of data.train and data.eval that can be read. If both are the same tasks, they are returned only
    once.

    `make` makes the tasks of sources that roles cannot read themselves. `read` has the tasks that were read before.
    """
    files: list[TaskFile] = []
    for key, sources in {"data.train": tasks.data.train, "data.eval": tasks.data.eval}.items():
        with found.collected():
            if key in read:
                files.append(read[key])
            elif sources and key not in missing and not (files and tasks.data.evaluates_training_tasks):
                if found.any and tasks.made_file(sources) is not None:
                    continue
                make(sources)
                files.append(tasks.all(sources, held_out=key == "data.eval"))
    return files


def _check_source(folder: str | None) -> None:
    """Raises ConfigError: the folder that `replay.source` names has no whole store."""
    from asyncrl.replay.stored import shard_paths

    if folder is None:
        return
    try:
        shard_paths(Path(folder))
    except StoreError as error:
        raise ConfigError(f"replay.source={folder}: {error}, such as runs/NAME/replay") from error


def _check_optimizer(name: str) -> None:
    from asyncrl.learner.model.optimizer import check_optimizer

    check_optimizer(name)


def _check_models(
    config: TrainConfig, open_chat: Callable[[], Chat], files: Sequence[TaskFile], found: Problems
) -> None:
    """Check the models, and what is computed with their tokenizer: prompts, grammars and ground truths.

    Raises ConfigError: a model does not exist, so that nothing else of it can be checked.
    """
    from asyncrl.engine.sglang.families import check_family
    from asyncrl.modelling.opening import reads_images

    model, critic, implicit, actor, engine = config.model, config.critic, config.implicit, config.actor, config.engine
    check_existence(model, critic, implicit, config.scoring)
    with found.collected():
        check_family(engine, model)
        size = policy_size(model)
        check_tokenizer(model)
        check_length(model, actor, engine)
        check_freezing(model, critic, implicit)
        check_learning(model, critic, config.learner, config.algorithm)
        adapters = check_adapters(model, critic, implicit)
        free = free_bytes(locations.run_dir(config.run))
        check_disk(config.run, config.learner, config.replay, size, free, adapters)
    if not actor.played_by:
        found.check(partial(check_grammars, engine.kind, actor, files))
        with found.collected():
            _check_template(open_chat(), actor, reads_images(engine.kind, model), files)
    if actor.has_verl_loops:
        found.check(partial(_check_texts, files))
    found.check(partial(check_truths, config.scoring, model, actor.sandbox, files, config.data.columns))


def _check_texts(files: Sequence[TaskFile]) -> None:
    """Raises ConfigError: a row has an image, which agent loops of verl cannot show."""
    from asyncrl.chat.image_blocks import image_blocks

    for file in files:
        for row, task in file.by_roles().items():
            if image_blocks(task.messages):
                raise ConfigError(
                    f"actor.agent=verl: {file.place(row)} has an image, and agent loops of verl show only text here: "
                    "leave actor.agent out, so that asyncrl plays the episodes, or leave out the rows with images"
                )


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
