"""Checks before anything starts that the models of a run exist and have enough positions for the longest episodes. No
weights are read."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.config.keys import near_path
from asyncrl.config.schema import ActorConfig, CriticConfig, EngineConfig, ImplicitConfig, ModelConfig, ScoringConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.preflight.hub import no_answer, unreachable
from asyncrl.machine.remote_folder import is_url, local_copy

log = logging.getLogger("asyncrl.train")

WEIGHTS = ("*.safetensors", "*.bin")


def check_existence(model: ModelConfig, critic: CriticConfig, implicit: ImplicitConfig, scoring: ScoringConfig) -> None:
    """Raises ConfigError, with one line for each model that a role will load and that does not exist."""
    found = [(key, each.path, missing_model(each)) for key, each in _trained(model, critic, implicit)]
    found += [(key, path, _missing(path)) for key, path in _scorers(scoring)]
    if lines := [f"{key}={path}: {problem}" for key, path, problem in found if problem]:
        raise ConfigError("\n".join(lines))


def policy_size(model: ModelConfig) -> int:
    """Count the parameters of the policy. Raises ConfigError: its files cannot be read."""
    from asyncrl.modelling.shapes import model_shapes

    return sum(math.prod(shape) for shape in model_shapes(model).tensors.values())


def check_tokenizer(model: ModelConfig) -> None:
    """Load the policy's tokenizer, and log warnings about its missing parts.

    Raises ConfigError: it cannot be loaded, or `model.tokenizer` has ids that the policy does not know.
    """
    from asyncrl.modelling.opening import open_config
    from asyncrl.modelling.tokenizer import check_vocabulary, open_tokenizer

    tokenizer = open_tokenizer(model, warn=True)
    # A tokenizer in the model's own folder is not checked: it may have ids that it never uses.
    if model.tokenizer is not None:
        check_vocabulary(model, tokenizer, open_config(model).get_text_config().vocab_size)


def check_length(policy: ModelConfig, actor: ActorConfig, engine: EngineConfig) -> None:
    """Raises ConfigError: the policy has too few positions for the episodes."""
    from asyncrl.modelling.attention import check_positions
    from asyncrl.modelling.opening import open_config

    model = open_config(policy)
    lengths = {"actor.max_tokens": actor.max_tokens}
    if engine.kind == "embedded" and engine.max_length is not None:
        lengths["engine.max_length"] = engine.max_length
    positions = getattr(model.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < max(lengths.values()):
        keys = " and ".join(f"{key}={length}" for key, length in lengths.items() if length > positions)
        raise ConfigError(f"{keys}: the model {policy.path} has {positions} positions; set at most {positions}")
    try:
        check_positions(model, max(lengths.values()))
    except ConfigError as error:
        raise ConfigError(f"model.path={policy.path}: {error}; lower actor.max_tokens") from error


def check_freezing(model: ModelConfig, critic: CriticConfig, implicit: ImplicitConfig) -> None:
    """Raises ConfigError: a model lacks the parameters that an option freezes, or no parameter would be left to
    train."""
    from asyncrl.modelling.freezing import frozen_names
    from asyncrl.modelling.opening import beside
    from asyncrl.modelling.shapes import empty_model

    frozen = [("model.freeze", model.path, model.freeze), ("critic.freeze", critic.path, critic.freeze)]
    if implicit.train:
        frozen.append(("implicit.freeze", implicit.path, implicit.freeze))
    for key, path, wanted in frozen:
        if wanted:
            empty = empty_model(beside(model, path))
            frozen_names(empty, wanted, key, may_be_all=key == "critic.freeze")


def check_adapters(model: ModelConfig, critic: CriticConfig, implicit: ImplicitConfig) -> int | None:
    """Count the parameters of the policy's adapters. The result is None if the policy has none.

    Raises ConfigError: a model cannot have the adapters that an option wants, or peft is not installed.
    """
    counts: dict[str, int] = {}
    sections = [("model", model.path, model.lora), ("critic", critic.path, critic.lora)]
    if implicit.train:
        sections.append(("implicit", implicit.path, implicit.lora))
    for section, path, lora in sections:
        if lora.is_used:
            from asyncrl.learner.model.lora import add_adapters
            from asyncrl.modelling.opening import beside
            from asyncrl.modelling.shapes import empty_model

            counts[section] = add_adapters(empty_model(beside(model, path)), lora, f"{section}.lora")
    return counts.get("model")


def _trained(model: ModelConfig, critic: CriticConfig, implicit: ImplicitConfig) -> Iterator[tuple[str, ModelConfig]]:
    """Yield the key and the settings of every model that the learner loads."""
    from asyncrl.modelling.opening import beside

    yield "model.path", model
    if critic.path is not None:
        yield "critic.path", beside(model, critic.path)
    if implicit.train and implicit.path is not None:
        yield "implicit.path", beside(model, implicit.path)


def _scorers(scoring: ScoringConfig) -> Iterator[tuple[str, str]]:
    """Yield the key and the path of every model that a scorer loads from a folder or from the hub."""
    models: dict[str, Any] = {"scoring.prm": scoring.prm, "scoring.outcome_model": scoring.outcome_model}
    for key, model in models.items():
        if model.path is not None and model.family != "remote" and "." not in model.family:
            yield f"{key}.path", model.path


def missing_model(model: ModelConfig) -> str | None:
    """Return the reason why `model.path` names no model, or `None` if it names one. A model at a URL is copied to this
    host."""
    if not is_url(model.path):
        return _missing(model.path, model.revision)
    try:
        return _missing(str(local_copy(model.path, model.copies)))
    except ConfigError as error:
        return str(error)


def missing_folder(path: str) -> str | None:
    """Return the reason why the folder `path` has no model. Return `None` if it has one, or if the hub may have a model
    of this name."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            return "the folder has no config.json: name the folder of a model"
        return None if any(any(folder.glob(each)) for each in WEIGHTS) else "the folder has no weight files"
    if folder.is_file():
        return "it is a file: name the folder of a model"
    if folder.is_absolute():
        return f"there is no such folder{near_path(path, ())}"
    if path.startswith(".") or path.count("/") > 1:
        # A resumed run keeps the relative paths with which it was started first, but its working directory may be
        # another.
        where = near_path(path, ()) or f"; a relative path starts at the working directory, {Path.cwd()}"
        return f"there is no such folder{where}"
    return None


def _missing(path: str, revision: str | None = None) -> str | None:
    """Return the reason why `path`, a folder or a name on the hub, has no model at this `revision`, or `None` if it has
    one."""
    if (reason := missing_folder(path)) or Path(path).is_dir():
        return reason
    from huggingface_hub import constants, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str):
            return None
    except HFValidationError:
        return "there is no such folder, and no model of the Hugging Face hub can have this name"
    if constants.HF_HUB_OFFLINE:
        at = f" at revision {revision}" if revision is not None else ""
        return (
            f"there is no such folder, the model is not in this machine's cache{at}, and HF_HUB_OFFLINE=1 forbids "
            "asking the hub: download it first, or name a folder"
        )
    log.info("there is no folder %s here; looking for it on the Hugging Face hub", path)
    fix = (
        f"without the hub, copy the model to this machine and name its folder. Write a folder as ./{path}, which is "
        "never looked for on the hub; HF_HUB_OFFLINE=1 never asks the hub"
    )
    if reason := unreachable():
        return f"there is no such folder, and the Hugging Face hub cannot be reached: {reason}; {fix}"
    # A name without an owner most likely means a folder, so the retries of the hub's client are not worth their time.
    if "/" not in path and (
        reason := no_answer(hf_hub_url(path, "config.json", revision=revision, endpoint=constants.ENDPOINT))
    ):
        return f"there is no folder {path} here, and the Hugging Face hub cannot be reached ({reason}); {fix}"
    try:
        hf_hub_download(path, "config.json", revision=revision)
    except (OSError, ValueError) as error:
        first = next(iter(str(error).splitlines()), "")
        given = f"{type(error).__name__}: {first}"
        return f"there is no such folder, and the Hugging Face hub gives no such model ({given}); {fix}"
    return None
