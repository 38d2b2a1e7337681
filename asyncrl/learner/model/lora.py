"""Adds adapters to a model that is not sharded yet, by peft: new adapters, or the adapters of a peft folder.

New adapters are as peft makes them: `lora_A` is random, and `lora_B` is zero, so that they do not change the model at
first. The random numbers depend only on the seed and the name of the layer, so all ranks have rows of the same
matrices.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from xxhash import xxh3_64_intdigest

from asyncrl.config.schema import LoraConfig, ModelConfig
from asyncrl.config.schema.lora import ALL_LINEAR
from asyncrl.errors import ConfigError
from asyncrl.learner.model.loading import StoredModel, assign_rows
from asyncrl.modelling.adapters import ADAPTER, adapted_layers, adapter_parameters, unknown_tensors, whole_tensor

logger = logging.getLogger(__name__)

PREFIX = "base_model.model."
"""The beginning of the names of all tensors in peft's files."""
_ONLY = "only linear layers other than the head can have one"
_OF_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""The names of layers that peft treats as stacked experts in any mixture of experts."""
_MAY_DIFFER = frozenset(
    {
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout", "init_lora_weights"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version", "auto_mapping"),
    }
)
"""The settings in which adapters of a folder may differ from peft's plain LoRA."""


def with_adapters(stored: StoredModel, config: LoraConfig, key: str, seed: int) -> StoredModel:
    """Return the model with the adapters of `config`, the section `key` of the configuration. The adapters get their
    values when the model is read. All other parameters are frozen.

    Raises ConfigError: see `add_adapters`; the folder of adapters does not have the tensors that its configuration
    names.
    """
    if not config.is_used:
        return stored
    add_adapters(stored.model, config, key)
    given = None if config.path is None else _read(config.path, key)
    if given is not None and (wrong := unknown_tensors(stored.model, given)):
        raise ConfigError(
            f"{key}.path={config.path}: {len(wrong)} tensors of these adapters do not fit the model, the first is "
            f"{wrong[0]}; name the model that they were trained on"
        )

    def start() -> None:
        for name, parameter in adapter_parameters(stored.model).items():
            assign_rows(parameter, _first_value(name, parameter, seed) if given is None else given[name])

    return replace(stored, start=start)


def add_adapters(model: Any, config: LoraConfig, key: str) -> int:
    """Put adapters without values into a Hugging Face `model` that is not sharded, and freeze everything else. Returns
    the number of their parameters.

    Raises ConfigError: peft is not installed; the model is quantised; no layer that can have adapters matches
    `config.targets`; the adapters of a folder are not plain LoRA.
    """
    check_installed(key)
    if getattr(model.config, "quantization_config", None):
        raise ConfigError(f"{key}: the weights of {model.name_or_path} are quantised, and QLoRA is not supported")
    from peft import inject_adapter_in_model

    adapters = _new(model, config, key) if config.path is None else _stored(config.path, key)
    try:
        inject_adapter_in_model(adapters, model, ADAPTER, low_cpu_mem_usage=next(model.parameters()).is_meta)
    # peft raises errors of many types for a configuration that another program has written.
    except Exception as error:
        raise ConfigError(f"{key}.path={config.path}: these adapters do not fit the model: {error!r}") from error
    heads = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    for name, layer in model.named_modules():
        is_adapted = hasattr(layer, "lora_A") and hasattr(layer, "base_layer")
        if is_adapted and (id(layer) in heads or not isinstance(layer.base_layer, nn.Linear)):
            raise ConfigError(f"{key}.path={config.path}: these adapters include one for {name}, but {_ONLY}")
    count = sum(each.numel() for each in adapter_parameters(model).values())
    total = sum(each.numel() for each in model.parameters())
    layers = len(adapted_layers(model))
    logger.info("%s trains %s of %s parameters, in adapters of %d layers", key, f"{count:,}", f"{total:,}", layers)
    return count


@torch.no_grad()
def gather_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole adapters of a model, sharded or not, by name, as copies on the CPU. All ranks call this."""
    return {name: whole_tensor(each).cpu().clone() for name, each in adapter_parameters(model).items()}


def save_adapters(model: Any, tensors: Mapping[str, Tensor], base: ModelConfig, folder: Path) -> None:
    """Write the adapters `tensors` of `model` into a new peft folder. The written configuration names the base model
    `base`. If the base model is a local folder, the configuration has its absolute path. `model` was prepared by
    `add_adapters`. Raises OSError, SafetensorError."""
    folder.mkdir(parents=True)
    config = copy(model.peft_config[ADAPTER])
    # A relative path would name another folder, or none, for a reader in another working directory.
    own = Path(base.path)
    config.base_model_name_or_path = str(own.absolute()) if own.is_dir() else base.path
    config.revision = base.revision
    config.task_type, config.inference_mode = "CAUSAL_LM", True
    config.target_modules = _target_names(model)
    config.save_pretrained(folder)
    named = {f"{PREFIX}{name}": each.contiguous() for name, each in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})


def _target_names(model: nn.Module) -> list[str]:
    """Return the names, for peft's configuration, of the layers with adapters: short names such as `q_proj`, unless a
    module without adapters has the same short name."""
    layers = adapted_layers(model)
    leaves = {name.rpartition(".")[2] for name in layers}
    modules = [name for name, _ in model.named_modules() if ".base_layer" not in name and ".lora_" not in name]
    is_clear = {name for name in modules if name.rpartition(".")[2] in leaves} == layers.keys()
    return sorted(leaves if is_clear else layers)


def _is_mixture(model: nn.Module) -> bool:
    return any("experts" in name.split(".") for name, _ in model.named_modules())


def check_installed(key: str) -> None:
    """Raises ConfigError: peft is not installed."""
    if find_spec("peft") is None:
        raise ConfigError(f"{key} needs the extra: pip install 'asyncrl[lora]'")


def _new(model: Any, config: LoraConfig, key: str) -> Any:
    """Return the configuration of new adapters in peft's form, with the full names of the layers. Raises ConfigError: a
    layer in `config.targets` does not exist, or can have no adapter."""
    from peft import LoraConfig as PeftLora

    head, every = model.get_output_embeddings(), dict(model.named_modules())
    linear = {name for name, each in every.items() if isinstance(each, nn.Linear) and each is not head}
    if _is_mixture(model):
        linear = {name for name in linear if name.rpartition(".")[2] not in _OF_EXPERTS}
    targets: set[str] = set()
    for target in config.targets:
        named = linear if target == ALL_LINEAR else {each for each in every if f".{each}".endswith(f".{target}")}
        if not named:
            leaves = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ConfigError(f"{key}.targets={target}: the model has no module of this name; it has {leaves}")
        if other := sorted(named - linear):
            only = f"{_ONLY}, and in a mixture of experts none called {', '.join(sorted(_OF_EXPERTS))}"
            raise ConfigError(f"{key}.targets={target}: {other[0]} can have no adapter: {only}")
        targets |= named
    return PeftLora(
        r=config.rank or 0,
        lora_alpha=config.alpha,
        use_rslora=config.rslora,
        target_modules=sorted(targets),
        bias="none",
    )


def _stored(path: str, key: str) -> Any:
    """Read the configuration of the adapters in a peft folder. Raises ConfigError: the adapters are not plain LoRA."""
    from peft import LoraConfig as PeftLora
    from peft import PeftConfig

    try:
        found = PeftConfig.from_pretrained(path)
    except Exception as error:
        raise ConfigError(f"{key}.path={path}: it has no adapter_config.json of peft: {error!r}") from error
    plain = PeftLora()
    other = {name for name, value in vars(plain).items() if getattr(found, name, None) != value} - _MAY_DIFFER
    if getattr(found, "init_lora_weights", True) not in (True, False, "gaussian"):
        # Other initialisations also change the base model.
        other.add("init_lora_weights")
    if not isinstance(found, PeftLora) or other:
        raise ConfigError(
            f"{key}.path={path}: only plain LoRA adapters can be trained, and these are of the type {found.peft_type} "
            f"with other values of {', '.join(sorted(other))}"
        )
    alphas = [found.lora_alpha, *(found.alpha_pattern.values() if isinstance(found.alpha_pattern, dict) else ())]
    if not all(isinstance(each, int | float) and 0 < each < math.inf for each in alphas):
        raise ConfigError(f"{key}.path={path}: its lora_alpha must be positive numbers, not {alphas!r:.100}")
    if found.lora_dropout:
        logger.warning("%s was trained with lora_dropout=%s; here it is 0", path, found.lora_dropout)
        found.lora_dropout = 0.0
    return found


def _read(path: str, key: str) -> dict[str, Tensor]:
    """Read the tensors in a peft folder. Raises ConfigError: the tensors cannot be read, or have numbers that are not
    finite."""
    from peft.utils import load_peft_weights

    try:
        found = {name.removeprefix(PREFIX): each for name, each in load_peft_weights(path, device="cpu").items()}
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError, UnpicklingError) as error:
        raise ConfigError(f"{key}.path={path}: its adapters cannot be read: {error}") from error
    for name, each in found.items():
        if not (each.is_floating_point() and each.float().isfinite().all()):
            raise ConfigError(
                f"{key}.path={path}: {name} of these adapters, {each.dtype}, has numbers that are not finite"
            )
    return found


def _first_value(name: str, parameter: nn.Parameter, seed: int) -> Tensor:
    """Return the matrix with which an adapter begins, with the rows of all ranks."""
    value = torch.zeros(parameter.shape)
    if ".lora_A." in name:
        generator = torch.Generator().manual_seed(xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1)
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return value
