"""What benchmarks.gpu_loop keeps of a result, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from benchmarks.gpu_loop import named, parse
from benchmarks.loop_result import Result
from benchmarks.record import RESULTS

SETTINGS = {"size": "tiny", "steps": 4}


def row(max_lag: int, samples_per_s: float = 2.0) -> dict[str, Any]:
    phases = {"step": 2.0, "train": 1.0, "proximal": 0.0, "wait": 1.0}
    rates = {"samples_per_s": samples_per_s, "fleet_tokens_per_s": 100.0, "fleet_to_bare": 0.8}
    shares = {"fleet_idle": 0.5, "learner_idle": 0.3, "mfu": {}, "push": {}, "token_lags": {"0": 1.0}}
    return {"max_lag": max_lag, **rates, **shares, "seconds_of_a_step": phases, "thrown_away_tokens": 0}


def result(folder: Path, device: str = "a GPU", resume: bool = True, **settings: Any) -> Result:
    return Result(folder, "gpu_loop-test", device, {**SETTINGS, **settings}, resume)


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A folder with a result that has one age bound."""
    own = result(tmp_path / "runs" / "mine")
    own.served_by("0.5.23")
    own.content["bare_tokens_per_s"] = 100.0
    own.add(row(0))
    own.write()
    return tmp_path / "runs" / "mine"


@pytest.mark.parametrize(
    ("gpus", "words", "expected"),
    [
        (2, [], "0.6B-2gpu"),
        (2, ["--servers", "1"], "0.6B-2gpu"),
        (2, ["--servers", "2"], "0.6B-2gpu-2servers"),
        (2, ["--set", "weights.mode=in_place"], "0.6B-2gpu-in_place"),
        (2, ["--servers", "2", "--set", "learner.lr=1", "weights.mode=in_place"], "0.6B-2gpu-2servers-in_place"),
        (1, ["--set", "weights.mode=in_place", "weights.mode=retract"], "0.6B-1gpu"),
        (1, ["--servers", "1", "--name", "mine"], "mine"),
        (0, ["--servers", "2"], "0.6B-0gpu-2servers"),
    ],
)
def test_the_name_has_servers_and_weights_mode_where_they_are_not_the_default(
    gpus: int, words: list[str], expected: str
) -> None:
    options = parse(["--python", "python", "--size", "0.6B", "--gpus", "0", *words])
    options.gpus = gpus
    assert named(options) == f"gpu_loop-{expected}"


def test_a_result_goes_where_models_and_logs_go_and_not_among_the_committed_ones() -> None:
    words = ["--python", "python", "--size", "tiny", "--gpus", "0"]
    assert parse(words).out == Path("runs/gpu_loop")
    assert parse([*words, "--dir", "/disk"]).out == Path("/disk")
    assert parse([*words, "--dir", "/disk", "--out", str(RESULTS)]).out == RESULTS


def test_a_result_goes_on_where_device_settings_and_sglang_are_the_same(measured: Path) -> None:
    own = result(measured)
    own.served_by("0.5.23")
    assert (own.lags, own.content["bare_tokens_per_s"]) == ([0], 100.0)
    assert result(measured, resume=False).lags == []


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"device": "another GPU"}, "device is 'a GPU' there and 'another GPU' here"),
        ({"steps": 8}, "steps is 4 there and 8 here"),
        ({"servers": 2}, "servers is None there and 2 here"),
    ],
)
def test_a_result_of_another_device_or_of_other_settings_is_not_resumed(
    measured: Path, changed: dict[str, Any], difference: str
) -> None:
    before = (measured / "gpu_loop-test.json").read_text()
    with pytest.raises(ConfigError, match=f"gpu_loop-test.json: {difference}; .* another --name"):
        result(measured, **changed)
    assert (measured / "gpu_loop-test.json").read_text() == before


def test_a_result_over_another_sglang_is_not_resumed(measured: Path) -> None:
    with pytest.raises(ConfigError, match=r"SGLang is '0.5.23' there and '0.5.24' here; .* another --name"):
        result(measured).served_by("0.5.24")
    result(measured, resume=False).served_by("0.5.24")


def test_a_file_that_is_no_result_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "gpu_loop-test.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"gpu_loop-test.json: benchmarks.gpu_loop did not write it"):
        result(tmp_path)
