"""Step scores: from what a process model says of every step to what the reward and the algorithms read.

scale (every step's score) -> earned (what hacks would add is taken away) -> aggregate (one number, for the reward)
                                                                         -> transformed (for the algorithms)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import ShapingConfig
from asyncrl.scoring.models.base import StepScores
from asyncrl.types import Step

Scores = NDArray[np.float32]

_AGGREGATIONS: Mapping[str, Callable[[Scores], np.float32]] = {
    "mean_response": np.mean,
    "best_of_n": np.mean,
    "pooled_last": lambda scores: scores[-1],
    "min": np.min,
    "product": np.prod,
}


def scale(scores: StepScores, config: ShapingConfig) -> Scores:
    """Every step's score, float32[K]: tanh of the logit, its sigmoid, or the model's own probability."""
    logit = scores.logit.astype(np.float64)
    if config.use_logit_tanh:
        return (config.tanh_rmax * np.tanh(logit / config.tanh_tau)).astype(np.float32)
    if config.prm_apply_sigmoid:
        return (0.5 * (1 + np.tanh(0.5 * logit))).astype(np.float32)
    return scores.probability


def middle(config: ShapingConfig) -> float:
    """The score of a step that is as likely right as wrong."""
    return 0.0 if config.use_logit_tanh else 0.5


def repeated(texts: Sequence[str]) -> list[bool]:
    """Which steps say what an earlier one said, apart from white space."""
    seen: set[str] = set()
    found = []
    for text in (" ".join(text.split()) for text in texts):
        found.append(text in seen)
        seen.add(text)
    return found


def earned(
    scores: Scores, steps: Sequence[Step], texts: Sequence[str], length: int, config: ShapingConfig
) -> tuple[Scores, list[int]]:
    """The scores that count, float32[k], and which of the K steps they belong to. `length` is the episode's policy
    tokens.

    Steps behind the first final answer and steps that repeat another are left out, so that they neither earn nor cost
    anything; what is too long keeps only a score below 0.
    """
    if not config.enable_anti_hack:
        return scores, list(range(len(scores)))
    kept = list(_scored(texts, config))
    capped = [length > config.max_resp_len or steps[k].end - steps[k].start > config.max_step_tokens for k in kept]
    return np.where(capped, np.minimum(scores[kept], 0), scores[kept]).astype(np.float32), kept


def _scored(texts: Sequence[str], config: ShapingConfig) -> Iterator[int]:
    for index, is_repeated in enumerate(repeated(texts)):
        if not is_repeated:
            yield index
        if config.stop_at_answer and re.search(config.answer_pattern, texts[index]):
            return


def aggregate(scores: Scores, how: str) -> float | None:
    """Step scores float32[k], k > 0, as one number; None for `per_step`, where algorithms read the steps."""
    return None if how == "per_step" else float(_AGGREGATIONS[how](scores))


def transformed(scores: Scores, config: ShapingConfig) -> Scores:
    """What algorithms read of each step: min(r_k - eta, 0) for `clip`, r_k - r_{k+1} for `delta`, with nothing behind
    the last step, so that the steps from k on sum to r_k.

    Source: On Designing Effective RL Reward at Training Time for LLM Reasoning, 2024.
    """
    for name in config.step_transforms:
        if name == "clip":
            scores = np.minimum(scores - np.float32(config.clip_eta), np.float32(0))
        else:
            scores = scores - np.append(scores[1:], np.float32(0))
    return scores
