"""Reads a configuration of TRL: a Python script, a YAML file of TrlParser or a JSON file.

A script is not run. The arguments of its GRPOConfig, GRPOTrainer and LoraConfig are read, as far as its text tells
their values.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from asyncrl.compat.trl.values import MadeOf, Named, Script, UnknownValueError
from asyncrl.compat.yaml_files import read_small, read_yaml
from asyncrl.config.group_files import FAILURES, reason
from asyncrl.errors import ConfigError

TRAINER = (
    "model",
    "reward_funcs",
    "args",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "reward_processing_classes",
    "callbacks",
    "optimizers",
    "peft_config",
)
"""The arguments of GRPOTrainer that scripts give by position."""
LORA = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "target_parameters": "lora_target_parameters",
    "task_type": "lora_task_type",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
"""The arguments of peft's LoraConfig, each with the word of TRL's command line."""
LORA_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}


class TrlConfig:
    """The values of a configuration of TRL, with TRL's defaults.

    `given` has the keys that the file and the words name. `remarks` has a line for each value that only the running
    script knows, and for each class or function that Python would find only by running the script.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any], remarks: Sequence[str] = ()) -> None:
        self._values = {**defaults, **{key: value for key, value in given.items() if value is not None}}
        self.given = list(given)
        self.remarks = list(remarks)

    def __getitem__(self, key: str) -> Any:
        """The value of a key, or TRL's default."""
        return self._values.get(key)

    def says(self, key: str) -> bool:
        """True if the file or a word gives the key a value."""
        return key in self.given and self._values.get(key) is not None


def read_trl(file: Path | None, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The keys in a file (.py, .yaml or .json), changed by words (KEY=VALUE), and remarks on unreadable values.

    Raises ConfigError: the file or a word cannot be read.
    """
    given: dict[str, Any] = {}
    remarks: list[str] = []
    if file is not None:
        try:
            given, remarks = _of_file(file)
        except (*FAILURES, SyntaxError, RecursionError) as error:
            raise ConfigError(f"{file}: it cannot be read: {reason(error)}") from error
        except MemoryError as error:  # Python's parser raises it for deep nesting.
            raise ConfigError(f"{file}: it cannot be read: its expressions are nested too deeply") from error
    for word in words:
        key, sign, text = word.removeprefix("--").partition("=")
        if not sign or not key:
            raise ConfigError(f"{word}: write KEY=VALUE")
        try:
            given[key] = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[call-overload, index]
        except FAILURES:
            given[key] = text
        remarks = [each for each in remarks if not each.startswith(f"{key}: ")]
    return given, remarks


def _of_file(file: Path) -> tuple[dict[str, Any], list[str]]:
    if file.suffix == ".py":
        return _of_script(Script(read_small(file), file.stem), file)
    content = json.loads(read_small(file)) if file.suffix == ".json" else read_yaml(file)
    if not isinstance(content, dict):
        raise ValueError("it must hold KEY: VALUE lines, as a configuration of TrlParser does")
    return {str(key): value for key, value in content.items()}, []


def _of_script(script: Script, file: Path) -> tuple[dict[str, Any], list[str]]:
    configs, trainers = [*script.calls("GRPOConfig")], [*script.calls("GRPOTrainer")]
    if not configs and not trainers:
        raise ValueError("it calls neither GRPOConfig nor GRPOTrainer")
    given: dict[str, Any] = {}
    remarks: list[str] = []
    if len(configs) > 1 or len(trainers) > 1:
        remarks.append("the script makes several configurations or trainers: the last of each is translated")
    pairs: list[tuple[str, ast.AST]] = [*_arguments(trainers[-1], TRAINER)] if trainers else []
    if configs:
        pairs += [*_arguments(configs[-1], ("output_dir",)), *script.attributes_of(configs[-1])]
    for name, node in pairs:
        if name == "args" and configs:
            continue
        try:
            value = dict(script.value(node)) if name == "**" else {name: script.value(node)}
        except (UnknownValueError, ValueError, TypeError, OverflowError) as error:
            given.pop(name, None)
            wanted = "KEY=VALUE for each of its keys" if name == "**" else f"{name}=VALUE"
            remarks.append(f"{name}: only the running script knows this value ({error}); give {wanted}")
            continue
        given |= value
    return {**_adapters(given), **{key: value for key, value in given.items() if key != "args"}}, [
        *remarks,
        *_to_import(script, file, given),
    ]


def _arguments(call: ast.Call, positions: Sequence[str]) -> Iterator[tuple[str, ast.expr]]:
    yield from zip(positions, call.args, strict=False)
    yield from ((each.arg or "**", each.value) for each in call.keywords)


def _adapters(given: dict[str, Any]) -> dict[str, Any]:
    """Remove the LoraConfig in `peft_config`, and return the words of TRL's command line that have its values."""
    adapters = given.get("peft_config")
    if not isinstance(adapters, MadeOf):
        return {}
    del given["peft_config"]
    found = {LORA.get(name, f"peft_config.{name}"): value for name, value in adapters.keywords.items()}
    return {"use_peft": True, **LORA_DEFAULTS, **found}


def _to_import(script: Script, file: Path, given: Mapping[str, Any]) -> Iterator[str]:
    """A remark if a run would start the script's own training when it imports the script's functions."""
    values = [each for value in given.values() for each in (value if isinstance(value, list) else [value])]
    here = sorted({each.path for each in values if isinstance(each, Named) and each.defined_here})
    if here and script.trains_when_imported():
        yield (
            f"{', '.join(here)}: importing {file.name} would start its training; put the functions into a file of "
            f"their own, or the training under if __name__ == '__main__':"
        )
