"""A tokenizer that is one character a token, episodes written as text, and a replay that only remembers."""

from collections.abc import Sequence

import numpy as np

from asyncrl.errors import ScoringError
from asyncrl.scoring.transcript import Transcript
from asyncrl.types import Finish, Labels, Lease, Role, Step, Task, ToolCall, Trajectory, Turn

END = 0x10FFFF
"""The id of the one special token, which ends a turn."""


class CharTokenizer:
    """Token ids are code points; END is special and reads <end>."""

    def decode(self, token_ids, skip_special_tokens=False, *, clean_up_tokenization_spaces):
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
        "loss_mask": mask,
        "logprobs": np.where(mask, -0.5, 0).astype(np.float32),
        "versions": np.where(mask, 0, -1).astype(np.int32),
        "turns": tuple(spans),
        "steps": tuple(steps),
        "finish": Finish.COMPLETED,
    }
    task = Task(f"task-{index}", [{"role": "user", "content": "?"}], truth, "test")
    return task, Trajectory(**{**values, **changes})


def answered(text: str, index: int = 0, **changes) -> tuple[Task, Trajectory]:
    """A short episode: a prompt, a tool call with its result, and an answer."""
    turns = [("prompt", "what?"), ("assistant", "call"), ("tool", "ok"), ("assistant", text)]
    return episode(*turns, index=index, **changes)


class FakePRM:
    """Scores every step 0.75, except where a transcript holds `bad`: then the whole batch fails in the way given."""

    name = "fake@1"

    def __init__(self, failure: str = "error") -> None:
        self.failure = failure
        self.batches: list[int] = []

    def score(self, transcripts: Sequence[Transcript]) -> list[np.ndarray]:
        self.batches.append(len(transcripts))
        return [self._one(transcript) for transcript in transcripts]

    def _one(self, transcript: Transcript) -> np.ndarray:
        scores = np.full(sum(segment.is_step for segment in transcript), 0.75, np.float32)
        if not any("bad" in segment.text for segment in transcript):
            return scores
        match self.failure:
            case "nan":
                return scores * np.float32("nan")
            case "count":
                return scores[:-1]
            case "too long":
                raise ScoringError("the transcript is too long")
        raise IndexError("deep inside the model")


class FakeReplay:
    """Hands out batches of episodes, and remembers what comes back."""

    def __init__(self, *batches: list[tuple[Task, Trajectory]]) -> None:
        self.batches = list(batches)
        self.labels: dict[str, Labels] = {}
        self.failures: dict[str, str] = {}
        self.renewals = 0

    def lease(self, serves: Sequence[str], trajectories: int, tokens: int) -> list[Lease]:
        batch = self.batches.pop(0) if self.batches else []
        return [Lease(task, trajectory, tuple(serves), None, True) for task, trajectory in batch]

    def renew(self) -> None:
        self.renewals += 1

    def label(self, labels: Sequence[Labels]) -> None:
        self.labels.update({each.trajectory_id: each for each in labels})

    def scoring_failed(self, trajectory_id: str, reason: str) -> None:
        self.failures[trajectory_id] = reason
