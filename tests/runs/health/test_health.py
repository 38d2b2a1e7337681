"""The sentences in which a run is told that something is wrong with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.dashboard.overview import overview
from asyncrl.observe.sinks import JsonLines, metrics_file
from asyncrl.replay.batches.selection import Contrast, Selection, Sums
from asyncrl.runs.health.evidence import STALE_VERSIONS, Evidence, read_evidence, recent_counts, recent_shares
from asyncrl.runs.health.health import RULES, judge
from asyncrl.runs.health.trends import of_evaluations, of_steps
from asyncrl.runs.run import Run
from asyncrl.runs.summary import summarise
from asyncrl.runs.summary_text import as_text, summary_rows
from asyncrl.runs.terminal import TerminalTable
from tests.runs.support import write_run


def row(step: int, low: float, high: float, **changes: float) -> dict[str, Any]:
    values = {"reward/mean": (low + high) / 2, "reward/min": low, "reward/max": high, "grad_norm": 0.5}
    return {"step": step, **values, "groups/zero_variance": 0.5, "updates_skipped": 0, **changes}


def of_rows(rows: list[dict[str, Any]], **more: Any) -> Evidence:
    trained = [each for each in rows if "reward/mean" in each]
    return Evidence("runs/x", trained[:10], trained[-50:], trained, group_size=4, **more)


def texts(seen: Evidence) -> dict[str, str]:
    return {each.kind: each.text for each in judge(seen).findings}


def counted(**values: float) -> dict[str, Any]:
    return {"step": 0, "time": 0.0, **values}


EMPTY = {"grad_norm": 0.0}
LEVEL = {"groups/zero_variance": 1.0}
RIGHT = {"outcome/mean": 1.0}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], {}),
        ([row(0, 0, 1), row(1, 0, 0, **EMPTY), row(2, 0, 0, **EMPTY)], {}),
        ([row(4, 0, 0, **EMPTY)], {"reward": "every reward of step 4 was 0"}),
        ([row(step, 1, 1, **EMPTY) for step in range(9)], {"reward": "every reward of steps 6 to 8 was 1"}),
        ([row(0, 0, 0, **EMPTY), {"step": 1, "steps_skipped": 1}, row(2, 0, 1)], {}),
        (
            [row(step, 0, 1, **EMPTY, **LEVEL) for step in range(3)],
            {"empty": "steps 0 to 2 learned nothing (updates_empty): the rewards within each group were equal"},
        ),
        ([row(step, 0, 1, **EMPTY) for step in range(3)], {"empty": "masked/any"}),
        ([row(0, 0, 1, updates_skipped=2)], {"skipped": "2 updates were left out"}),
        (
            [row(step, 0, 1, **{"groups/zero_variance": 0.95}) for step in range(12)],
            {"equal": "in 95% of the groups of steps 2 to 11 all rewards were equal"},
        ),
        (
            [row(step, 0, 1, entropy=1.5 if step < 10 else 0.1) for step in range(20)],
            {"entropy": "the entropy of the policy fell from 1.5 to 0.1 nats a token"},
        ),
        (
            [row(step, 0, 1, entropy=1.0 if step < 10 else 6.0) for step in range(20)],
            {"entropy": "the entropy of the policy rose from 1 to 6 nats a token"},
        ),
        ([row(step, 0, 1, entropy=1.0 - 0.02 * step) for step in range(20)], {}),
        (
            [row(step, 0, 1, kl_reference=0.01 if step < 5 else 3.0) for step in range(8)],
            {"kl": "the KL to the reference (kl_reference) was 3 nats a token in steps 5 to 7"},
        ),
        ([row(step, 0, 1, kl_reference=0.01 if step < 6 else 3.0) for step in range(8)], {}),
        (
            [row(step, 0, 1, **{"weights/adapters_kept": 0.02 * step}) for step in range(20)],
            {"rounded": "engines got only 29% of what the adapters learned in steps 10 to 19"},
        ),
        ([row(step, 0, 1, **{"weights/adapters_kept": 0.1 * step}) for step in range(10)], {}),
        ([row(step, 0, 1, **{"weights/adapters_kept": 0.01}) for step in range(9)], {}),
        (
            [row(step, 0, 1, **{"mismatch/k3": 13.0 if step == 3 else 0.005}) for step in range(8)],
            {"kl": "(mismatch/k3) was 13 nats a token in step 3, far more than usual: the engine samples from another"},
        ),
        (
            [row(step, 0, 1, **{"mismatch/k3": 0.3 if step > 4 else 0.005}) for step in range(8)],
            {"kl": "(mismatch/k3) was 0.3 nats a token in steps 5 to 7, far more than usual: the engine samples from"},
        ),
        ([row(step, 0, 1, **{"mismatch/k3": 0.9 if step == 3 else 0.005}) for step in range(8)], {}),
        ([row(step, 0, 1, **{"mismatch/k3": 13.0 if step == 3 else 0.005}) for step in range(14)], {}),
        (
            [row(step, 0, 1 + step % 2) for step in range(40)],
            {"reward_still": "the reward does not rise: it was 0.731 in the first third of steps 0 to 39 and 0.769"},
        ),
        (
            [row(step, 0, 2 - step / 20 + step % 2 / 10) for step in range(40)],
            {"reward_falls": "the reward falls: it was 0.8"},
        ),
        ([row(step, 0, 1 + step / 20 + step % 2 / 10) for step in range(40)], {}),
    ],
)
def test_a_warning_says_what_is_wrong_in_which_steps_and_what_to_look_at(
    rows: list[dict[str, Any]], expected: dict[str, str]
) -> None:
    found = texts(of_rows(rows))
    assert found.keys() == expected.keys()
    for kind, text in expected.items():
        assert text in found[kind]


@pytest.mark.parametrize(
    "rows",
    [
        [row(0, 0, 1, **{"outcome/mean": 0.5}), *(row(step, 1, 1, **RIGHT, **EMPTY, **LEVEL) for step in range(1, 4))],
        [row(step, 0, 1, **{"groups/zero_variance": 0.95, "outcome/mean": min(step, 0.99)}) for step in range(12)],
    ],
)
def test_a_policy_that_solves_everything_is_a_result_and_no_warning(rows: list[dict[str, Any]]) -> None:
    health = judge(of_rows(rows))
    assert health.warnings == []
    (remark,) = health.remarks
    assert "the policy solves the tasks of steps" in remark
    assert "This is a success" in remark


def test_a_reward_that_stands_still_near_its_best_is_not_said_to_be_too_hard() -> None:
    def rows(outcome: float) -> list[dict[str, Any]]:
        return [row(step, 0, 1 + step % 2, **{"outcome/mean": outcome}) for step in range(40)]

    assert texts(of_rows(rows(0.93))) == {}
    assert texts(of_rows(rows(0.8))).keys() == {"reward_still"}


def test_a_first_step_in_which_engine_and_learner_disagree_gets_a_warning_at_once() -> None:
    found = texts(of_rows([row(0, 0, 1, **{"mismatch/k3": 13.0})], is_running=True))
    assert "13 nats a token in step 0" in found["kl"]
    assert "Check that both have the same weights (docs/weights.md), model, chat template and precision" in found["kl"]


def test_a_reward_that_is_right_from_the_first_step_on_is_no_result() -> None:
    rows = [row(step, 1, 1, **RIGHT, **EMPTY, **LEVEL) for step in range(1, 4)]
    health = judge(of_rows(rows, is_running=True))
    assert health.remarks == []
    (warning,) = health.warnings
    assert warning.startswith("nearly every episode has been right since the first step")
    assert "`asyncrl inspect step runs/x 3`), and try the rule with a wrong answer" in warning


@pytest.mark.parametrize(
    ("failures", "rest"),
    [(122, "Nothing is left to train on"), (61, "The run trains only on the rest, a biased sample")],
)
def test_failing_episodes_say_if_any_are_left(failures: int, rest: str) -> None:
    seen = of_rows([], counts={"failures": failures, "accepted": 122 - failures}, newest_failure="no scorer")
    said = f"({failures} of 122) failed or could not be scored. {rest}; newest failure: no scorer."
    assert said in texts(seen)["failing"]


def test_a_run_without_groups_is_not_told_that_its_groups_are_equal() -> None:
    rows = [row(step, 0, 1, **LEVEL) for step in range(12)]
    assert texts(replace(of_rows(rows), group_size=1)) == {}


def test_a_running_run_is_judged_only_after_a_few_steps() -> None:
    rows = [row(step, 0, 0, **EMPTY) for step in range(2)]
    assert texts(of_rows(rows, is_running=True)) == {}
    assert texts(of_rows(rows)).keys() == {"reward"}


@pytest.mark.parametrize(
    ("shares", "count", "expected"),
    [
        ((0.28, 0.2), 64, "the held-out accuracy is 0.2 after 20 steps, below the 0.28 of the first"),
        ((0.28, 0.26), 64, ""),
        ((0.28, 0.26), 4096, "the held-out accuracy is 0.26"),
        ((0.2, 0.28), 64, ""),
    ],
)
def test_a_held_out_result_below_its_first_one_is_said_unless_it_is_noise(
    shares: tuple[float, float], count: int, expected: str
) -> None:
    rows = [{"step": 20 * at, "eval/accuracy": share, "eval/count": count} for at, share in enumerate(shares)]
    assert expected in (text := texts(Evidence("runs/x", evaluations=rows)).get("held_out", ""))
    assert bool(text) is bool(expected)


@pytest.mark.parametrize(
    ("shares", "count", "expected"),
    [
        ((0.07, 0.28, 0.12), 500, "the held-out accuracy is 0.12 after 40 steps, below the 0.28 of the best"),
        ((0.07, 0.28, 0.22), 500, ""),
        ((0.07, 0.28, 0.12), 30, ""),
        ((0.07, 0.28, 0.02), 500, "below the 0.28 of the best"),
        ((0.1, *[0.3] * 50, 0.2), 500, ""),
    ],
)
def test_a_held_out_result_far_below_its_best_one_is_said(shares: tuple[float, ...], count: int, expected: str) -> None:
    rows = [{"step": 20 * at, "eval/accuracy": share, "eval/count": count} for at, share in enumerate(shares)]
    assert expected in (text := texts(Evidence("runs/x", evaluations=rows)).get("held_out", ""))
    assert bool(text) is bool(expected)


@pytest.mark.parametrize(
    ("mismatch", "said"), [(0.0, "the distance to the policy that sampled"), (0.01, "a single step")]
)
def test_a_large_update_means_old_data_if_the_policy_that_sampled_is_the_proximal_one(
    mismatch: float, said: str
) -> None:
    rows = [row(step, 0, 1, **{"update/k3": 0.5, "mismatch/k3": mismatch}) for step in range(12)]
    assert said in texts(of_rows(rows))["kl"]


@pytest.mark.parametrize(("share", "warns"), [(0.7, True), (0.2, False)])
def test_a_loss_that_gives_most_tokens_no_weight_is_said(share: float, warns: bool) -> None:
    seen = of_rows([row(step, 0, 1, **{"clip/faded": share}) for step in range(12)])
    assert ("70% of the tokens of steps 2 to 11 a weight below 0.01" in texts(seen).get("faded", "")) is warns


@pytest.mark.parametrize(("age", "named"), [(7.9, True), (1.2, False)])
def test_the_warning_of_a_fallen_result_names_the_age_of_old_data(age: float, named: bool) -> None:
    evaluations = [{"step": 64 * at, "eval/accuracy": share, "eval/count": 500} for at, share in ((0, 0.2), (1, 0.01))]
    seen = replace(of_rows([row(step, 0, 1, **{"lag/mean": age}) for step in range(12)]), evaluations=evaluations)
    assert ("they were 7.9 versions old on average" in texts(seen)["held_out"]) is named


def test_truncated_episodes_and_malformed_calls_are_warned_of_by_their_newest_shares() -> None:
    calls = {"tool_calls": 1000.0, "tool_malformed": 10.0}
    before = counted(episodes=1000, truncated=20, **calls)
    after = counted(episodes=1100, truncated=111, tool_calls=1100, tool_malformed=40, tool_unknown=20)
    found = texts(Evidence("runs/x", actors=[[before, after]]))
    assert found.keys() == {"truncated", "malformed"}
    assert "91% of the newest 100 episodes were truncated" in found["truncated"]
    assert "50% of the newest 100 tool calls were malformed" in found["malformed"]
    assert texts(Evidence("runs/x", actors=[[before]])) == {}


def test_the_newest_share_counts_from_the_start_of_a_restarted_actor_and_over_all_actors() -> None:
    old, new = counted(episodes=5000, truncated=5000), counted(episodes=40, truncated=10)
    other = [counted(episodes=count, truncated=0) for count in (0, 30, 60)]
    assert recent_counts([[old, new], other], ("truncated",), ("episodes",)) == (10, 100)
    assert recent_shares([[old, new], other]) == {"truncated": 0.1}


def test_a_filter_that_refuses_nearly_everything_is_warned_of() -> None:
    counts = {"accepted": 1000, "filtered": 984}
    assert (
        "replay.filter refused 98% of the episodes (984 of 1000)" in texts(Evidence("runs/x", counts=counts))["filter"]
    )
    assert texts(Evidence("runs/x", counts={"accepted": 1000, "filtered": 500})) == {}
    assert texts(Evidence("runs/x", refusing="the filters refuse all"))["filter"] == "the filters refuse all"


@pytest.mark.slow
def test_rewards_of_an_environment_without_a_weight_are_warned_of_once_an_episode_has_some(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [0.1, 0.2])
    scorer = JsonLines(metrics_file(folder, "scoring-0"), lambda: 110.0)
    scorer.log(0, {"environment_mean": 0.0, "rules_mean": 0.5})
    assert "unread" not in texts(read_evidence(Run(folder), is_running=True))
    scorer.log(0, {"environment_mean": 0.25, "rules_mean": 0.5})
    found = texts(read_evidence(Run(folder), is_running=True))["unread"]
    assert "nothing trains on rewards of tools, environments or simulated users (0.25 on average)" in found
    assert "give these rewards a weight (scoring.shaping.environment_weight=1.0), train each turn with its own" in found


def test_no_rule_finds_anything_in_a_run_without_rows() -> None:
    assert all(rule(Evidence("runs/x")) is None for rule in RULES)


def test_a_trend_has_a_way_only_beyond_its_noise() -> None:
    noisy = [{"step": step, "reward/mean": 0.5 + 0.2 * (-1) ** step + step / 400} for step in range(20)]
    clear = [{"step": step, "reward/mean": 0.5 + 0.01 * (-1) ** step + step / 40} for step in range(20)]
    for rows, way in ((noisy, ""), (clear, "up"), (clear[:2], "")):
        trend = of_steps(rows, rows, "reward/mean")
        assert trend is not None
        assert trend.way == way
    shares = [{"step": step, "eval/accuracy": share, "eval/count": 100} for step, share in ((0, 0.2), (9, 0.4))]
    trend = of_evaluations(shares, "eval/accuracy")
    assert trend is not None
    assert trend.way == "up"
    assert of_evaluations([], "eval/accuracy") is None


@pytest.mark.slow
def test_a_biased_choice_of_the_age_bound_is_a_warning_with_both_means(tmp_path: Path) -> None:
    rows = []
    for deviation in (-45.0, -50.0):
        trained, evicted = Sums(), Sums()
        trained.add(100, 2, 0.5)
        evicted.add(900, 2, 0.5)
        contrasts = {"length": Contrast(deviation, 50.0, 400), "turns": Contrast(3.0, 50.0, 400)}
        rows.append(dict(Selection({"trained": trained, "evicted": evicted}, contrasts).values()))
    for shard, values in enumerate(rows):
        JsonLines(metrics_file(tmp_path, f"replay-{shard}"), lambda: 1.0).log(0, values)
    (found,) = judge(read_evidence(Run(tmp_path), is_running=True)).findings
    assert found.kind == "selection"
    assert "Means of the trained and of the others: length 100 and 900. Raise replay.max_lag" in found.text


def test_the_evidence_of_a_run_is_its_first_newest_and_spread_rows(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path / "run", [step / 400 for step in range(400)]))
    seen = read_evidence(run, is_running=False)
    assert [each["step"] for each in seen.first] == list(range(10))
    assert [each["step"] for each in seen.newest] == list(range(350, 400))
    assert (seen.spread[0]["step"], seen.spread[-1]["step"]) == (0, 399)
    assert 100 <= len(seen.spread) <= 150
    assert [each["step"] for each in seen.evaluations] == [0, 400]
    assert (seen.counts["accepted"], seen.group_size) == (3200, 8)
    assert judge(seen).warnings == []
    assert {name: trend.way for name, trend in judge(seen).trends.items()} == {
        "reward": "up",
        "held-out accuracy": "up",
    }


def test_an_actor_that_has_left_is_no_evidence(tmp_path: Path) -> None:
    now = [100.0]
    gone, present = (JsonLines(metrics_file(tmp_path, f"actor-{at}"), lambda: now[0]) for at in range(2))
    gone.log(0, {"episodes": 100, "truncated": 100})
    now[0] = 300.0
    present.log(STALE_VERSIONS + 1, {"episodes": 100, "truncated": 0})
    assert recent_shares(read_evidence(Run(tmp_path), is_running=True).actors) == {"truncated": 0.0}


def test_an_actor_whose_clock_is_ahead_hides_no_other_actor(tmp_path: Path) -> None:
    for at, (ahead_s, truncated) in enumerate(((0.0, 100), (600.0, 0))):
        actor = JsonLines(metrics_file(tmp_path, f"actor-{at}"), lambda ahead_s=ahead_s: 100.0 + ahead_s)
        actor.log(7 + at, {"episodes": 100, "truncated": truncated})
    assert recent_shares(read_evidence(Run(tmp_path), is_running=True).actors) == {"truncated": 0.5}


@pytest.mark.slow
def test_console_page_status_and_summary_say_the_same_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", [0.1, 0.2, 0.3, 0.4])
    run = Run(folder)
    table = TerminalTable(run, 4, 1, lambda: {"actor-1": 0})
    actor = JsonLines(metrics_file(folder, "actor-1"), lambda: 110.0)
    actor.log(0, {"episodes": 100, "truncated": 91, "tool_calls": 100, "tool_malformed": 50})
    warnings = judge(read_evidence(run, is_running=True)).warnings
    assert [text.partition(" of the")[0] for text in warnings] == ["91%", "50%"]
    table.update()
    shown = capsys.readouterr().err
    assert "truncated 91%  malformed calls 50%" in shown
    assert all(f"warning: {text}" in shown for text in warnings)
    assert overview(run)["warnings"] == warnings
    summary = summarise(run, 4, "done", "", "")
    assert summary.warnings[:2] == warnings
    assert summary.shares == {"truncated": 0.91, "malformed calls": 0.5}
    assert all(f"warning            {text}" in as_text(summary_rows(summary)) for text in warnings)
