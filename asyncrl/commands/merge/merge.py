"""`asyncrl merge --from DIR --to DIR`: writes a sharded checkpoint as a Hugging Face folder, for from_pretrained.

The first DIR may be
- a run of asyncrl, or one of its checkpoints (runs/NAME/checkpoints/step-000040): the same as `asyncrl export`
- a folder of verl with FSDP shards (global_step_N/actor with model_world_size_N_rank_K.pt)
- a folder with a Megatron distributed checkpoint in the format torch_dist
- a peft folder of LoRA adapters, which are merged into the model that the folder or --config names

The command works on the CPU, and needs host memory for one or two copies of the model. For verl and Megatron, the
configuration and the tokenizer come from the folder `huggingface` that verl writes next to the shards.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncrl.commands.export import export_run, require_new
from asyncrl.config.commands import command_name
from asyncrl.config.locations import CONFIG_FILE
from asyncrl.config.schema import LoraConfig, ModelConfig
from asyncrl.errors import CheckpointError, ConfigError

_DTYPES = ("float32", "bfloat16", "float16")
_ADAPTERS = "adapter_config.json"
_TEMPLATES = ("huggingface", "model/huggingface", "../huggingface")


def main(argv: Sequence[str]) -> None:
    """The command's entry point. If the merge fails, it ends with a message and status 1."""
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="source", type=Path, required=True, metavar="DIR", help="the checkpoint")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the new folder")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="DIR",
        help="folder of config.json and the tokenizer (huggingface, next to verl's shards); for adapters, the model "
        "that they were trained on",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="dtype of the weights (default: the checkpoint's)")
    parser.add_argument(
        "--tie-word-embedding",
        action="store_true",
        help="use the embedding as the output layer, and drop the checkpoint's output layer",
    )
    given = parser.parse_args(argv)
    merge(given.source, given.to, given.config, given.dtype, given.tie_word_embedding)
    sys.stdout.write(f"{given.to}\n")


def merge(source: Path, to: Path, config: Path | None = None, dtype: str | None = None, tied: bool = False) -> None:
    """Write the model in the checkpoint `source` into the new folder `to`. The options are those of the command line.

    Raises ConfigError: `to` exists already, or there is no usable configuration. Raises CheckpointError: the format of
    `source` is unknown, or `source` is damaged or does not fit its configuration. Raises OSError.
    """
    require_new(to)
    if (source / _ADAPTERS).is_file():
        _merge_adapter(source, to, config, dtype, tied)
        return
    own = _own_run(source)
    if own is None:
        _merge_foreign(source, to, config, dtype, tied)
        return
    if config or dtype or tied:
        raise ConfigError(
            "--config, --dtype and --tie-word-embedding are not for runs of asyncrl, whose own configuration has "
            "these settings"
        )
    run, steps = own
    export_run(str(run), steps, to)


def _own_run(source: Path) -> tuple[Path, int | None] | None:
    """The run, and the step if `source` is one of its checkpoints. None if `source` is not asyncrl's."""
    if (source / CONFIG_FILE).is_file() and (source / "checkpoints").is_dir():
        return source, None
    from asyncrl.learner.checkpoint.files import COMPLETE, PROGRESS

    if not (source / PROGRESS).is_file():
        return None
    run = source.absolute().parent.parent
    step = source.name.removeprefix("step-")
    if not (run / CONFIG_FILE).is_file() or not step.isdecimal():
        raise CheckpointError(
            f"{source} is a checkpoint of asyncrl outside of its run: move it back to RUN/checkpoints/step-N, since "
            f"{CONFIG_FILE} of its run describes the model"
        )
    if not (source / COMPLETE).is_file():
        raise CheckpointError(f"{source} is not complete: the learner was stopped while it wrote the checkpoint")
    return run, int(step)


def _merge_adapter(source: Path, to: Path, config: Path | None, dtype: str | None, tied: bool) -> None:
    if tied:
        raise ConfigError(
            "--tie-word-embedding is for checkpoints of verl and Megatron; adapters take it from the model's config"
        )
    try:
        stored = {} if config else json.loads((source / _ADAPTERS).read_text())
        base, revision = config or stored["base_model_name_or_path"], stored.get("revision")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{source / _ADAPTERS} cannot be read: {error!r}") from error
    if not base or not isinstance(base, str | Path):
        raise ConfigError(f"{source / _ADAPTERS} names no model: name the model by --config")
    from asyncrl.learner.checkpoint.export import merge_adapter
    from asyncrl.modelling.opening import open_config

    model = ModelConfig(str(base), revision=revision, lora=LoraConfig(path=str(source)))
    own = str(open_config(model).dtype or "float32").removeprefix("torch.")
    merge_adapter(replace(model, dtype=dtype or own), to)


def _merge_foreign(source: Path, to: Path, config: Path | None, dtype: str | None, tied: bool) -> None:
    # These imports are here because torch takes seconds to load, and wrong arguments should be refused at once.
    from asyncrl.commands.merge.distributed import DistributedTensors, distributed_folder
    from asyncrl.commands.merge.folder import OutputSettings, empty_model, expected_shapes, has_value_head, write_folder
    from asyncrl.commands.merge.megatron import MegatronNames
    from asyncrl.commands.merge.shards import FsdpShards, shard_files
    from asyncrl.weights.manifest import DTYPES

    files, chunks = shard_files(source), distributed_folder(source)
    if not files and chunks is None:
        raise _unknown(source)
    settings = OutputSettings(config or _template(source), tied, DTYPES[dtype] if dtype else None)
    described = settings.config()
    if chunks is not None:
        tensors = MegatronNames(described).read(DistributedTensors(chunks), tied)
        model = empty_model(described, has_value_head(set(tensors)))
    else:
        shards = FsdpShards(files)
        model = empty_model(described, has_value_head(shards.names))
        tensors = shards.merge(expected_shapes(model, shards.names))
    write_folder(model, tensors, settings, to)


def _template(source: Path) -> Path:
    for place in _TEMPLATES:
        if (source / place / "config.json").is_file():
            return source / place
    raise ConfigError(
        f"{source} has no folder huggingface with a config.json: name a folder with a config.json by --config, such as "
        "the model from which the training began"
    )


def _unknown(source: Path) -> CheckpointError:
    if not source.is_dir():
        return CheckpointError(f"the folder {source} does not exist")
    for place in (".", *_TEMPLATES[:2]):
        if any((source / place).glob("*.safetensors")):
            return CheckpointError(f"{source / place} already has safetensors: it needs no merging")
    inner = next((each.name for each in source.iterdir() if each.name in ("actor", "critic")), None)
    advice = f"; name the folder of one model, such as {source / inner}" if inner else ""
    if (source.absolute().parent / CONFIG_FILE).is_file():
        advice = f"; it is part of a run: name the run, {source.parent}, or a checkpoint in it, checkpoints/step-N"
    return CheckpointError(
        f"{source} is not a known checkpoint: it has neither {CONFIG_FILE} and checkpoints (a run of asyncrl), nor "
        f"model_world_size_N_rank_K.pt (verl's FSDP), nor metadata.json (Megatron's torch_dist), nor {_ADAPTERS} "
        f"(peft){advice}"
    )
