"""Prints the turns of an episode as they happen, and the result of the episode."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from asyncrl.observe.shown_text import NAME_CHARS
from asyncrl.scoring.rules.base import RuleScores
from asyncrl.text import printable
from asyncrl.types import Task, Trajectory

STYLES: Mapping[str, str] = {"assistant": "green", "tool": "cyan", "user": "bold", "system": "dim"}


class Transcript:
    """Prints an episode on `console`."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def task(self, task: Task, place: str, tools: Sequence[str]) -> None:
        """Show the task and its tools."""
        self._line("task", f"{task.id} ({place})")
        self._line("tools", ", ".join(tools) or "none")

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Show new messages of the conversation."""
        for message in messages:
            role = str(message["role"])
            name = f"{role} {message['name']}" if role == "tool" and message.get("name") else role
            self._console.print(Rule(Text(printable(name), STYLES.get(role, "")), align="left", style="dim"))
            if reasoning := message.get("reasoning_content"):
                self._text(f"<think>{reasoning}</think>", "dim")
            content = message.get("content") or ""
            self._text(content if isinstance(content, str) else "".join(map(_part, content)), "")
            for call in message.get("tool_calls") or ():
                function = call["function"]
                arguments = json.dumps(function["arguments"], ensure_ascii=False)
                self._text(f"→ {function['name']}({arguments})", STYLES["assistant"])

    def outcome(self, trajectory: Trajectory) -> None:
        """Show how the episode ended."""
        self._console.print(Rule(style="dim"))
        self._line("finish", f"{trajectory.finish.value} after {_count(trajectory)} turns of the policy")
        self._line("tokens", f"{len(trajectory)}, of which {trajectory.sampled_tokens} sampled")
        self._line("seconds", ", ".join(f"{phase} {value:.3g}" for phase, value in trajectory.timings.items()))
        scores = [turn.score for turn in trajectory.turns if turn.role == "assistant"]
        if scored := any(score is not None for score in scores):
            self._line("turns", ", ".join("none" if score is None else f"{score:g}" for score in scores))
        if trajectory.rewards or not scored:
            self._line("environment", _numbers(trajectory.rewards) or "no reward")

    def scores(self, scores: RuleScores, answer: str, truth: str) -> None:
        """Show the scores of the rules."""
        self._line("answer", answer or "(empty)")
        self._line("ground truth", truth or "(empty)")
        self._line("outcome", f"{scores.outcome:g}")
        self._line("rules", _numbers(scores.scores))
        for name, text in scores.reasons:
            self._line(f"reason of {name}", text)

    def step_rewards(self, rewards: Sequence[float]) -> None:
        """Show the rewards or scores of the steps, in order."""
        self._line("steps", ", ".join(f"{reward:g}" for reward in rewards))

    def unscored_steps(self, why: str) -> None:
        """Show that the steps have no scores."""
        self._line("steps", f"not scored: {why}")

    def failure(self, what: str) -> None:
        """Show why the episode or a rule failed."""
        self._console.print(Rule(style="dim"))
        self._text(what, "bold red")

    def _line(self, name: str, value: str) -> None:
        self._console.print(Text.assemble((f"{name:<13} ", "dim"), printable(value)), soft_wrap=True)

    def _text(self, text: str, style: str) -> None:
        if text:
            self._console.print(Text(printable(text), style), soft_wrap=True)


def _part(block: Any) -> str:
    """A block of a message's content as text. An image becomes `[image DIGEST]`."""
    if isinstance(block, str):
        return block
    digest = block.get("digest", "")
    return f"[image {digest[:NAME_CHARS]}]" if block.get("type") == "image" else str(block.get("text") or "")


def _count(trajectory: Trajectory) -> int:
    return sum(turn.role == "assistant" for turn in trajectory.turns)


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
