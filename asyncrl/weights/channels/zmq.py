"""The engine's end of the ZeroMQ channel: pulls manifests and chunks from a publisher.

Replies come in the order of the requests, so one that does not match the oldest request means that the transfer is
broken. Memory holds one update and the outstanding chunks, and is taken only once the manifest has been checked.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from itertools import islice

import torch
import zmq.asyncio

from asyncrl.errors import UnavailableError, WeightsError, WireError
from asyncrl.network.keys import CHECK_KEYS, ClientKeys
from asyncrl.network.sockets import connect
from asyncrl.weights.manifest import DTYPES, MAX_CHUNK_BYTES, Chunk, Manifest, bytes_of, read_manifest
from asyncrl.wire import Message, decode, encode


class ZmqChannel:
    """A publisher at `endpoint`, with at most `credits` chunks outstanding. `keys` are those of network.keys.

    Every method raises UnavailableError where the publisher is silent for `timeout_s`, and WireError where it answers
    nonsense or refuses; then `reset` before the next call.
    """

    def __init__(
        self,
        endpoint: str,
        context: zmq.asyncio.Context,
        *,
        credits: int = 8,
        timeout_s: float = 10.0,
        keys: ClientKeys | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._context = context
        self._credits = credits
        self._timeout_s = timeout_s
        self._keys = keys
        self._sequence = 0
        self._socket: zmq.asyncio.Socket | None = None

    def reset(self) -> None:
        """Drop the connection with everything outstanding; the next call makes a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def newer_than(self, version: int) -> Manifest | None:
        """The newest manifest as soon as it is newer than `version`, or None after a second or so without one."""
        sequence = await self._send("manifest", {"holds": version})
        reply = await self._receive(sequence)
        if reply.kind == "nothing":
            return None
        manifest = read_manifest(reply.body)
        if manifest.version <= version:
            raise WireError(f"asked for a version newer than {version}, the publisher offers {manifest.version}")
        return manifest

    async def fetch(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """All tensors of a manifest that `newer_than` gave. Raises WeightsError: a checksum does not match."""
        tensors = {spec.name: torch.empty(spec.shape, dtype=DTYPES[spec.dtype]) for spec in manifest.tensors}
        buffers = [bytes_of(tensor) for tensor in tensors.values()]
        checksums = [0] * len(buffers)
        outstanding: deque[tuple[int, Chunk]] = deque()
        remaining = manifest.chunks()
        while True:
            for chunk in islice(remaining, self._credits - len(outstanding)):
                outstanding.append((await self._ask(manifest.version, chunk), chunk))
            if not outstanding:
                break
            sequence, chunk = outstanding.popleft()
            data = (await self._receive(sequence)).arrays.get("bytes")
            if data is None or len(data) != chunk.stop - chunk.start:
                raise WireError(f"the publisher sent no whole {chunk}")
            buffers[chunk.tensor][chunk.start : chunk.stop] = data
            checksums[chunk.tensor] = zlib.crc32(data.data, checksums[chunk.tensor])
        damaged = [spec.name for spec, own in zip(manifest.tensors, checksums, strict=True) if spec.checksum != own]
        if damaged:
            raise WeightsError(f"version {manifest.version} arrived damaged: the checksums of {damaged[:3]} differ")
        return tensors

    def _connected(self) -> zmq.asyncio.Socket:
        if self._socket is None:
            self._socket = connect(self._context, self.endpoint, self._keys, MAX_CHUNK_BYTES)
        return self._socket

    async def _ask(self, version: int, chunk: Chunk) -> int:
        place = {"tensor": chunk.tensor, "start": chunk.start, "stop": chunk.stop}
        return await self._send("chunk", {"version": version, **place})

    async def _send(self, kind: str, body: dict[str, int]) -> int:
        self._sequence += 1
        await self._connected().send_multipart(encode(Message(kind, self._sequence, body)))
        return self._sequence

    async def _receive(self, sequence: int) -> Message:
        try:
            async with asyncio.timeout(self._timeout_s):
                frames = await self._connected().recv_multipart(copy=False)
        except TimeoutError:
            advice = f"; {CHECK_KEYS}" if self._keys else ""
            raise UnavailableError(
                f"the weight publisher at {self.endpoint} has been silent for {self._timeout_s:g} s{advice}"
            ) from None
        reply = decode([frame.buffer for frame in frames])
        if reply.kind == "refused":
            raise WireError(f"the weight publisher refused: {reply.body.get('reason')}")
        if reply.sequence != sequence:
            raise WireError(f"the weight publisher answered request {reply.sequence} instead of {sequence}")
        return reply
