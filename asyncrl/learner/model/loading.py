"""Loads a Hugging Face model shard by shard.

The model is built without weights and sharded, and then each rank reads its rows from the safetensors files. Host
memory never holds more than the rank's shard and one part (see modelling/weight_format.py): one tensor, or the tensors
that transformers converts together, such as the experts of a layer. A model whose files cannot be read this way is
loaded whole on every rank, by transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import GenerationConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.ranks.ranks import shard_of
from asyncrl.machine.activity import Activity
from asyncrl.machine.long_work import tracked, unmeasured_work
from asyncrl.modelling.adapters import base_parameters
from asyncrl.modelling.opening import open_config
from asyncrl.modelling.source import ModelSource, source_of
from asyncrl.modelling.vision import auto_class
from asyncrl.modelling.weight_format import ConvertedTensors, WeightFormat

logger = logging.getLogger(__name__)

COMPARED_ROWS = 4096


class _LoadWholeError(Exception):
    """The reason why a model cannot be read shard by shard."""


class NoSafetensorsError(_LoadWholeError):
    """A model has no safetensors files."""


def open_model(config: ModelConfig, activity: Activity | None = None, with_head: bool = True) -> StoredModel:
    """Open the causal language model that `config` names. Its weights are read after the model is sharded.

    If the whole model must be loaded at once, `activity` shows how long this takes. Without `with_head` the files may
    lack the head of a language model, which a critic does not need. Raises ConfigError: the model cannot be loaded.
    """
    path = config.path
    try:
        return _open_shards(config, with_head)
    except _LoadWholeError as reason:
        logger.warning("each rank loads the whole of %s, which takes more memory: %s", path, reason)
        model, missing = _read_whole(config, activity)
        return StoredModel(model, missing=missing)
    except (OSError, ValueError, LookupError, ImportError, SafetensorError) as error:
        raise ConfigError(f"{path!r} cannot be loaded: {error!r}") from error


def read_model(config: ModelConfig) -> Any:
    """Read the causal language model that `config` names, on the CPU, in float32. Tensors that its files lack are
    random. Raises ConfigError: the model cannot be loaded."""
    return _read_whole(config)[0]


def _read_whole(config: ModelConfig, activity: Activity | None = None) -> tuple[Any, frozenset[str]]:
    """Do the same as `read_model`, and return the names of the random tensors, too."""
    try:
        source = source_of(config)
        with unmeasured_work(f"loading {config.path}", activity):
            # Names float32, since the dtype in config.json might round the numbers of the files.
            opened = open_config(config)
            read: Any = auto_class(opened).from_pretrained(
                source.path, config=opened, dtype=torch.float32, output_loading_info=True, **source.options
            )
    except (OSError, ValueError, LookupError, ImportError, RuntimeError) as error:
        raise ConfigError(f"{config.path!r} cannot be loaded: {error!r}") from error
    model, info = read
    return model.eval(), frozenset(info["missing_keys"])


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """Reads the tensors of a model's files, and converts them to the model's own tensors. The keys of `files` and
    `shapes` are the names in files."""

    form: WeightFormat
    files: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    def rows(self, name: str, rows: range | None = None) -> Tensor:
        """Read some rows of a stored tensor, or all."""
        # A file that stays open keeps its pages in memory.
        with safe_open(self.files[name], "pt") as file:
            part: Tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[rows.start : rows.stop]
            return part

    def same(self, name: str, other: str) -> bool:
        """True if two stored tensors are equal."""
        if self.shapes[name] != self.shapes.get(other):
            return False
        starts = range(0, self.shapes[name][0], COMPARED_ROWS)
        parts = (range(start, start + COMPARED_ROWS) for start in starts)
        return all(torch.equal(self.rows(name, rows), self.rows(other, rows)) for rows in parts)

    def whole(self, part: ConvertedTensors) -> dict[str, Tensor]:
        """Return the model's tensors of a part."""
        return self.form.restore_part(part, {name: self.rows(name) for name in part.published})


@dataclass(frozen=True, slots=True, eq=False)
class StoredModel:
    """A Hugging Face `model` whose parameters are still on the meta device, and the `weights` in its files. The model's
    buffers have their values already.

    If `weights` is None, the model already has its values, except for `missing` tensors, which its files lack. `start`
    gives values to parameters that are in no file of the model.
    """

    model: Any
    weights: _Weights | None = None
    missing: frozenset[str] = frozenset()
    start: Callable[[], None] = lambda: None

    @torch.no_grad()
    def read(self, root: nn.Module, device: torch.device, activity: Activity | None = None) -> None:
        """Load this rank's shards of the parameters that `root` shares with the model, on `device`. Call this after
        `root` is sharded. `activity` shows the progress. Raises ConfigError: a file cannot be read, or tensors of
        `root` are missing."""
        if self.weights is None:
            self._check_whole(root)
        else:
            root._apply(lambda each: torch.empty_like(each, device=device) if each.is_meta else each)
            self._read(self.weights, activity)
        self.start()

    def _read(self, weights: _Weights, activity: Activity | None) -> None:
        parameters = base_parameters(self.model)
        parts = weights.form.parts
        try:
            for part in tracked(parts, f"loading {self.model.name_or_path}", len(parts), "parts", activity):
                targets = {name: parameters[name] for name in part.model if name in parameters}
                # The head of a language model stays on the meta device if a critic is loaded, and is not read.
                if targets and not any(each.is_meta for each in targets.values()):
                    _read(weights, part, targets)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"the weights of {self.model.name_or_path!r} cannot be read: {error}") from error

    def _check_whole(self, root: nn.Module) -> None:
        # A missing tensor would have different random numbers on each rank. Tensors outside of `root`, such as the
        # language model's head for a critic, do not matter.
        own = {id(each) for each in (*root.parameters(), *root.buffers())}
        named = base_parameters(self.model, remove_duplicate=False) | dict(self.model.named_buffers())
        if lacking := sorted(name for name in self.missing if id(named.get(name)) in own):
            raise ConfigError(
                f"the files of {self.model.name_or_path!r} lack {len(lacking)} tensors of the model, such as "
                f"{lacking[0]}: copy the files again, or correct config.json"
            )


def _read(weights: _Weights, part: ConvertedTensors, targets: Mapping[str, Tensor]) -> None:
    if not part.unchanged:
        whole = weights.whole(part)
        for name, target in targets.items():
            assign_rows(target, whole[name])
        return
    [stored] = part.published
    for target in targets.values():
        if (local := _local(target)).numel():
            local.copy_(weights.rows(stored, _own_rows(target)))


def assign_rows(target: Tensor, whole: Tensor) -> None:
    """Copy `whole` into `target`, or only this rank's rows if `target` is sharded. Call this under `torch.no_grad`."""
    _local(target).copy_(whole if (own := _own_rows(target)) is None else whole[own.start : own.stop])


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _own_rows(tensor: Tensor) -> range | None:
    """Return the rows of a sharded tensor that this rank has. Returns None if it has all rows."""
    if isinstance(tensor, DTensor):
        for dimension, placement in enumerate(tensor.placements):
            if placement.is_shard():
                mesh = tensor.device_mesh
                return shard_of(len(tensor), mesh.get_local_rank(dimension), mesh.size(dimension))
    return None


def _open_shards(named: ModelConfig, with_head: bool) -> StoredModel:
    """Open a model to read it shard by shard. Raises _LoadWholeError: the model must be loaded whole; ConfigError,
    OSError, ValueError, ImportError, SafetensorError: the model cannot be loaded at all."""
    source = source_of(named)
    config = open_config(named)
    if getattr(config, "quantization_config", None):
        raise _LoadWholeError("its weights are quantised")
    files, shapes = stored_tensors(source)
    # Chooses the same dtype as from_pretrained with dtype="auto".
    floats = (each for file in dict.fromkeys(files.values()) for each in _float_dtypes(file))
    dtype = config.dtype or next(floats, None)
    if dtype is None:
        raise ValueError("its files have no floating-point tensor")
    with _parameters_on_meta():
        model = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=named.trust_remote_code).eval()
    if model.can_generate():
        # If there is no generation_config.json, the model keeps the generation settings made from config.json.
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(source.path, revision=source.options["revision"])
    weights = _Weights(WeightFormat(model, files), files, shapes)
    _check_stored(model, weights, with_head)
    _read_buffers(model, weights)
    return StoredModel(model, weights)


def stored_tensors(source: ModelSource) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Return the file and the shape of each tensor in the safetensors files of a folder or hub model. Downloads the
    files of a hub model.

    Raises NoSafetensorsError: the model has no such files; OSError, SafetensorError: the files cannot be read."""
    path, revision = source.path, source.revision
    found = cached_file(path, SAFE_WEIGHTS_NAME, revision=revision, _raise_exceptions_for_missing_entries=False)
    files = [found or ""]
    if found is None:
        index = cached_file(
            path, SAFE_WEIGHTS_INDEX_NAME, revision=revision, _raise_exceptions_for_missing_entries=False
        )
        if index is None:
            raise NoSafetensorsError("it has no safetensors files")
        files, _ = get_checkpoint_shard_files(path, index, revision=revision)
    stored: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                stored[name], shapes[name] = file, tuple(opened.get_slice(name).get_shape())
    return stored, shapes


def _float_dtypes(file: str) -> Iterator[torch.dtype]:
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            if (dtype := opened.get_tensor(name).dtype).is_floating_point:
                yield dtype


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let modules that are made during the block have no memory for their parameters; their buffers have values."""

    def without_memory(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def _check_stored(model: Any, weights: _Weights, with_head: bool) -> None:
    """Raises _LoadWholeError: the files lack tensors that the model would save, or have different values for tied
    tensors. Without `with_head` they may lack the head."""
    head = None if with_head else model.get_output_embeddings()
    left_out = {name for name, each in model.named_parameters() if head is not None and each is head.weight}
    for name, shape in weights.form.shapes.items():
        if name not in left_out and weights.shapes.get(name) != shape:
            raise _LoadWholeError(f"transformers would save {name} {list(shape)}, which the files do not have")
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = own[id(parameter)]
        if name != first and name in weights.files and not weights.same(name, first):
            raise _LoadWholeError(f"its files have other values for {name} than for {first}, which the model ties")


def _read_buffers(model: Any, weights: _Weights) -> None:
    """Read the persistent buffers, in the dtype of the files."""
    buffers = weights.form.buffer_dtypes.keys()
    for part in weights.form.parts:
        for name, value in weights.whole(part).items() if buffers & part.model.keys() else ():
            if name in buffers:
                module, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(module), leaf, value.clone())
