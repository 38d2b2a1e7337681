"""The engine's end of the ZeroMQ route: pulls manifests and chunks from a publisher.

Replies come in the order of the requests, so a reply that does not match the oldest request means that the transfer is
broken. Memory holds the arriving version and the outstanding chunks. With deltas it also holds the last version. Memory
for a version is allocated only after its manifest was checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, islice

import msgspec
import numpy as np
import torch
import xxhash

from asyncrl.errors import WeightsError, WireError
from asyncrl.weights.buckets import plan_buckets
from asyncrl.weights.delta import Bytes, Delta, apply
from asyncrl.weights.manifest import Manifest, TensorSpec, bytes_of, checksum, dtype_name, new_bytes, places
from asyncrl.weights.requests import Requests
from asyncrl.weights.stored_tensors import StoredTensors
from asyncrl.weights.threads import in_own_thread

APPLY_THREADS = 4
ARENA_BYTES = 64 << 20
"""Tensors are received into buffers of this size, because the system gives huge pages only to large buffers."""

_MANIFEST = msgspec.msgpack.Decoder(Manifest)


class ZmqRoute:
    """Pulls from the publisher by `requests`, with at most `credits` requests for chunks outstanding.

    With `deltas` the last version stays in memory as a base for the next version. The two share the tensors that did
    not change. If a version comes without deltas, a tensor travels only if its checksum differs from its checksum in
    the last version. If there is no last version, a tensor travels only if the files of `stored` do not have it.
    `received` counts bytes of weights.

    `newer_than` and `fetch` raise UnavailableError if the publisher is silent for too long, and WireError if the
    publisher refuses or its answer is malformed. After such an error, call `reset` before the next call.
    """

    name = "zmq"

    def __init__(
        self, requests: Requests, *, credits: int = 16, deltas: bool = True, stored: StoredTensors | None = None
    ) -> None:
        self.endpoint = requests.endpoint
        self._requests = requests
        self._credits = credits
        self._keep = deltas
        self._stored = stored
        self._held: tuple[Manifest, Mapping[str, torch.Tensor]] | None = None
        self.received = 0

    def reset(self) -> None:
        """Drop the connection with all outstanding requests. The next call makes a new connection."""
        self._requests.reset()

    async def newer_than(self, version: int) -> Manifest | None:
        """Return the newest manifest as soon as it is newer than `version`, or None after about a second."""
        base = self._held[0].digest if self._held else ""
        reply = await self._requests.ask("manifest", {"holds": version, "base": base})
        if reply.kind == "nothing":
            return None
        manifest = reply.read(_MANIFEST)
        if manifest.version <= version:
            raise WireError(f"asked for a version newer than {version}, the publisher offers {manifest.version}")
        return manifest

    async def fetch(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """Return all tensors of a manifest from `newer_than`. Raises WeightsError: a checksum does not match."""
        if manifest.deltas and self._held:
            tensors = await self._fetch_deltas(*self._held, manifest)
        else:
            tensors = await self._fetch_whole(manifest)
        if self._keep:
            self._held = (manifest, tensors)
        return tensors

    async def _fetch_whole(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        tensors, missing = await in_own_thread(partial(self._known, manifest))
        parts = [bytes_of(tensors[manifest.tensors[index].name]) for index in missing]
        firsts = list(accumulate((spec.nbytes for spec in manifest.tensors), initial=0))
        own = await self._fetch_parts(manifest, parts, [firsts[index] for index in missing])
        specs = [manifest.tensors[index] for index in missing]
        damaged = [spec.name for spec, each in zip(specs, own, strict=True) if spec.checksum != each]
        if damaged:
            raise WeightsError(f"version {manifest.version} arrived damaged: the checksums of {damaged[:3]} differ")
        return tensors

    def _known(self, manifest: Manifest) -> tuple[dict[str, torch.Tensor], list[int]]:
        """Make all tensors of a version. Tensors that this process holds are shared. The others get new memory. If the
        process holds no version yet, tensors from the files are copied into it. Returns all tensors, and the indices of
        those that are still missing."""
        held = self._held[1] if self._held else {}
        same = {spec.name: held[spec.name] for spec in manifest.tensors if _has(held.get(spec.name), spec)}
        others = [spec for spec in manifest.tensors if spec.name not in same]
        fresh: dict[str, torch.Tensor] = {}
        for bucket in plan_buckets(others, ARENA_BYTES):
            fresh |= bucket.views(new_bytes(bucket.nbytes))
        known = set(same)
        if self._stored is not None and self._held is None:
            known |= self._stored.copy({spec: fresh[spec.name] for spec in others})
        missing = [index for index, spec in enumerate(manifest.tensors) if spec.name not in known]
        found = same | fresh
        return {spec.name: found[spec.name] for spec in manifest.tensors}, missing

    async def _fetch_deltas(
        self, held: Manifest, base: Mapping[str, torch.Tensor], manifest: Manifest
    ) -> dict[str, torch.Tensor]:
        chain = [Delta(header, np.empty(header.nbytes, np.uint8)) for header in manifest.deltas]
        payloads = [delta.payload for delta in chain]
        await self._fetch_parts(manifest, payloads, list(accumulate(map(len, payloads), initial=0))[:-1])
        try:
            with ThreadPoolExecutor(APPLY_THREADS) as pool:
                return await in_own_thread(partial(apply, base, held, manifest, chain, pool.map))
        except (WeightsError, WireError):
            # Drops the base, so that the next manifest has no deltas.
            self._held = None
            raise

    async def _fetch_parts(self, manifest: Manifest, parts: Sequence[Bytes], firsts: Sequence[int]) -> list[int]:
        """Fill `parts` with the publisher's bytes, and return their checksums.

        `firsts` are the offsets of the parts' first bytes among all bytes of the version.
        """
        sums = [xxhash.xxh3_64() for _ in parts]
        edges, size = list(accumulate(map(len, parts), initial=0)), manifest.chunk_bytes
        remaining = (
            (start, min(start + size, end), shift)
            for begin, end, shift in _runs(edges, firsts)
            for start in range(begin, end, size)
        )
        outstanding: deque[tuple[int, int, int]] = deque()
        while True:
            for start, stop, shift in islice(remaining, self._credits - len(outstanding)):
                body = {"version": manifest.version, "start": start + shift, "stop": stop + shift}
                outstanding.append((await self._requests.send("chunk", body), start, stop))
            if not outstanding:
                return [each.intdigest() for each in sums]
            sequence, start, stop = outstanding.popleft()
            arrays = (await self._requests.receive(sequence)).arrays.values()
            if sum(map(len, arrays)) != stop - start:
                raise WireError(f"the publisher did not send the bytes from {start} to {stop}")
            for data in arrays:
                for part, where in places(edges, start, start + len(data)):
                    count = where.stop - where.start
                    parts[part][where], data = data[:count], data[count:]
                    sums[part].update(parts[part][where].data)
                    start += count
            self.received += sum(map(len, arrays))


def _runs(edges: Sequence[int], firsts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Join neighbouring parts to one span if they are neighbours at the publisher, too. Part i has the bytes [edges[i],
    edges[i + 1]) of the concatenated parts. Yield (begin, end, shift) of each span: byte p of the concatenated parts is
    byte p + shift at the publisher."""
    begin = 0
    for index, first in enumerate(firsts):
        shift = first - edges[index]
        if index + 1 == len(firsts) or firsts[index + 1] - edges[index + 1] != shift:
            if edges[index + 1] > edges[begin]:
                yield edges[begin], edges[index + 1], shift
            begin = index + 1


def _has(tensor: torch.Tensor | None, spec: TensorSpec) -> bool:
    """True if a tensor has exactly the bytes of `spec`."""
    if tensor is None or (dtype_name(tensor.dtype), tuple(tensor.shape)) != (spec.dtype, spec.shape):
        return False
    return checksum(bytes_of(tensor.contiguous())) == spec.checksum
