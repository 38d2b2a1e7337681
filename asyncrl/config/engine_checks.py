"""What the settings of an engine made of servers must satisfy together."""

from __future__ import annotations

import re
from collections.abc import Mapping

from asyncrl.config.schema import EngineConfig, TrainConfig
from asyncrl.errors import ConfigError

NEUTRAL: Mapping[str, float] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""The values at which a sampling option changes nothing."""

VLLM_COLDEST = 0.01
"""vLLM samples at no lower temperature but 0, without saying so."""

TRANSPORTS = ("tensor", "disk", "distributed", "ipc")
STAGING = re.compile(r"cpu|cuda(:\d+)?")


def check_engine(config: TrainConfig) -> None:
    """Raises ConfigError."""
    _check_sampling(config.engine)
    _check_transports(config)
    _check_staging(config)
    if config.engine.kind == "embedded":
        return
    _check_servers(config)
    _check_cache(config)
    if config.engine.kind == "vllm":
        _check_vllm(config)


def _check_sampling(engine: EngineConfig) -> None:
    for name, value in engine.sampling.items():
        if name not in NEUTRAL:
            raise ConfigError(f"engine.sampling.{name}={value}: there are {', '.join(NEUTRAL)}; see actor.temperature")
        if value != NEUTRAL[name]:
            raise ConfigError(
                f"engine.sampling.{name}={value}: tokens would come from another distribution than log-probs tell, "
                f"which importance weights cannot see; leave it at {NEUTRAL[name]:g}"
            )


def _check_transports(config: TrainConfig) -> None:
    transports = config.weights.transports
    if not transports or set(transports) - set(TRANSPORTS) or len(set(transports)) < len(transports):
        raise ConfigError(
            f"weights.transports={transports}: name each of {', '.join(TRANSPORTS)} at most once, one at least"
        )


def _check_staging(config: TrainConfig) -> None:
    engine, weights = config.engine, config.weights
    staging = f"weights.staging={weights.staging}"
    if not STAGING.fullmatch(weights.staging):
        raise ConfigError(f"{staging}: name cpu, cuda or a GPU such as cuda:1")
    on_gpu = weights.staging != "cpu"
    if on_gpu and engine.kind == "embedded":
        raise ConfigError(f"{staging}: the embedded engine holds weights where it uses them; leave it at cpu")
    if "ipc" in weights.transports and not on_gpu:
        raise ConfigError(
            f"weights.transports={weights.transports}: ipc hands over GPU memory, but {staging}; "
            "set weights.staging=cuda (or cuda:N), a GPU of this machine's servers"
        )
    if on_gpu and "distributed" in weights.transports and engine.launch:
        first, count = engine.server.first_gpu, engine.server.count * engine.server.tp_size
        if int(weights.staging.partition(":")[2] or 0) in range(first, first + count):
            raise ConfigError(
                f"weights.transports={weights.transports}: NCCL takes no two ranks on one GPU, and {staging} is one of "
                "the servers'; use ipc, or stage on a GPU that has no server (weights.staging, engine.server.first_gpu)"
            )


def _check_servers(config: TrainConfig) -> None:
    engine = config.engine
    sources = {
        "engine.urls": bool(engine.urls),
        "engine.urls_file": engine.urls_file is not None,
        "engine.router": engine.router is not None,
        "engine.launch": engine.launch,
    }
    if sum(sources.values()) != 1:
        raise ConfigError(f"engine.kind={engine.kind} needs servers: set exactly one of {', '.join(sources)}")
    for url in [*engine.urls, *([engine.router] if engine.router else [])]:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url} is no url of a server: it must begin with http:// or https://")
    if engine.launch and engine.kind != "sglang":
        raise ConfigError(
            "engine.launch=true starts SGLang servers only; start others yourself and name them in engine.urls"
        )
    if config.cluster.actors > 1:
        raise ConfigError(
            f"cluster.actors={config.cluster.actors}: a server belongs to one actor. Use one actor with more servers "
            "(engine.server.count, engine.urls), or start others by hand (asyncrl actor ...), each with its own"
        )


def _check_cache(config: TrainConfig) -> None:
    mode, cache = config.weights.mode, config.engine.prefix_cache
    if mode == "in_place" and cache == "flush":
        raise ConfigError(
            "weights.mode=in_place keeps the cache, which cannot be flushed: set engine.prefix_cache=salt"
        )
    if mode == "retract" and cache == "salt":
        raise ConfigError(
            "engine.prefix_cache=salt: a retracted request keeps its salt, and would find prefixes of older weights "
            "again; use flush, or weights.mode=in_place"
        )


def _check_vllm(config: TrainConfig) -> None:
    transports, temperature = config.weights.transports, config.actor.temperature
    if transports != ["disk"]:
        raise ConfigError(f"weights.transports={transports}: vLLM takes weights from a folder only, set [disk]")
    if 0 < temperature < VLLM_COLDEST:
        raise ConfigError(
            f"actor.temperature={temperature}: vLLM would sample at {VLLM_COLDEST} instead, and log-probs would not be "
            "those that the learner computes; set that or more"
        )
