"""Reward managers that judge whole groups, in their real process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from asyncrl.config.schema import ManagerConfig, ModelConfig, ScoringConfig
from asyncrl.errors import AsyncrlError, ConfigError, ScoringError
from asyncrl.scoring.managers import Managers, ManagerScore, check_managers
from asyncrl.types import Lease
from tests.helpers import GENEROUS_S
from tests.scoring.whole_groups import group, saved_tokenizer

pytestmark = pytest.mark.slow

SHARES = "tests.scoring.shares.Shares"
RANKING = "tests.data.verl.ranking_manager.RankingRewardManager"


@contextmanager
def managers(folder: Path, **settings: Any) -> Iterator[Managers]:
    config = ScoringConfig(manager=ManagerConfig(**{"name": SHARES, "timeout_s": GENEROUS_S, **settings}))
    with closing(Managers(config, ModelConfig(path=saved_tokenizer(folder)))) as opened:
        yield opened


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Managers]:
    """Managers of several data sources in one process, since each process takes seconds to start."""
    folder = tmp_path_factory.mktemp("policy")
    loop_manager = Path(__file__).parents[1] / "data" / "verl" / "loop_manager.py"
    (folder / "brief.py").write_text(loop_manager.read_text())
    sources = {
        "double": {"params": {"top": 2.0}},
        "ranked": {"name": RANKING, "compute_score": "tests.scoring.shares.length"},
        "none": None,
        "rows": {
            "name": f"{folder}/brief.py:BriefRewardManager",
            "compute_score": "tests.scoring.shares.digits",
            "compute_score_params": {"worth": 2.0},
            "params": {"points": 3.0},
        },
    }
    with managers(folder, batch_groups=2, sources=sources) as opened:
        yield opened


def judged(opened: Managers, *groups: list[Lease]) -> list[list[ManagerScore | AsyncrlError]]:
    return [[_result(future) for future in members] for members in opened.submit(groups)]


def _result(future: Any) -> ManagerScore | AsyncrlError:
    error = future.exception(GENEROUS_S)
    assert error is None or isinstance(error, AsyncrlError)
    return error or future.result()


def rewards(scores: list[ManagerScore | AsyncrlError]) -> list[float]:
    return [each.reward for each in scores if isinstance(each, ManagerScore)]


def test_a_manager_compares_the_members_of_a_group(shares: Managers) -> None:
    (scores,) = judged(shares, group("t1", ["it is 72", "72!", "71"]))
    assert rewards(scores) == [0.5, 0.5, 0.0]
    assert [each.extra["right"] for each in scores] == [1.0, 1.0, 0.0]


def test_a_call_has_up_to_so_many_groups_of_training_or_of_an_evaluation(shares: Managers) -> None:
    sizes = [2, 3, 1, 1]
    names = ["t1", "t2", "t3", "e0-000001"]
    found = judged(shares, *(group(name, ["72"] * size) for name, size in zip(names, sizes, strict=True)))
    assert [[each.extra["rows"] for each in scores] for scores in found] == [[5, 5], [5, 5, 5], [1], [1]]
    assert [scores[0].extra["validate"] for scores in found] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("raise", "the reward manager raised LookupError: no such thing"),
        ("exit", r"the reward manager raised SystemExit: 3 \(\S+, line \d+\)"),
        ("nan", r"gave row 1 \(t2\.1\.0\) the reward nan"),
    ],
)
def test_a_group_fails_alone_whatever_its_manager_does(shares: Managers, answer: str, reason: str) -> None:
    good, bad = judged(shares, group("t1", ["72", "7"]), group("t2", ["72", answer]))
    assert rewards(good) == [1.0, 0.0]
    assert all(isinstance(each, ScoringError) for each in bad)
    with pytest.raises(ScoringError, match=reason):
        raise next(iter(bad))


@pytest.mark.heavy
def test_a_manager_that_never_ends_is_stopped_by_its_time_limit(tmp_path: Path) -> None:
    with managers(tmp_path, timeout_s=10.0) as opened:
        (scores,) = judged(opened, group("t1", ["hang"]))
        assert "longer than scoring.manager.timeout_s=10" in str(scores[0])
        assert rewards(judged(opened, group("t1", ["72"]))[0]) == [1.0]


def test_data_sources_have_managers_parameters_and_functions_of_their_own(shares: Managers) -> None:
    found = judged(
        shares,
        group("t1", ["72", "71"]),
        group("t2", ["72", "71"], source="double"),
        group("t3", ["a", "a b c d", "a b"], source="ranked"),
        group("t4", ["72"], source="none"),
    )
    assert [rewards(scores) for scores in found] == [[1, 0], [2, 0], [0, 1, 0.5], []]
    assert [each.outcome for each in found[2]] == [0, 1, 1]
    assert found[2][0].extra == {"acc": 0.0, "group_size": 3.0}
    assert "none has no manager" in str(found[3][0])


def test_a_manager_for_single_rows_judges_groups_and_a_row_that_fails_is_named(shares: Managers) -> None:
    good, bad = judged(shares, group("t1", ["72", "none"], source="rows"), group("t2", ["72", "fail"], source="rows"))
    assert rewards(good) == [3.0, 0.0]
    assert [each.outcome for each in good] == [2.0, 0.0]
    assert good[0].extra == {"acc": 2.0, "letters": 2.0}
    for each in bad:
        assert "run_single failed for row 1: LookupError: no such digits" in str(each)


def test_samples_are_printed_once_for_each_version_in_training_and_in_evaluations(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    score = "tests.scoring.shares.length"
    with managers(tmp_path, name=RANKING, compute_score=score, num_examine=2, val_num_examine=1) as opened:
        calls = [
            group("t1", ["first a", "first b", "first c"]),
            group("t2", ["again a", "again b"]),
            group("t3", ["newer a"], version=1),
            group("e1-000001", ["held out a"], version=1),
            group("e1-000002", ["held out b"], version=1),
        ]
        judged(opened, *calls)
    lines = capfd.readouterr().out.splitlines()
    printed = [line.removeprefix("[response] ") for line in lines if line.startswith("[response]")]
    assert printed == ["first a", "first b", "newer a", "held out a"]
    assert lines.count("[ground_truth] 72") == len(printed)


def test_a_manager_that_cannot_be_made_is_refused_before_the_run_and_at_the_start(tmp_path: Path) -> None:
    config = ScoringConfig(manager=ManagerConfig(name=SHARES, params={"botom": 1}))
    with pytest.raises(ConfigError, match=r"scoring\.manager: .*Shares cannot be made .*botom"):
        check_managers(config)
    for wrong, reason in (("nave", "use one of naive, batch"), ("no_such_module.Manager", "cannot be imported")):
        with pytest.raises(ConfigError, match=reason):
            check_managers(replace(config, manager=ManagerConfig(name=wrong)))
    with pytest.raises(ConfigError, match=r"cannot be imported .*no_such"):
        check_managers(replace(config, manager=ManagerConfig(name="naive", compute_score="no_such.score")))
    with pytest.raises(ConfigError, match=r"model\.path=.*its tokenizer cannot be loaded"):
        Managers(ScoringConfig(manager=ManagerConfig(name=SHARES)), ModelConfig(path=str(tmp_path / "nothing")))


def test_a_module_that_starts_its_own_manager_when_it_is_imported_is_refused_instead_of_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
        from asyncrl.config.schema import ManagerConfig, ModelConfig, ScoringConfig
        from asyncrl.scoring.managers import Managers
        from tests.scoring.shares import Shares
        Managers(ScoringConfig(manager=ManagerConfig(name="no_guard.Shares")), ModelConfig(path={model!r}))
    """
    model = saved_tokenizer(tmp_path)
    (tmp_path / "no_guard.py").write_text(dedent(program).format(model=model))
    monkeypatch.syspath_prepend(tmp_path)
    config = ScoringConfig(manager=ManagerConfig(name="no_guard.Shares"))
    with pytest.raises(ConfigError, match=r"move the code that does so into a block .* if __name__ == .__main__"):
        Managers(config, ModelConfig(path=model))


def rows(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    return 0.0


def whole_batch(data_sources: list[str], solution_strs: list[str], scale: float = 1.0, **lists: object) -> list[float]:
    return [scale for _ in data_sources]


@pytest.mark.parametrize(
    ("name", "function", "params", "refused"),
    [
        ("batch", "rows", {}, "the manager batch passes data_sources, solution_strs"),
        ("naive", "whole_batch", {}, "the manager naive passes data_source, solution_str"),
        ("batch", "whole_batch", {"scale": 2.0}, None),
        *((name, "rows", {}, None) for name in ("naive", "dapo", "prime")),
    ],
)
def test_a_function_that_the_manager_cannot_call_is_refused_before_the_run(
    name: str, function: str, params: dict[str, Any], refused: str | None
) -> None:
    config = ScoringConfig(manager=ManagerConfig(name=name, compute_score=f"{__name__}.{function}", params=params))
    if refused is None:
        check_managers(config)
    else:
        with pytest.raises(ConfigError, match=rf"compute_score=.*{function}: {refused}"):
            check_managers(config)


def test_closing_ends_a_call_and_fails_what_waits(tmp_path: Path) -> None:
    with managers(tmp_path) as opened:
        futures = opened.submit([group("t1", ["hang"]), group("t2", ["72"])])
        opened.close()
        assert all(isinstance(_result(each), AsyncrlError) for members in futures for each in members)
        assert isinstance(_result(opened.submit([group("t3", ["72"])])[0][0]), ScoringError)
