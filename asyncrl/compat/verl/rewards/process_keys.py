"""The keys of verl's process-reward managers `qwen_prm` and `skywork_prm`, with verl's defaults.

`ProcessRewardKeys.scoring` converts them to asyncrl's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.config.keys import did_you_mean
from asyncrl.config.option import option, options
from asyncrl.config.schema import ScoringConfig, ScoringModelConfig, ShapingConfig
from asyncrl.errors import ConfigError

WHOLE = ("mean_response", "pooled_last", "best_of_n", "min", "product")
"""Aggregations that combine the step scores into one number."""
STEPS = ("per_step", "raw")
"""Aggregations that keep one score per step."""
DTYPES = {
    **{"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16", "half": "float16"},
    **{"float32": "float32", "fp32": "float32", "float": "float32"},
}
SPLITS = {"qwen_prm": "paragraph", "skywork_prm": "line"}
"""The value of `actor.step_split` for each manager: it divides responses into the same steps as the manager does."""
STRATEGIES = ("fsdp", "fsdp2")


@dataclass(frozen=True)
class ShapingKeys:
    """The keys that `scoring.shaping` has under the same names."""

    prm_apply_sigmoid: bool = option(False, "true: a step's score is the sigmoid of its logit; false: the logit itself")
    use_logit_tanh: bool = option(False, "a step's score is tanh_rmax * tanh(logit / tanh_tau), without a sigmoid")
    tanh_tau: float = option(2.0, "scale of the logit in tanh", "(0, inf)")
    tanh_rmax: float = option(1.0, "largest score that tanh gives", "(0, inf)")
    prm_acc_bonus_weight: float = option(0.0, "added for a right answer", "[0, inf)")
    enable_anti_hack: bool = option(True, "turns on stop_at_answer, max_resp_len and incorrect_answer_penalty")
    stop_at_answer: bool = option(True, "steps after the first final answer earn nothing")
    incorrect_answer_penalty: float = option(0.0, "added for a wrong answer", "(-inf, 0]")
    target_response_length: int = option(400, "tokens at which the length bonus is largest", "[1, inf)")
    length_bonus_weight: float = option(0.05, "largest bonus of a right answer for its length", "[0, inf)")
    max_resp_len: int = option(1024, "a response of more tokens earns no process score", "[1, inf)")

    def shaping(self, aggregation: str) -> ShapingConfig:
        """The keys as the section `scoring.shaping`. The reward is the process score with bonuses and penalties."""
        is_bare = not (self.prm_apply_sigmoid or self.use_logit_tanh)
        how = "per_step" if aggregation in STEPS else aggregation
        given = {each.name: getattr(self, each.name) for each in options(ShapingKeys)}
        return ShapingConfig(
            **given, outcome_weight=0.0, process_weight=1.0, prm_aggregation=how, use_raw_logit=is_bare
        )


@dataclass(frozen=True)
class ProcessRewardKeys(ShapingKeys):
    """All keys of a process-reward manager."""

    prm_model_path: str | None = option(
        None, "folder or hub name of the process reward model; null or empty: no model, only the accuracy counts"
    )
    prm_aggregation: str = option(
        "mean_response",
        "how step scores become the reward; raw and per_step keep one score per step",
        choices=(*WHOLE, *STEPS),
    )
    prm_micro_batch_size: int = option(8, "most sequences in a forward pass", "[1, inf)")
    dtype: str = option("bfloat16", "compute dtype of the model", choices=tuple(DTYPES))
    device_map: str = option("auto", "device of the model: cpu, cuda, cuda:N, or auto (all GPUs, else the CPU)")
    use_shm: bool = option(False, "copy the model to shared memory first; ignored here")
    strategy: str | None = option(None, "how the model is split; ignored here", choices=STRATEGIES)

    def model(self, family: str, gpus: int) -> ScoringModelConfig:
        """The keys as the section `scoring.prm`, for a machine with `gpus` GPUs. Raises ConfigError: the device is
        wrong."""
        device = self.device_map
        if device != "auto" and device != "cpu" and not device.startswith("cuda"):
            raise ConfigError(f"device_map={device}: use auto, cpu, cuda, or cuda:N")
        return ScoringModelConfig(
            family=family,
            path=self.prm_model_path,
            dtype=DTYPES[self.dtype],
            device=device,
            gpus=max(1, gpus) if device == "auto" else 1,
            micro_inputs=self.prm_micro_batch_size,
        )

    def scoring(self, family: str, gpus: int) -> ScoringConfig:
        """The keys as the section `scoring`. Raises ConfigError: the device is wrong."""
        return ScoringConfig(prm=self.model(family, gpus), shaping=self.shaping(self.prm_aggregation))

    @property
    def needs_accuracy(self) -> bool:
        """True if the reward depends on the correctness of the answer."""
        penalty = self.enable_anti_hack and self.incorrect_answer_penalty
        return bool(self.prm_acc_bonus_weight or self.length_bonus_weight or penalty)


@dataclass(frozen=True)
class SkyworkRewardKeys(ProcessRewardKeys):
    """The keys of `skywork_prm`. By default a score is the sigmoid of the model's value, as in the model's card."""

    prm_apply_sigmoid: bool = option(True, "true: a step's score is the sigmoid of its logit; false: the logit itself")


KEYS: Mapping[str, type[ProcessRewardKeys]] = {"qwen_prm": ProcessRewardKeys, "skywork_prm": SkyworkRewardKeys}
"""The keys of each manager."""


def read_keys(manager: str, given: Mapping[str, Any]) -> ProcessRewardKeys:
    """The `given` keys of a manager, checked. Raises ConfigError: a key is unknown, wrong or missing."""
    known = {each.name: each for each in options(KEYS[manager])}
    given = {**given, "prm_model_path": given.get("prm_model_path") or None}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{manager}: unknown key {name}{did_you_mean(name, known)}")
        if not known[name].allows(value):
            raise ConfigError(f"{manager}: {name}={value!r}: it must be {known[name].allowed}")
    keys = KEYS[manager](**given)
    if keys.prm_model_path is None and not keys.needs_accuracy:
        raise ConfigError(
            f"{manager}: nothing gives a reward: set prm_model_path to the folder or hub name of the process reward "
            "model, or prm_acc_bonus_weight"
        )
    if keys.prm_aggregation == "product" and not keys.prm_apply_sigmoid | keys.use_logit_tanh:
        raise ConfigError(f"{manager}: prm_aggregation=product needs scores above 0: set prm_apply_sigmoid=true")
    return keys


def defaults(manager: str) -> dict[str, Any]:
    """The keys of a manager with their defaults."""
    return asdict(KEYS[manager]())
