"""Kept episodes of a run that never was: groups with tools, branches, grammars, a lag, and hostile text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from asyncrl.observe.kept.episode import BEST, RANDOM, WORST, KeptEpisode, KeptStep, row_of
from asyncrl.observe.kept.writing import KeptWriter
from asyncrl.types import Finish, Labels, Reason, Role, Step, Task, ToolCall, Trajectory, Turn, runs_of

Encode = Callable[[str], Sequence[int]]

HOSTILE = "<script>alert(1)</script> \x1b[31mred\x1b[0m \u202eright to left\u202c &amp; \x00"
P, A, T = Role.PROMPT, Role.ASSISTANT, Role.TOOL


def utf8(text: str) -> list[int]:
    """Tokens of an example: the bytes of the text."""
    return list(text.encode())


def from_utf8(ids: list[int]) -> str:
    """The text of tokens that `utf8` made."""
    return bytes(ids).decode(errors="replace")


def write_examples(run_dir: Path, steps: int = 4, members: int = 4, encode: Encode = utf8) -> list[KeptStep]:
    """Three groups of each step, in the run's folder `run_dir`."""
    writer = KeptWriter(run_dir, max_bytes=1 << 30)
    made = [example_step(step, members, encode) for step in range(steps)]
    for each in made:
        writer.add(each)
    return made


def example_step(step: int, members: int = 4, encode: Encode = utf8, groups: int = 3) -> KeptStep:
    """The sample of a step: `groups` groups of `members`."""
    return KeptStep(
        step, [example_episode(step, group, member, encode) for group in range(groups) for member in range(members)]
    )


def example_episode(step: int, group: int, member: int, encode: Encode = utf8) -> KeptEpisode:
    """An episode that calls a tool. Member 1 has two branches, member 2 a grammar, and member 3 is cut off and hostile.
    The task of the third group is not known."""
    rng = np.random.default_rng([step, group, member])
    name, lag = f"t{3 * step + group:09d}", min(step, (group + member) % 3)
    task = Task(
        id=f"examples/train/{3 * step + group}",
        messages=[{"role": "user", "content": f"What is {step} + {group}?"}],
        ground_truth=str(step + group),
        data_source="examples",
    )
    trajectory = _played(f"{name}.{member}.0", task, member, step, lag, encode)
    reward = (member % 2) * 1.0 + 0.01 * group
    labels = Labels(
        trajectory.id,
        reward=reward,
        outcome=float(member % 2),
        scorer="exact_number+example-prm",
        step_scores=rng.random(len(trajectory.steps)).astype(np.float32),
        step_ends=np.array([each.end for each in trajectory.steps], np.int32),
        extra={"rules": reward, "accuracy": float(member % 2), "rule/exact_number": reward},
        vote=str(member),
        reasons=(Reason("exact_number", f"read {member} {HOSTILE if member == 3 else ''}"),),
    )
    mask = trajectory.loss_mask
    noise = rng.normal(0, 0.1, len(trajectory))
    proximal = np.where(mask, np.minimum(trajectory.logprobs + noise, 0), 0).astype(np.float32)
    why = ((BEST,) if member == 1 else (), (WORST,) if member == 0 else (), (RANDOM,))[group % 3]
    return KeptEpisode(
        row_of(step, step, trajectory, labels, task, why),
        trajectory,
        labels,
        task if group % 3 < 2 else None,
        advantages=np.where(mask, reward - 0.5, 0).astype(np.float32),
        importance_weights=np.where(mask, np.exp(proximal - trajectory.logprobs), 0).astype(np.float32),
        proximal_logprobs=proximal,
    )


def _played(name: str, task: Task, member: int, step: int, lag: int, encode: Encode) -> Trajectory:
    call = (ToolCall("calculator", {"expression": "1 + 1"}),)
    texts = [
        (P, f"user: {task.messages[0]['content']}\n", ()),
        (A, "I use the tool: calculator(1 + 1).", call),
        (T, f"tool: {HOSTILE if member == 3 else '2'}\n", ()),
        (A, f"The answer is {task.ground_truth}. \N{GRINNING FACE}", ()),
    ]
    if member == 1:
        texts += [(P, "user: Sum up what you did.\n", ()), (A, "I added two numbers.", ())]
    tokens: list[int] = []
    turns: list[Turn] = []
    for role, text, calls in texts:
        start = len(tokens)
        tokens += encode(text)
        grammar = "regex" if member == 2 and role is A else ""
        reason = "" if role is not A else "length" if member == 3 else "stop"
        turns.append(Turn(start, len(tokens), role, reason, calls, grammar))
    versions = np.full(len(tokens), -1, np.int32)
    spans = [turn for turn in turns if turn.role is A]
    for number, turn in enumerate(spans):
        # The first turn is the older one where the weights changed meanwhile.
        versions[turn.start : turn.end] = step - (lag if number == 0 else 0)
    mask = versions >= 0
    rng = np.random.default_rng(len(tokens) + member)
    return Trajectory(
        id=name,
        task_id=task.id,
        group_id=name.partition(".")[0],
        member=member,
        tokens=np.array(tokens, np.int32),
        logprobs=np.where(mask, -rng.exponential(0.5, len(tokens)), 0).astype(np.float32),
        version_runs=runs_of(versions),
        turns=tuple(turns),
        steps=tuple(Step(turn.start, turn.end) for turn in spans),
        finish=Finish.TRUNCATED if member == 3 else Finish.COMPLETED,
        timings={"generate": 1.5, "tools": 0.25},
        grammar_mass=np.where(mask, 0.9, 1).astype(np.float32) if member == 2 else np.zeros(0, np.float32),
    )
