"""The nouns that every room shares. Invariants are checked on construction; an object that exists is valid.

Shapes: T tokens of one episode, K steps of one episode. Arrays are numpy, read-only by convention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import InvariantError

NO_VERSION = -1
"""The version of a token that no policy sampled: a prompt, a tool result, a template mark."""

_DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in (("tokens", "i4"), ("loss_mask", "?"), ("logprobs", "f4"), ("versions", "i4"))
}


_LARGEST = float(np.finfo(np.float32).max)


def _require(condition: bool, owner: str, message: str) -> None:
    if not condition:
        raise InvariantError(f"{owner}: {message}")


class Role(StrEnum):
    """Who speaks in a turn. A prompt begins a branch: what stands before it is not part of what the policy sees."""

    PROMPT = "prompt"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Finish(StrEnum):
    """How an episode that may be trained on ended. An episode that failed has no trajectory at all."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"


class Purpose(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Which run something belongs to: its name, and an id that was made once, which tells it from another run of the
    same name. The id is empty where only the name is known: away from the run's folder."""

    name: str
    id: str = ""

    def __post_init__(self) -> None:
        _require(isinstance(self.name, str) and isinstance(self.id, str), "run", "its name and id must be text")

    def may_be(self, other: RunIdentity) -> bool:
        """Whether nothing that is known of both tells them apart."""
        return self.name == other.name and (self.id == other.id or not (self.id and other.id))

    def __str__(self) -> str:
        return f"{self.name!r} (id {self.id or 'not known'})"


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the data. `tools` are OpenAI function schemas; `tools_kwargs` are keyed by tool name."""

    id: str
    messages: Sequence[Mapping[str, Any]]
    ground_truth: str
    data_source: str
    tools: Sequence[Mapping[str, Any]] = ()
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(bool(self.id), "a task", "it needs an id")
        _require(len(self.messages) > 0, self.id, "the task has no messages")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one assistant turn is sampled. Temperature 0 is greedy, and its log-probs are those at temperature 1."""

    temperature: float = 1.0
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        _require(self.temperature >= 0, "sampling", f"temperature is {self.temperature}; use 0 (greedy) or more")
        _require(self.max_new_tokens > 0, "sampling", f"max_new_tokens is {self.max_new_tokens}; it must be positive")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission to run one episode. The engine must serve `min_version` or newer before it starts."""

    id: str
    task: Task
    group_id: str
    member: int
    purpose: Purpose
    temperature: float
    min_version: int

    @property
    def pin(self) -> str | None:
        """The engine's session where it is to be served with exactly `min_version`: in evaluations."""
        return self.id if self.purpose is Purpose.EVAL else None


class ToolCall(NamedTuple):
    """One call of a tool. It, turns and steps are tuples, since an episode has many and tuples are made fast."""

    name: str
    arguments: Mapping[str, Any]


class Turn(NamedTuple):
    """The token span [start, end) of one turn. An assistant turn covers exactly the tokens that the policy sampled."""

    start: int
    end: int
    role: Role
    finish_reason: str = ""
    tool_calls: Sequence[ToolCall] = ()


class Step(NamedTuple):
    """The token span [start, end) that gets one process score; it lies inside one assistant turn."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One episode as one token sequence, or as several: `branches`, one behind the other, which know nothing of each
    other. Only an agent that rewrites its history has more than one.

    tokens int32[T]; loss_mask bool[T], true exactly on the tokens that the policy sampled; logprobs float32[T], the
    behaviour policy's at the sampling temperature, 0 elsewhere; versions int32[T], the policy version that sampled the
    token, `NO_VERSION` elsewhere. `rewards` come from the environment (tools); `timings` are seconds by phase. The id
    is the ticket's, so that an episode that ran twice is stored once.

    Raises InvariantError: shapes differ, a sampled token lacks a finite log-prob, a version or a token to follow, a
    token that was not sampled has a log-prob, spans are out of order, an assistant's turn or a step has tokens that
    were not sampled.
    """

    id: str
    task_id: str
    group_id: str
    member: int
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    turns: Sequence[Turn]
    steps: Sequence[Step]
    finish: Finish
    rewards: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Messages are made only on failure: this runs for every trajectory that the replay takes.
        shape = self.tokens.shape
        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.shape != shape or array.ndim != 1:
                raise InvariantError(
                    f"{self.id}: {name} is {array.dtype}{list(array.shape)}; it must be {dtype}[T], "
                    f"tokens have the shape {list(shape)}"
                )
        # As bytes, masks compare in half the time.
        mask = self.loss_mask.tobytes()
        _require(b"\1" in mask, self.id, "no token was sampled by the policy")
        _require(int(self.tokens.min()) >= 0, self.id, "a token id is negative")
        _require(
            (self.versions >= 0).tobytes() == mask and int(self.versions.min()) >= NO_VERSION,
            self.id,
            f"versions must be 0 or more exactly on the sampled tokens and {NO_VERSION} elsewhere",
        )
        # Extremes, since nan spreads to them: two passes instead of four over the longest array there is.
        _require(
            -math.inf < float(self.logprobs.min()) and float(self.logprobs.max()) <= 1e-4,
            self.id,
            "a sampled token has no valid log-prob (they must be finite and at most 0, elsewhere 0)",
        )
        _require(not self.logprobs[~self.loss_mask].any(), self.id, "a token that was not sampled has a log-prob")
        _check_spans(self.id, "turn", self.turns, shape[0])
        _check_spans(self.id, "step", self.steps, shape[0])
        self._check_sampled(mask)
        for start, end in self.branches:
            if start == end or mask[start]:
                raise InvariantError(f"{self.id}: branch [{start}, {end}) does not begin with a token that was given")

    def _check_sampled(self, mask: bytes) -> None:
        """All of the assistant's turns and of the steps was sampled; `mask` has a byte a token."""
        for start, end, role, *_ in self.turns:
            if role is Role.ASSISTANT and mask.find(b"\0", start, end) >= 0:
                raise InvariantError(f"{self.id}: the assistant's turn [{start}, {end}) was not all sampled")
        for start, end in self.steps:
            if start == end or mask.find(b"\0", start, end) >= 0:
                raise InvariantError(f"{self.id}: step [{start}, {end}) is empty, or not all of it was sampled")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def branches(self) -> list[tuple[int, int]]:
        """The token spans [start, end) of its branches: each begins where a prompt does."""
        prompts = [turn.start for turn in self.turns if turn.role is Role.PROMPT and turn.start > 0]
        return list(pairwise([0, *prompts, len(self.tokens)])) if prompts else [(0, len(self.tokens))]

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled one of its tokens."""
        # Seen as unsigned, NO_VERSION is the largest.
        return int(self.versions.view(np.uint32).min())

    @property
    def sampled_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


def _check_spans(owner: str, what: str, spans: Sequence[Turn] | Sequence[Step], length: int) -> None:
    position = 0
    for span in spans:
        if not position <= span.start <= span.end <= length:
            raise InvariantError(
                f"{owner}: {what} [{span.start}, {span.end}) overlaps its predecessor or leaves the {length} tokens"
            )
        position = span.end


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """What the scoring pool adds to one trajectory.

    `reward` is the shaped scalar that baselines compare; `outcome` is the verifier's own verdict. `step_scores`
    float32[K] has one score a step and `step_ends` int32[K] the exclusive end of each step's span in the trajectory's
    tokens; both are empty where no process model scored. `extra` holds named scores.

    Raises InvariantError: a score is not finite as a float32, scores and ends do not pair, or ends do not increase.
    """

    trajectory_id: str
    reward: float
    outcome: float
    scorer: str
    step_scores: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    step_ends: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    extra: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = np.asarray([self.reward, self.outcome, *self.extra.values()], dtype=np.float64)
        owner = self.trajectory_id
        finite = bool((np.abs(values) <= _LARGEST).all())
        _require(finite, owner, f"a label is not finite as a float32: {values.tolist()!r:.200}")
        _require(self.step_scores.dtype == np.float32, owner, "step scores must be float32")
        _require(bool(np.isfinite(self.step_scores).all()), owner, "a step score is not finite")
        _require(
            self.step_ends.dtype == np.int32 and self.step_ends.shape == self.step_scores.shape,
            owner,
            f"{self.step_scores.shape} step scores do not pair with {self.step_ends.shape} ends",
        )
        ends = self.step_ends.tolist()
        _require(self.step_ends.ndim == 1, owner, f"step scores have the shape {self.step_scores.shape}, not [K]")
        increasing = all(before < after for before, after in pairwise([0, *ends]))
        _require(increasing, owner, f"step ends must be 1 or more and increase: {ends!r:.200}")


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """A trajectory that a scorer shall score. `kinds` are the kinds of scores that it shall give now, `partial` is what
    earlier kinds found (None at first), and `final` is true where nothing remains to be scored after these."""

    task: Task
    trajectory: Trajectory
    kinds: tuple[str, ...]
    partial: Labels | None
    final: bool


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The trajectories that make learner step `step`, in order, recorded before it is handed out.

    `version` is the learner's policy version at that step. `group_ids`, `tokens` (all of a trajectory's tokens),
    `sampled` (those of the policy) and `weights` (importance weights of the sampler, at most 1) run parallel to `ids`.
    `skipped` is the reason why the step trains nothing, where somebody skipped the plan for good.
    """

    step: int
    version: int
    ids: Sequence[str]
    group_ids: Sequence[str]
    tokens: Sequence[int]
    sampled: Sequence[int]
    weights: Sequence[float]
    skipped: str = ""

    def __post_init__(self) -> None:
        _require(
            len(self.ids) == len(self.group_ids) == len(self.tokens) == len(self.sampled) == len(self.weights) > 0,
            f"plan {self.step}",
            "ids, group_ids, tokens, sampled and weights must be parallel and not empty",
        )
        _require(len(set(self.ids)) == len(self.ids), f"plan {self.step}", "it names a trajectory twice")
