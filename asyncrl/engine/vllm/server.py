"""Calls one vLLM server, started with VLLM_SERVER_DEV_MODE=1 for its control calls. It loads weights from a folder.

A server started with `--enable-scale-out` reports which version sampled which token, so that requests may continue
through an update. On other servers no request may run during an update. After a restart the pushed weights are lost; a
restart is detected by the server's start time.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.base import PlacedImage
from asyncrl.engine.fleet.http import Http, ServerRefusedError
from asyncrl.engine.fleet.server import Segment, ServerFaultError, check_overrides
from asyncrl.engine.fleet.update import Update
from asyncrl.engine.vllm.requests import (
    completion_body,
    generate_body,
    logprob_body,
    read_logprobs,
    read_segment,
)
from asyncrl.errors import EngineError
from asyncrl.types import Sampling
from asyncrl.weights.canary import QUANTIZED, UNKNOWN

logger = logging.getLogger(__name__)

CONTROL_S = 30.0
NO_IMAGES = "vLLM servers are given no images: set engine.kind=sglang"
_STARTED = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class VllmServer:
    """An `InferenceServer` (see the fleet's protocol) at `url`.

    - The server must accept `context` tokens, and must have been started with `overrides` of its model's configuration.
    - `tied`: true if the policy's output layer is its embedding
    - A check may take `silence_s` seconds, and an update may take `load_s` seconds.
    - `seeds` has the seeds of the servers of a fleet by their urls. A warning is logged if two servers have the same
      seed.
    """

    def __init__(
        self,
        url: str,
        *,
        context: int,
        tied: bool,
        overrides: Mapping[str, Any] | None = None,
        silence_s: float = 60.0,
        load_s: float = 300.0,
        http: Http | None = None,
        seeds: MutableMapping[str, int] | None = None,
    ) -> None:
        self.url = url
        self.spans = False
        self.precision = UNKNOWN
        self.route = "disk"
        self._http = http or Http(url)
        self._context = context
        self._tied = tied
        self._overrides = overrides or {}
        self._silence_s = silence_s
        self._load_s = load_s
        self._seeds = {} if seeds is None else seeds
        self._model = ""
        self._label = ""
        self._started = ""
        self._tried_spans = False

    async def join(self) -> None:
        """Examine the server (see `InferenceServer`).

        Raises ServerFaultError also if its log-probs, weights or context would be wrong.
        """
        try:
            [model, *_] = (await self._get("/v1/models"))["data"]
            settings = (await self._get("/server_info?config_format=json"))["vllm_config"]
            self._model, longest = model["id"], int(model["max_model_len"])
            mode, device = settings["model_config"]["logprobs_mode"], settings["device_config"]["device"]
            self.precision = _precision(settings)
            if wrong := self._wrong(longest, mode, device):
                raise ServerFaultError(f"{self.url} {wrong}")
            _check_cache(self.url, settings)
            given = settings["model_config"].get("hf_overrides") or {}
            check_overrides(self.url, self._overrides, given if isinstance(given, dict) else {}, "--hf-overrides")
            self._note_seed(settings["model_config"].get("seed"))
            self._started = await self._start_time()
            await self.abort()
        except (ServerRefusedError, KeyError, TypeError, ValueError) as error:
            raise ServerFaultError(
                f"{self.url} is not a vLLM server that was started with VLLM_SERVER_DEV_MODE=1: {error!r}"
            ) from error
        self.spans = self._tried_spans = False

    def _note_seed(self, seed: int | None) -> None:
        """Note the server's seed. Warn if another server of the fleet has the same one."""
        if seed is None or self._seeds.get(self.url) == seed:
            return
        same = [url for url, other in self._seeds.items() if other == seed and url != self.url]
        self._seeds[self.url] = seed
        if same:
            logger.warning(
                "%s and %s were started with --seed %d. With equal batches they draw the same random numbers, and "
                "members of a group may be the same episode: start each server with another --seed",
                *(self.url, same[0], seed),
            )

    def _wrong(self, longest: int, mode: str, device: str) -> str:
        if longest < self._context:
            return (
                f"takes {longest} tokens, actor.max_tokens is {self._context}; start it with a longer --max-model-len"
            )
        if mode != "processed_logprobs":
            return f"gives {mode}, which leave out the temperature; start it with --logprobs-mode processed_logprobs"
        if self._tied and device == "cpu":
            return (
                "runs on a CPU, where vLLM keeps the old output layer of a model with tied embeddings through an "
                "update of its weights; use a model without tie_word_embeddings, or a GPU"
            )
        return ""

    async def check(self) -> None:
        await self._get("/health")
        if (started := await self._start_time()) != self._started:
            raise ServerFaultError(f"{self.url} was restarted at {started}, and has lost its pushed weights")

    async def generate(
        self,
        rid: str,
        tokens: NDArray[np.int32],
        sampling: Sampling,
        stop: Sequence[int],
        salt: str | None,
        routed_from: int | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> Segment:
        """Continue `tokens` (see `InferenceServer`). vLLM reports no experts, and gets no images."""
        if images:
            raise EngineError(NO_IMAGES)
        if self.spans:
            body = generate_body(rid, tokens, sampling, stop, salt)
            answer = await self._http.call("POST", "/inference/v1/generate", msgspec.json.encode(body))
            return read_segment(answer, sampling, stop)
        label = self._label
        body = completion_body(self._model, rid, tokens, sampling, stop, salt)
        answer = await self._http.call("POST", "/v1/completions", msgspec.json.encode(body))
        # The answer does not show if the server was restarted meanwhile, and answered with the weights of its folder.
        await self.check()
        return read_segment(answer, sampling, stop, label)

    async def logprobs(
        self, tokens: Sequence[int], salt: str | None, start: int = 1, images: Sequence[PlacedImage] = ()
    ) -> NDArray[np.float32]:
        """The log-probs of `tokens` (see `InferenceServer`). vLLM returns log-probs of whole prompts, and gets no
        images.
        """
        if images:
            raise EngineError(NO_IMAGES)
        body = msgspec.json.encode(logprob_body(self._model, tokens, salt))
        return read_logprobs(await self._http.call("POST", "/v1/completions", body, self._load_s), tokens, start)

    async def abort(self, rid: str | None = None) -> None:
        """End requests (see `InferenceServer`). A single request needs no call: it ends with its connection, which the
        caller has closed."""
        if rid is None:
            await self._post("/pause?mode=abort&clear_cache=false")
            await self.resume()

    async def pause(self, mode: str) -> None:
        """Pause (see `InferenceServer`). vLLM needs only one mode, since the flush removes keys and values."""
        await self._post("/pause?mode=keep&clear_cache=false")

    @property
    def loads_after_requests(self) -> bool:
        return False

    def retracts(self, mode: str) -> bool:
        """True in mode retract (see `InferenceServer`), whose flush drops keys and values. Mode in_place has no
        flush."""
        return mode == "retract"

    async def resume(self) -> None:
        await self._post("/resume")

    async def prepare(self, update: Update) -> None:
        await update.folder()

    async def load(self, update: Update) -> None:
        """Load the update (see `InferenceServer`). The first load after a join also tests if answers have versions."""
        # `join` cannot test this: the test needs a request, which would kill a server in the middle of an update.
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(await update.folder())}}
        await self._http.post("/collective_rpc", body, self._load_s)
        if not self._tried_spans:
            self.spans, self._tried_spans = await self._tells_versions(), True
        if self.spans:
            await self._post("/update_weight_version", {"new_version": update.label})
        self._label = update.label

    async def _tells_versions(self) -> bool:
        body = generate_body("versions", np.zeros(1, np.int32), Sampling(1.0, 1), (), None)
        try:
            answer = await self._http.post("/inference/v1/generate", body, self._silence_s)
        except ServerRefusedError:
            return False
        return bool(answer["choices"][0].get("weight_versions"))

    async def flush(self) -> None:
        """Flush the cache (see `InferenceServer`). Paused and ending requests lose their keys and values, too."""
        answer = await self._post("/reset_prefix_cache?reset_running_requests=true")
        if answer == {"success": False}:
            raise ServerFaultError(f"{self.url} keeps the prefixes of older weights")

    async def leave(self) -> None:
        """Do nothing: `join` and `load` set up no state on a vLLM server."""

    async def close(self) -> None:
        await self._http.close()

    async def _start_time(self) -> str:
        found = _STARTED.search(str(await self._get("/metrics")))
        if found is None:
            raise ServerFaultError(f"{self.url}/metrics has no process_start_time_seconds")
        return found.group(1)

    async def _get(self, path: str) -> Any:
        return await self._http.get(path, self._silence_s)

    async def _post(self, path: str, body: Any = None) -> Any:
        return await self._http.post(path, body, CONTROL_S)


def _check_cache(url: str, settings: Mapping[str, Any]) -> None:
    """Raises ServerFaultError: the server keeps prefixes outside of its GPU, where a flush does not reach them."""
    if settings.get("kv_transfer_config") or settings.get("cache_config", {}).get("kv_offloading_size"):
        raise ServerFaultError(
            f"{url} also keeps keys and values outside of its GPU, where those of older weights outlive an update; "
            "start it without --kv-transfer-config and --kv-offloading-size"
        )


def _precision(settings: Mapping[str, Any]) -> str:
    model, cache = settings["model_config"], settings.get("cache_config", {})
    if model.get("quantization") or "fp" in str(cache.get("cache_dtype")):
        return QUANTIZED
    return str(model.get("dtype") or UNKNOWN).removeprefix("torch.")
