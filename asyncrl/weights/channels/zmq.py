"""The engine's end of the ZeroMQ channel: pulls manifests and chunks from a publisher.

Replies come in the order of the requests, so one that does not match the oldest request means that the transfer is
broken. Memory holds one update, the outstanding chunks, and with deltas the version before; it is taken only once the
manifest has been checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash

from asyncrl.errors import WeightsError, WireError
from asyncrl.weights.buckets import Entry, plan_buckets
from asyncrl.weights.channels.requests import Requests
from asyncrl.weights.delta import Bytes, Delta, DeltaHeader, apply, read_header
from asyncrl.weights.manifest import Chunk, Manifest, bytes_of, chunks, new_bytes, read_manifest, together
from asyncrl.weights.threads import in_own_thread

APPLY_THREADS = 4
ARENA_BYTES = 64 << 20
"""Tensors are received into buffers of this size, since large ones have huge pages."""


class ZmqChannel:
    """The publisher behind `requests`, with at most `credits` requests for chunks outstanding.

    With `deltas` the last version stays in memory as a base for the next, which then shares what did not change with
    it. `received` counts bytes of weights.

    Every method raises UnavailableError where the publisher is silent for too long, and WireError where it
    refuses or its answer is malformed; then `reset` before the next call.
    """

    name = "zmq"

    def __init__(self, requests: Requests, *, credits: int = 16, deltas: bool = True) -> None:
        self.endpoint = requests.endpoint
        self._requests = requests
        self._credits = credits
        self._keep = deltas
        self._held: tuple[Manifest, Mapping[str, torch.Tensor]] | None = None
        self._headers: tuple[DeltaHeader, ...] = ()
        self.received = 0

    def reset(self) -> None:
        """Drop the connection with everything outstanding; the next call makes a new one."""
        self._requests.reset()

    async def newer_than(self, version: int) -> Manifest | None:
        """The newest manifest as soon as it is newer than `version`, or None after a second or so without one."""
        base = self._held[0].digest if self._held else ""
        reply = await self._requests.ask("manifest", {"holds": version, "base": base})
        if reply.kind == "nothing":
            return None
        manifest = read_manifest(reply.body)
        if manifest.version <= version:
            raise WireError(f"asked for a version newer than {version}, the publisher offers {manifest.version}")
        self._headers = _read_headers(reply.body.get("deltas"), manifest)
        return manifest

    async def fetch(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """All tensors of a manifest that `newer_than` gave. Raises WeightsError: a checksum does not match."""
        if self._headers and self._held:
            tensors = await self._fetch_deltas(*self._held, manifest, self._headers)
        else:
            tensors = await self._fetch_whole(manifest)
        if self._keep:
            self._held = (manifest, tensors)
        return tensors

    async def _fetch_whole(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        entries = [Entry(spec.name, spec.dtype, spec.shape) for spec in manifest.tensors]
        for bucket in plan_buckets(entries, ARENA_BYTES):
            tensors |= bucket.views(new_bytes(bucket.nbytes))
        own = await self._fetch_parts(manifest, [bytes_of(tensor) for tensor in tensors.values()])
        damaged = [spec.name for spec, each in zip(manifest.tensors, own, strict=True) if spec.checksum != each]
        if damaged:
            raise WeightsError(f"version {manifest.version} arrived damaged: the checksums of {damaged[:3]} differ")
        return tensors

    async def _fetch_deltas(
        self, held: Manifest, base: Mapping[str, torch.Tensor], manifest: Manifest, headers: Sequence[DeltaHeader]
    ) -> dict[str, torch.Tensor]:
        chain = [Delta(header, np.empty(header.nbytes, np.uint8)) for header in headers]
        await self._fetch_parts(manifest, [delta.payload for delta in chain])
        try:
            with ThreadPoolExecutor(APPLY_THREADS) as pool:
                return await in_own_thread(partial(apply, base, held, manifest, chain, pool.map))
        except (WeightsError, WireError):
            # The next manifest comes without deltas.
            self._held = None
            raise

    async def _fetch_parts(self, manifest: Manifest, parts: Sequence[Bytes]) -> list[int]:
        """Fill `parts` with what the publisher sends; their checksums."""
        sums = [xxhash.xxh3_64() for _ in parts]
        outstanding: deque[tuple[int, list[Chunk]]] = deque()
        pieces = chunks((len(part) for part in parts), manifest.chunk_bytes)
        remaining = together(pieces, manifest.chunk_bytes)
        while True:
            for group in islice(remaining, self._credits - len(outstanding)):
                outstanding.append((await self._ask(manifest.version, group), group))
            if not outstanding:
                return [each.intdigest() for each in sums]
            sequence, group = outstanding.popleft()
            arrays = (await self._requests.receive(sequence)).arrays
            for index, chunk in enumerate(group):
                data = arrays.get(str(index))
                if data is None or len(data) != chunk.stop - chunk.start:
                    raise WireError(f"the publisher sent no whole {chunk}")
                parts[chunk.part][chunk.start : chunk.stop] = data
                sums[chunk.part].update(data.data)
                self.received += len(data)

    async def _ask(self, version: int, group: Sequence[Chunk]) -> int:
        rows = [(chunk.part, chunk.start, chunk.stop) for chunk in group]
        return await self._requests.send("chunks", {"version": version, "chunks": rows})


def _read_headers(rows: Any, manifest: Manifest) -> tuple[DeltaHeader, ...]:
    """Raises WireError: they are malformed, or no fewer bytes than the version itself."""
    if not isinstance(rows, list):
        raise WireError("a manifest must come with a list of deltas, which may be empty")
    headers = tuple(read_header(row) for row in rows)
    if sum(header.nbytes for header in headers) > manifest.nbytes:
        raise WireError("the deltas are larger than the weights")
    return headers
