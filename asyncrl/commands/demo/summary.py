"""The end of the demo: one task before and after the training, the parts of its reward, and commands to try next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.config.commands import runnable
from asyncrl.config.locations import SUMMARY_FILE
from asyncrl.errors import AsyncrlError
from asyncrl.machine.files import write_whole
from asyncrl.observe.kept.episode import HELD_OUT, KeptEpisode, KeptRow
from asyncrl.observe.shown_text import shown_text
from asyncrl.runs.decoding import Decode, decoder
from asyncrl.runs.inspect.episode import step_scores
from asyncrl.runs.run import Run
from asyncrl.runs.summary import quoted
from asyncrl.text import shortened
from asyncrl.types import Role, ToolCall, Turn, process_score

LONGEST_TEXT = 100
SHOWN_FILE = "demo.txt"
"""The file in the run's folder with the text that the demo showed after the training."""
ROUNDING = 1e-4
"""The largest difference between a reward and the sum of its parts. They may differ, because rewards are stored as
float32."""


def audit(run_dir: Path, max_times_sampled: int) -> dict[str, int]:
    """Count the lost trajectories, and the trajectories that were trained more than `max_times_sampled` times."""
    with Run(run_dir).stored() as stored:
        found = stored.audit(max_times_sampled)
    return {name: found[name] for name in ("lost", "trained_twice")}


def written_once(run_dir: Path, process_weight: float) -> str:
    """The line of the report, and one task before and after the training. The text is stored, and made again only if
    the run has trained since then."""
    text = run_dir / SHOWN_FILE
    if not _is_newer(text, run_dir / SUMMARY_FILE):
        # Imported here, because making the text loads transformers. A finished run repeats its stored text without this
        # wait.
        from asyncrl.runs.report.page import write_report

        report = f"  {'report':<19}{write_report(str(run_dir))}\n"
        try:
            shown = before_and_after(Run(run_dir), process_weight)
        except (AsyncrlError, OSError) as error:
            # The text is not stored, so that the next call tries again.
            return f"{report}\nThe kept episodes cannot be read: {error}\n"
        write_whole(text, f"{report}{shown}")
    return text.read_text()


def _is_newer(file: Path, than: Path) -> bool:
    return file.exists() and than.exists() and file.stat().st_mtime_ns > than.stat().st_mtime_ns


def before_and_after(run: Run, process_weight: float) -> str:
    """One held-out task as the policy played it before and after the training, with the parts of both rewards. Empty if
    the run kept no held-out episodes, for example because it had no evaluations. Raises AsyncrlError or OSError: the
    episodes cannot be read."""
    pair = most_improved(run.kept().rows())
    if pair is None:
        return ""
    episodes = [run.kept().read(row.step, row.id) for row in pair]
    decode = decoder(run)
    names = ("before training", f"after {pair[1].step} steps")
    parts = [_episode(name, each, process_weight, decode) for name, each in zip(names, episodes, strict=True)]
    return f"\nThe task {_question(episodes[0])}\n{''.join(line for each in parts for line in each)}"


def most_improved(rows: Sequence[KeptRow]) -> tuple[KeptRow, KeptRow] | None:
    """The first and the last held-out episode of the task whose reward rose most from the first evaluation to the last
    one. The result is None if the two evaluations have no task in common, or if there is only one evaluation."""
    held_out = [row for row in rows if HELD_OUT in row.flags]
    if not held_out or held_out[0].step == held_out[-1].step:
        return None
    first, last = ({row.task_id: row for row in held_out if row.step == held_out[end].step} for end in (0, -1))
    pairs = [(first[task], last[task]) for task in first if task in last]
    return max(pairs, key=lambda pair: pair[1].reward - pair[0].reward, default=None)


def _question(episode: KeptEpisode) -> str:
    task = episode.task
    if task is None:
        return episode.row.task_id
    asked = next((str(each["content"]) for each in task.messages if each["role"] == "user"), "")
    return f"{shortened(asked, LONGEST_TEXT)}, whose answer is {task.truth_text}"


def _episode(name: str, episode: KeptEpisode, process_weight: float, decode: Decode) -> Iterator[str]:
    """The lines of an episode: its reward, then a line for each turn after the prompt."""
    yield f"  {name}: {reward_text(episode, process_weight)}\n"
    scores = step_scores(episode.labels)
    for turn in episode.trajectory.turns[1:]:
        found = [f"{score:.2f}" for end, score in scores.items() if turn.start < end <= turn.end]
        score = f"   (step score {', '.join(found)})" if found else ""
        yield f"    {_speaker(turn):<8}{_turn(turn, episode, decode)}{score}\n"


def reward_text(episode: KeptEpisode, process_weight: float) -> str:
    """The reward as the sum of its parts. If the known parts do not add up to it, the text has only the reward and the
    outcome."""
    labels, process = episode.labels, process_score(episode.labels)
    text = f"reward {labels.reward:.2f}"
    if process is None or abs(labels.outcome + process_weight * process - labels.reward) > ROUNDING:
        return f"{text} (outcome {labels.outcome:.2f})"
    right = "right" if labels.outcome else "wrong"
    return f"{text} = {labels.outcome:g} ({right} answer) + {process_weight:g} x {process:.2f} (scores of the steps)"


def _speaker(turn: Turn) -> str:
    return "policy" if turn.role is Role.ASSISTANT else turn.role.value


def _turn(turn: Turn, episode: KeptEpisode, decode: Decode) -> str:
    if turn.tool_calls:
        return shortened(", ".join(map(_call, turn.tool_calls)), LONGEST_TEXT)
    text = shown_text(episode.trajectory, turn.start, turn.end, decode)
    return shortened(_without_marks(text), LONGEST_TEXT)


def _call(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{name}={value}' for name, value in call.arguments.items())})"


def _without_marks(text: str) -> str:
    """The text of a turn without the marks of the demo's chat template."""
    for mark in ("<|im_start|>user", "<|im_start|>assistant", "<|im_end|>", "<tool_response>", "</tool_response>"):
        text = text.replace(mark, " ")
    return text


def try_next(run_dir: Path) -> str:
    """Commands to try after the demo, each with its effect, in two columns."""
    asyncrl, folder = runnable(), quoted(run_dir)
    things = {
        f"{asyncrl} dashboard {folder}": "a page with curves and episodes of the run",
        f"{asyncrl} inspect list {folder} --sort reward": "the episodes, the best first",
        f"{asyncrl} demo run.name=dapo algorithm=dapo": "the demo with another algorithm",
        f"{asyncrl} evaluate {folder}": "pass@k of the trained policy on the held-out tasks",
    }
    width = max(map(len, things)) + 2
    return "\nFour things to try next:\n" + "".join(f"  {command:<{width}}{what}\n" for command, what in things.items())
