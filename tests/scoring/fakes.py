"""A tokenizer with one character a token, episodes written as text, models with prescribed scores, a replay."""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise

import numpy as np
from msgspec import structs

from asyncrl.config.schema import ScoringConfig
from asyncrl.config.schema.scoring import needs
from asyncrl.errors import AsyncrlError, RefusedError, ScoringError, UnavailableError, WireError
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.feed import Feed
from asyncrl.scoring import answers
from asyncrl.scoring.models.base import StepScores
from asyncrl.scoring.rules.base import RuleInput
from asyncrl.scoring.rules.registry import load_rules
from asyncrl.scoring.scorer import Scorer
from asyncrl.scoring.transcript import Transcript
from asyncrl.types import Finish, Labels, Lease, Role, Step, Task, ToolCall, Trajectory, Turn, runs_of
from tests.fake_replay import FakeReplay

END = 0x10FFFF
"""The id of the one special token, which ends a turn."""


class CharTokenizer:
    """Token ids are code points; END is special and reads <end>."""

    def decode(self, token_ids, skip_special_tokens=False, *, clean_up_tokenization_spaces=False):
        assert not clean_up_tokenization_spaces
        special = "" if skip_special_tokens else "<end>"
        return "".join(special if token == END else chr(token) for token in token_ids)


def episode(*turns: tuple[str, str], index: int = 0, truth: str = "72", **changes) -> tuple[Task, Trajectory]:
    """An episode of (role, text) turns, every assistant turn a step; a text that begins with "call" is a tool call."""
    tokens, spans, steps = [], [], []
    for role, text in turns:
        start = len(tokens)
        tokens += [ord(character) for character in text]
        if role == "assistant":
            tokens.append(END)
            steps.append(Step(start, len(tokens)))
        calls = (ToolCall("calculator", {}),) if text.startswith("call") else ()
        spans.append(Turn(start, len(tokens), Role(role), "stop", calls))
    mask = np.zeros(len(tokens), np.bool_)
    for step in steps:
        mask[step.start : step.end] = True
    values = {
        "id": f"episode-{index}",
        "task_id": f"task-{index}",
        "group_id": "group",
        "member": index,
        "tokens": np.array(tokens, np.int32),
        "logprobs": np.where(mask, -0.5, 0).astype(np.float32),
        "version_runs": runs_of(np.where(mask, 0, -1).astype(np.int32)),
        "turns": tuple(spans),
        "steps": tuple(steps),
        "finish": Finish.COMPLETED,
    }
    source = changes.pop("source", "test")
    task = Task(f"task-{index}", [{"role": "user", "content": "?"}], truth, source)
    return task, Trajectory(**{**values, **changes})


def answered(text: str, index: int = 0, **changes) -> tuple[Task, Trajectory]:
    """A short episode: a prompt, a tool call with its result, and an answer."""
    turns = [("prompt", "what?"), ("assistant", "call"), ("tool", "ok"), ("assistant", text)]
    return episode(*turns, index=index, **changes)


def lines(*texts: str, index: int = 0, **changes) -> tuple[Task, Trajectory]:
    """An episode of one assistant turn, every line of it a step."""
    task, trajectory = episode(("prompt", "what?"), ("assistant", "\n".join(texts)), index=index, **changes)
    bounds = np.cumsum([len("what?"), *(len(text) + 1 for text in texts)]).tolist()
    steps = tuple(Step(start, end) for start, end in pairwise(bounds))
    return task, structs.replace(trajectory, steps=steps)


def rule_input(text: str, truth: str = "72", **changes) -> RuleInput:
    """The input of a rule for an answered episode."""
    task, trajectory = answered(text, truth=truth, **changes)
    return answers.rule_input(task, trajectory, CharTokenizer())


def rules_of(rule: str, **params):
    """Scores an answer for a ground truth with one rule of these parameters."""
    rules = load_rules(ScoringConfig(rules={"test": [{"name": rule, "params": params}]}))
    return lambda answer, truth="72": rules.score(rule_input(answer, truth=truth))


def lease(found: tuple[Task, Trajectory], *kinds: str, partial: Labels | None = None, final: bool = True) -> Lease:
    return Lease(*found, kinds, partial, final)


class InProcess:
    """Rules without processes of their own."""

    def __init__(self, config: ScoringConfig) -> None:
        self._rules = load_rules(config, CharTokenizer)

    def submit(self, given: RuleInput) -> Future:
        future: Future = Future()
        try:
            future.set_result(self._rules.score(given))
        except AsyncrlError as error:
            future.set_exception(error)
        return future


def make_scorer(config: ScoringConfig | None = None, prm=None, outcome_model=None, managers=None) -> Scorer:
    config = config or ScoringConfig()
    return Scorer(config, CharTokenizer(), InProcess(config), prm, outcome_model, managers)


def score(found: tuple[Task, Trajectory], config: ScoringConfig | None = None, prm=None, outcome_model=None):
    """The labels of one episode that passes through all that there is at once, or why it has none."""
    kinds = ["rules", *(["outcome_model"] if outcome_model else []), *(["prm"] if prm else [])]
    (result,) = make_scorer(config, prm, outcome_model).score([lease(found, *kinds)])
    return result if isinstance(result, ScoringError) else result.labels


class FakePRM:
    """Scores every step 0.75, except where a transcript holds `bad`: then the whole batch fails in the way given."""

    name = "fake@1"

    def __init__(self, failure: str = "error") -> None:
        self.failure = failure
        self.batches: list[int] = []

    def score(self, transcripts: Sequence[Transcript]) -> list[StepScores]:
        self.batches.append(len(transcripts))
        return [StepScores.of_probabilities(self._one(transcript)) for transcript in transcripts]

    def _one(self, transcript: Transcript) -> np.ndarray:
        scores = np.full(sum(passage.is_step for passage in transcript), 0.75, np.float32)
        if not any("bad" in passage.text for passage in transcript):
            return scores
        match self.failure:
            case "nan":
                return scores * np.float32("nan")
            case "count":
                return scores[:-1]
            case "too long":
                raise ScoringError("the transcript is too long")
        raise IndexError("deep inside the model")


class ServedPRM(FakePRM):
    """A model of a service that is away for the first `calls`, and for every text with the word `fatal`."""

    def __init__(self, calls: int = 0) -> None:
        super().__init__()
        self.calls = calls

    def score(self, transcripts: Sequence[Transcript]) -> list[StepScores]:
        self.calls -= 1
        if self.calls >= 0 or any("fatal" in passage.text for transcript in transcripts for passage in transcript):
            raise UnavailableError("connection refused")
        return super().score(transcripts)


class TextPRM:
    """Gives each step the score that `judge` has for its text."""

    name = "text@1"

    def __init__(self, judge) -> None:
        self._judge = judge

    def score(self, transcripts: Sequence[Transcript]) -> list[StepScores]:
        return [
            StepScores.of_probabilities([self._judge(passage.plain) for passage in each if passage.is_step])
            for each in transcripts
        ]


class FakeOutcome:
    """Scores every episode with the same number, or `bad` ones with nonsense."""

    name = "outcome@1"

    def __init__(self, value: float = 0.25) -> None:
        self._value = value

    def score(self, transcripts: Sequence[Transcript]) -> list[float]:
        return [float("nan") if any("bad" in passage.text for passage in each) else self._value for each in transcripts]


class ReplayOf(FakeReplay):
    """Holds episodes, each a group of its own, and remembers what comes back; one failure gives an episode up. A lease
    holds as many as the first batch."""

    def __init__(self, *batches: list[tuple[Task, Trajectory]], config: ScoringConfig) -> None:
        episodes = [each for batch in batches for each in batch]
        super().__init__(
            feed=Feed([task for task, _ in episodes], seed=0, shuffle=False),
            group_size=1,
            admission=Admission(0, len(episodes)),
            max_attempts=1,
            needs=partial(needs, config),
        )
        for ticket, (_, trajectory) in zip(self.tickets([], len(episodes)), episodes, strict=True):
            self.put(structs.replace(trajectory, id=ticket.id, group_id=ticket.group_id, member=ticket.member))
        self.labelled: dict[str, Labels] = {}
        self.renewals = 0
        self.deliveries: list[int] = []
        self._size = len(batches[0])
        self._final: set[str] = set()

    def lease(self, serves: Sequence[str], trajectories: int, tokens: int, groups: int = 1) -> list[Lease]:
        leases = super().lease(serves, self._size, tokens, groups)
        self._final = {each.trajectory.id for each in leases if each.final}
        return leases

    def renew(self) -> None:
        super().renew()
        self.renewals += 1

    def label(self, labels: Sequence[Labels]) -> list[RefusedError | WireError | None]:
        errors = super().label(labels)
        self.deliveries.append(len(labels))
        assert not any(each.trajectory_id in self.labelled for each in labels)
        taken = [each for each, error in zip(labels, errors, strict=True) if error is None]
        self.labelled |= {each.trajectory_id: each for each in taken if each.trajectory_id in self._final}
        return errors
