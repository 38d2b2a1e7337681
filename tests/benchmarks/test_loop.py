"""The workload and the arithmetic of benchmarks.gpu_loop; tests/sglang runs it whole."""

from __future__ import annotations

import statistics
from itertools import count
from pathlib import Path

import pytest
import torch

from asyncrl.observe.sinks import JsonLines, metrics_file
from benchmarks.loop_bare import Answers, Load, client_rate
from benchmarks.loop_figures import FIRST, figures
from benchmarks.loop_report import draw, table
from benchmarks.loop_runs import server_gpus
from benchmarks.loop_workload import DrawnUser, Workload
from benchmarks.shapes import SHAPES, end_turns, make_model


def test_an_episode_is_the_same_at_each_call_and_lengths_have_the_median_and_the_bounds_of_the_file() -> None:
    workload = Workload.named("heavy")
    episodes = [workload.episode(f"t{number:09d}.0") for number in range(2000)]
    assert episodes[7] == workload.episode("t000000007.0")
    assert {len(episode) for episode in episodes} == {2, 3, 4}
    lengths = [turn.tokens for episode in episodes for turn in episode]
    assert statistics.median(lengths) == pytest.approx(300, rel=0.1)
    assert min(lengths) >= 16
    assert max(lengths) == 3000
    assert all(0.5 <= turn.wait_s <= 30 for episode in episodes for turn in episode)


def test_short_episodes_have_short_messages_and_no_waits_and_the_policy_ends_their_turns() -> None:
    workload = Workload.named("short")
    episodes = [workload.episode(f"t{number:09d}.0") for number in range(500)]
    turns = [turn for episode in episodes for turn in episode]
    assert {len(episode) for episode in episodes} == {4, 5, 6}
    assert workload.mean_turn == 40
    assert {(turn.tokens, turn.wait_s) for turn in turns} == {(256, 0.0)}
    assert (min(turn.message for turn in turns), max(turn.message for turn in turns)) == (10, 30)
    assert workload.longest_episode < 2300


async def test_the_simulated_user_answers_until_the_episode_has_its_turns() -> None:
    user, workload = DrawnUser({"workload": "short"}), Workload.named("short")
    messages: list[dict[str, str]] = [{"role": "user", "content": "a"}]
    turns = workload.episode("t1.0")
    for turn in turns[:-1]:
        messages.append({"role": "assistant", "content": "b"})
        ends, text, score, _ = await user.generate_response("t1.0.2", messages)
        assert (ends, len(str(text)), score) == (False, turn.message, None)
        messages.append({"role": "user", "content": str(text)})
    messages.append({"role": "assistant", "content": "b"})
    assert (await user.generate_response("t1.0.2", messages))[0] is True
    assert (await user.generate_response("t1.0.1", messages[:2]))[1] == messages[2]["content"], "a repeated attempt"


def test_a_model_with_random_weights_ends_its_turns_with_the_wanted_probability() -> None:
    model, end = make_model("tiny"), SHAPES["tiny"].vocabulary - 1
    end_turns(model, end, 40.0)
    tokens = torch.randint(end, (4, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        shares = model(tokens, use_cache=False).logits[:, 16:].softmax(-1)[..., end]
    assert shares.mean().item() == pytest.approx(1 / 40, rel=0.1)
    assert shares.min().item() > 1 / 80
    assert shares.max().item() < 1 / 20


@pytest.mark.slow
async def test_a_bare_client_plays_both_workloads_on_an_embedded_engine(tmp_path: Path) -> None:
    make_model("tiny").save_pretrained(tmp_path)
    for workload, stop in (("heavy-tiny", ()), ("short-tiny", (5,))):
        load = Load(workload, 4096, stop, at_once=4, group=2, warm_s=0.1, measured_s=0.2, model=str(tmp_path))
        assert await client_rate(load) > 0


@pytest.mark.parametrize(
    ("gpus", "servers", "expected"),
    [(0, None, [0]), (0, 2, [0, 0]), (1, None, [0]), (2, None, [1]), (2, 2, [0, 1]), (4, None, [1, 2, 3]), (4, 1, [3])],
)
def test_servers_are_on_the_last_gpus_and_on_the_learners_where_there_are_as_many(
    gpus: int, servers: int | None, expected: list[int]
) -> None:
    assert list(server_gpus(gpus, servers)) == expected
    assert list(server_gpus(gpus, servers, 1 + bool(gpus))) == sorted(expected * (1 + bool(gpus)))


def test_the_tokens_of_an_answer_count_where_its_request_overlaps_the_time() -> None:
    answers = Answers([(0.0, 4.0, 400), (3.0, 5.0, 100), (8.0, 9.0, 50)])
    assert answers.rate(2.0, 4.0) == (200 + 50) / 2


PAUSES = (0.0, 2.0, 2.02, 2.04, 2.09)
"""Seconds for which pushes have stopped servers, by step: the first ones longer than those that count."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A learner with a step every 2 s, and an actor with 100 tokens/s, half of its time idle."""

    def sink(role: str) -> JsonLines:
        times = iter(range(0, 1000, 2))
        return JsonLines(metrics_file(tmp_path, role), clock=lambda: float(next(times)))

    learner, actor, replay = sink("learner"), sink("actor-0"), sink("replay")
    for step in range(FIRST + 3):
        seconds = {"seconds/step": 2.0, "seconds/wait": 0.5, "seconds/fetch": 0.1, "seconds/train": 1.0}
        lags = {"lag/0": 3, "lag/1": 1, "token_lag/0": 0.5, "token_lag/2": 0.5}
        learner.log(step, {**seconds, **lags, "trajectories_trained": 4 * (step + 1), "tokens_sampled": 60})
        counters = {"tokens": 200 * step, "idle_seconds": step, "segments": 8 * step, "cut_segments": step}
        pushes = {"weights_updates": step, "weights_transfer_s": 0.2 * step, "weights_switch_s": 0.1 * step}
        pauses = {
            "push_pauses": step,
            "push_pause_s": PAUSES[step],
            "push_pause_last_s": PAUSES[step] - PAUSES[step - 1],
        }
        actor.log(step, {**counters, **pushes, **pauses, "weights_bytes": 3e6 * step, "seconds": 2 * step})
        decided = {f"decided/{end}/episodes": 2 for end in ("trained", "evicted")}
        decided |= {"decided/trained/tokens": 20, "decided/evicted/tokens": 4000}
        replay.log(step, {"tokens_thrown_away": 70 if step < FIRST else 100, "evicted": step, **decided})
    return tmp_path


def test_figures_leave_out_the_first_steps_and_compare_the_fleet_with_the_bare_rate(run_dir: Path) -> None:
    row = figures(run_dir, bare_tokens_per_s=125.0)
    assert (row["steps"], row["seconds"], row["samples_per_s"]) == (3, 6.0, 2.0)
    assert (row["fleet_tokens_per_s"], row["fleet_to_bare"], row["fleet_idle"]) == (100.0, 0.8, 0.5)
    assert row["learner_idle"] == 0.3
    assert row["seconds_of_a_step"]["train"] == 1.0
    assert (row["lags"], row["token_lags"]) == ({0: 0.75, 1: 0.25}, {0: 0.5, 2: 0.5})
    pauses = {"pauses": 3, "pause_median_s": 0.02, "pause_p95_s": 0.047, "pause_max_s": 0.05}
    assert row["push"] == {"transfer_s": 0.2, "switch_s": 0.1, "megabytes": 3.0, **pauses}
    assert row["counts"] == {"updates": 3, "requests": 24, "requests_cut": 3}
    assert (row["thrown_away_tokens"], row["evicted"]) == (30, 3)
    lines = table([{"max_lag": 0, **row}, {"max_lag": 4, **row, "samples_per_s": 5.0}]).splitlines()
    assert lines[2].startswith("| 0 | 2.00 | 1.00 |  | 100 | 80% | 50% | 30% |")
    assert "| 0.200, 0.100 | 20, 47, 50 |" in lines[2]
    assert lines[2].endswith("| 30 | 1,005, 10, 2,000 |")
    assert lines[3].startswith("| 4 | 5.00 | 2.50 |  |")


def test_a_counter_of_a_process_that_was_started_again_goes_on(tmp_path: Path) -> None:
    learner = JsonLines(metrics_file(tmp_path, "learner"), clock=count(0.0, 10.0).__next__)
    for step in range(FIRST + 3):
        learner.log(step, {"seconds/step": 10.0, "trajectories_trained": step, "tokens_sampled": 1})
    actor = JsonLines(metrics_file(tmp_path, "actor-0"), clock=count(0.0, 10.0).__next__)
    for tokens in (100, 200, 300, 50, 150):
        actor.log(0, {"tokens": tokens, "idle_seconds": 0.0, "seconds": 1.0})
    assert figures(tmp_path, 1.0)["fleet_tokens_per_s"] == pytest.approx((100 + 50 + 100) / 30, abs=0.1)


def test_a_run_that_is_over_before_the_actor_writes_metrics_has_the_mean_rate_since_its_start(tmp_path: Path) -> None:
    learner = JsonLines(metrics_file(tmp_path, "learner"), clock=count(100.0, 1.0).__next__)
    for step in range(FIRST + 1):
        learner.log(step, {"seconds/step": 1.0, "trajectories_trained": step, "tokens_sampled": 1})
    actor = JsonLines(metrics_file(tmp_path, "actor-0"), clock=lambda: 105.0)
    actor.log(0, {"tokens": 700, "idle_seconds": 0.0, "seconds": 7.0})
    assert figures(tmp_path, 1.0)["fleet_tokens_per_s"] == 100.0


def test_stops_of_pushes_between_two_rows_are_told_apart_and_go_on_after_a_restart(tmp_path: Path) -> None:
    learner = JsonLines(metrics_file(tmp_path, "learner"), clock=count(0.0, 10.0).__next__)
    for step in range(FIRST + 3):
        learner.log(step, {"seconds/step": 10.0, "trajectories_trained": step, "tokens_sampled": 1})
    actor = JsonLines(metrics_file(tmp_path, "actor-0"), clock=count(0.0, 10.0).__next__)
    # Counted, their sum and the last: two stops of 0.1 and 0.3 s, then one of 0.2 s of a process that is new.
    for pauses, total, last in ((1, 9.0, 9.0), (1, 9.0, 9.0), (3, 9.4, 0.3), (1, 0.2, 0.2), (1, 0.2, 0.2)):
        values = {"push_pauses": pauses, "push_pause_s": total, "push_pause_last_s": last}
        actor.log(0, {"tokens": 0, "idle_seconds": 0.0, "seconds": 1.0, **values})
    push = figures(tmp_path, 1.0)["push"]
    assert push == {"pauses": 3, "pause_median_s": 0.2, "pause_p95_s": 0.29, "pause_max_s": 0.3}


@pytest.mark.slow
def test_the_picture_has_the_age_bounds_of_all_results_in_one_order(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of different sizes are often measured at different bounds."""
    from matplotlib.axes import Axes

    drawn: list[list[float]] = []
    plot = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda axes, x, *rest, **named: (drawn.append(x), plot(axes, x, *rest, **named)))
    row = figures(run_dir, 125.0)
    results = {name: [{"max_lag": lag, **row} for lag in lags] for name, lags in (("a", (0, 4)), ("b", (0, 1, 4)))}
    draw(results, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    assert [drawn[0], drawn[4]] == [[0, 2], [0, 1, 2]]


def test_a_run_that_ended_in_its_first_steps_has_no_figures(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs 3"):
        figures(tmp_path, 1.0)
