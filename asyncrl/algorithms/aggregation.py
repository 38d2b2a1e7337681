"""Aggregations turn the losses of tokens into one number, always over the global minibatch.

The coefficient of a token depends only on global counts, and on the length of its sequence before any rejection. So the
partial sums add up to the same number for any split into micro-batches and ranks.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Totals
from asyncrl.algorithms.parts import Part, param
from asyncrl.algorithms.policy_tokens import Segments
from asyncrl.errors import InvariantError


class Aggregation(Part):
    """The base class of the aggregations."""

    kind = "aggregation"

    @abstractmethod
    def __call__(self, losses: Tensor, sequences: Segments, lengths: Tensor, totals: Totals) -> Tensor:
        """The share of this micro-batch in the aggregate, a float64 scalar. The shares of all micro-batches and ranks
        add up to the aggregate.

        - `losses` float[M]: the losses of the kept tokens
        - `sequences`: the segments of these tokens by sequence
        - `lengths` int64[R]: the number of each sequence's policy tokens before any rejection
        - `totals`: the counts over the global minibatch. `group_tokens` int64[R] is cut to the sequences of this pass
        """


class TokenMean(Aggregation):
    """Every token has the same weight.

    Formula: (sum of the losses of all tokens) / N
    Use: by default; long episodes have more weight than short ones
    Source: DAPO: An Open-Source LLM Reinforcement Learning System at Scale, 2025 (token-level loss)
    """

    name = "token-mean"

    def __call__(self, losses: Tensor, sequences: Segments, lengths: Tensor, totals: Totals) -> Tensor:
        return losses.sum(dtype=torch.float64) / max(1, totals.tokens)


class TokenSum(Aggregation):
    """No normalisation.

    Formula: sum of the losses of all tokens
    Use: with a learning rate that was chosen for sums
    Source: Policy Gradient Methods for Reinforcement Learning with Function Approximation, 1999
    Caveat: the gradient grows with the batch.
    """

    name = "token-sum"

    def __call__(self, losses: Tensor, sequences: Segments, lengths: Tensor, totals: Totals) -> Tensor:
        return losses.sum(dtype=torch.float64)


class SeqMeanTokenSum(Aggregation):
    """The sum over the tokens of each sequence, averaged over sequences.

    Formula: (sum of the losses of all tokens) / S
    Use: to train the log-prob of whole sequences, as in REINFORCE
    Source: Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs, 2024
    Caveat: the gradient grows with the length of sequences.
    """

    name = "seq-mean-token-sum"

    def __call__(self, losses: Tensor, sequences: Segments, lengths: Tensor, totals: Totals) -> Tensor:
        return losses.sum(dtype=torch.float64) / max(1, totals.sequences)


class SeqMeanTokenMean(Aggregation):
    """Every sequence has the same weight.

    Formula: mean over the S sequences of (sum of the losses of the sequence's tokens) / (number of its tokens)
    Use: with losses gspo and gmpo, or for GRPO as it was first published
    Source: DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, 2024
    Caveat: a token of a long wrong answer is punished less than a token of a short wrong answer.
    """

    name = "seq-mean-token-mean"

    def __call__(self, losses: Tensor, sequences: Segments, lengths: Tensor, totals: Totals) -> Tensor:
        return (sequences.sum(losses) / lengths.clamp(min=1)).sum() / max(1, totals.sequences)


class PromptMean(Aggregation):
    """Every group (prompt) has the same weight, and so has every token within a group.

    Formula: mean over groups of (sum of the losses of the group's tokens) / (number of these tokens)
    Use: as a compromise between token-mean and seq-mean-token-mean: a prompt with long answers has no more weight than
    other prompts, and all tokens of the answers to one prompt have the same weight
    Source: The Art of Scaling Reinforcement Learning Compute for LLMs, 2025 (prompt-level averaging); loss_aggregation
    of the library prime-rl
    Caveat: a group that is split over several minibatches counts as a whole group in each of them.
    """

    name = "prompt-mean"

    def __call__(self, losses: Tensor, sequences: Segments, lengths: Tensor, totals: Totals) -> Tensor:
        """Raises InvariantError: `totals` has no group_tokens."""
        if totals.group_tokens is None:
            raise InvariantError("prompt-mean needs the tokens of each group: give the totals of Totals.of")
        return (sequences.sum(losses) / totals.group_tokens.clamp(min=1)).sum() / max(1, totals.groups)


class SeqMeanTokenSumNorm(Aggregation):
    """The sum over the tokens of each sequence, averaged over sequences and divided by a constant.

    Formula: (sum of the losses of all tokens) / (S norm)
    Use: with advantage dr_grpo: the divisor does not depend on the lengths of sequences, and the gradient has the usual
    size
    Source: Understanding R1-Zero-Like Training: A Critical Perspective, 2025
    """

    name = "seq-mean-token-sum-norm"

    norm: float = param(
        ..., "the constant in the divisor, usually the largest allowed length of a response", "(0, inf)"
    )

    def __call__(self, losses: Tensor, sequences: Segments, lengths: Tensor, totals: Totals) -> Tensor:
        return losses.sum(dtype=torch.float64) / (max(1, totals.sequences) * self.norm)
