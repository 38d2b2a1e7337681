"""Converts weights between a model in memory and the published format. Published tensors have the names and shapes of a
Hugging Face folder.

In memory, transformers may have other tensors than in files: for example it stacks the experts of a layer into one
tensor, and separates them again when it saves. Servers know only the names in the files. So the learner converts its
tensors back, and publishes those that `save_pretrained` would write: parameters (tied ones once) and persistent
buffers.

An embedded engine converts published tensors as `from_pretrained` would. LoRA adapters are merged into the matrices
that they change. Tensors are converted in parts. To convert a part, no tensor of another part is needed, so a sharded
model is never gathered as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from asyncrl.errors import ConfigError
from asyncrl.modelling.adapters import base_parameters

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ConvertedTensors:
    """One part of a model: tensors that are converted together.

    - `model`: their names and shapes in the model
    - `published`: the names and shapes of the published tensors that they become
    - `unchanged`: true if the part is a single tensor, which keeps its contents and is at most renamed
    """

    model: Shapes
    published: Shapes
    unchanged: bool


def model_tensors(model: Any) -> dict[str, Tensor]:
    """The parameters of a Hugging Face `model` and its persistent buffers, without adapters.

    Tied parameters appear once, under their first name.
    """
    persistent = model.state_dict().keys()
    buffers = {name: each for name, each in model.named_buffers() if name in persistent}
    return base_parameters(model) | buffers


class WeightFormat:
    """Converts the tensors of a Hugging Face `model` to their published form and back, in `parts` in the model's order.

    - `stored` has the names of the tensors in the model's files. Leave it out if transformers has loaded the model from
      its files, or if the model has no files.
    - `buffer_dtypes` are the dtypes that persistent buffers had when this object was made.

    Raises ConfigError: transformers cannot convert the model back part by part.
    """

    def __init__(self, model: Any, stored: Collection[str] | None = None) -> None:
        self._model = model
        tensors = model_tensors(model)
        if stored is not None:
            model._weight_conversions = _used(model, stored)
        buffers = tensors.keys() - base_parameters(model).keys()
        self.buffer_dtypes = {name: tensors[name].dtype for name in buffers}
        empty = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in tensors.items()}
        try:
            self.parts = self._parts(empty)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"transformers cannot convert a {type(model).__name__} back to the format of its files: {error!r}"
            ) from error

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all published tensors."""
        return {name: shape for part in self.parts for name, shape in part.published.items()}

    def publish(self, part: ConvertedTensors, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the model's `tensors` of `part` to their published form, on their device and in their dtype.

        The result may share memory with `tensors`.
        """
        if part.unchanged:
            return dict(zip(part.published, tensors.values(), strict=True))
        return self._revert(tensors)

    def restore(self, published: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert all `published` tensors to the model's. Unchanged tensors share memory with `published`.

        Raises ConfigError: transformers makes other tensors of them than the model has.
        """
        restored: dict[str, Tensor] = {}
        for part in self.parts:
            restored |= self.restore_part(part, published)
        return restored

    def restore_part(self, part: ConvertedTensors, published: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the published tensors of `part` only. Raises ConfigError: see `restore`."""
        given = {name: published[name] for name in part.published}
        made = dict(zip(part.model, given.values(), strict=True)) if part.unchanged else self._convert(given)
        if _shapes(made) != part.model:
            raise ConfigError(f"transformers makes {sorted(made)[:3]} of published tensors, not {list(part.model)}")
        return made

    def check_restores(self) -> None:
        """Raises ConfigError: `restore` does not undo `publish`."""
        self.restore({name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()})

    def _parts(self, empty: Mapping[str, Tensor]) -> tuple[ConvertedTensors, ...]:
        whole = self._revert(empty)
        # If transformers does not convert a tensor, it returns the same object, perhaps under another name.
        names = {id(each): name for name, each in whole.items()}
        together = {name: self._revert({name: each}).keys() for name, each in empty.items() if id(each) not in names}
        parts: dict[str, ConvertedTensors] = {}
        for name, each in empty.items():
            if name not in together:
                renamed = _shapes({names[id(each)]: each})
                parts[name] = ConvertedTensors(_shapes({name: each}), renamed, unchanged=True)
            elif not any(name in part.model for part in parts.values()):
                group = {other: empty[other] for other in _connected(name, together)}
                parts[name] = ConvertedTensors(_shapes(group), _shapes(self._revert(group)), unchanged=False)
        found = {name: shape for part in parts.values() for name, shape in part.published.items()}
        if found != _shapes(whole):
            wrong = sorted(found.items() ^ _shapes(whole).items())
            raise ConfigError(
                f"the weights of a {type(self._model).__name__} cannot be published part by part: converted alone, "
                f"{len(wrong)} tensors differ from what save_pretrained writes, the first is {wrong[0][0]}"
            )
        return tuple(parts.values())

    def _revert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(revert_weight_conversion(self._model, dict(tensors)))

    def _convert(self, published: Mapping[str, Tensor]) -> dict[str, Tensor]:
        renamings, converters = _sorted(_conversions(self._model))
        sources = {pattern: each for each in converters for pattern in each.source_patterns}
        started: dict[str, Any] = {}
        for name in sorted(published, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters)
            if pattern is None:
                raise ConfigError(f"transformers can save {name}, but cannot load it")
            converter = started.setdefault(target, deepcopy(sources[pattern]))
            converter.add_tensor(target, name, pattern, published[name])
        made: dict[str, Tensor] = {}
        for target, converter in started.items():
            converted = converter.convert(target, model=self._model, config=self._model.config)
            made |= {name: each[0] if isinstance(each, list) else each for name, each in converted.items()}
        return made


def _connected(name: str, together: Mapping[str, Collection[str]]) -> list[str]:
    """The tensors that are converted together with `name`: they share published tensors with it, directly or through
    further tensors."""
    found, reached = {name}, set(together[name])
    while more := {other for other in together.keys() - found if reached & set(together[other])}:
        found |= more
        reached.update(*(together[other] for other in more))
    return [other for other in together if other in found]


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in tensors.items()}


def _sorted(conversions: Collection[Any]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    return renamings, [each for each in conversions if isinstance(each, WeightConverter)]


def _conversions(model: Any) -> list[Any]:
    """The conversions with which the model was loaded, or transformers' usual ones if it was not loaded from files."""
    loaded = getattr(model, "_weight_conversions", None)
    if loaded is not None:
        return list(loaded)
    usual = get_model_conversion_mapping(model, add_legacy=False)
    return [each for each in usual if not isinstance(each, PrefixChange)]


def _used(model: Any, stored: Collection[str]) -> list[Any]:
    """The conversions that `from_pretrained` would use for files with the tensors `stored`, and would keep on the
    model."""
    conversions, own = get_model_conversion_mapping(model), model.state_dict()
    renamings, converters = _sorted(conversions)
    for name in sorted(stored, key=dot_natural_key):
        rename_source_key(name, renamings, converters, model.base_model_prefix, own)
    return [each for each in conversions if each.was_used()]
