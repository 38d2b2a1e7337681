"""The declaration of a study becomes runs with their settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import chain

import pytest

from asyncrl.config.compose import read
from benchmarks.studies import age, mismatch
from benchmarks.studies.__main__ import main
from benchmarks.studies.results import FOLDER, Results
from benchmarks.studies.search import best_rate
from benchmarks.studies.study import LADDER, LR, MAIN, RUNG, SEARCH, SEARCH_SEED, Run, Study, overrides
from tests.benchmarks.studies.support import STUDIES, STUDY


def test_the_cells_are_all_combinations_but_the_skipped() -> None:
    assert list(STUDY.cells()) == [
        {"size": "small", "colour": "red"},
        {"size": "small", "colour": "blue"},
        {"size": "large", "colour": "red"},
    ]
    assert list(STUDY.cells({"size": {"large"}})) == [{"size": "large", "colour": "red"}]


def test_settings_are_those_of_all_studies_then_of_the_study_then_of_its_levels_then_of_the_command() -> None:
    study = dataclasses.replace(STUDY, settings={"learner.group_size": 4})
    run = study.run({"size": "large", "colour": "red"}, 7, 3e-4, {"learner.batch_size": 16})
    changed = {"learner.steps": 4, "learner.group_size": 4, "algorithm.loss": {"name": "ppo"}, LR: 3e-4}
    assert run.settings == {**LADDER, **changed, "learner.batch_size": 16}
    assert (run.stage, run.seed, run.lr) == (MAIN, 7, 3e-4)
    assert study.run(run.levels, 7, None, {}).lr == LADDER[LR]


def test_every_level_of_the_searched_factor_gets_the_same_runs() -> None:
    found = {level: STUDY.searches(level, {}) for level in ("red", "blue")}
    for level, runs in found.items():
        assert [run.lr for run in runs] == [1e-5, 1e-4]
        assert {(run.stage, run.seed, run.settings["learner.steps"]) for run in runs} == {(SEARCH, SEARCH_SEED, 2)}
        assert all(run.levels == {"size": "small", "colour": level} for run in runs)


def test_rates_that_other_studies_take_are_those_that_age_has_found() -> None:
    results = Results(FOLDER / "age.parquet", age.STUDY.factors)
    found = {name: best_rate(age.STUDY.searches(name, {}), results) for name in mismatch.RATES}
    assert found == mismatch.RATES
    assert found["truncate"] == LADDER[LR]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["icepop", "opsm", "dppo", "luspo", "vespo", "topr", "oapl"])
def test_a_preset_named_as_a_level_of_age_is_the_same_algorithm(name: str) -> None:
    needed = ["model.path=m", "data.train=x", "scoring.rule=exact_number"]
    preset = read([*needed, f"algorithm={name}"], names_missing_data=False)
    level = read([*needed, *overrides(age.CORRECTIONS[name], "m")], names_missing_data=False)
    assert preset.algorithm == level.algorithm


def test_a_run_with_another_setting_seed_or_stage_is_another_run() -> None:
    cell = {"size": "small", "colour": "red"}
    runs = [
        *(STUDY.run(cell, 0, 1e-4, {}), STUDY.run(cell, 1, 1e-4, {}), STUDY.run(cell, 0, 1e-5, {})),
        STUDY.run(cell, 0, 1e-4, {"learner.group_size": 4}),
        *STUDY.searches("red", {}),
    ]
    assert len({run.fingerprint for run in runs}) == len({run.name for run in runs}) == len(runs)
    assert STUDY.run(cell, 0, 1e-4, {}) == runs[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factors": {"size": {"a": {"x": 1}}, "colour": {"b": {"x": 2}}}}, "size and colour both set x"),
        ({"skipped": [{"size": "huge"}]}, "size has no level huge"),
        ({"panels": "shape"}, "there is no factor shape"),
        ({"search": dataclasses.replace(age.STUDY.search, at={})}, "the search must name every factor"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    plain: dict[str, object] = {"search": None, "skipped": []}
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(STUDY, **{**plain, **changes})


def test_settings_become_words_of_the_command_line() -> None:
    settings = {
        **{"rung": "undo", "warm_start": 3, "learner.export": False, "critic.path": "{model}", "data.eval": None},
        "algorithm.correction": [{"name": "mask", "params": {"low": 0.5, "high": 5.0}}],
    }
    assert overrides(settings, "folder/policy") == [
        "actor.tools=[asyncrl.commands.demo.ladder.LadderCalculator,asyncrl.commands.demo.ladder.Undo]",
        "actor.max_turns=12",
        "replay.sampler.kind=fifo",
        "replay.spare_batches=null",
        "replay.old_groups.wait_s=0.0",
        "replay.old_groups.mask=false",
        "learner.export=false",
        "critic.path=folder/policy",
        "data.eval=null",
        "algorithm.correction=[{name:mask,params:{low:0.5,high:5.0}}]",
    ]


def each_level(study: Study) -> Iterator[Run]:
    """Yield a run for each level of each factor: that of the first cell which has the level."""
    cells = list(study.cells())
    for factor, levels in study.factors.items():
        for level in levels:
            yield study.run(next(cell for cell in cells if cell[factor] == level), 0, None, {})


RUNS = {f"{run.study}, {', '.join(run.levels.values())}": run for run in chain(*map(each_level, STUDIES))}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_level_of_every_study_is_a_configuration(name: str) -> None:
    run = RUNS[name]
    given = [f"data.train={__file__}", f"data.eval={__file__}", "model.path=policy"]
    config = read([*given, *overrides(run.settings, "policy")])
    assert config.learner.lr == run.lr
    if RUNG in run.settings:
        assert config.actor.max_turns >= max(run.rung.operations) + 1


def test_the_package_lists_the_study_of_each_of_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    listed = [line.split(":")[0].rpartition(".")[2] for line in capsys.readouterr().out.splitlines()]
    small = ["age", "guards", "long_tasks", "mismatch", "process_rewards", "reuse", "wall_clock", "waste"]
    assert listed == sorted([*small, "pretrained_age"])
