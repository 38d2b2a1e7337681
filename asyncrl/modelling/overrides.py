"""`model.override_config`: a run's changes to fields of the model's Hugging Face configuration.

Every role that opens the model applies the changes in the same way. Servers get them from `engine_overrides`, and an
exported config.json contains them. These changes may alter how weights are used, but not the weights' names and shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from asyncrl.config.keys import did_you_mean
from asyncrl.config.option import as_yaml
from asyncrl.errors import ConfigError
from asyncrl.modelling.flops import EXPERTS
from asyncrl.modelling.vision import auto_class
from asyncrl.modelling.weight_format import Shapes, model_tensors

KEY = "model.override_config"
ROPE = "rope_parameters"
_FORBIDDEN = {
    **dict.fromkeys(("dtype", "torch_dtype"), "set model.dtype"),
    **dict.fromkeys(("model_type", "architectures", "auto_map"), "it decides which code runs the model; keep it"),
    **dict.fromkeys(("transformers_version", "_name_or_path"), "transformers writes it itself; leave it out"),
    **dict.fromkeys(
        ("return_dict", "output_hidden_states", "output_attentions"), "it changes the result of a call; leave it out"
    ),
}


def override(config: Any, given: Mapping[str, Any], trust_remote_code: bool = False) -> Any:
    """Copy the Hugging Face `config`, with the values `given` for some fields.

    Nested fields are written as nested mappings, or as names joined by dots. Raises ConfigError for these reasons:

    - `given` has a field that `config` lacks, or a value that transformers refuses
    - a number is not finite
    - a token would use no experts, or more experts than a layer has
    - the weights would have other names or shapes
    """
    changes = engine_overrides(config, given)
    text = f"{KEY}={as_yaml(dict(given))}"
    if not _is_finite(changes):
        raise ConfigError(f"{text}: a number is not finite")
    try:
        changed = type(config).from_dict(_merged(config.to_dict(), changes))
    # transformers' checks of a configuration raise many kinds of errors.
    except Exception as error:
        raise ConfigError(f"{text}: transformers refuses it: {error}") from error
    changed.name_or_path, changed._commit_hash = config.name_or_path, getattr(config, "_commit_hash", None)
    _check_experts(changed, text)
    _check_same_weights(config, changed, text, trust_remote_code)
    return changed


def _is_finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _check_experts(config: Any, text: str) -> None:
    """Raises ConfigError: a token goes to no expert, or to more experts than a layer has."""
    config = config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None)
    number = next((found for name in EXPERTS if (found := getattr(config, name, None))), None)
    if number is not None and chosen is not None and not 1 <= chosen <= number:
        raise ConfigError(f"{text}: a token goes to {chosen} of {number} experts; set at least 1 and at most {number}")


def engine_overrides(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `given` overrides in the form for servers.

    Fields have the names of config.json, and mappings such as rope_parameters have all their entries. Raises
    ConfigError: `given` has a field that `config` lacks.
    """
    found: dict[str, Any] = {}
    _collect(config, _nested(given), found, "")
    return found


def _nested(given: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in given.items():
        first, _, rest = str(name).partition(".")
        inner = _nested({rest: value}) if rest else _nested(value) if isinstance(value, Mapping) else value
        nested[first] = _merged(nested.get(first, {}), inner) if isinstance(inner, Mapping) else inner
    return nested


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the `changes`, which are merged into nested mappings."""
    merged = dict(values)
    for name, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if both else value
    return merged


def _collect(config: Any, given: Mapping[str, Any], found: dict[str, Any], prefix: str) -> None:
    values = config.to_dict()
    for name, value in given.items():
        own = config.attribute_map.get(name, name)
        if own in _FORBIDDEN:
            raise ConfigError(f"{KEY}.{prefix}{name}: {_FORBIDDEN[own]}")
        if own not in values:
            # For a `rope_theta` that is not nested, the suggestion may be the nested field rope_parameters.rope_theta.
            near = did_you_mean(name, [*_dotted(config), *config.attribute_map])
            raise ConfigError(f"{KEY}.{prefix}{name}: a {config.model_type} configuration has no such field{near}")
        inner = getattr(config, own)
        if isinstance(inner, PreTrainedConfig):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{KEY}.{prefix}{name}={value}: this is a section; name one of its fields after a dot"
                )
            _collect(inner, value, found.setdefault(own, {}), f"{prefix}{name}.")
        elif isinstance(value, Mapping) and isinstance(values[own], Mapping):
            _check_entries(values[own], value, f"{prefix}{name}.", own == ROPE)
            found[own] = _merged(values[own], value)
        else:
            found[own] = value


def _check_entries(values: Mapping[str, Any], given: Mapping[str, Any], prefix: str, rope: bool) -> None:
    """Raises ConfigError: `given` has an entry that `values` lacks. With `rope`, `given` may have any entry of rotary
    embeddings, since another type of embedding may need more entries."""
    known = [*map(str, values), *(RopeParameters.__annotations__ if rope else ())]
    for name, value in given.items():
        if known and str(name) not in known:
            raise ConfigError(f"{KEY}.{prefix}{name}: there is no such entry{did_you_mean(str(name), known)}")
        if isinstance(value, Mapping) and isinstance(values.get(name), Mapping):
            _check_entries(values[name], value, f"{prefix}{name}.", rope)


def _dotted(config: Any, prefix: str = "") -> Iterator[str]:
    """The names of all fields, with dots in the names of nested fields."""
    for name, value in config.to_dict().items():
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            yield from _dotted(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
            yield from (f"{prefix}{name}.{entry}" for entry in value) if isinstance(value, dict) else ()


def _check_same_weights(config: Any, changed: Any, text: str, trust_remote_code: bool) -> None:
    before, after = _shapes(config, text, trust_remote_code), _shapes(changed, text, trust_remote_code)
    if wrong := [name for name in {**before, **after} if before.get(name) != after.get(name)]:
        first = wrong[0]
        raise ConfigError(
            f"{text}: {len(wrong)} tensors of the model would differ from its weight files; the first is {first}: "
            f"{_shape(after, first)} instead of {_shape(before, first)}. Leave out fields that change names or shapes "
            "of weights"
        )


def _shape(shapes: Shapes, name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "none"


def _shapes(config: Any, text: str, trust_remote_code: bool) -> dict[str, tuple[int, ...]]:
    try:
        with torch.device("meta"):
            model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    # A model's modules raise many kinds of errors when they are made, such as a KeyError for an unknown activation
    # function.
    except Exception as error:
        raise ConfigError(f"{text}: transformers cannot make a model of it: {error!r}") from error
    return {name: tuple(each.shape) for name, each in model_tensors(model).items()}
