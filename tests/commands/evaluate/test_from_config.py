"""The configuration of an evaluation: the run's own with words on top, and the same for every role."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from threading import Event

import pytest
import yaml

from asyncrl.commands.evaluate.evaluation import _folder, evaluate, requested
from asyncrl.commands.evaluate.from_config import EvaluationRequest, require_same, without_training
from asyncrl.config.changes import values_of
from asyncrl.config.compose import read
from asyncrl.config.schema import RunConfig
from asyncrl.data.writing import write_tasks
from asyncrl.errors import ConfigError, StoppedError
from asyncrl.launch.preflight.algorithm import check_algorithm
from tests.helpers import make_task

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that differs from the defaults in keys of every kind, on ports that are taken."""
    write_tasks(tmp_path / "tasks.parquet", [make_task(number) for number in range(4)])
    words = [
        *("algorithm=dapo", "actor.temperature=0.7", "actor.tools=[]", "engine=sglang", "engine.urls=[http://a:1]"),
        *("scoring.rules={test: [{name: exact_match, weight: 0.5}]}", "data.weights={test: 2.0}", "replay.shards=2"),
        *("network.replay_port=7000", "network.weights_port=7002", "observe.sinks=[wandb]", "learner.eval_attempts=3"),
        *(
            "model.path='a folder, with a comma'",
            f"data.train={tmp_path}/tasks.parquet",
            "weights.to_engines=distributed",
        ),
    ]
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(read(words))))
    return folder


def request(run: Path, *words: str) -> EvaluationRequest:
    return EvaluationRequest(run, str(run), [str(run.parents[1] / "tasks.parquet")], 8, words)


def test_every_role_reads_the_configuration_of_the_run_without_its_training(run: Path, tmp_path: Path) -> None:
    asked = request(run, "cluster.launcher=hosts", "cluster.hosts=[a,b]")
    config = without_training(asked.read(), asked, run / "evaluations" / "one")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(asdict(config)))
    assert read([f"experiment='{path}'"]) == config
    assert (config.learner.steps, config.learner.eval_attempts, config.replay.shards) == (0, 8, 1)
    assert (config.data.eval, config.data.weights) == (asked.data, {})
    assert (config.network.replay_port, config.weights.to_engines, config.observe.sinks) == (0, "auto", ["console"])
    assert config.scoring.rules == {"test": [{"name": "exact_match", "weight": 0.5}]}
    assert (config.actor.temperature, config.model.path) == (0.7, "a folder, with a comma")


def test_words_win_over_the_run_and_a_group_replaces_its_section(run: Path) -> None:
    config = request(run, "actor.temperature=0.2", "engine=embedded").read()
    assert config.actor.temperature == 0.2
    assert (config.engine.kind, config.engine.urls) == ("embedded", [])


def test_a_model_is_configured_by_words_as_for_training(run: Path) -> None:
    asked = EvaluationRequest(None, "it's a model", request(run).data, 1, ["scoring.rule=f1"])
    config = asked.read()
    assert (config.model.path, config.scoring.rule, config.network.replay_port) == ("it's a model", "f1", 0)


def test_words_that_evaluate_sets_itself_are_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.eval: --data names the tasks\nlearner.eval_attempts: --n sets it"):
        request(run, "data.eval=x", "learner.eval_attempts=2").read()
    with pytest.raises(ConfigError, match="gives the configuration; set single keys"):
        request(run, "experiment=demo").read()
    with pytest.raises(ConfigError, match=r"model.lora.path: adapters cannot be evaluated alone: merge them"):
        request(run, "model.lora.path=adapter").read()


def test_an_evaluation_goes_on_with_what_it_measures_only(run: Path, tmp_path: Path) -> None:
    config = request(run).read()
    require_same(values_of(config), tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    require_same(values_of(replace(config, engine=replace(config.engine, slots=3))), tmp_path)
    with pytest.raises(ConfigError, match=r"actor.temperature=0.9: it was 0.7"):
        require_same(values_of(replace(config, actor=replace(config.actor, temperature=0.9))), tmp_path)


def test_an_evaluation_with_other_words_is_refused_by_the_names_of_what_the_user_sets(run: Path) -> None:
    folder = run / "evaluations" / "one"
    first = without_training(request(run).read(), request(run), folder)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(first)))

    def refused(asked: EvaluationRequest) -> list[str]:
        with pytest.raises(ConfigError, match="holds another evaluation: set these back") as error:
            require_same(values_of(without_training(asked.read(), asked, folder)), folder)
        return str(error.value).splitlines()[1:]

    assert refused(request(run, "data.eval_limit=2")) == ["data.eval_limit=2: it was null"]
    other = replace(request(run), data=["other.parquet"], attempts=3)
    tasks = request(run).data[0]
    assert refused(other) == [f"--data=[other.parquet]: it was [{tasks}]", "--n=3: it was 8"]


def test_a_weight_of_demonstrations_needs_none_in_an_evaluation(run: Path) -> None:
    words = ["algorithm.demonstration.weight=shaped", "data.demonstration=target"]
    config = without_training(request(run, *words).read(), request(run), run / "evaluations" / "one")
    assert (config.data.demonstration, config.algorithm.demonstration.weight) == (None, "none")
    check_algorithm(config)


def test_a_run_is_evaluated_on_its_own_held_out_tasks_unless_others_are_named(run: Path, tmp_path: Path) -> None:
    tasks, file = str(tmp_path / "tasks.parquet"), run / "config.yaml"
    with pytest.raises(ConfigError, match=r"has no data.eval; name the tasks with --data TASKS"):
        requested(str(run), None, 8, None, [], None)
    with pytest.raises(ConfigError, match=r"neither a run nor a folder owner/model; .* name the tasks with --data"):
        requested("owner/model", None, 8, None, [], None)
    with pytest.raises(ConfigError, match=r"is not a run, .*; for a model, name the tasks with --data TASKS"):
        requested(str(tmp_path), None, 8, None, [], None)
    values = yaml.safe_load(file.read_text())
    values["data"]["eval"] = [tasks, tasks]
    file.write_text(yaml.safe_dump(values))
    asked = requested(str(run), None, 8, None, [], None)
    assert asked.data == [tasks, tasks]
    assert without_training(asked.read(), asked, run / "evaluations" / "one").data.eval == [tasks, tasks]
    assert requested(str(run), tasks, 8, None, [], None).data == [tasks]
    values["data"]["eval"] = [str(tmp_path / "missing.parquet")]
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match="the file does not exist"):
        requested(str(run), None, 8, None, [], None)


def test_the_limit_of_a_run_is_for_its_own_held_out_tasks_and_a_word_sets_one_for_others(
    run: Path, tmp_path: Path
) -> None:
    tasks, file = str(tmp_path / "tasks.parquet"), run / "config.yaml"
    values = yaml.safe_load(file.read_text())
    values["data"].update(eval=[tasks, tasks], eval_limit=5, limit=7)
    file.write_text(yaml.safe_dump(values))

    def limits(data: str | None, *words: str) -> tuple[int | None, int | None]:
        asked = requested(str(run), data, 8, None, words, None)
        found = without_training(asked.read(), asked, run / "evaluations" / "one").data
        return found.limit, found.eval_limit

    assert limits(None) == (5, 5)
    assert limits(tasks) == (None, None)
    assert limits(tasks, "data.eval_limit=3") == limits(None, "data.eval_limit=3") == (3, 3)
    asked = EvaluationRequest(None, "a model", [tasks], 1, ["data.eval_limit=2"])
    assert asked.read().data.eval_limit == 2
    with pytest.raises(ConfigError, match=r"data\.limit: data\.eval_limit is the maximum number"):
        limits(None, "data.limit=3")


def test_a_stop_ends_an_evaluation_that_has_not_started(run: Path, tmp_path: Path) -> None:
    stop = Event()
    stop.set()
    data = request(run).data
    with pytest.raises(StoppedError, match="nothing was started"):
        evaluate(EvaluationRequest(None, "no-model", data, 1, [f"run.dir={tmp_path}"]), None, 1.0, stop)


def test_the_models_of_two_runs_have_a_folder_each() -> None:
    names = [
        _folder(RunConfig(), EvaluationRequest(None, model, ["test.parquet"], 8, ()), None).name
        for model in ("runs/sft/model", "runs/rl/model", "some/hub-name", "model")
    ]
    assert names == ["sft-model-test-n8", "rl-model-test-n8", "hub-name-test-n8", "model-test-n8"]
