"""Opens the tasks and the demonstrations of a run, as its configuration describes them."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config import locations
from asyncrl.config.schema import ActorConfig, ModelConfig, TrainConfig
from asyncrl.data.opening import Rendering, RunTasks
from asyncrl.data.rendered import RunDemonstrations


def run_tasks(config: TrainConfig) -> RunTasks:
    """The tasks of a run."""
    rendering = _rendering(config.model, config.actor)
    # Only agent loops of verl read all columns of a row, so the tasks of other runs stay small.
    return RunTasks(config.data, locations.run_dir(config.run), rendering, config.actor.has_verl_loops)


def run_demonstrations(config: TrainConfig) -> RunDemonstrations:
    """The rendered demonstrations of a run."""
    sft, store = config.algorithm.sft, config.replay.source
    return RunDemonstrations(
        run_dir=locations.run_dir(config.run),
        rendering=_rendering(config.model, config.actor),
        max_tokens=sft.max_tokens or config.actor.max_tokens,
        overlong=sft.overlong,
        store=None if store is None else Path(store),
    )


def _rendering(model: ModelConfig, actor: ActorConfig) -> Rendering:
    return Rendering(
        [model.path, model.revision, model.tokenizer, model.chat_template],
        [
            *(actor.tools, actor.environment, actor.environments, actor.template_kwargs, actor.tool_call_format),
            *actor.verl_tools,
        ],
    )
