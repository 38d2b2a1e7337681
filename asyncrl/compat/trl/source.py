"""Reads a configuration of TRL: a Python script, a YAML file of TrlParser or a JSON file.

A script is not run. The arguments of its GRPOConfig, GRPOTrainer and LoraConfig are read if its text shows their
values.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from asyncrl.compat.trl.values import MadeOf, Named, Script, ScriptRows, UnknownValueError
from asyncrl.compat.yaml_files import read_small, read_yaml
from asyncrl.config.group_files import FAILURES, reason
from asyncrl.config.keys import near_path
from asyncrl.config.option import as_yaml
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
"""The first arguments of GRPOTrainer, in order, since a script may give them by position."""
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
LISTS = ("reward_funcs", "tools")
"""Arguments whose readable items are translated even if other items cannot be read."""
TRAINERS = frozenset(("accelerate", "bitsandbytes", "datasets", "deepspeed", "peft", "trl", "unsloth", "vllm"))
"""Packages of training scripts that the environment of asyncrl may lack."""
NULLS = ("vllm_importance_sampling_clip_max",)
"""Keys that have a default, but for which null has a meaning of its own: here, no bound."""
OTHERWISE = {"max_completion_length": "vllm_max_model_length"}
"""Maps a key to another key, whose value is used if the first key is null."""
LONGEST_EXPRESSION = 60
LORA_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}


class TrlConfig:
    """The values of a configuration of TRL, with TRL's defaults.

    `given` has the keys that the file and the words name. `remarks` has a line for each value that only the running
    script knows, and for each key whose null is read as TRL's default. It also has a line about classes and functions
    of the script, if importing the script would start the training or need packages of TRL.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any], remarks: Sequence[str] = ()) -> None:
        values = {key: given.get(OTHERWISE.get(key, "")) if value is None else value for key, value in given.items()}
        self._values = {
            **defaults,
            **{key: value for key, value in values.items() if value is not None or key in NULLS},
        }
        self.given = list(given)
        self.remarks = [
            *remarks,
            *(
                f"{key}=null: TRL's default {as_yaml(defaults[key])} counts; give {key}=VALUE"
                for key, value in values.items()
                if value is None and key not in NULLS and defaults.get(key) is not None
            ),
        ]

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
        if not file.exists():
            raise ConfigError(f"{file}: there is no such file{near_path(str(file), ('.py', '.yaml', '.yml', '.json'))}")
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
            value = dict(script.value(node)) if name == "**" else {name: _value(script, name, node)}
        except (UnknownValueError, ValueError, TypeError, OverflowError) as error:
            given.pop(name, None)
            wanted = "KEY=VALUE for each of its keys" if name == "**" else f"{name}=VALUE"
            remarks.append(f"{name}: only the running script knows this value ({error}); give {wanted}")
            continue
        given |= value
    if (environments := given.get("environment_factory")) is not None:
        given["environment_factory"] = _with_names(environments, script, file)
    return {**_adapters(given), **{key: value for key, value in given.items() if key != "args"}}, [
        *remarks,
        *_to_import(script, file, given),
    ]


def _with_names(environments: Any, script: Script, file: Path) -> Any:
    """The classes of environments. A class of the script, or of a module in the script's folder, also gets the names
    that its body defines."""
    if isinstance(environments, Mapping):
        return {name: _with_names(each, script, file) for name, each in environments.items()}
    if not isinstance(environments, Named):
        return environments
    module, _, name = environments.path.rpartition(".")
    place = file.parent / f"{module.replace('.', '/')}.py"
    if not environments.defined_here and not place.is_file():
        return environments
    try:
        home = script if environments.defined_here else Script(read_small(place), place.stem)
    except (*FAILURES, SyntaxError, RecursionError, MemoryError):
        return environments  # A run names what is wrong with the module.
    return replace(environments, names=home.names_in_class(name))


def _value(script: Script, name: str, node: ast.AST) -> Any:
    value = script.items(node) if name in LISTS else script.value(node)
    if isinstance(value, ScriptRows) and len(expression := ast.unparse(node)) <= LONGEST_EXPRESSION:
        return replace(value, expression=expression)
    return value


def _arguments(call: ast.Call, positions: Sequence[str]) -> Iterator[tuple[str, ast.expr]]:
    yield from zip(positions, call.args, strict=False)
    yield from ((each.arg or "**", each.value) for each in call.keywords)


def _adapters(given: dict[str, Any]) -> dict[str, Any]:
    """Remove the LoraConfig in `peft_config`, and return its values by the words of TRL's command line."""
    adapters = given.get("peft_config")
    if not isinstance(adapters, MadeOf):
        return {}
    del given["peft_config"]
    found = {LORA.get(name, f"peft_config.{name}"): value for name, value in adapters.keywords.items()}
    return {"use_peft": True, **LORA_DEFAULTS, **found}


def _to_import(script: Script, file: Path, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a remark if a run must import the script to find its functions, and the import would start the script's
    training or need packages of TRL."""
    named = [value for key, value in given.items() if key != "tools"]  # A run imports no plain functions as tools.
    values = [each for value in named for each in (value if isinstance(value, list) else [value])]
    here = sorted({each.path for each in values if isinstance(each, Named) and each.defined_here})
    effects = ["start its training"] if script.trains_when_imported() else []
    effects += [f"need {', '.join(needed)}"] if (needed := sorted(script.imported_packages() & TRAINERS)) else []
    if here and effects:
        yield (
            f"{', '.join(here)}: importing {file.name} would {' and '.join(effects)}: move "
            f"{'this definition' if len(here) == 1 else 'these definitions'} into another file, such as "
            f"my_{file.name}, and write this module's name in the experiment file"
        )
