"""The summary of a run is read from its folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from asyncrl.config.locations import SOLVED_FILE
from asyncrl.observe.sinks import JsonLines, metrics_file
from asyncrl.replay.protocol import FailEpisode
from asyncrl.replay.starts.admission import Admission
from asyncrl.runs.run import Run
from asyncrl.runs.summary import SUMMARY_FILE, summarise
from asyncrl.runs.summary_text import write_summary
from asyncrl.runs.table import state_of
from tests.replay.support import Core, make_settings

RESUME = "asyncrl train run.name=run"


def write_metrics(run_dir: Path, rewards: list[float], failed: int = 0) -> None:
    learner, evaluation, actor = (
        JsonLines(metrics_file(run_dir, name)) for name in ("learner", "evaluation", "actor-0")
    )
    for step, reward in enumerate(rewards):
        seconds = {"seconds/step": 2.0, "idle": 0.25}
        spread = {"reward/min": 0.0, "reward/max": 1.0, "groups/zero_variance": 0.0, "grad_norm": 1.0}
        learner.log(
            step, {"reward/mean": reward, "outcome/mean": 0.5, "lag/max": 1, "updates_skipped": 0, **spread, **seconds}
        )
    for step, accuracy in ((0, 0.5), (len(rewards), 0.75)):
        means = {"eval/outcome": accuracy, "eval/accuracy": accuracy, "eval/reward": 0.0}
        evaluation.log(step, {**means, "eval/count": 50 - failed, "eval/failed": failed})
    # An actor that was restarted counts from 0 again.
    for tokens in (100, 300, 20):
        actor.log(0, {"tokens": tokens, "seconds": tokens / 10, "idle_seconds": tokens / 40})


def test_it_tells_what_was_learned_what_failed_and_where_everything_is(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0.1, 0.3, *[0.5] * 4, 0.7, 0.9])
    core = Core(tmp_path / "replay", make_settings())
    core.fail(core.tickets(1)[0].id)
    core.deliver(core.tickets(4))
    core.label_all(1.0)
    core.planned(0)
    core.store.close()
    text = write_summary(Run(tmp_path), 8, "done", "", RESUME)
    for line in (
        "result             done after 8 of 8 steps",
        "reward             0.2 -> 0.8 (first and last 2 steps)",
        "held-out accuracy  0.5 -> 0.75 (first and last)",
        "trajectories       0 trained, 0 evicted, 0 filtered, 0 dropped, 0 given up, 4 unused",
        "failures           1 episodes, 0 scorings",
        "dead letters       1: 1 of episodes, 0 of scorings, 0 of skipped plans",
        "1 x broken",
        "speed              10 sampled tokens/s, largest lag 1, learner idle 25%, engine idle 25%",
        f"episodes           {tmp_path / 'replay'}",
        f"asyncrl inspect dead-letters {tmp_path}",
        f"asyncrl export {tmp_path}",
    ):
        assert line in text
    assert "warning" not in text
    assert RESUME not in text
    written = json.loads((tmp_path / SUMMARY_FILE).read_text())
    assert written["reward"] == {"first": 0.2, "last": 0.8}
    assert sum(written["trajectories"].values()) == 4


def test_its_tokens_a_second_are_those_of_the_whole_run_if_an_actor_was_added_late(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0.5])
    for name, seconds in (("actor-0", 10_000), ("actor-1", 500)):
        metrics_file(tmp_path, name).unlink(missing_ok=True)
        values = {"tokens": 100 * seconds, "seconds": seconds, "idle_seconds": 0}
        JsonLines(metrics_file(tmp_path, name)).log(0, values)
    speed = summarise(Run(tmp_path), 8, "done", "", RESUME).speed
    assert (speed["seconds"], speed["tokens_per_s"]) == (10_000, 105)


def test_it_tells_what_became_of_old_groups(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0.5] * 4)
    core = Core(tmp_path / "replay", make_settings())
    core.deliver(core.tickets(4))
    with core.store.transaction() as tx:
        tx.add("wait_limits_reached")
        tx.add("tokens_masked", tx.counter("tokens_accepted") // 4)
        tx.add("tokens_evicted", tx.counter("tokens_accepted") // 2)
    masked, evicted = core.status()["tokens_masked"], core.status()["tokens_evicted"]
    core.store.close()
    for shard, waits in (("replay-0", (3.0, 7.5, 1.0)), ("replay-1", (2.0, 4.0, 4.5))):
        for waited in waits:  # The first shard was restarted, and counts from 0 again.
            JsonLines(metrics_file(tmp_path, shard)).log(0, {"learner_waited_for_old_groups_s": waited})
    text = write_summary(Run(tmp_path), 4, "done", "", RESUME)
    gone = f"{evicted} sampled tokens thrown away (50.0% of the accepted ones)"
    told = f"{masked} sampled tokens masked (25.0% of the accepted ones), the learner waited 8 s for them, 1 wait"
    assert f"old groups         {gone}, {told} reached the limit" in text
    assert json.loads((tmp_path / SUMMARY_FILE).read_text())["old_groups"] == {
        "tokens_evicted": evicted,
        "tokens_masked": masked,
        "evicted": 0.5,
        "masked": 0.25,
        "waited_s": 8.5,
        "wait_limits": 1,
    }


def test_it_warns_of_a_biased_sample_and_of_held_out_tasks_that_the_means_leave_out(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0.5], failed=13)
    core = Core(tmp_path / "replay", make_settings(admission=Admission(1, 40), max_attempts=1))
    core.deliver(core.tickets(30))
    first_members = [trajectory.id for trajectory in core.lease() if trajectory.id.endswith(".0.0")]
    for trajectory in first_members[:4]:
        core.scoring_failed(trajectory)
    core.store.close()
    text = write_summary(Run(tmp_path), 1, "done", "", RESUME)
    for part in (
        "held-out failed    13 -> 13 (first and last; the means leave these out)",
        "13% of the episodes (4 of 30) failed or could not be scored",
        "a biased sample; newest failure: scoring: nonsense",
        f"asyncrl inspect dead-letters {tmp_path}",
        "actor.max_failure_share",
    ):
        assert part in text


def test_a_stopped_run_tells_what_its_checkpoint_has_and_shows_no_model_of_an_earlier_end(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0.5] * 11)
    for name in ("model", "checkpoints/step-000004", "checkpoints/step-000008", "checkpoints/step-000011"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("step-000004", "step-000008"):
        (tmp_path / "checkpoints" / name / "complete").touch()
    text = write_summary(Run(tmp_path), 30, "stopped", "", RESUME)
    assert "stopped after 11 of 30 steps, 8 of them in the newest checkpoint; the same command resumes it" in text
    assert str(tmp_path / "model") not in text
    assert f"model              {tmp_path / 'model'}" in write_summary(Run(tmp_path), 11, "done", "", RESUME)


def test_steps_that_a_stopped_learner_saved_count_as_trained_before_the_replay_hears_of_them(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0.5])
    core = Core(tmp_path / "replay", make_settings())
    core.deliver(core.tickets(4))
    core.label_all(1.0)
    planned = len(core.planned(0).ids)
    core.store.close()
    assert summarise(Run(tmp_path), 8, "stopped", "", RESUME).trajectories["trained"] == 0
    mark = tmp_path / "checkpoints" / "step-000001" / "complete"
    mark.parent.mkdir(parents=True)
    mark.touch()
    trajectories = summarise(Run(tmp_path), 8, "stopped", "", RESUME).trajectories
    assert trajectories["trained"] == planned > 0
    assert sum(trajectories.values()) == 4


def test_a_run_whose_tasks_are_solved_says_so_in_words_and_has_a_model(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0.5] * 11)
    JsonLines(metrics_file(tmp_path, "replay")).log(11, {"solved": "all", "filtered": 99, "accepted": 100})
    (tmp_path / "model").mkdir()
    (tmp_path / SOLVED_FILE).write_text("the policy solves these tasks")
    run = Run(tmp_path)
    text = write_summary(run, 30, "solved", run.solved(), RESUME)
    assert (
        "result             solved after 11 of 30 steps\n  solved             the policy solves these tasks\n" in text
    )
    assert text.count("the policy solves") == 1
    assert "replay.filter refused" not in text, "this is no fault of the filter"
    assert f"model              {tmp_path / 'model'}" in text
    assert f"asyncrl evaluate {tmp_path}" in text
    assert "asyncrl train" not in text
    assert run.end() == state_of(run) == "solved"


def test_a_run_that_never_trained_says_so_with_the_command_that_resumes_it(tmp_path: Path) -> None:
    text = write_summary(Run(tmp_path), 8, "failed", "learner cannot run", RESUME)
    for part in (
        "failed after 0 of 8 steps; the same command resumes it",
        "no step was trained",
        "the store cannot be read",
        RESUME,
    ):
        assert part in text
    assert json.loads((tmp_path / SUMMARY_FILE).read_text())["reason"] == "learner cannot run"


def test_a_run_that_was_stopped_before_its_first_step_has_no_warning_and_no_word_of_dead_letters(
    tmp_path: Path,
) -> None:
    core = Core(tmp_path / "replay", make_settings())
    core.deliver(core.tickets(4))
    core.store.close()
    text = write_summary(Run(tmp_path), 8, "stopped", "", RESUME)
    assert "remark             the run was stopped before its first step, so nothing was trained\n" in text
    assert "warning" not in text
    assert "dead-letters" not in text
    failed = write_summary(Run(tmp_path), 8, "failed", "learner cannot run", RESUME)
    assert f"warning            no step was trained: see {tmp_path / 'logs'}\n" in failed


def test_a_run_that_shall_train_nothing_has_no_warning(tmp_path: Path) -> None:
    assert "no step was trained" not in write_summary(Run(tmp_path), 0, "done", "", RESUME)


def test_its_commands_can_be_copied_into_a_shell(tmp_path: Path) -> None:
    run_dir = tmp_path / "it's mine"
    write_metrics(run_dir, [0.5])
    commands = [
        line.split("asyncrl", 1)[1] for line in write_summary(Run(run_dir), 1, "done", "", RESUME).splitlines()[-3:]
    ]
    assert all(str(run_dir) in shlex.split(command) for command in commands)


def test_it_has_each_error_of_a_role_with_its_count(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0.5])
    (tmp_path / "logs").mkdir()
    line = "2026-11-28 20:57:58,928 ERROR asyncrl.machine.files: the disk is full: {} waits for room\n"
    (tmp_path / "logs" / "learner.log").write_text("".join(map(line.format, ("step 1", "step 2", "step 3"))))
    text = write_summary(Run(tmp_path), 1, "done", "", RESUME)
    assert "error              learner: the disk is full: step 3 waits for room (3 times)\n" in text
    errors = json.loads((tmp_path / SUMMARY_FILE).read_text())["errors"]
    assert errors == ["learner: the disk is full: step 3 waits for room (3 times)"]


def test_the_text_of_a_summary_has_no_effect_on_a_terminal(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0.5])
    core = Core(tmp_path / "replay", make_settings())
    core.ask(FailEpisode(core.tickets(1)[0].id, "\x1b]0;title\x07\x1b[2J"))
    core.store.close()
    text = write_summary(Run(tmp_path), 8, "failed", "", RESUME)
    assert "\x1b" not in text
    assert "\ufffd]0;title" in text


def test_nobody_is_told_to_resume_a_run_that_is_running(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0.5])
    assert RESUME in summarise(Run(tmp_path), 8, "unfinished", "", RESUME).next
    assert RESUME not in summarise(Run(tmp_path), 8, "running", "", RESUME).next
