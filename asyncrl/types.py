"""The data types that all packages share. Invariants are checked on construction, so every object is valid.

In shapes, T is the number of tokens of an episode, and K the number of its steps. Arrays are numpy, read-only by
convention.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from operator import lt
from typing import Any, NamedTuple, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import InvariantError
from asyncrl.plain import copied

NO_VERSION = -1
"""The version of a token that no policy sampled, as in prompts, tool results and the chat template's marks."""
DEMONSTRATED = -2
"""The version of a token in an assistant turn of a demonstration. The learner trains on the token, although no policy
sampled it."""

MAX_LOGPROB = 1e-4
"""The largest valid log-prob. It is above 0, because engines round some log-probs up."""
INT32, FLOAT32, UINT8 = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.uint8)
NO_MASS = np.zeros(0, np.float32)
NO_ROUTING = np.zeros((0, 0), np.uint8)
NO_IMAGE_SPANS = np.zeros((0, 2), np.int32)
DIGEST_BYTES = 32
MAX_IMAGES = 256
"""The largest number of images in one trajectory. An image that is shown twice counts twice."""
NO_IMAGE_DIGESTS = np.zeros((0, DIGEST_BYTES), np.uint8)
MAX_ROUTING_BYTES = 4096
"""The largest number of bytes for one token's experts: enough for 128 layers with 16 of 65535 experts each."""
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def _require(condition: bool, owner: str, message: str) -> None:
    if not condition:
        raise InvariantError(f"{owner}: {message}")


class Role(StrEnum):
    """The speaker of a turn. A prompt begins a branch: after it, the policy no longer sees the tokens before the
    prompt."""

    PROMPT = "prompt"
    ASSISTANT = "assistant"
    TOOL = "tool"


PROMPT, ASSISTANT = Role.PROMPT, Role.ASSISTANT


class Finish(StrEnum):
    """The reason why a trajectory ends. An episode that failed has no trajectory.

    DEMONSTRATION: the trajectory records a task's demonstration in place of an episode.
    """

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    DEMONSTRATION = "demonstration"


class Purpose(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The identity of a run: its name, and an id that distinguishes runs of the same name.

    The id is empty if it is unknown, for example on a host without the run's folder.
    """

    name: str
    id: str = ""

    def may_be(self, other: RunIdentity) -> bool:
        """True if the names are equal, and the ids are equal or one of them is unknown."""
        return self.name == other.name and (self.id == other.id or not (self.id and other.id))

    def __str__(self) -> str:
        return f"{self.name!r} (id {self.id or 'not known'})"


TEXT_PROMPT = "text_prompt"
"""A field of a task's `extra_info`. It is true if the data file gave the prompt as a text instead of messages. The text
became a user message."""


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the data.

    - `ground_truth` and `extra_info`: plain values of the row (texts, numbers, lists, mappings and nulls)
    - `tools`: OpenAI function schemas
    - `demonstration`: the messages that a demonstration adds to `messages`. Empty if the row has no demonstration, or
      if this task is for an episode that the policy plays
    - `columns`: the values of the row's other columns. Empty unless agent loops of verl play, which read them
    """

    id: str
    messages: Sequence[Mapping[str, Any]]
    ground_truth: Any
    data_source: str
    tools: Sequence[Mapping[str, Any]] = ()
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    demonstration: Sequence[Mapping[str, Any]] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(bool(self.id), "a task", "it needs an id")
        _require(len(self.messages) > 0, self.id, "the task has no messages")

    @property
    def truth_text(self) -> str:
        """The ground truth as text: text stays unchanged, any other value becomes JSON.

        Null fields are left out, since Parquet gives every struct in a column the fields of all structs there.
        """
        if isinstance(self.ground_truth, str):
            return self.ground_truth
        return json.dumps(without_nulls(self.ground_truth), ensure_ascii=False, default=str)

    @property
    def tools_kwargs(self) -> Mapping[str, Any]:
        """Maps the name of a tool to the arguments with which it is created."""
        return self.extra_info.get("tools_kwargs") or {}

    def copy(self) -> Task:
        """A deep copy for user code, which may modify it."""
        return Task(**{each.name: copied(getattr(self, each.name)) for each in fields(self)})


def without_nulls(value: Any) -> Any:
    """The plain value without the null fields of its mappings."""
    if isinstance(value, dict):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, (list, tuple)) else value


class Grammar(NamedTuple):
    """A grammar for a whole assistant turn.

    `kind` is json_schema, regex or ebnf; `text` is the JSON schema, regular expression or EBNF grammar.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of one assistant turn.

    - `temperature`: with 0, sampling is greedy, and the log-probs are those of temperature 1
    - `grammar`: tokens outside of the grammar get probability 0, and log-probs are renormalised
    - `alternatives`: the number of most likely tokens that the engine reports at each position, if it can
    - `seed`: determines the tokens in a server that samples by the seed of each request. A fleet sets it; other engines
      do not read it
    """

    temperature: float = 1.0
    max_new_tokens: int = 256
    grammar: Grammar | None = None
    alternatives: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.temperature >= 0, "sampling", f"temperature is {self.temperature}; use 0 (greedy) or more")
        _require(self.max_new_tokens > 0, "sampling", f"max_new_tokens is {self.max_new_tokens}; it must be positive")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission to run one episode. The episode starts once the engine serves `min_version` or newer.

    If the engine does not get that version for a long time, the episode may start with `fallback_version` or a newer
    one. `fallback_version` is None if no version before `min_version` is allowed.

    If the task has a demonstration, the actor records the demonstration instead of an episode.
    """

    id: str
    task: Task
    group_id: str
    member: int
    purpose: Purpose
    temperature: float
    min_version: int
    fallback_version: int | None = None

    @property
    def pin(self) -> str | None:
        """The name of the session that the engine must serve with exactly `min_version`. None in training, because only
        an evaluation needs one exact version."""
        return self.id if self.purpose is Purpose.EVAL else None


class ToolCall(NamedTuple):
    """One call of a tool. Calls, turns and steps are tuples, because an episode has many, and tuples are fast."""

    name: str
    arguments: Mapping[str, Any]

    def copy(self) -> ToolCall:
        return ToolCall(self.name, copied(dict(self.arguments)))


class Turn(NamedTuple):
    """The token span [start, end) of one turn. An assistant turn covers exactly the tokens that the policy sampled.

    `grammar` is the kind of the turn's grammar, "" without a grammar. `score` is the turn's reward from a simulated
    user, an environment or an agent.
    """

    start: int
    end: int
    role: Role
    finish_reason: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    grammar: str = ""
    score: float | None = None


class Step(NamedTuple):
    """The token span [start, end) of one step, which a process model scores. It lies within one assistant turn."""

    start: int
    end: int


class Trajectory(msgspec.Struct, frozen=True, eq=False, dict=True):
    """One episode as one token sequence. If the agent rewrote its history, the sequence has several branches, in order.
    A branch does not see the tokens of other branches.

    - `id`: the ticket's id, so that an episode that ran twice is stored once.
    - `tokens` int32[T].
    - `logprobs` float32[T]: of the behaviour policy, at the sampling temperature; 0 on tokens that no policy sampled.
    - `version_runs` int32[R, 2]: each row describes a run of consecutive tokens with the same policy version. The row
      has the index of the first token, and the version: `NO_VERSION` if no policy sampled the tokens. `versions` has
      the version of each token.
    - `rewards`: the rewards that tools, an environment or an agent gave, by name. `timings`: seconds by phase.
    - `grammar_mass` float32[T], empty if no turn has a grammar: the total probability of the tokens that the grammar
      allowed, before renormalisation. 1 on tokens without a grammar, 0 if it was not measured.
    - `routed_experts` uint8[T, B], or uint8[0, 0] if the engine does not report experts: the experts of each token,
      packed into B bytes by `modelling.routing.RoutingShape`. All B bytes are 255 for a token whose experts are not
      known.
    - `image_spans` int32[I, 2]: the tokens [start, end) of each image. An image has one placeholder token for each
      feature that the model's vision tower computes for it. `image_digests` uint8[I, 32]: the SHA-256 of each image's
      bytes. The replay stores an image once for all episodes of a group.

    If `finish` is DEMONSTRATION, the tokens of assistant turns have the version `DEMONSTRATED` and the log-prob 0.

    `wire` and `inspect` derive their formats from this class, so a new field is sent and exported automatically.

    Raises InvariantError if one of these does not hold:

    - Shapes and dtypes are as above, numbers are finite, and spans are in order and within the tokens.
    - Every sampled token has a valid log-prob, and the log-prob of every other token is 0.
    - All tokens of an assistant's turn and of a step were sampled or demonstrated. The first token of a branch was not.
    - Only assistant turns have scores.
    - A grammar's mass is from 0 to 1, and 1 on tokens that were not sampled.
    - A token's experts take at most `MAX_ROUTING_BYTES`.
    - An image lies in one branch, on tokens that were not sampled.
    """

    id: str
    task_id: str
    group_id: str
    member: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    version_runs: NDArray[np.int32]
    turns: tuple[Turn, ...]
    steps: tuple[Step, ...]
    finish: Finish
    rewards: Mapping[str, float] = {}
    timings: Mapping[str, float] = {}
    grammar_mass: NDArray[np.float32] = NO_MASS
    routed_experts: NDArray[np.uint8] = NO_ROUTING
    image_spans: NDArray[np.int32] = NO_IMAGE_SPANS
    image_digests: NDArray[np.uint8] = NO_IMAGE_DIGESTS

    def __post_init__(self) -> None:
        # This runs for every trajectory that the replay receives. For speed it checks runs instead of tokens, makes few
        # passes over arrays, and builds messages only on failure. A struct is also created faster than a dataclass.
        length = self.tokens.size
        _check_array(self.id, "tokens", self.tokens, INT32, (length,))
        _check_array(self.id, "logprobs", self.logprobs, FLOAT32, (length,))
        _check_array(self.id, "version_runs", self.version_runs, INT32, (self.version_runs.size // 2, 2))
        runs = _Runs(self.version_runs[:, 0].tolist(), self.version_runs[:, 1].tolist(), length)
        runs.check(self.id, DEMONSTRATED if self.is_demonstration else 0)
        if np.minimum.reduce(self.tokens) < 0:
            raise InvariantError(f"{self.id}: a token id is negative")
        runs.check_logprobs(self.id, self.logprobs)
        runs.check_turns(self.id, self.turns)
        runs.check_steps(self.id, self.steps)
        if not all(map(math.isfinite, (*self.rewards.values(), *self.timings.values()))):
            raise InvariantError(f"{self.id}: a reward or a time is not finite: {self.rewards}, {self.timings!r:.100}")
        has_grammar = any(turn.grammar for turn in self.turns)
        _check_array(self.id, "grammar_mass", self.grammar_mass, FLOAT32, (length if has_grammar else 0,))
        if has_grammar:
            self._check_mass()
        if self.routed_experts is not NO_ROUTING:
            self._check_routing()
        if self.image_spans is not NO_IMAGE_SPANS or self.image_digests is not NO_IMAGE_DIGESTS:
            self._check_images(runs)

    def _check_mass(self) -> None:
        mass = self.grammar_mass
        # The condition is negated, so that it also refuses nan: every comparison with nan is false.
        if not (mass.min() >= 0 and mass.max() <= 1 and (mass[~self.loss_mask] == 1).all()):
            raise InvariantError(f"{self.id}: a grammar's mass is not from 0 to 1, or not 1 where nothing was sampled")

    def _check_routing(self) -> None:
        shape = self.routed_experts.shape
        width = shape[1] if len(shape) == 2 else -1
        _check_array(
            self.id, "routed_experts", self.routed_experts, UINT8, (len(self) if self.routed_experts.size else 0, width)
        )
        if width > MAX_ROUTING_BYTES:
            raise InvariantError(
                f"{self.id}: a token's experts take {width} bytes; at most {MAX_ROUTING_BYTES} are allowed"
            )

    def _check_images(self, runs: _Runs) -> None:
        count = len(self.image_spans)
        _check_array(self.id, "image_spans", self.image_spans, INT32, (count, 2))
        _check_array(self.id, "image_digests", self.image_digests, UINT8, (count, DIGEST_BYTES))
        position, bounds = 0, {start for start, _ in self.branches}
        for start, end in self.image_spans.tolist():
            if not position <= start < end <= len(self):
                raise InvariantError(f"{self.id}: image [{start}, {end}) overlaps the one before or leaves the tokens")
            if not runs.none_sampled(start, end) or any(start < bound < end for bound in bounds):
                raise InvariantError(f"{self.id}: image [{start}, {end}) has sampled tokens, or lies in two branches")
            position = end

    def __len__(self) -> int:
        return len(self.tokens)

    def copy(self) -> Trajectory:
        """A copy for user code, which may modify its mappings. The arrays are shared."""
        turns = tuple(each._replace(tool_calls=tuple(map(ToolCall.copy, each.tool_calls))) for each in self.turns)
        own = {"turns": turns, "rewards": copied(dict(self.rewards)), "timings": copied(dict(self.timings))}
        return msgspec.structs.replace(self, **own)

    @property
    def image_names(self) -> list[bytes]:
        """The digests of the images, in order."""
        return [each.tobytes() for each in self.image_digests]

    @cached_property
    def versions(self) -> NDArray[np.int32]:
        """int32[T]: the policy version that sampled each token, `NO_VERSION` elsewhere."""
        # For a few long runs, slices are faster than np.repeat.
        starts, versions = self.version_runs.T.tolist()
        found = np.empty(len(self), np.int32)
        for start, end, version in zip(starts, [*starts[1:], len(self)], versions, strict=True):
            found[start:end] = version
        return found

    @cached_property
    def loss_mask(self) -> NDArray[np.bool_]:
        """bool[T]: true exactly on the tokens that the policy sampled, or that a demonstration teaches."""
        mask: NDArray[np.bool_] = self.versions != NO_VERSION
        return mask

    @property
    def is_demonstration(self) -> bool:
        """True if the trajectory records a demonstration instead of an episode."""
        return self.finish is Finish.DEMONSTRATION

    @property
    def turn_scores(self) -> list[float]:
        """The rewards of assistant turns that have one, in order. See `Turn.score`."""
        return [turn.score for turn in self.turns if turn.score is not None]

    @property
    def branches(self) -> list[tuple[int, int]]:
        """The token spans [start, end) of the branches. Each branch begins with a prompt."""
        prompts = [turn.start for turn in self.turns if turn.role is Role.PROMPT and turn.start > 0]
        return list(pairwise([0, *prompts, len(self.tokens)])) if prompts else [(0, len(self.tokens))]

    def begins_as(self, other: Trajectory) -> int:
        """The length of the common prefix of the first branches of `self` and `other`. The prefix ends before the first
        image that differs."""
        common = common_prefix(*(each.tokens[slice(*each.branches[0])] for each in (self, other)))
        # All images have the same placeholder tokens, so images are compared by digest.
        own, others = (
            set(zip(each.image_spans[:, 0].tolist(), each.image_names, strict=True)) for each in (self, other)
        )
        return min([common, *(int(start) for start, _ in own ^ others)])

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the sampled tokens; `DEMONSTRATED` for a demonstration."""
        return int(min(version for version in self.version_runs[:, 1].tolist() if version != NO_VERSION))

    @property
    def newest_version(self) -> int:
        """The newest policy version among the sampled tokens; negative for a demonstration."""
        return int(self.version_runs[:, 1].max())

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled, or that a demonstration teaches."""
        # For a few runs, lists take a fifth of the time of arrays.
        starts, versions = self.version_runs.T.tolist()
        ends = (*starts[1:], len(self))
        return sum(
            end - start for start, end, version in zip(starts, ends, versions, strict=True) if version != NO_VERSION
        )


def common_prefix(left: NDArray[Any], right: NDArray[Any]) -> int:
    """The length of the common prefix of two arrays [T]."""
    shorter = min(len(left), len(right))
    differing = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differing[0]) if len(differing) else shorter


def dtype_of(hint: Any) -> np.dtype[Any] | None:
    """The dtype that the annotation of an array names, such as `NDArray[np.int32]`; None for other annotations."""
    # Before numpy 2.5, NDArray is an alias of ndarray. From 2.5 on, it is a type alias of its own.
    if get_origin(hint) is not get_origin(NDArray[Any]):
        return None
    element = get_args(hint)[-1]
    found: np.dtype[Any] = np.dtype(get_args(element)[0] if get_origin(element) is np.dtype else element)
    return found


def runs_of(versions: NDArray[np.int32]) -> NDArray[np.int32]:
    """The runs int32[R, 2] of equal `versions` int32[T], in the form of `Trajectory.version_runs`."""
    changes = (versions[1:] != versions[:-1]).nonzero()[0]
    runs = np.zeros((len(changes) + 1, 2), np.int32)
    runs[1:, 0] = changes + 1
    runs[:, 1] = versions[runs[:, 0]]
    return runs


def _check_array(owner: str, name: str, array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise InvariantError(f"{owner}: {name} is {array.dtype}{list(array.shape)}; it must be {dtype}{list(shape)}")


class _Runs(NamedTuple):
    """The version runs of `length` tokens, and checks of other fields against them."""

    starts: list[int]
    versions: list[int]
    length: int

    def check(self, owner: str, least: int) -> None:
        """Check the runs. `least` is `DEMONSTRATED` for a demonstration, else 0."""
        if self.starts[:1] != [0] or not all(map(lt, self.starts, [*self.starts[1:], self.length])):
            raise InvariantError(f"{owner}: version runs do not cover {self.length} tokens: {self.starts!r:.100}")
        if least == DEMONSTRATED:
            if not {DEMONSTRATED} <= set(self.versions) <= {NO_VERSION, DEMONSTRATED}:
                raise InvariantError(f"{owner}: a demonstration teaches no token, or has tokens of a policy version")
        elif min(self.versions) < NO_VERSION or max(self.versions) == NO_VERSION:
            raise InvariantError(f"{owner}: no token was sampled, or versions are less than {NO_VERSION}")

    def check_logprobs(self, owner: str, logprobs: NDArray[np.float32]) -> None:
        # The lowest and the highest log-prob of each run. If a run has a nan, both are nan.
        lowest, highest = np.minimum.reduceat(logprobs, self.starts), np.maximum.reduceat(logprobs, self.starts)
        for version, low, high in zip(self.versions, lowest.tolist(), highest.tolist(), strict=True):
            if version < 0:
                if not low == high == 0:
                    raise InvariantError(f"{owner}: a token that was not sampled has a log-prob")
            elif not (low > -math.inf and high <= MAX_LOGPROB):
                raise InvariantError(f"{owner}: a sampled token has no valid log-prob: it must be finite and at most 0")

    def check_turns(self, owner: str, turns: tuple[Turn, ...]) -> None:
        position, branches = 0, [0]
        for start, end, role, _, _, _, score in turns:
            if not position <= start <= end <= self.length:
                raise self._out_of_order(owner, "turn", start, end)
            position = end
            if score is not None and (role is not ASSISTANT or not math.isfinite(score)):
                raise InvariantError(f"{owner}: the {role}'s turn [{start}, {end}) has the score {score}")
            if role is ASSISTANT:
                if start < end and not self._all_sampled(start, end):
                    raise InvariantError(f"{owner}: the assistant's turn [{start}, {end}) was not all sampled")
            elif role is PROMPT and start > 0:
                branches.append(start)
        for start, end in pairwise([*branches, self.length]):
            if start == end or self._all_sampled(start, start + 1):
                raise InvariantError(f"{owner}: branch [{start}, {end}) is empty, or begins with a sampled token")

    def check_steps(self, owner: str, steps: tuple[Step, ...]) -> None:
        position = 0
        for start, end in steps:
            if not position <= start <= end <= self.length:
                raise self._out_of_order(owner, "step", start, end)
            position = end
            if start == end or not self._all_sampled(start, end):
                raise InvariantError(f"{owner}: step [{start}, {end}) is empty, or has tokens that were not sampled")

    def _out_of_order(self, owner: str, what: str, start: int, end: int) -> InvariantError:
        return InvariantError(
            f"{owner}: {what} [{start}, {end}) overlaps the one before or leaves the {self.length} tokens"
        )

    def _all_sampled(self, start: int, end: int) -> bool:
        """True if all tokens of [start, end), which is not empty, were sampled."""
        return NO_VERSION not in self._versions_in(start, end)

    def none_sampled(self, start: int, end: int) -> bool:
        """True if no token of [start, end), which is not empty, was sampled."""
        return set(self._versions_in(start, end)) == {NO_VERSION}

    def _versions_in(self, start: int, end: int) -> list[int]:
        first, after = bisect_right(self.starts, start) - 1, bisect_left(self.starts, end)
        return self.versions[first:after]


MAX_REASONS, MAX_REASON_CHARS = 32, 4000
"""The largest number of reasons for one episode, and the largest length of a reason in characters."""


class Reason(NamedTuple):
    """An explanation of an episode's score as text. `scorer` is the name of the rule or reward manager that gave it."""

    scorer: str
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """The scores that the scoring pool adds to one trajectory.

    - `reward`: the number that algorithms compare within a group. Shaping may have added bonuses and penalties to it
    - `outcome`: the verifier's score, without shaping
    - `step_scores` float32[K] and `step_ends` int32[K]: each step's score, and the exclusive end of its token span;
      empty if nothing scored the steps or turns of the trajectory
    - `extra`: further scores, by name
    - `vote`: the short answer, which is the same text for attempts with the same answer; empty if there is no answer
    - `reasons`: explanations by scorers

    Raises InvariantError: a score is not finite as a float32, step scores and ends differ in number, or ends do not
    increase. There may be at most MAX_REASONS reasons of MAX_REASON_CHARS characters.
    """

    trajectory_id: str
    reward: float
    outcome: float
    scorer: str
    step_scores: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    step_ends: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    extra: Mapping[str, float] = field(default_factory=dict)
    vote: str = ""
    reasons: tuple[Reason, ...] = ()

    def __post_init__(self) -> None:
        owner, count = self.trajectory_id, self.step_scores.size
        bounded = len(self.reasons) <= MAX_REASONS and all(len(each.text) <= MAX_REASON_CHARS for each in self.reasons)
        _require(bounded, owner, f"there may be {MAX_REASONS} reasons of {MAX_REASON_CHARS} characters each")
        _check_array(owner, "step_scores", self.step_scores, FLOAT32, (count,))
        _check_array(owner, "step_ends", self.step_ends, INT32, (count,))
        values = [self.reward, self.outcome, *self.extra.values(), *self.step_scores.tolist()]
        ends = self.step_ends.tolist()
        finite = all(abs(value) <= LARGEST_FLOAT32 for value in values)
        _require(finite, owner, f"a label is not finite as a float32: {values!r:.200}")
        _require(all(map(lt, [0, *ends], ends)), owner, f"step ends must be 1 or more and increase: {ends!r:.200}")


def process_score(labels: Labels) -> float | None:
    """The process score of an episode: the aggregate of its step scores if the labels have one, else their mean. None
    without step scores."""
    for name in ("process", "shadow/process"):
        if name in labels.extra:
            return labels.extra[name]
    return float(labels.step_scores.mean()) if labels.step_scores.size else None


SCORES_OF_ALL = ("reward", "outcome")
"""The names of the scores that all labels have."""


@dataclass(frozen=True, slots=True)
class LabelNeeds:
    """The requirements of an algorithm for the labels of every trained episode.

    `scores` are the required names in `extra`. `unit_steps`: step scores must be in [-1, 1].
    """

    scores: tuple[str, ...] = ()
    unit_steps: bool = False

    def unmet(self, labels: Labels) -> str:
        """The reason why the algorithm cannot train on an episode with these labels; empty if it can."""
        if missing := [name for name in self.scores if name not in labels.extra]:
            return (
                f"the algorithm reads the scores {missing!r:.200}, but the labels have {sorted(labels.extra)!r:.500}; "
                "add these scores to every episode, or remove their names from the algorithm"
            )
        largest = float(np.abs(labels.step_scores).max(initial=0.0))
        if self.unit_steps and largest > 1:
            return f"its step scores reach {largest:g}, but the algorithm needs step scores in [-1, 1]"
        return ""


NOTHING_NEEDED = LabelNeeds()


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """A trajectory for a scorer to score.

    - `kinds`: the kinds of scores to give now
    - `partial`: the labels of earlier kinds; None if these kinds are the first
    - `final`: true if these kinds are the last
    """

    task: Task
    trajectory: Trajectory
    kinds: tuple[str, ...]
    partial: Labels | None
    final: bool


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The trajectories of learner step `step`, in order. The replay records the plan before the learner gets it.

    - `version`: the learner's policy version at this step
    - `ids`: the trajectories. If the tasks of a shard are solved, its part of the plan may have none. `group_ids`,
      `tokens`, `sampled` and `weights` have one entry for each trajectory, in the same order
    - `group_ids`: the group of each trajectory
    - `tokens`, `sampled`: for each trajectory the number of its tokens, and the number of its tokens that the policy
      sampled
    - `weights`: the sampler's importance weights, at most 1
    - `shared`: for each trajectory the length of its common prefix with the previous trajectory of the same group;
      empty if the lengths are unknown
    - `demonstrations`: the indices in `ids` of demonstrations
    - `first_trained`: for each trajectory the oldest policy version whose tokens the step trains. Older tokens are
      context without loss. Empty: all tokens are trained
    - `trained`: for each trajectory the number of tokens that the step trains; empty: as `sampled`
    - `skipped`: the reason why the step trains nothing, if a user skipped the plan; else empty
    """

    step: int
    version: int
    ids: Sequence[str]
    group_ids: Sequence[str]
    tokens: Sequence[int]
    sampled: Sequence[int]
    weights: Sequence[float]
    skipped: str = ""
    shared: Sequence[int] = ()
    demonstrations: Sequence[int] = ()
    first_trained: Sequence[int] = ()
    trained: Sequence[int] = ()

    def __post_init__(self) -> None:
        _require(
            len(self.ids) == len(self.group_ids) == len(self.tokens) == len(self.sampled) == len(self.weights),
            f"plan {self.step}",
            "ids, group_ids, tokens, sampled and weights must be parallel",
        )
        _require(
            len(self.shared) in (0, len(self.ids)), f"plan {self.step}", "shared must be parallel to ids, or empty"
        )
        _require(
            len(self.first_trained) == len(self.trained) and len(self.trained) in (0, len(self.ids)),
            f"plan {self.step}",
            "first_trained and trained must be parallel to ids, or both empty",
        )
        _require(len(set(self.ids)) == len(self.ids), f"plan {self.step}", "it names a trajectory twice")

    @property
    def trained_tokens(self) -> Sequence[int]:
        """The number of tokens of each trajectory that the step trains."""
        return self.trained or self.sampled
