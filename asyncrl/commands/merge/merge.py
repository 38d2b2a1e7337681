"""`asyncrl merge --from DIR --to DIR`: a checkpoint in shards as a Hugging Face folder, which from_pretrained loads.

DIR may be a run of asyncrl, or one of its checkpoints (runs/NAME/checkpoints/step-000040), as `asyncrl export` writes
it; a folder of verl with FSDP shards (global_step_N/actor with model_world_size_N_rank_K.pt); or one with a Megatron
distributed checkpoint in the format torch_dist; or a peft folder of LoRA adapters, which are merged into the model that
it names, or that --config names. It works on the CPU, and needs host memory for the whole model, once or
twice. The configuration and the tokenizer come from the folder `huggingface` that verl writes next to the shards.
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
    """The entry of the command line. Ends with a message and status 1 where the folder cannot be made."""
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="source", type=Path, required=True, metavar="DIR", help="the checkpoint")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="write this folder")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="DIR",
        help="take config.json and the tokenizer from this folder (huggingface, next to verl's shards); of "
        "adapters, the model that they were trained on",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="the dtype of the weights (that of the checkpoint)")
    parser.add_argument(
        "--tie-word-embedding",
        action="store_true",
        help="the output layer is the embedding; drop the one that the checkpoint has",
    )
    given = parser.parse_args(argv)
    merge(given.source, given.to, given.config, given.dtype, given.tie_word_embedding)
    sys.stdout.write(f"{given.to}\n")


def merge(source: Path, to: Path, config: Path | None = None, dtype: str | None = None, tied: bool = False) -> None:
    """Write the model in the checkpoint `source` into the new folder `to`; the options are the same as on the command
    line.

    Raises ConfigError: something is at `to` already, or there is no usable configuration; CheckpointError: `source` is
    of no known format, damaged, or its tensors are not those of the configuration; OSError.
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
            "--config, --dtype and --tie-word-embedding are for checkpoints of verl; a run of asyncrl has them in its "
            "own configuration"
        )
    run, steps = own
    export_run(str(run), steps, to)


def _own_run(source: Path) -> tuple[Path, int | None] | None:
    """The run that `source` is or belongs to, and the step of the checkpoint; None: it is no checkpoint of ours."""
    if (source / CONFIG_FILE).is_file() and (source / "checkpoints").is_dir():
        return source, None
    from asyncrl.learner.checkpoint.files import COMPLETE, PROGRESS

    if not (source / PROGRESS).is_file():
        return None
    run = source.absolute().parent.parent
    step = source.name.removeprefix("step-")
    if not (run / CONFIG_FILE).is_file() or not step.isdecimal():
        raise CheckpointError(
            f"{source} is a checkpoint of asyncrl outside of its run: put it back into RUN/checkpoints/step-N of the "
            f"run whose {CONFIG_FILE} describes the model"
        )
    if not (source / COMPLETE).is_file():
        raise CheckpointError(f"{source} is not complete: its learner was stopped while it wrote")
    return run, int(step)


def _merge_adapter(source: Path, to: Path, config: Path | None, dtype: str | None, tied: bool) -> None:
    if tied:
        raise ConfigError("--tie-word-embedding is for checkpoints of verl: the configuration of the model says this")
    try:
        stored = {} if config else json.loads((source / _ADAPTERS).read_text())
        base, revision = config or stored["base_model_name_or_path"], stored.get("revision")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{source / _ADAPTERS} cannot be read: {error!r}") from error
    if not base or not isinstance(base, str | Path):
        raise ConfigError(f"{source / _ADAPTERS} names no model: name it with --config")
    from asyncrl.learner.checkpoint.export import merge_adapter
    from asyncrl.modelling.opening import open_config

    model = ModelConfig(str(base), revision=revision, lora=LoraConfig(path=str(source)))
    own = str(open_config(model).dtype or "float32").removeprefix("torch.")
    merge_adapter(replace(model, dtype=dtype or own), to)


def _merge_foreign(source: Path, to: Path, config: Path | None, dtype: str | None, tied: bool) -> None:
    # Loads torch, which takes seconds: wrong arguments are refused before.
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
        f"{source} has no folder huggingface with a config.json: name one with --config, such as the model from which "
        "the training began"
    )


def _unknown(source: Path) -> CheckpointError:
    if not source.is_dir():
        return CheckpointError(f"there is no folder {source}")
    for place in (".", *_TEMPLATES[:2]):
        if any((source / place).glob("*.safetensors")):
            return CheckpointError(f"{source / place} has safetensors already: it needs no merging")
    inner = next((each.name for each in source.iterdir() if each.name in ("actor", "critic")), None)
    advice = f"; name the folder of one model, such as {source / inner}" if inner else ""
    if (source.absolute().parent / CONFIG_FILE).is_file():
        advice = f"; it is part of a run: name the run, {source.parent}, or a checkpoint in it, checkpoints/step-N"
    return CheckpointError(
        f"{source} is no checkpoint that is known: it has neither {CONFIG_FILE} and checkpoints (a run of asyncrl), "
        f"nor model_world_size_N_rank_K.pt (verl's FSDP), nor a metadata.json (Megatron's torch_dist), "
        f"nor an {_ADAPTERS} (peft){advice}"
    )
