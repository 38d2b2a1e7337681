"""KEY=VALUE of a study's command, from its words to settings or a refusal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from benchmarks.studies import command
from benchmarks.studies.changed import changed_settings
from benchmarks.studies.study import LR
from tests.benchmarks.studies.support import STUDY

CELL = {"size": "small", "colour": "red"}


def test_a_number_is_the_same_however_it_is_written() -> None:
    assert changed_settings(["learner.lr=1e-4"]) == {LR: 0.0001}
    prints = {
        STUDY.run(CELL, 0, None, changed_settings([word])).fingerprint
        for word in ("learner.lr=1e-4", "learner.lr=0.0001", "+learner.lr=1.0E-4")
    }
    assert prints == {STUDY.run(CELL, 0, 1e-4, {}).fingerprint}


def test_values_are_those_that_asyncrl_train_reads() -> None:
    words = ["learner.export=true", "learner.steps=80", "data_x=null", "algorithm.loss={name:x,params:{y:1e-3}}"]
    assert list(changed_settings(words).values()) == [True, 80, None, {"name": "x", "params": {"y": 0.001}}]


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("learner.steps", "write KEY=VALUE"),
        ("run.dir=elsewhere", "the study's command names the folder of each run"),
        ("model.path=mine", "the study makes the policy of each seed"),
        ("+data.train=mine.parquet", "the study has its own tasks"),
        ("rung=ladder", "no such rung; choose one of brackets-2, brackets-4"),
        ("rung=[undo]", "no such rung"),
        ("warm_start=long", "it must be a number of updates"),
    ],
)
def test_a_setting_that_no_run_can_have_is_refused(word: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        changed_settings([word])


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("learner.stpes=80", "there is no such key; did you mean learner.steps?"),
        ("learner.batch_size=many", "it must be a whole number"),
        ("learner.group_size=7", "learner.batch_size=32 with learner.group_size=7"),
    ],
)
def test_the_plan_refuses_what_asyncrl_train_would_refuse(word: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=re.escape(reason)):
        command.main(STUDY, [word, "--plan", "--results", str(tmp_path)])
