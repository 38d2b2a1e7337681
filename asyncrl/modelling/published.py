"""A policy's weights as a Hugging Face folder has them: what is pushed, written and exported.

In memory transformers may have other tensors than in files: it stacks the experts of a layer into one tensor, for
example, and takes them apart again when it saves. Servers know the names of files only. So what leaves the learner is
what `save_pretrained` would write: parameters (tied ones once) and persistent buffers, converted back. What arrives at
an embedded engine is converted as `from_pretrained` would.

Tensors are converted in parts, each of which needs no tensor of another part; so a model never need be whole.
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

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that are converted together: names and shapes of the model's `own`, and of those that are `published`.

    Where a tensor is only renamed, or not even that, it is `alone`: a part by itself, whose contents stay.
    """

    own: Shapes
    published: Shapes
    alone: bool


def own_tensors(model: Any) -> dict[str, Tensor]:
    """The parameters of a Hugging Face `model`, tied ones once under their first name, and its persistent buffers."""
    persistent = model.state_dict().keys()
    buffers = {name: each for name, each in model.named_buffers() if name in persistent}
    return dict(model.named_parameters()) | buffers


class Published:
    """How the tensors of a Hugging Face `model` are published: in `parts`, in the model's order.

    `stored` names the tensors of the files that the model is loaded from; without it the model is one that was loaded,
    or has none. `dtypes` are those of persistent buffers when this is made, by own name.

    Raises ConfigError: transformers cannot convert the model back part by part.
    """

    def __init__(self, model: Any, stored: Collection[str] | None = None) -> None:
        self._model = model
        tensors = own_tensors(model)
        if stored is not None:
            model._weight_conversions = _used(model, stored)
        self.dtypes = {name: tensors[name].dtype for name in tensors.keys() - dict(model.named_parameters()).keys()}
        empty = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in tensors.items()}
        try:
            self.parts = self._parts(empty)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"transformers cannot convert a {type(model).__name__} back to what its files have: {error!r}"
            ) from error

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all published tensors."""
        return {name: shape for part in self.parts for name, shape in part.published.items()}

    def publish(self, part: Part, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The published tensors of `part`, on the device and in the dtype of `own`, whose memory they may share."""
        if part.alone:
            return dict(zip(part.published, own.values(), strict=True))
        return self._revert(own)

    def adopt(self, published: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's own tensors from all `published` ones, with which they share memory where nothing is converted.

        Raises ConfigError: transformers does not make the model's tensors of them.
        """
        own: dict[str, Tensor] = {}
        for part in self.parts:
            given = {name: published[name] for name in part.published}
            made = dict(zip(part.own, given.values(), strict=True)) if part.alone else self._convert(given)
            if {name: tuple(each.shape) for name, each in made.items()} != part.own:
                raise ConfigError(f"transformers makes {sorted(made)[:3]} of published tensors, not {list(part.own)}")
            own |= made
        return own

    def check_adopts(self) -> None:
        """Raises ConfigError: `adopt` is not the way back from `publish`."""
        self.adopt({name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()})

    def _parts(self, empty: Mapping[str, Tensor]) -> tuple[Part, ...]:
        whole = self._revert(empty)
        # What is not converted comes back as the same object, perhaps under another name.
        names = {id(each): name for name, each in whole.items()}
        together = {name: self._revert({name: each}).keys() for name, each in empty.items() if id(each) not in names}
        parts: dict[str, Part] = {}
        for name, each in empty.items():
            if name not in together:
                parts[name] = Part(_shapes({name: each}), _shapes({names[id(each)]: each}), alone=True)
            elif not any(name in part.own for part in parts.values()):
                own = {other: empty[other] for other in _connected(name, together)}
                parts[name] = Part(_shapes(own), _shapes(self._revert(own)), alone=False)
        found = {name: shape for part in parts.values() for name, shape in part.published.items()}
        if found != _shapes(whole):
            wrong = sorted(found.items() ^ _shapes(whole).items())
            raise ConfigError(
                f"the weights of a {type(self._model).__name__} cannot be published part by part: converted alone, "
                f"{len(wrong)} tensors differ from what save_pretrained writes, the first is {wrong[0][0]}"
            )
        return tuple(parts.values())

    def _revert(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(revert_weight_conversion(self._model, dict(own)))

    def _convert(self, published: Mapping[str, Tensor]) -> dict[str, Tensor]:
        renamings, converters = _sorted(_conversions(self._model))
        sources = {pattern: each for each in converters for pattern in each.source_patterns}
        under_way: dict[str, Any] = {}
        for name in sorted(published, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters)
            if pattern is None:
                raise ConfigError(f"transformers knows how to save {name}, and not how to load it")
            converter = under_way.setdefault(target, deepcopy(sources[pattern]))
            converter.add_tensor(target, name, pattern, published[name])
        made: dict[str, Tensor] = {}
        for target, converter in under_way.items():
            converted = converter.convert(target, model=self._model, config=self._model.config)
            made |= {name: each[0] if isinstance(each, list) else each for name, each in converted.items()}
        return made


def _connected(name: str, together: Mapping[str, Collection[str]]) -> list[str]:
    """Which tensors are converted with `name`: those that have a part in the same published one, and so on."""
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
    """Those that the model was loaded with, or what transformers takes for a model that was not loaded."""
    loaded = getattr(model, "_weight_conversions", None)
    if loaded is not None:
        return list(loaded)
    usual = get_model_conversion_mapping(model, add_legacy=False)
    return [each for each in usual if not isinstance(each, PrefixChange)]


def _used(model: Any, stored: Collection[str]) -> list[Any]:
    """The conversions that `from_pretrained` would use, and remember, for files with the tensors `stored`."""
    conversions, own = get_model_conversion_mapping(model), model.state_dict()
    renamings, converters = _sorted(conversions)
    for name in sorted(stored, key=dot_natural_key):
        rename_source_key(name, renamings, converters, model.base_model_prefix, own)
    return [each for each in conversions if each.was_used()]
