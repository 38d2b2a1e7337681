"""The canary of a version: the learner's log-probs of a short fixed sequence.

Every engine that takes the version must compute the same log-probs before it serves the version. This check finds wrong
weights of any cause: a route, a tensor's name or a kernel. The tokens depend only on the run's seed, so all versions of
a run have the same tokens.

The statistic is the mean absolute difference of the log-probs over the sequence. Learner and engine round differently,
which may change the log-prob of a single token much. A wrong tensor changes the log-probs of nearly all tokens.

Rounding changes a log-prob in proportion to the logits, and these differ from model to model. So the limit is a share
of the spread (standard deviation) of the learner's own log-probs over the sequence. docs/weights.md has measurements.

Weights pass if the difference is below the limit. An engine that kept its old weights may pass, too, but it answers
with the same bits as before. The check refuses an engine with the same bits once the learner's own log-probs have moved
by more than `STALE_SHARE` of the limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WeightsError
from asyncrl.types import MAX_LOGPROB

LENGTH = 32

QUANTIZED = "quantized"
INT4 = "int4"
TOLERANCES = {"float32": 0.005, "bfloat16": 0.08, "float16": 0.08, QUANTIZED: 0.3, INT4: 0.8}
"""Maps the precision of an engine to the allowed difference, as a share of the spread."""

UNKNOWN = "bfloat16"
"""The assumed precision of an engine that does not report its precision."""

MIN_SPREAD = 0.1
"""The spread counts as at least this much. The log-probs of a nearly uniform model hardly differ, so their own spread
would allow almost no difference."""

STALE_SHARE = 0.1


class CanaryError(WeightsError):
    """An engine took a version and failed to repeat the version's canary. The engine does not serve the version."""


class Canary(msgspec.Struct, frozen=True):
    """The T `tokens` of a canary, and the T - 1 log-probs of all but the first. The learner computed them in `dtype`,
    at temperature 1.

    Raises ValueError: the numbers of tokens and log-probs do not match, or a value is impossible.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not 0 < len(self.logprobs) == len(self.tokens) - 1 or min(self.tokens) < 0:
            raise ValueError(f"a canary has {len(self.tokens)} tokens and {len(self.logprobs)} log-probs")
        if not all(-np.inf < each <= MAX_LOGPROB for each in self.logprobs):
            raise ValueError("the log-probs of a canary are not finite, or above 0")

    def check_ids(self, vocabulary: int) -> None:
        """Raises WeightsError: a token is outside of the policy's vocabulary. Such a token may crash a server."""
        if max(self.tokens) >= vocabulary:
            raise WeightsError(
                f"the canary has token {max(self.tokens)}, the engine's model has ids up to {vocabulary - 1}; "
                "learner and engine must load the same model"
            )


def canary_tokens(seed: int, vocabulary: int, length: int = LENGTH) -> tuple[int, ...]:
    """Draw the first `length` tokens of the canary, for a run with this seed. The canary has one token from each of
    `LENGTH` equal parts of the vocabulary, in a random order.
    """
    # Each part of the vocabulary has a token: the canary then also finds a server that kept the old embeddings of one
    # part, for example on one of its GPUs.
    drawn = {
        part: int.from_bytes(hashlib.blake2b(f"canary {seed} {part}".encode(), digest_size=8).digest(), "big")
        for part in range(LENGTH)
    }
    edges = [part * vocabulary // LENGTH for part in range(LENGTH + 1)]
    return tuple(
        edges[part] + drawn[part] % max(1, edges[part + 1] - edges[part])
        for part in sorted(drawn, key=drawn.__getitem__)[:length]
    )


@dataclass(frozen=True, slots=True)
class CanaryCheck:
    """The canary that an engine must repeat before it serves `version`. The version came to this process by `route`.

    `tolerance` is the allowed difference as a share of the spread. If it is None, the share in `TOLERANCES` is allowed.
    """

    version: int
    canary: Canary
    route: str
    tolerance: float | None = None

    def allowed(self, precision: str) -> float:
        """Return the allowed mean difference for an engine that computes in `precision`, a key of `TOLERANCES`."""
        share = self.tolerance
        if share is None:
            share = max(TOLERANCES.get(each, TOLERANCES[UNKNOWN]) for each in (self.canary.dtype, precision))
        return share * max(MIN_SPREAD, float(np.std(self.canary.logprobs)))


class CanaryJudge:
    """Judges the answers of one engine, version after version."""

    def __init__(self) -> None:
        self.difference = 0.0
        self.allowed = 0.0
        self.failures = 0
        self._last: tuple[CanaryCheck, NDArray[np.float32]] | None = None

    @property
    def counters(self) -> dict[str, float]:
        """The mean difference and the allowed difference of the last version's log-probs, and the number of versions
        that failed."""
        return {
            "canary_difference": self.difference,
            "canary_allowed": self.allowed,
            "canary_failures": self.failures,
        }

    def judge(
        self,
        check: CanaryCheck,
        answer: Sequence[float] | NDArray[np.float32],
        precision: str,
        by: str,
        asked: int | None = None,
    ) -> None:
        """Raises CanaryError: the `answer` of the engine at `by` does not repeat the canary. The answer has the `asked`
        - 1 log-probs of tokens 2 to `asked`. If `asked` is None, the answer has the log-probs of all tokens after the
        first.
        """
        given = np.array(answer, np.float32)
        expected = np.array(check.canary.logprobs[: None if asked is None else asked - 1], np.float32)
        self.allowed = check.allowed(precision)
        if given.shape != expected.shape:
            # An answer of the wrong length is never compared: a single log-prob may match by chance.
            self.difference = np.inf
            raise self._failed(check, by, f"the engine gives {given.size} log-probs, {len(expected)} were asked for")
        # Replaces nan by infinity. Metrics report the largest difference of several engines, and a nan would not count
        # as the largest.
        mean = np.abs(given - expected).mean() if len(given) else np.inf
        self.difference = np.inf if np.isnan(mean) else float(mean)
        if self.difference > self.allowed:
            raise self._failed(
                check,
                by,
                f"over {len(given)} tokens the log-probs of the engine differ from the learner's by "
                f"{self.difference:.4g} on average, where {self.allowed:.4g} is allowed; their means are "
                f"{_mean(given):.4g} and {_mean(expected):.4g}",
            )
        is_new = True
        if self._last is not None and self._last[0].canary.tokens == check.canary.tokens:
            before, answered = self._last
            is_new = not np.array_equal(answered, given)
            moved = float(np.abs(expected - before.canary.logprobs[: len(given)]).mean())
            if not is_new and moved > STALE_SHARE * self.allowed:
                raise self._failed(
                    check,
                    by,
                    f"the engine's log-probs equal those of version {before.version} bit for bit, and since then the "
                    f"learner's own have moved by {moved:.4g} on average: the engine kept its old weights",
                )
        if is_new:
            self._last = (check, given)

    def refuse(self, check: CanaryCheck, by: str, reason: str, advice: str = "") -> CanaryError:
        """Return the error for an engine that did not answer. The error has the `reason`, and `advice` for the user."""
        return self._failed(check, by, f"the engine did not answer the canary ({reason}){advice}")

    def _failed(self, check: CanaryCheck, by: str, reason: str) -> CanaryError:
        self.failures += 1
        return CanaryError(
            f"version {check.version}, received by {check.route}, fails its canary in {by} and is not served there: "
            f"{reason} (docs/faults.md)"
        )


def _mean(values: NDArray[np.float32]) -> float:
    return float(values.mean()) if len(values) else float("nan")
