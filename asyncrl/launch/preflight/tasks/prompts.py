"""Measures prompts before anything starts. If the options for long prompts need it, all prompts are measured. Otherwise
only a sample is measured, to find an `actor.max_tokens` that is too small."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import ActorConfig, DataConfig, TrainConfig
from asyncrl.errors import DataError
from asyncrl.machine.files import partial_name, sync

if TYPE_CHECKING:
    from asyncrl.chat.chat import Chat
    from asyncrl.data.reading import TaskFile

log = logging.getLogger("asyncrl.train")

SAMPLED = 200
"""The maximum number of prompts of a file that are measured if no option needs all lengths."""
REFUSED_SHARE = 0.5
"""The start is refused if at least this share of the sampled prompts leaves no room for an answer."""


def check_prompts(data: DataConfig, tasks: TaskFile, measure: Callable[[TaskFile], NDArray[np.int32]]) -> None:
    """Measure the prompts if the configuration needs it, and log how many tasks `data.filter_overlong` leaves out.

    `measure` is `prompt_lengths` with the run's configuration. Raises DataError: no task is left, or a prompt is too
    long and the configuration allows neither to leave it out nor to cut it; StoppedError: the command was stopped
    meanwhile.
    """
    limit = data.max_prompt_length
    if limit is None or not (data.filter_overlong or data.truncation == "error"):
        return
    lengths = measure(tasks)
    if not (too_long := np.flatnonzero(lengths > limit)).size:
        return
    first = tasks.place(int(too_long[0]))
    if not data.filter_overlong:
        raise DataError(
            f"{first} has a prompt of {lengths[too_long[0]]} tokens: it and {too_long.size - 1} others of {len(tasks)} "
            f"are longer than data.max_prompt_length={limit}; set data.filter_overlong=true to leave them out, or "
            "data.truncation to cut them"
        )
    log.info(
        "data.filter_overlong leaves out %d of %d tasks, whose prompts are longer than %d tokens (the longest has %d, "
        "the first is %s)",
        *(too_long.size, len(tasks), limit, lengths.max(), first),
    )
    tasks.left(lengths <= limit)


def check_room(actor: ActorConfig, chat: Chat, tasks: TaskFile, stop: threading.Event | None = None) -> None:
    """Measure up to SAMPLED prompts, evenly spread over the rows, with the tools of their tasks. Log a warning if some
    of them leave no room for an answer within `actor.max_tokens`: the episodes of such a task fail.

    Raises DataError: at least REFUSED_SHARE of them leave no room, or the chat template refuses a prompt; StoppedError:
    `stop` was set meanwhile.
    """
    from asyncrl.tools.offered import Offer
    from asyncrl.tools.prompts import measured

    sample = tasks.spread(SAMPLED)
    lengths = measured(chat, Offer(actor), sample, stop)
    too_long = np.flatnonzero(lengths >= actor.max_tokens)
    if not too_long.size:
        return
    problem = (
        f"actor.max_tokens={actor.max_tokens} leaves no room for an answer in {too_long.size} of {len(sample)} prompts "
        f"that were measured with system message and tools; the first is {sample.place(int(too_long[0]))} with "
        f"{lengths[too_long[0]]} tokens, and the longest has {lengths.max()}. Raise actor.max_tokens to the longest "
        "prompt plus the turns of an episode, or leave such tasks out: data.filter_overlong=true with "
        f"data.max_prompt_length below {actor.max_tokens}"
    )
    if too_long.size >= REFUSED_SHARE * len(sample):
        raise DataError(problem)
    log.warning("%s", problem)


def prompt_lengths(config: TrainConfig, stop: threading.Event | None, tasks: TaskFile) -> NDArray[np.int32]:
    """Count the tokens of each prompt, with the tools of its task as an actor shows them. Returns int32[rows].

    The lengths are kept in the run's folder. Raises DataError: the chat template refuses a task; StoppedError: `stop`
    was set meanwhile.
    """
    from asyncrl.chat.from_config import open_chat
    from asyncrl.data.from_config import run_tasks
    from asyncrl.data.opening import read_lengths
    from asyncrl.tools.offered import Offer
    from asyncrl.tools.prompts import measured

    path = run_tasks(config).lengths_file(tasks)
    if path.exists():
        try:
            return read_lengths(path, len(tasks))
        except DataError as error:
            log.warning("prompts are measured again: %s", error)
    lengths = measured(open_chat(config), Offer(config.actor), tasks, stop)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_name(path)
    with partial.open("wb") as file:
        np.save(file, lengths, allow_pickle=False)
    sync(partial)
    partial.rename(path)
    return lengths


def prepare_data(config: TrainConfig, stop: threading.Event | None = None) -> None:
    """Make the tasks of `data.dataset` and measure the prompts that `data.filter_overlong` needs, unless the run's
    folder has them already. Raises ConfigError or DataError: the tasks cannot be made or measured; StoppedError: `stop`
    was set meanwhile."""
    from asyncrl.data.from_config import run_tasks
    from asyncrl.launch.preflight.tasks.datasets import make_tasks

    for sources, held_out in ((config.data.train, False), (config.data.eval, True)):
        if sources:
            make_tasks(config, sources, anew=False)
            if config.data.filter_overlong:
                prompt_lengths(config, stop, run_tasks(config).all(sources, held_out))
