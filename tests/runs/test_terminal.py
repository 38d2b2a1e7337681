"""The table of a run on its terminal shows the newest values, and says why the run waits or fails."""

from __future__ import annotations

import json
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.config.locations import ALIVE_FOLDER, PROCESSES_FILE
from asyncrl.config.schema import TrainConfig
from asyncrl.machine.doing import Doing
from asyncrl.observe.sinks import JsonLines, metrics_file, remove_steps
from asyncrl.runs.lines import read_lines
from asyncrl.runs.live_rows import LINE_S
from asyncrl.runs.run import Run
from asyncrl.runs.terminal import TerminalTable


def test_the_newest_values_of_every_role_are_shown(tmp_path: Path) -> None:
    learner, evaluation, actor = (
        JsonLines(metrics_file(tmp_path, name)) for name in ("learner", "evaluation", "actor-0")
    )
    table = TerminalTable(Run(tmp_path), 100, 1, lambda: {"replay": 1, "actor-0": 0})
    assert dict(table.rows())["step"] == "0/100"
    learner.log(8, {"reward/mean": 0.5, "lag/max": 2.0})
    learner.log(9, {"reward/mean": 0.25, "idle": 0.5, "lag/max": 1.0})
    assert not {"recomputed tokens", "stop of a push"} & {name for name, _ in table.rows()}
    pauses = {"push_pauses": 4, "push_pause_s": 0.1, "push_pause_max_s": 0.06}
    actor.log(1, {"tokens_per_s": 1234.0, "idle": 0.1, "recomputed_tokens": 5000, **pauses})
    evaluation.log(6, {"eval/accuracy": 0.9, "eval/outcome": 0.95, "eval/count": 37, "eval/failed": 13})
    rows = dict(table.rows())
    assert (rows["step"], rows["reward"], rows["learner idle"]) == ("10/100", "0.25", "50%")
    assert (rows["held-out outcome"], rows["held-out accuracy"]) == ("0.95", "0.9")
    assert rows["held-out failed"] == "13 of 50"
    assert (rows["lag"], rows["restarts"]) == ("1", "1")
    assert (rows["sampled tokens/s now"], rows["engine idle"]) == ("1234", "10%")
    assert rows["recomputed tokens"] == "5000"
    assert rows["stop of a push"] == "25 ms, at most 60"
    explained = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    assert [name for name in rows if f"`{name}`" not in explained] == []


def test_rates_of_an_earlier_start_are_not_shown_as_those_of_a_resumed_run(tmp_path: Path) -> None:
    learner, actor = (JsonLines(metrics_file(tmp_path, name)) for name in ("learner", "actor-0"))
    learner.log(8, {"reward/mean": 0.5})
    actor.log(1, {"tokens_per_s": 571.0, "idle": 0.0})
    table = TerminalTable(Run(tmp_path), 100, 1, lambda: {"actor-0": 0})
    rows = dict(table.rows())
    assert (rows["step"], rows["sampled tokens/s now"], rows["engine idle"]) == ("9/100", "-", "-")
    actor.log(0, {"tokens_per_s": 12.0, "idle": 0.9})
    rows = dict(table.rows())
    assert (rows["sampled tokens/s now"], rows["engine idle"]) == ("12", "90%")


def test_steps_that_a_resumed_learner_trains_again_are_shown_and_kept_once(tmp_path: Path) -> None:
    path, table = metrics_file(tmp_path, "learner"), TerminalTable(Run(tmp_path), 100, 1, dict)
    for steps, reward in ((range(4), 0.25), (range(2, 5), 0.5)):
        remove_steps(path, lambda step, first=steps[0]: step >= first)
        learner = JsonLines(path)
        for step in steps:
            learner.log(step, {"reward/mean": reward})
        rows = dict(table.rows())
        assert (rows["step"], rows["reward"]) == (f"{steps[-1] + 1}/100", str(reward))
    assert [line["reward/mean"] for line in read_lines(path)] == [0.25, 0.25, 0.5, 0.5, 0.5]


def test_a_full_store_is_shown_with_what_helps(tmp_path: Path) -> None:
    replay, table = JsonLines(metrics_file(tmp_path, "replay")), TerminalTable(Run(tmp_path), 100, 1, dict)
    for used, shown in ((8.0, False), (9.0, True), (8.0, False)):
        replay.log(0, {"store_bytes": used, "high_water_bytes": 8.0})
        assert ("raise replay.max_store_gb" in dict(table.rows()).get("store", "")) is shown


def test_why_everything_fails_is_shown_as_long_as_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, replay = TrainConfig(), JsonLines(tmp_path / "metrics" / "replay-1.jsonl")
    config.replay.shards = 2
    for step, reason in enumerate(["", "the last 40 episodes failed; newest failure: t1.0.0: [/tool] is away", ""]):
        replay.log(step, {"failing": reason})
        table = TerminalTable(Run(tmp_path), 100, 2, dict)
        assert dict(table.rows()).get("failing", "") == reason
        table.update()
        assert reason in capsys.readouterr().err


def test_failures_a_second_and_the_newest_failure_are_shown_while_some_fail(tmp_path: Path) -> None:
    now, replay = [0.0], JsonLines(tmp_path / "metrics" / "replay.jsonl")
    replay.log(0, {"failures": 900, "failing": "", "newest_failure": "t1.0.0: an earlier one"})
    table = TerminalTable(Run(tmp_path), 100, 1, dict, clock=lambda: now[0])

    def shown() -> dict[str, str]:
        now[0] += 10.0
        return {name: text for name, text in table.rows() if name in ("failed/s", "newest failure", "failing")}

    assert shown() == {}
    replay.log(0, {"failures": 920, "scoring_failures": 30, "newest_failure": "t2.0.0: KeyError"})
    assert shown() == {"failed/s": "5", "newest failure": "t2.0.0: KeyError"}
    replay.log(0, {"failures": 921, "scoring_failures": 30, "failing": "the last 40 episodes failed"})
    assert shown() == {"failed/s": "2.55", "failing": "the last 40 episodes failed"}
    shown(), shown()
    assert shown() == {"failing": "the last 40 episodes failed"}


def test_a_run_that_learns_nothing_warns_once_for_each_time_that_this_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    table = TerminalTable(Run(tmp_path), 100, 1, dict, lambda: now[0])
    learner = JsonLines(metrics_file(tmp_path, "learner"))
    warned = []
    for step, reward in enumerate([0, 0, 0, 0, 1, 0, 0, 0]):
        row = {"reward/mean": reward, "reward/min": 0, "reward/max": reward, "grad_norm": reward, "updates_skipped": 0}
        learner.log(step, {**row, "groups/zero_variance": 1 - reward})
        now[0] += LINE_S
        table.update()
        if "warning: every reward" in capsys.readouterr().err:
            warned.append(step)
    assert warned == [2, 7]


def test_a_run_that_trains_on_a_biased_sample_warns_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now, config = [0.0], TrainConfig()
    config.replay.shards = 2
    table = TerminalTable(Run(tmp_path), 100, 2, dict, lambda: now[0])
    replays = [JsonLines(metrics_file(tmp_path, f"replay-{shard}")) for shard in range(2)]
    warned = []
    for accepted, dead in ((10, 5), (15, 1), (20, 3), (40, 3), (50, 40)):
        for replay in replays:
            replay.log(0, {"accepted": accepted, "dead": dead, "failures": 0, "newest_failure": "t1.0.0: KeyError"})
        now[0] += LINE_S
        table.update()
        if "warning: " in (text := capsys.readouterr().err):
            warned.append(accepted)
            for part in (
                "15% of the episodes (6 of 40)",
                "biased sample; newest failure: t1.0.0: KeyError",
                "dead-letters",
            ):
                assert part in text
    assert warned == [20]


class OnTerminal:
    """A table on a fake terminal of 100 columns, whose text is collected."""

    def __init__(self, folder: Path) -> None:
        self._file, self._now = StringIO(), 0.0
        console = Console(file=self._file, force_terminal=True, width=100, no_color=True)
        self.table = TerminalTable(Run(folder), 100, 1, dict, lambda: self._now, console=console)

    def shown(self) -> str:
        self._now += LINE_S
        self._file.truncate(0)
        with self.table:
            self.table.update()
        return self._file.getvalue()


def test_a_terminal_has_a_bar_of_the_steps_and_the_time_left(tmp_path: Path) -> None:
    shown = OnTerminal(tmp_path)
    assert "0%" in shown.shown()
    learner = JsonLines(metrics_file(tmp_path, "learner"))
    for step in range(25):
        learner.log(step, {"reward/mean": 0.5, "seconds/step": 2.0})
    text = shown.shown()
    assert "━" in text
    assert "25%" in text
    assert "2 min left" in text, "75 steps of 2 s"


def test_lines_have_the_time_left_and_the_work_of_the_run(tmp_path: Path) -> None:
    table = TerminalTable(Run(tmp_path), 100, 1, dict)
    JsonLines(metrics_file(tmp_path, "learner")).log(9, {"reward/mean": 0.5, "seconds/step": 0.5})
    write_doing(tmp_path, learner="checkpoint")
    rows = dict(table.rows())
    assert (rows["left"], rows["now"]) == ("45 s", "learner writes a checkpoint")


def test_a_line_never_has_the_whole_text_of_a_long_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    JsonLines(metrics_file(tmp_path, "replay")).log(0, {"failing": "the tool said\n" + 5000 * "x"})
    TerminalTable(Run(tmp_path), 100, 1, dict).update()
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) < 400
    assert "failing the tool said xxx" in line


def test_an_error_of_a_role_is_printed_once_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now, log = [0.0], tmp_path / "logs" / "learner.log"
    log.parent.mkdir()
    log.write_text("2026-11-28 20:57:58,928 ERROR asyncrl.learner: an earlier start\n")
    table = TerminalTable(Run(tmp_path), 100, 1, dict, lambda: now[0])
    shown = []
    for step in (10, 20, None):
        if step is not None:
            text = f"the disk is full: the checkpoint of step {step} waits for room"
            log.write_text(f"{log.read_text()}2026-11-28 20:57:58,928 ERROR asyncrl.machine.files: {text}\n")
        now[0] += LINE_S
        table.update()
        shown.append(capsys.readouterr().err)
    assert f"error of learner: the disk is full: the checkpoint of step 10 waits for room; see {log}\n" in shown[0]
    assert "errors 2 of learner" in shown[1]
    assert ["error of learner" in each for each in shown] == [True, False, False]
    assert "earlier start" not in "".join(shown)


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_that_a_role_wrote_has_an_effect_on_the_terminal(tmp_path: Path, terminal: bool) -> None:
    written, reason = StringIO(), "\x1b]0;title\x07\x1b[2J [red]reversed\u202e"
    table = TerminalTable(
        Run(tmp_path), 100, 1, dict, console=Console(file=written, force_terminal=terminal, width=200)
    )
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "actor-0.log").write_text(f"2026-11-28 20:57:58,928 ERROR asyncrl.actor: {reason}\n")
    JsonLines(metrics_file(tmp_path, "replay")).log(0, {"failing": reason, "refusing": reason})
    with table:
        table.update()
    shown = written.getvalue()
    assert shown.count("[red]reversed") >= 3
    assert not {part for part in ("\x1b]", "\x07", "\x1b[2J\ufffd", "\x1b[2J [", "\u202e") if part in shown}


def test_a_solved_shard_does_not_say_that_nothing_is_trained_while_another_one_trains(tmp_path: Path) -> None:
    reason = "replay.filter refused the last 8 groups, so that nothing can be trained: the policy solves these tasks"
    shards = [JsonLines(metrics_file(tmp_path, f"replay-{shard}")) for shard in range(2)]
    shards[0].log(0, {"refusing": "", "solved": reason})
    shards[1].log(0, {"refusing": "", "solved": ""})
    table = TerminalTable(Run(tmp_path), 100, 2, dict)
    said = "the policy solves the tasks of 1 of 2 shards of the replay; steps train the groups of the others"
    assert dict(table.rows())["filter"] == said
    shards[1].log(0, {"refusing": "", "solved": reason})
    assert [value for name, value in table.rows() if name == "filter"] == [reason, reason]


def test_damaged_rows_do_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    for role in ("learner", "evaluation", "actor-0", "replay"):
        rows = [
            {"time": 1.0, "seconds/step": 2.0},
            {"step": None, "time": 2.0},
            {"step": 3, "time": 3.0, "reward/mean": "high", "seconds/step": None, "eval/failed": 2, "idle": []},
            {"step": 4, "time": 4.0, "seconds/step": 1e308, "entropy": float("nan"), "tokens_per_s": {}},
            {"step": 5, "time": 5.0, "failures": "many", "store_bytes": None, "seconds/step": 1e308},
        ]
        metrics_file(tmp_path, role).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    rows = dict(TerminalTable(Run(tmp_path), 100, 1, lambda: {"actor-0": 0}).rows())
    assert (rows["step"], rows["reward"], rows["held-out failed"]) == ("6/100", "-", "2 of 2")


def write_doing(folder: Path, **phases: str) -> None:
    """The files with which supervised roles say what they do."""
    (folder / ALIVE_FOLDER).mkdir()
    (folder / PROCESSES_FILE).write_text(json.dumps({name: {"host": "a", "pid": 1, "restarts": 0} for name in phases}))
    for name, phase in phases.items():
        (folder / ALIVE_FOLDER / name).touch()
        Doing(phase, time.time()).write(folder / ALIVE_FOLDER / name)
