"""Aggregations: how the losses of tokens become one number, always over the global minibatch.

The coefficients depend only on global counts and on each sequence's own length before any rejection, so partial sums
add up to the same number whatever the micro-batches and ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Totals
from asyncrl.algorithms.parts import Part, param
from asyncrl.algorithms.view import Segments


@dataclass(frozen=True, kw_only=True)
class Aggregation(Part):
    """Base of the aggregations."""

    kind: ClassVar[str] = "aggregation"

    @abstractmethod
    def __call__(self, losses: Tensor, sequences: Segments, lengths: Tensor, totals: Totals) -> Tensor:
        """This micro-batch's part of the aggregate, a float64 scalar.

        losses float[M] of the kept tokens, in segments by sequence; lengths int64[R], the sequences' policy tokens
        before any rejection; totals of the global minibatch.
        """


@dataclass(frozen=True, kw_only=True)
class TokenMean(Aggregation):
    """Every token weighs the same.

    Formula: sum of all tokens / N
    Use: the default; long episodes weigh more
    Source: DAPO: An Open-Source LLM Reinforcement Learning System at Scale, 2025 (token-level loss)
    """

    name: ClassVar[str] = "token-mean"

    def __call__(self, losses: Tensor, sequences: Segments, lengths: Tensor, totals: Totals) -> Tensor:
        return losses.sum(dtype=torch.float64) / max(1, totals.tokens)


@dataclass(frozen=True, kw_only=True)
class TokenSum(Aggregation):
    """No normalisation.

    Formula: sum of all tokens
    Use: when the learning rate is chosen for sums
    Source: Policy Gradient Methods for Reinforcement Learning with Function Approximation, 1999
    Caveat: the gradient grows with the batch.
    """

    name: ClassVar[str] = "token-sum"

    def __call__(self, losses: Tensor, sequences: Segments, lengths: Tensor, totals: Totals) -> Tensor:
        return losses.sum(dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class SeqMeanTokenSum(Aggregation):
    """A mean over sequences of their sums.

    Formula: sum of all tokens / S
    Use: the log-prob of whole sequences, as REINFORCE has it
    Source: Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs, 2024
    Caveat: the gradient grows with length.
    """

    name: ClassVar[str] = "seq-mean-token-sum"

    def __call__(self, losses: Tensor, sequences: Segments, lengths: Tensor, totals: Totals) -> Tensor:
        return losses.sum(dtype=torch.float64) / max(1, totals.sequences)


@dataclass(frozen=True, kw_only=True)
class SeqMeanTokenMean(Aggregation):
    """Every sequence weighs the same.

    Formula: mean over sequences of (sum of its tokens / its length)
    Use: gspo and gmpo; the original GRPO
    Source: DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, 2024
    Caveat: a long wrong answer is punished less a token than a short one.
    """

    name: ClassVar[str] = "seq-mean-token-mean"

    def __call__(self, losses: Tensor, sequences: Segments, lengths: Tensor, totals: Totals) -> Tensor:
        return (sequences.sum(losses) / lengths.clamp(min=1)).sum() / max(1, totals.sequences)


@dataclass(frozen=True, kw_only=True)
class SeqMeanTokenSumNorm(Aggregation):
    """A mean over sequences of their sums, over a constant.

    Formula: sum of all tokens / (S norm)
    Use: dr_grpo: no length in the normalisation, and a gradient of the usual size
    Source: Understanding R1-Zero-Like Training: A Critical Perspective, 2025
    """

    name: ClassVar[str] = "seq-mean-token-sum-norm"

    norm: float = param(..., "the constant; commonly the longest response allowed", "(0, inf)")

    def __call__(self, losses: Tensor, sequences: Segments, lengths: Tensor, totals: Totals) -> Tensor:
        return losses.sum(dtype=torch.float64) / (max(1, totals.sequences) * self.norm)
