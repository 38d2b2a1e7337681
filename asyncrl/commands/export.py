"""`asyncrl export RUN [--step K|best] [--adapter|--critic] [--to DIR]`: writes the policy of a checkpoint as a Hugging
Face folder.

The command works on the CPU, also while the run trains, and does not change the run. RUN is the folder of a run, such
as runs/NAME, or its name. Without --step it exports the newest checkpoint; `--step best` means the checkpoint with the
best evaluation (learner.keep_best).

The new folder has the same files as the folder `model` of a finished run: the weights in model.dtype, the
configuration, the tokenizer and a model card. Adapters (model.lora) are merged into the weights. --adapter writes only
the adapters, which `PeftModel.from_pretrained` loads. --critic writes only the critic, which
`AutoModelForTokenClassification.from_pretrained` loads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.commands.checkpoints import BEST, FinishedSteps, checkpoint_of, read_checkpoint
from asyncrl.config.commands import command_name
from asyncrl.config.schema import AlgorithmConfig, CriticConfig, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.runs.card import write_card
from asyncrl.runs.finding import require_run
from asyncrl.runs.from_config import read_config


def main(argv: Sequence[str]) -> None:
    """The command's entry point. If the export fails, it ends with a message and status 1."""
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run, such as runs/NAME, or its name")
    parser.add_argument(
        "--step",
        type=_step,
        metavar="K",
        help="export the checkpoint after K learner steps, or `best`; default: the newest",
    )
    parser.add_argument("--adapter", action="store_true", help="write only the adapters of model.lora")
    parser.add_argument("--critic", action="store_true", help="write the critic instead of the policy")
    parser.add_argument("--to", type=Path, metavar="DIR", help="the new folder; default: RUN/exports/step-K")
    given = parser.parse_args(argv)
    sys.stdout.write(f"{export_run(given.run, given.step, given.to, given.adapter, given.critic)}\n")


def _step(given: str) -> int | str:
    if given != BEST and not given.isdecimal():
        raise argparse.ArgumentTypeError(f"{given!r} is neither a number of steps nor {BEST}")
    return given if given == BEST else int(given)


def export_run(
    name: str, steps: int | str | None = None, to: Path | None = None, adapter: bool = False, critic: bool = False
) -> Path:
    """Export the policy of a checkpoint, or only its adapters, or the critic. Return the new folder.

    `steps` means the same as in `checkpoint_of`. Raises ConfigError: the run does not exist, or does not train the
    adapters or the critic that are asked for, or `to` exists already. Raises CheckpointError: the checkpoint does not
    exist or cannot be read. Raises OSError.
    """
    run = require_run(name)
    config = read_config(run.folder)
    if adapter and not config.model.lora.is_used:
        raise ConfigError(f"{run.folder} trains no adapters (model.lora): leave out --adapter")
    if critic and not _trains_critic(config.algorithm, config.learner.minibatches):
        raise ConfigError(f"{run.folder} trains no critic (algorithm.advantage): leave out --critic")
    checkpoint = checkpoint_of(run.folder, config.learner, steps)
    kind = "-adapter" if adapter else "-critic" if critic else ""
    folder = to or run.folder / "exports" / f"{checkpoint.folder.name}{kind}"
    require_new(folder)
    if critic:
        write_critic(config.critic, config.model, checkpoint, folder)
        return folder
    if adapter:
        write_adapter(config.model, checkpoint, folder)
        return folder
    write_policy(config.model, checkpoint, folder)
    write_card(run, folder, checkpoint.steps)
    return folder


def _trains_critic(algorithm: AlgorithmConfig, minibatches: int) -> bool:
    # Imported here, so that a command that imports this file does not load torch.
    from asyncrl.algorithms.algorithm import Algorithm

    return Algorithm.from_config(algorithm, minibatches).needs_critic


def require_new(folder: Path) -> None:
    """Raises ConfigError: `folder` is a file, or a folder that is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already: remove it, or name another folder by --to")


def write_policy(model: ModelConfig, checkpoint: FinishedSteps, folder: Path) -> None:
    """Write the policy of a checkpoint into `folder`, replacing its contents."""
    from asyncrl.learner.checkpoint.export import export_checkpoint

    read_checkpoint(checkpoint, lambda source: export_checkpoint(model, source, folder))


def write_critic(critic: CriticConfig, model: ModelConfig, checkpoint: FinishedSteps, folder: Path) -> None:
    """Write the critic of a checkpoint into `folder`, replacing its contents."""
    from asyncrl.learner.checkpoint.critic_export import export_checkpoint_critic

    read_checkpoint(checkpoint, lambda source: export_checkpoint_critic(critic, model, source, folder))


def write_adapter(model: ModelConfig, checkpoint: FinishedSteps, folder: Path) -> None:
    """Write the adapters of a checkpoint into `folder`, replacing its contents."""
    from asyncrl.learner.checkpoint.export import export_checkpoint_adapter

    read_checkpoint(checkpoint, lambda source: export_checkpoint_adapter(model, source, folder))
