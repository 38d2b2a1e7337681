"""Logs samples of evaluations: some episodes with their scores."""

from __future__ import annotations

import logging
from collections import Counter

from asyncrl import ids
from asyncrl.scoring.answers import prompt_and_response, response_text
from asyncrl.scoring.transcript import Decoder, decode
from asyncrl.text import cut
from asyncrl.types import Labels, Task, Trajectory, process_score

MAX_CHARS = 2000
"""The maximum number of characters that the log shows of a prompt or of a response."""

logger = logging.getLogger(__name__)


class EvaluationSamples:
    """Logs the first `count` episodes that this scorer labels, for each data source of each evaluation."""

    def __init__(self, count: int, tokenizer: Decoder) -> None:
        self._count = count
        self._tokenizer = tokenizer
        self._version = -1
        self._logged: Counter[str] = Counter()

    def show(self, task: Task, trajectory: Trajectory, labels: Labels) -> None:
        """Log an episode of an evaluation, unless `count` episodes of its data source have been logged already.

        The count starts again with each policy version that is evaluated.
        """
        if not ids.is_evaluation(trajectory.id):
            return
        version = ids.evaluated_version(trajectory.id)
        if version != self._version:
            self._version, self._logged = version, Counter()
        if self._logged[task.data_source] < self._count:
            self._logged[task.data_source] += 1
            logger.info("%s", described(task, trajectory, labels, self._tokenizer))


def described(task: Task, trajectory: Trajectory, labels: Labels, tokenizer: Decoder) -> str:
    """An episode with its scores as text: the last branch's prompt and response, and the ground truth."""
    begin, response = prompt_and_response(trajectory)
    prompt = decode(trajectory.tokens[begin:response].tolist(), tokenizer, skip_special=True)
    scores = {"outcome": labels.outcome, "reward": labels.reward, "process": process_score(labels)}
    shown = {**labels.extra, **{name: score for name, score in scores.items() if score is not None}}
    lines = (
        f"[sample] {trajectory.id} of {task.data_source}, {trajectory.sampled_tokens} policy tokens",
        f"[prompt] {cut(prompt, MAX_CHARS)}",
        f"[response] {cut(response_text(trajectory, tokenizer), MAX_CHARS)}",
        f"[ground_truth] {cut(task.truth_text, MAX_CHARS)}",
        f"[vote] {labels.vote}",
        *(f"[{name}] {text}" for name, text in labels.reasons),
        f"[score] {', '.join(f'{name} {score:.4g}' for name, score in shown.items())}",
    )
    return "\n".join(lines)
