"""Tensors in the body of a post: works from anywhere, and is slow, since JSON takes bytes as base64 only."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from contextlib import aclosing

import torch

from asyncrl.actor.engine.fleet.update import Update
from asyncrl.actor.engine.sglang.transports.base import Transport, bucketed
from asyncrl.weights.buckets import Bucket


class TensorTransport(Transport):
    """Posts buckets to `/update_weights_from_tensor`."""

    async def send(self, update: Update) -> None:
        def make(bucket: Bucket, tensors: Mapping[str, torch.Tensor], label: str | None) -> bytes:
            return tensors_body({entry.name: tensors[entry.name] for entry in bucket.entries}, self.end.ranks, label)

        async with self.end.updating(), aclosing(bucketed(update, self.end.bucket_bytes, make)) as bodies:
            async for body in bodies:
                await self.end.post("/update_weights_from_tensor", body)


def tensors_body(bucket: Mapping[str, torch.Tensor], ranks: int, label: str | None) -> bytes:
    """The body of a post; `label` names the weights once this, the last bucket, is loaded.

    Every rank is given all and keeps its share. A plain pickle is what a server takes from an unrelated process; the
    cache is flushed by a call of its own, since a flush under requests fails the update or, before 0.5.22, the server.
    """
    plain = [(name, _own_storage(tensor)) for name, tensor in bucket.items()]
    data = base64.b64encode(pickle.dumps(plain, protocol=5))
    label_field = "" if label is None else f', "weight_version": "{label}"'
    payloads = [b'"', data, b'"', *[b', "', data, b'"'] * (ranks - 1)]
    # One join: each further step would copy hundreds of megabytes.
    return b"".join(
        [b'{"serialized_named_tensors": [', *payloads, b'], "flush_cache": false', label_field.encode(), b"}"]
    )


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU without the rest of a larger storage, all of which a pickle would carry."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
