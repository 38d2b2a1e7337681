"""LoRA: which adapters a model gets, which alone are trained."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.option import option

ALL_LINEAR = "all-linear"
_SAME = "the checkpoints hold these adapters alone"


@dataclass
class LoraConfig:
    """Adapters: small matrices that are added to matrices of the model, which stay as they are. Only adapters are
    trained."""

    rank: int | None = option(
        None, "rank of new adapters, which change nothing at first; null: there are none", "[1, inf)", fixed=_SAME
    )
    alpha: int = option(16, "adapters are scaled by this / rank", "[1, inf)", fixed=_SAME)
    rslora: bool = option(False, "scale by alpha / sqrt(rank) instead, for high ranks", fixed=_SAME)
    targets: list[str] = option(
        [ALL_LINEAR],
        "linear layers that get adapters: all-linear for all but the head, or names of modules such as q_proj",
        fixed=_SAME,
    )
    path: str | None = option(
        None,
        "peft folder or hub name of adapters to start from, which says their rank, alpha, rslora and targets",
        fixed=_SAME,
    )

    @property
    def is_used(self) -> bool:
        """True if the model gets adapters."""
        return self.rank is not None or self.path is not None
