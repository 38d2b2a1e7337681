"""Loads pushed weights inside an SGLang server, by repeating the copies that SGLang's own loader made.

SGLang calls `load` for each push (`--custom-weight-loader`). The actor owns a flat buffer with all weights. The first
push has the buffer's handle and the layout of its tensors, and the server keeps the handle open. Each later push has
only the buffer's key: the actor has filled the buffer again.

SGLang's loader finds the place of each tensor by its name. This takes some milliseconds for hundreds of tensors. So
`load` records the copies into the model's tensors while SGLang's loader makes them. Later pushes repeat these copies in
one call.

A loader that does more than copying cannot be repeated in this way, for instance if it computes a scale. Then each push
goes through SGLang's loader, and the server's log has the reason. The same happens once after the model's tensors have
moved.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

KEPT = "asyncrl_kept"
"""The attribute of a model that has its `KeptWeights`."""

aten = torch.ops.aten
Copy = tuple[torch.Tensor, torch.Tensor]
"""A target and its source."""
Layout = Sequence[tuple[str, str, list[int], int]]
"""The name, dtype, shape and first byte of each tensor in a buffer."""


def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load the weights in the actor's buffer into the model.

    `named_tensors` is one pair: a message in JSON and the buffer, uint8[n]. The message has the buffer's `key`. With
    `tensors`, a `Layout`, it announces a new buffer; otherwise the buffer is the one that this process keeps, and the
    tensor in the pair is empty.

    Raises RuntimeError, which ends the server: this process does not keep the buffer. So a server never serves other
    weights than the actor believes.
    """
    [(text, flat)] = named_tensors
    message = json.loads(text)
    kept = getattr(model, KEPT, None)
    if "tensors" in message:
        kept = KeptWeights(message["key"], flat, message["tensors"])
        setattr(model, KEPT, kept)
    if kept is None or kept.key != message["key"]:
        raise RuntimeError(f"this server does not keep the weights {message['key']}")
    kept.load(model)


class KeptWeights:
    """The buffer `flat` with all weights, and the copies from it into the model."""

    def __init__(self, key: str, flat: torch.Tensor, layout: Layout) -> None:
        self.key = key
        self._flat = flat
        self._layout = layout
        self._copies: list[list[Copy]] = []
        self._places: list[Any] = []
        self.reason = "its loader was not tried"

    @torch.no_grad()
    def load(self, model: Any) -> None:
        """Load the present contents of the buffer. Returns once all copies are complete."""
        self._synchronize()
        if not self.reason and self._places == _places(model):
            for copies in self._copies:
                torch._foreach_copy_([target for target, _ in copies], [source for _, source in copies])
        else:
            self._load_by_name(model)
        # The actor may fill the buffer again once this push has been answered.
        self._synchronize()

    def _load_by_name(self, model: Any) -> None:
        """Load through the model's own loader, and record its copies."""
        tensors = _views(self._flat, self._layout)
        with _Recorder(self._flat, model) as recorder:
            model.load_weights(tensors)
        if any(_storage(tensor) == _storage(self._flat) for _, tensor in _tensors(model)):
            # The model took tensors of the buffer as its own, but the buffer will change.
            recorder.reason = recorder.reason or "it uses loaded tensors without copying them"
            model.load_weights(_views(self._flat.clone(), self._layout))
        copies = _last_copies(recorder.copies)
        twice = "it copies twice to the same memory" if _overlap(copies) else ""
        reason = recorder.reason or twice or _missing(recorder.copies, tensors)
        if reason != self.reason:
            shown = f"at each push by name, because of its loader: {reason}" if reason else "by copies at once"
            logger.info("asyncrl loads the weights of %s %s", type(model).__name__, shown)
        self.reason = reason
        self._copies, self._places = _by_dtypes(copies), _places(model)

    def _synchronize(self) -> None:
        if self._flat.is_cuda:
            torch.cuda.synchronize(self._flat.device)


class _Recorder(TorchDispatchMode):
    """Records the copies from the storage of `flat` into the tensors of `model`.

    Constants may fill other parts of these tensors, such as the rows that pad a vocabulary. `reason` says what else
    happened; "" if there was nothing.
    """

    def __init__(self, flat: torch.Tensor, model: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[Copy] = []
        self.reason = ""
        self._flat = _storage(flat)
        self._own = {_storage(tensor) for _, tensor in _tensors(model)}
        self._known = {self._flat, *self._own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (args and isinstance(args[0], torch.Tensor) and not args[0].numel()):
            self._note(func, args, result)
        return result

    def _note(self, func: Any, args: Any, result: Any) -> None:
        if func is aten.copy_.default and self._is_plain(*args[:2]):
            self.copies.append((args[0], args[1]))
        elif func in (aten.fill_.Scalar, aten.zero_.default) and _storage(args[0]) in self._own:
            if _overlap_with(args[0], self.copies):
                self.reason = self.reason or "it sets loaded weights to a constant"
        elif not self._is_view(func, result):
            self.reason = self.reason or f"it calls {func}"

    def _is_plain(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        known = _storage(target) in self._own and _storage(source) == self._flat
        return known and target.shape == source.shape

    def _is_view(self, func: Any, result: Any) -> bool:
        results = result if isinstance(result, list | tuple) else [result]
        return not func._schema.is_mutable and all(_storage(each) in self._known for each in results)


def _views(flat: torch.Tensor, layout: Layout) -> list[tuple[str, torch.Tensor]]:
    """The tensors in `flat`, in the order of the layout."""
    views = []
    for name, dtype, shape, start in layout:
        kind: torch.dtype = getattr(torch, dtype)
        nbytes = torch.Size(shape).numel() * kind.itemsize
        views.append((name, flat[start : start + nbytes].view(kind).view(shape)))
    return views


def _storage(tensor: Any) -> int | None:
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, torch.Tensor) else None


def _tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _places(model: Any) -> list[Any]:
    """The places of the model's tensors in memory. Copies may be repeated only while these are the same."""
    return [(name, each.data_ptr(), each.shape, each.stride(), each.dtype) for name, each in _tensors(model)]


def _last_copies(copies: Sequence[Copy]) -> list[Copy]:
    """The last copy to each target. Tied embeddings, for instance, are loaded once for the input and once for the
    output."""
    last = {(target.data_ptr(), target.shape, target.stride()): (target, source) for target, source in copies}
    return list(last.values())


def _missing(copies: Iterable[Copy], tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The reason why these tensors may have been loaded in part without `copies`; "" if `copies` have each one whole.

    A recorder sees only its own thread, but a loader may copy in several threads.
    """
    sources = {(source.data_ptr(), source.shape, source.stride()) for _, source in copies}
    counts: Counter[int] = Counter()
    present = {tensor.data_ptr(): (name, tensor.numel()) for name, tensor in tensors if tensor.numel()}
    starts = sorted(present)
    for start, shape, _ in sources:
        counts[starts[bisect_right(starts, start) - 1]] += shape.numel()
    names = (name for start, (name, count) in present.items() if counts[start] != count)
    lacking = next(names, None)
    return "" if lacking is None else f"it does not copy {lacking} once and whole in its own thread"


def _overlap(copies: Iterable[Copy]) -> bool:
    """True if two copies may write the same memory, so that their order matters."""
    spans = sorted(_span(target) for target, _ in copies)
    return any(end > start for (_, end), (start, _) in pairwise(spans))


def _overlap_with(tensor: torch.Tensor, copies: Iterable[Copy]) -> bool:
    """True if `tensor` may have memory to which one of the `copies` writes."""
    start, end = _span(tensor)
    spans = (_span(target) for target, _ in copies if _storage(target) == _storage(tensor))
    return any(other_end > start and end > other_start for other_start, other_end in spans)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor that is not empty, and the byte after its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _by_dtypes(copies: Sequence[Copy]) -> list[list[Copy]]:
    """Group copies by their dtypes. A group of one dtype is copied by few kernels, a mixed one by a kernel each."""
    groups: dict[Any, list[Copy]] = {}
    for target, source in copies:
        groups.setdefault((target.dtype, source.dtype), []).append((target, source))
    return list(groups.values())
