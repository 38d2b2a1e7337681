"""The LoRA adapters of a model."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.option import option

ALL_LINEAR = "all-linear"
_SAME = "the checkpoints hold only these adapters"


@dataclass
class LoraConfig:
    """LoRA adapters: small trained matrices that are added to the frozen matrices of the model. A model without rank
    and path gets no adapters. To take back a rank and a path that a file sets, set rank to 0, or the whole section to
    null."""

    rank: int | None = option(
        None,
        "rank of new adapters, which change nothing before they are trained; null: no new adapters",
        "[1, inf)",
        fixed=_SAME,
    )
    alpha: int = option(
        16, "number alpha; the output of an adapter is multiplied by alpha / rank", "[1, inf)", fixed=_SAME
    )
    rslora: bool = option(False, "multiply by alpha / sqrt(rank) instead of alpha / rank, for high ranks", fixed=_SAME)
    targets: list[str] = option(
        [ALL_LINEAR],
        "linear layers that get adapters: all-linear (all except the head), or names of modules such as q_proj",
        fixed=_SAME,
    )
    path: str | None = option(
        None,
        "peft folder or hub name of adapters to start from; the folder sets rank, alpha, rslora and targets",
        fixed=_SAME,
    )

    @property
    def is_used(self) -> bool:
        """True if the model gets adapters."""
        return self.rank is not None or self.path is not None

    @property
    def given_by(self) -> str:
        """The name of the option that gives the model its adapters, if it gets some."""
        return "rank" if self.path is None else "path"
