"""Paths and columns that do not exist are refused before torch and transformers are imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.algorithms.registry import HOMES, parts
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError, DataError
from asyncrl.launch.preflight.paths import check_paths, named_code, part_names
from tests.helpers import GENEROUS_S


def check(config: TrainConfig) -> None:
    check_paths(config.data, config.algorithm, config.model, config.actor, config.scoring)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").touch()
    (tmp_path / "policy" / "model.safetensors").touch()
    (tmp_path / "paths_rewards.py").write_text("def score(): ...\n")
    config = TrainConfig()
    config.model.path, config.data.train = "./policy", ["train.jsonl"]
    return config


def test_a_misspelt_rule_is_told_together_with_paths_that_do_not_exist(config: TrainConfig):
    config.data.train, config.scoring.rule = ["trian.jsonl"], "exact_numbr"
    config.scoring.rules = {"s": [{"name": "gsm8"}], "t": None}
    with pytest.raises(ConfigError) as refused:
        check(config)
    file, rule, of_source = str(refused.value).splitlines()
    assert "train.jsonl" in file
    assert rule.startswith("scoring.rule=exact_numbr: use one of code, ")
    assert rule.endswith("did you mean exact_number?")
    assert of_source.startswith("scoring.rules.s=gsm8: ")


def test_a_misspelt_part_of_the_algorithm_is_told_together_with_paths_that_do_not_exist(config: TrainConfig):
    config.model.path = "./polcy"
    config.algorithm.loss.name, config.algorithm.value_aggregation.name = "gsop", "token_mean"
    with pytest.raises(ConfigError) as refused:
        check(config)
    model, loss, aggregation = str(refused.value).splitlines()
    assert model.startswith("model.path=./polcy: there is no such folder")
    assert loss.startswith("algorithm.loss=gsop: did you mean gspo? use one of ")
    assert aggregation.startswith("algorithm.value_aggregation=token_mean: did you mean token-mean? ")


def test_the_names_of_parts_are_those_of_the_registry():
    assert part_names() == {name for kind in HOMES for name in parts(kind)}


def test_a_file_in_place_of_a_model_is_called_a_file(config: TrainConfig):
    for path in ("train.jsonl", f"{Path.cwd()}/train.jsonl"):
        config.model.path = path
        with pytest.raises(ConfigError, match=rf"^model\.path={path}: it is a file: name the folder of a model$"):
            check(config)


def test_each_path_that_does_not_exist_has_a_line_with_the_path_that_was_meant(config: TrainConfig):
    config.scoring.rule = "paths_rewards.score"
    check(config)
    config.data.train, config.model.path = ["trian.jsonl"], f"{Path.cwd()}/polcy"
    config.scoring.rules = {"s": [{"name": "paths_rewards.scores"}]}
    config.actor.tools = ["calculator", "paths_tools.Weather"]
    with pytest.raises(ConfigError) as refused:
        check(config)
    assert [line.partition(": there is no such")[2] for line in str(refused.value).splitlines()[:2]] == [
        " file; did you mean train.jsonl?",
        f" folder; did you mean {Path.cwd()}/policy?",
    ]
    assert "actor.tools: 'paths_tools.Weather' cannot be imported" in str(refused.value)
    assert "did you mean paths_rewards.score?" in str(refused.value)


def test_missing_files_alone_are_an_error_of_the_data(config: TrainConfig):
    config.data.train = ["other.jsonl"]
    with pytest.raises(DataError, match=r"data\.train=other\.jsonl: there is no such file; see docs/data\.md"):
        check(config)


def test_all_code_that_a_configuration_names_is_found(config: TrainConfig):
    actor, scoring, algorithm = config.actor, config.scoring, config.algorithm
    actor.tools, actor.environments, actor.agent = ["calculator", "a.Tool"], {"maze": "b.Maze"}, "c.agent"
    user = {"class_name": "asyncrl.compat.verl.VerlInteraction", "config": {"class_name": "d.User"}}
    actor.interactions = {"plain": "e.User", "verl": user}
    scoring.rule, scoring.rules = "gsm8k", {"s": [{"name": "f.score"}]}
    scoring.manager.sources = {"t": {"name": "naive", "compute_score": "g.score"}}
    algorithm.loss.name, algorithm.correction[0].name = "h.Loss", "i.Correction"
    config.data.dataset = "j.Dataset"
    actor.verl_tools = [{"class_name": "k.Tool"}, {"function_tool_path": "l.py"}]
    named = named_code(config.data, algorithm, actor, scoring)
    assert {each.path for each in named} == {
        *("a.Tool", "b.Maze", "c.agent", "d.User", "e.User", "f.score", "g.score", "h.Loss", "i.Correction"),
        *("j.Dataset", "k.Tool", "l.py:tools"),
    }
    assert {each.path for each in named if each.loads} == {"d.User", "g.score", "k.Tool", "l.py:tools"}
    Path("loops.yaml").write_text("- {name: x, _target_: m.Loop, home: '${oc.env:NOWHERE}'}\n")
    actor.agent, actor.agent_options = "verl", {"default_agent_loop": "n.Loop", "agent_loop_config_path": "loops.yaml"}
    loops = {each.path for each in named_code(config.data, algorithm, actor, scoring) if "import_loop" in each.loads}
    assert loops == {"m.Loop", "n.Loop"}


@pytest.mark.slow
def test_a_module_of_a_tool_or_a_loop_of_verl_that_ends_its_process_does_not_end_the_start(config: TrainConfig):
    Path("paths_ends.py").write_text("import os\nos._exit(0)\n")
    config.actor.verl_tools, config.actor.agent = [{"class_name": "paths_ends.Tool"}], "verl"
    config.actor.agent_options = {"default_agent_loop": "paths_ends.Loop"}
    with pytest.raises(ConfigError, match=r"verl_tools: class_name=paths_ends\.Tool cannot be imported: .* status 0"):
        check(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("data.train=trian.jsonl", "data.train=trian.jsonl: there is no such file; did you mean train.jsonl?"),
        (
            "data.train=other.jsonl",
            "other.jsonl has no column prompt, data_source, reward_model; it has query, result; name the column of the "
            'ground truth, or any column if the reward needs none, as data.columns="{prompt: query, ground_truth: '
            'query}"',
        ),
        ("data.train=lacks.jsonl", "lacks.jsonl: line 2 has no value in column answer; mend or drop the row"),
    ],
)
def test_a_start_names_missing_paths_and_columns_before_it_imports_torch(config: TrainConfig, data: str, message: str):
    Path("other.jsonl").write_text('{"query": "1+1?", "result": 2}\n')
    Path("lacks.jsonl").write_text('{"prompt": "1+1?", "answer": 2}\n{"prompt": "1+2?"}\n')
    words = ["model.path=./policy", data]
    code = (
        "import sys; from asyncrl.launch.local import main; "
        f"status = main({words!r}); assert status == 2; assert not {{'torch', 'transformers'}} & sys.modules.keys()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=GENEROUS_S, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, f"asyncrl: {message}\n")
