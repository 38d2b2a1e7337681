from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, LevelCorrection
from asyncrl.algorithms.parts import param
from asyncrl.errors import ConfigError


class Truncate(LevelCorrection):
    """Truncated importance sampling: importance weights with a cap and an optional floor.

    Formula: w = max(floor, min(pi_prox / mu, cap)), with the ratio over the span that `level` names
    Use: by default; cap=inf is plain importance sampling
    Source: Truncated Importance Sampling, 2008; for LLMs, Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training, 2025
    Caveat: cap and floor add bias. With level=sequence, most weights of long episodes are nearly 0 or at the cap.
    """

    name = "truncate"
    weighs = True

    cap: float = param(2.0, "largest weight", "(0, inf]")
    floor: float = param(0.0, "smallest weight", "[0, inf)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.floor >= self.cap:
            raise ConfigError(f"{self.setting('floor')}: it must be below cap={self.cap}")

    def weigh(self, ages: Ages) -> Tensor:
        return self.ratio(ages).clamp(self.floor, self.cap)
