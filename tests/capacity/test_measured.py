"""Rates out of a run's files, and the command that uses them."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from msgspec.structs import replace

from asyncrl.capacity.command import ForecastProgress, _cells, notes
from asyncrl.capacity.description import Rates, RunDescription, Sizes, TypicalEpisode, read_description
from asyncrl.capacity.measured import decoding_times, describe
from asyncrl.capacity.simulation import simulate
from asyncrl.capacity.splits import balanced_rate, splits
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.replay.store.records import TrajectoryRecord
from asyncrl.replay.store.store import Store
from asyncrl.runs.run import Run
from tests.helpers import status_of

STEP = {
    "reward/mean": 1.0,
    "groups/zero_variance": 0.25,
    "tokens": 1000.0,
    "seconds/step": 4.0,
    "seconds/wait": 1.0,
    "seconds/proximal": 0.5,
    "seconds/train": 1.5,
    "seconds/publish": 0.75,
}


def actor_row(number: int) -> dict[str, Any]:
    """Busy half of the time, with 20 requests then, at 40 ms a pass."""
    return {
        "seconds": 10.0 * number,
        "tokens": 2500 * number,
        "episodes": 25 * number,
        "failed": 0,
        "idle": 0.5,
        "generate_s": 4.0,
        "wait_s": 0.5,
        "tools_s": 2.0,
        "weights_updates": 2 * number,
        "weights_transfer_s": 0.2 * number,
        "weights_switch_s": 0.1 * number,
    }


def scorer_row(number: int) -> dict[str, Any]:
    return {"time": 700.0 + 5 * number, "labelled": 10 * number, "handed_on": 0, "idle": 0.8}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    numbered = ({"step": number, "time": 100.0 * number, **row} for number, row in enumerate(rows))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in numbered))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of eight steps on two ranks. Its store has a group of two episodes."""
    config = TrainConfig()
    config.model.path, config.data.train = "x", ["x"]
    config.learner.batch_size, config.learner.group_size, config.cluster.learner_ranks = 16, 2, 2
    config.replay.max_lag = 3
    folder = tmp_path / "run"
    for name, rows in (
        ("learner", [{**STEP, "seconds/train": 60.0}] * 2 + [STEP] * 6),
        ("actor-0", [actor_row(number) for number in range(4)]),
        ("scoring-0", [scorer_row(number) for number in range(4)]),
    ):
        write_rows(folder / "metrics" / f"{name}.jsonl", rows)
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    store = Store(folder / "replay", 1 << 24, durable=False)
    with store.transaction() as tx:
        for member, (sampled, seconds) in enumerate(((50, 3.5), (150, 11.5))):
            record = TrajectoryRecord("t000000000", member, 2 * sampled, sampled, 0, turns=3, seconds=seconds)
            record.save(tx, f"t000000000.{member}.0")
    store.close()
    return folder


@pytest.mark.slow
def test_rates_are_those_of_the_runs_files(run: Path) -> None:
    found = describe(Run(run))
    rates = found.rates
    # A token takes 4 s / 100 of generation. What is left of 3.5 and 11.5 s, without 0.5 s of waiting, are tools.
    assert [(each.sampled, each.tokens, each.turns) for each in rates.tasks[0]] == [(150, 300, 3), (50, 100, 3)]
    assert [each.tools_s for each in rates.tasks[0]] == pytest.approx([5.0, 1.0])
    assert rates.pass_s + 20 * rates.request_s == pytest.approx(0.04)
    assert rates.token_s == pytest.approx(2.0 * 2 / 1000)
    assert (rates.step_s, rates.publish_s) == pytest.approx((0.25, 0.75))
    assert (rates.transfer_s, rates.switch_s) == pytest.approx((0.1, 0.05))
    assert rates.label_s == pytest.approx(0.1)
    assert (rates.zero_variance, rates.failed, rates.requests) == (0.25, 0.0, [20.0, 20.0])
    assert found.sizes == Sizes(engines=1, concurrency=16, learner_gpus=2, batch_size=16, group_size=2, max_lag=3)


@pytest.mark.slow
def test_actors_and_scorers_that_were_removed_long_ago_are_not_counted(run: Path) -> None:
    metrics = run / "metrics"
    write_rows(metrics / "actor-0.jsonl", [actor_row(number) for number in range(9)])
    write_rows(metrics / "actor-1.jsonl", [{**actor_row(number), "time": 95.0 * number} for number in range(9)])
    write_rows(metrics / "scoring-1.jsonl", [{**scorer_row(number), "time": 500.0} for number in range(2)])
    before = describe(Run(run)).sizes
    assert (before.engines, before.concurrency, before.scorers) == (2, 16, 2)
    write_rows(metrics / "actor-7.jsonl", [{**actor_row(number), "servers": 4} for number in range(4)])
    write_rows(metrics / "scoring-7.jsonl", [{**scorer_row(number), "time": 400.0} for number in range(2)])
    assert describe(Run(run)).sizes == before


@pytest.mark.slow
def test_the_workers_of_a_scorer_for_several_shards_are_one_scorer_which_is_busy_while_one_of_them_is(
    run: Path,
) -> None:
    metrics = run / "metrics"
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["replay"]["shards"] = 2
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (metrics / "scoring-0.jsonl").unlink()
    for shard in range(2):
        write_rows(metrics / f"scoring-0-shard-{shard}.jsonl", [scorer_row(number) for number in range(4)])
    found = describe(Run(run))
    assert found.sizes.scorers == 1
    # Each is busy for a fifth of the time, so one of them for 36%, in which both label 40 trajectories in 10 s.
    assert found.rates.label_s == pytest.approx(0.1 * 0.36 / 0.4)


@pytest.mark.slow
def test_a_run_that_has_not_done_enough_is_refused(run: Path) -> None:
    write_rows(run / "metrics" / "learner.jsonl", [STEP] * 3)
    with pytest.raises(
        ConfigError,
        match=r"has metrics of 3 steps, .* at least 3 steps after its first 2; .*resume .*/run learner\.steps=30",
    ):
        describe(Run(run))


@pytest.mark.slow
def test_a_step_that_a_stop_cut_short_is_left_out(run: Path) -> None:
    before = describe(Run(run))
    cut = {name: value for name, value in STEP.items() if name != "seconds/publish"}
    write_rows(
        run / "metrics" / "learner.jsonl", [{**STEP, "seconds/train": 60.0}] * 2 + [STEP] * 3 + [cut] + [STEP] * 3
    )
    assert describe(Run(run)) == before


@pytest.mark.slow
def test_metrics_that_are_damaged_or_lack_values_are_named(run: Path) -> None:
    write_rows(run / "metrics" / "scoring-0.jsonl", [{"time": 1.0}, {"time": 2.0}])
    with pytest.raises(ConfigError, match=r"'labelled'.*different version"):
        describe(Run(run))
    (run / "metrics" / "scoring-0.jsonl").write_text("garbage\n")
    with pytest.raises(ConfigError, match="damaged"):
        describe(Run(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "reason"),
    [
        ("learner", [{**STEP, "tokens": 0.0}] * 8, "ZeroDivisionError"),
        ("actor-0", [{**actor_row(number), "tokens": 1e12 * number} for number in range(4)], "would take no time"),
    ],
)
def test_metrics_of_which_a_rate_would_be_0_or_infinite_are_named(
    name: str, rows: list[dict[str, Any]], reason: str, run: Path
) -> None:
    write_rows(run / "metrics" / f"{name}.jsonl", rows)
    with pytest.raises(ConfigError, match=f"the metrics of .* cannot be used: .*{reason}.*damaged"):
        describe(Run(run))


def test_the_times_of_a_pass_are_fitted_and_never_negative() -> None:
    def windows(*times: tuple[float, float]) -> list[tuple[float, float]]:
        return [(requests, requests / seconds) for requests, seconds in times]

    assert decoding_times(windows((10, 0.03), (20, 0.05), (40, 0.09))) == pytest.approx((0.01, 0.002))
    assert decoding_times(windows((10, 0.05), (20, 0.04)))[1] == 0
    assert decoding_times(windows((10, 0.01), (20, 0.04)))[0] == 0


@pytest.mark.slow
def test_the_command_saves_reads_and_forecasts(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "saved.yaml"
    assert call(["--from", str(run), "--save", str(file), "--steps", "3"]) == 0
    out = capsys.readouterr().out
    assert "1,000 steps" in out
    assert "means over 6 measured learner steps, which is few: `asyncrl resume RUN learner.steps=30`" in out
    assert read_description(file) == describe(Run(run))
    assert call([str(file), "--max-lag", "1", "2", "--old-groups", "evict", "both", "--steps", "3", "--json"]) == 0
    sizes = [each["sizes"] for each in json.loads(capsys.readouterr().out)]
    assert [(each["max_lag"], each["wait_s"], each["masks_old"]) for each in sizes] == [
        (lag, *treated) for lag in (1, 2) for treated in ((0.0, False), (None, True))
    ]
    assert call([str(file), "--max-lag", "0", "1", "--old-groups", "wait", "both", "--steps", "3", "--json"]) == 0
    found = [read_description(file).sizes.treated(how, lag) for lag, how in ((0, "evict"), (1, "wait"), (1, "both"))]
    sizes = [each["sizes"] for each in json.loads(capsys.readouterr().out)]
    assert sizes == [msgspec.to_builtins(each) for each in found], "without an age there is nothing to treat"
    assert call([str(file), "--old-groups", "wait", "--steps", "3"]) == 0
    assert "for at most the time for which the learner trains a step. For another limit" in capsys.readouterr().out
    words = [str(file), "--gpus", "8", "--max-lag", "0", "2", "--steps", "3", "--price", "2", "--json"]
    assert call(words) == 0
    forecasts = json.loads(capsys.readouterr().out)
    assert {each["sizes"]["max_lag"] for each in forecasts} == {0, 2}
    assert all(each["sizes"]["learner_gpus"] + each["sizes"]["engines"] == 8 for each in forecasts)
    assert all(each["price_per_step"] == pytest.approx(8 * 2 * each["seconds_per_step"] / 3600) for each in forecasts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nothing"], "nothing: there is no such run, and no such file"),
        (["RUN", "cluster.gpus=8"], "cluster.gpus=8: there is no such option; did you mean --gpus 8?"),
        (["RUN", "--max_lag", "2"], "--max_lag: there is no such option; did you mean --max-lag?"),
        (["--steps", "3", "RUN", "--from", "RUN"], "name one run"),
        (["RUN", "--gpus", "12", "--host-gpus", "8"], "--host-gpus 8: 12 GPUs are not a whole number of hosts"),
        (["--from", "RUN", "--gpus", "1"], "the learner needs at least 1 of them, and the engines 1"),
        (
            ["RUN", "--gpus", "8", "--host-gpus", "8"],
            "--gpus 8: the learner needs at least 8 of them, and the engines 8",
        ),
        (["RUN", "--gpus", "12", "--host-gpus", "8", "--learner-gpus", "8"], "12 GPUs are not a whole number of hosts"),
        (
            ["RUN", "--gpus", "16", "--host-gpus", "8", "--learner-gpus", "3"],
            "--learner-gpus 3: it must be a multiple of --host-gpus 8",
        ),
        (["--from", "RUN", "--gpus", "4", "--learner-gpus", "4"], "is too small for an engine"),
        (["--from", "RUN", "--price", "nan"], "nan is not a price"),
        (["--from", "RUN", "--max-lag", "1000000"], "too many episodes to simulate"),
        (["--from", "RUN", "--batch-size", "3"], "batch_size 3 is not a multiple of group_size 2"),
    ],
)
def test_wrong_arguments_are_refused_with_the_reason(
    words: list[str], reason: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call([str(run) if word == "RUN" else word for word in words]) == 2
    assert reason in capsys.readouterr().err


def test_a_file_with_a_wrong_value_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("rates: {tasks: [[{sampled: 0, tokens: 1}]], pass_s: 1, request_s: 0}")
    with pytest.raises(ConfigError, match=r"rates\.tasks"):
        read_description(tmp_path / "bad.yaml")
    rates = "{tasks: [[{sampled: 1, tokens: 1}]], pass_s: 1, request_s: 0, token_s: 0}"
    wrong = {
        "oversample: .inf": r"sizes\.oversample",
        "sampler: olderst": "'olderst' must be one of oldest, fifo, freshest, prioritised .*sizes",
    }
    for size, reason in wrong.items():
        (tmp_path / "bad.yaml").write_text(f"{{rates: {rates}, sizes: {{engines: 1, {size}}}}}")
        with pytest.raises(ConfigError, match=reason):
            read_description(tmp_path / "bad.yaml")
    for seconds in ("0", "5e-324"):
        fast = rates.replace("pass_s: 1", f"pass_s: {seconds}")
        (tmp_path / "bad.yaml").write_text(f"{{rates: {fast}, sizes: {{engines: 1}}}}")
        with pytest.raises(ConfigError, match=r"pass_s and request_s together are less than 1e-09: .* no time"):
            read_description(tmp_path / "bad.yaml")


def test_numbers_are_read_as_people_write_them(tmp_path: Path) -> None:
    text = (
        "{rates: {tasks: [[{sampled: 1, tokens: 1}]], pass_s: 1, request_s: 2e-4, token_s: 1E-5}, sizes: {engines: 1}}"
    )
    (tmp_path / "rates.yaml").write_text(text)
    rates = read_description(tmp_path / "rates.yaml").rates
    assert (rates.request_s, rates.token_s) == (2e-4, 1e-5)


@pytest.mark.parametrize("gpus", [2, 8, 10_000])
def test_splits_leave_gpus_for_both_sides(gpus: int) -> None:
    rates = Rates(tasks=[[TypicalEpisode(sampled=100, tokens=200)]], pass_s=0.01, request_s=0.0, token_s=1e-4)
    run = RunDescription(rates, Sizes(engines=1, engine_gpus=1, batch_size=64 * gpus))
    found = splits(run, gpus)
    assert all(each.gpus == gpus and each.engines >= 1 for each in found)
    assert len({each.learner_gpus for each in found}) == len(found) == min(gpus - 1, 5)


@pytest.mark.slow
def test_busy_engines_whose_tokens_are_thrown_away_are_not_said_to_need_more_gpus() -> None:
    rates = Rates(tasks=[[TypicalEpisode(sampled=100, tokens=200)]], pass_s=0.01, request_s=1e-3, token_s=0.0)
    run = RunDescription(rates, Sizes(engines=2, batch_size=32, group_size=8, concurrency=32))
    busy = replace(simulate(run, 5), learner_idle=0.5, engine_idle=0.0, scorer_idle=0.9, discarded=0.0)
    for discarded, advice in ((0.1, "give them more GPUs"), (0.4, "40% of the sampled tokens are thrown away")):
        found = replace(busy, discarded=discarded)
        assert advice in " ".join(notes(run, [found], found))
    assert "-0%" not in [*_cells(replace(busy, learner_idle=-0.001), None)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "admitted"),
    [
        ({}, 4 * 32),
        ({"oversample": 1.5}, 4 * 32 + 16),
        ({"max_times_sampled": 2}, (3 + 2) * 32 / 2),
        ({"max_times_sampled": 2, "oversample": 1.5}, (3 + 2) * 32 / 2 + 16),
    ],
)
def test_the_age_bound_lets_as_many_episodes_run_as_the_replay_admits(changes: dict[str, Any], admitted: float) -> None:
    rates = Rates(tasks=[[TypicalEpisode(sampled=100, tokens=200)]], pass_s=0.01, request_s=0.0, token_s=1e-6)
    sizes = Sizes(engines=2, batch_size=32, group_size=8, concurrency=1000, max_lag=3, **changes)
    assert balanced_rate(rates, sizes) == pytest.approx(admitted), "an episode takes 1 s"
    run = RunDescription(rates, sizes)
    waiting = replace(simulate(run, 3), learner_idle=0.5, engine_idle=0.5, scorer_idle=0.9)
    assert f"it lets {admitted:.0f} episodes run" in " ".join(notes(run, [waiting], waiting))


@pytest.mark.slow
def test_whole_hosts_are_divided_and_gpus_without_work_are_counted(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call([str(run), "--gpus", "16", "--host-gpus", "8", "--engine-gpus", "4", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    pools = "{train: {nodes: 1, gpus: 8}, rollout: {nodes: 1, gpus: 8}}"
    assert f"Options for the fastest forecast: cluster.pools='{pools}' cluster.roles='{{actor: rollout}}'" in out
    assert "unused" not in out
    words = [str(run), "--gpus", "16", "--learner-gpus", "3", "4", "--engine-gpus", "4", "--steps", "2"]
    assert call(words) == 0
    assert "Engines of 4 GPUs leave some of 16 GPUs unused: 1 at 3 learner GPUs." in capsys.readouterr().out


def test_progress_is_a_line_now_and_then_where_nothing_is_a_terminal() -> None:
    now, out = 0.0, io.StringIO()
    progress = ForecastProgress(out, lambda: now)
    for now in (1.0, 9.0, 11.0, 12.0, 22.0):
        progress.update(1, 2, now / 50)
    assert out.getvalue().splitlines() == ["forecast 1 of 2:  22%", "forecast 1 of 2:  44%"]


def test_a_plan_without_a_run_is_refused_with_the_command_that_needs_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["--gpus", "8"]) == 2
    assert "asyncrl plan: name the run" in (error := capsys.readouterr().err)
    assert "--plan`" in error


def call(words: list[str]) -> int:
    return status_of("plan", *words)
