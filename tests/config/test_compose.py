"""Words of a command line become a configuration, or are refused all at once, one line each."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from hydra.core.config_store import ConfigStore

from asyncrl.config.compose import composed, read
from asyncrl.config.files import choices
from asyncrl.config.keys import near_path
from asyncrl.config.schema import LoraConfig, PartConfig, TrainConfig
from asyncrl.errors import ConfigError


@pytest.fixture
def required(tmp_path: Path) -> list[str]:
    """Words for the keys that must be set."""
    (tmp_path / "tasks.parquet").touch()
    return ["model.path=m", f"data.train={tmp_path}/tasks.parquet"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the user's own experiments."""
    (tmp_path / "experiment").mkdir()
    return tmp_path


def refused(words: list[str], folder: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(words, folder)
    return str(error.value).splitlines()


@pytest.mark.parametrize("word", ["model.lora=null", "model.lora.rank=0", "+model={lora: null}"])
def test_null_or_rank_0_undoes_the_adapters_of_a_file(tmp_path: Path, word: str) -> None:
    (tmp_path / "mine.yaml").write_text("model: {lora: {rank: 8, alpha: 32, rslora: true, targets: [q_proj]}}\n")
    words = ["model.path=m", "data.train=t.parquet", f"experiment={tmp_path / 'mine.yaml'}"]
    assert read([*words], names_missing_data=False).model.lora.is_used
    assert read([*words, word], names_missing_data=False).model.lora == LoraConfig()
    assert read([*words, word, "model.lora.rank=4"], names_missing_data=False).model.lora == LoraConfig(rank=4)
    with pytest.raises(
        ConfigError, match=r"there are no adapters; set model.lora.rank, or model.lora=null to undo all"
    ):
        read([*words, "model.lora.rank=null"], names_missing_data=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("learner.steps", "learner.steps: write KEY=VALUE"),
        ("=3", "=3: write KEY=VALUE"),
        ("a b=c", "a b=c: it cannot be read"),
        ("learner.betas=[0.9", "learner.betas=[0.9: it cannot be read"),
        pytest.param(f"run.name={'[' * 1200}{']' * 1200}", "run.name=[[[", id="nested"),
        ("run.name='mine", "run.name='mine: it cannot be read"),
        ("run.name=mine=yours", "run.name=mine=yours: it cannot be read"),
        ("data.train=é.parquet", "data.train=é.parquet: it cannot be read"),
        ("~learner.steps", "~learner.steps: a key cannot be removed"),
        ("actor.tools=calculator,python", "actor.tools=calculator,python: give one value; write a list as [a,b]"),
        ("learner.stepz=3", "learner.stepz=3: there is no such key; did you mean learner.steps?"),
        ("++learner.stepz=3", "learner.stepz=3: there is no such key; did you mean learner.steps?"),
        ("batch_size=3", "batch_size=3: there is no such key; did you mean learner.batch_size?"),
        ("algoritm=grpo", "algoritm=grpo: there is no such key; did you mean algorithm?"),
        ("hydra.run.dir=here", "hydra.run.dir=here: there is no such key"),
        ("algorithm=grop", "algorithm=grop: there is no such file; did you mean grpo?"),
        ("engine=null", "engine=null: there is no such file; use one of embedded, "),
        ("engine={kind: sglang}", "engine: choose a file with engine=NAME"),
        ("learner=3", "learner=3: set one of the keys below it, such as learner.steps"),
        ("learner={steps: 3, lrr: 4}", "learner.lrr=4: there is no such key; did you mean learner.lr?"),
        ("learner.steps=many", "learner.steps=many: it must be a whole number in [0, inf)"),
        ("learner.steps=", "learner.steps=: it must be a whole number in [0, inf)"),
        ("learner.batch_size=null", "learner.batch_size=null: it must be a whole number in [1, inf)"),
        ("run.name=", "run.name=: it must be text"),
        ("learner.betas=[a,b]", "learner.betas=[a, b]: it must be a list of numbers in [0, 1)"),
        ("engine.launch=perhaps", "engine.launch=perhaps: it must be true or false"),
        ("scoring.needs={gsm8k: rules}", "scoring.needs={gsm8k: rules}: it must be a mapping to lists of rules, "),
        ("+algorithm.los=gspo", "algorithm.los=gspo: there is no such key; did you mean algorithm.loss?"),
        ("learner.betas.1=0", "learner.betas.1=0: there is no such key; set learner.betas as a whole"),
        (
            "algorithm.correction.1.params=3",
            "algorithm.correction.1.params=3: there is no such key; set algorithm.corr",
        ),
        ("algorithm.loss=[gspo]", "algorithm.loss=[gspo]: it must be a part: NAME, or {name: NAME, params: {...}}"),
        ("algorithm.loss={nam: gspo}", "algorithm.loss.nam=gspo: there is no such key; did you mean algorithm.loss.na"),
        ("algorithm.correction=[{params: {}}]", "algorithm.correction: it must be a list of parts"),
        ("learner.steps=${learner.stepz}", "learner.steps: Interpolation key 'learner.stepz' not found"),
        ("run.name=${oc.env:ASYNCRL_NOT_SET}", "run.name: KeyError raised while resolving interpolation"),
        ("run.name=${run.name}", "run.name: Recursive interpolation detected"),
    ],
)
def test_a_word_that_cannot_be_used_is_refused_in_one_line(required: list[str], word: str, line: str) -> None:
    lines = refused([*required, word])
    assert len(lines) == 1
    assert lines[0].startswith(line)


@pytest.mark.slow
def test_all_that_is_wrong_is_refused_at_once() -> None:
    words = ["learner.stepz=3", "learner.lr=fast", "actor.concurrency=0", "learner.eval_every=5"]
    assert [line.split("=")[0].split(":")[0] for line in refused(words)] == [
        *("learner.stepz", "learner.lr"),
        *("model.path", "data.train", "actor.concurrency", "learner.eval_every"),
    ]


@pytest.mark.slow
def test_a_wrong_file_of_an_experiment_brings_no_errors_of_what_it_may_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.yaml").touch()
    expected = {
        "experiment=demos": "experiment=demos: there is no such file; did you mean demo?",
        "experiment=frist": "experiment=frist: there is no such file; did you mean ./first.yaml?",
        "frist.yaml": f"experiment=frist.yaml: there is no file {tmp_path}/frist.yaml; did you mean first.yaml?",
    }
    for word, line in expected.items():
        assert refused([word, "learner.eval_every=5"]) == [line]
    assert refused(["experiment=demos", "actor.concurrency=0"])[1:] == [
        "actor.concurrency=0: it must be a whole number in [1, inf) or null"
    ]


def test_a_yaml_file_alone_is_the_file_of_the_experiment(
    required: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.yaml").write_text("learner: {steps: 7}\n")
    assert read([*required, "a b.yaml"]).learner.steps == 7


@pytest.mark.slow
def test_words_win_over_files_and_files_over_defaults(required: list[str], folder: Path) -> None:
    (folder / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /algorithm: dapo\nlearner: {steps: 7, lr: 1e-3}\n"
    )
    config = read([*required, "experiment=mine", "learner.steps=8", "+scoring.rules.a=gsm8k"], folder)
    assert (config.learner.steps, config.learner.lr, config.learner.batch_size) == (8, 1e-3, 64)
    assert config.algorithm.loss.params["clip_high"] == 0.28
    assert config.scoring.rules == {"a": "gsm8k"}


@pytest.mark.slow
def test_a_file_is_chosen_by_its_path_and_names_others_by_paths_that_begin_at_it(
    required: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "exp.yaml").write_text(
        "defaults: [base.yaml, override /algorithm: ../algo.yaml]\nlearner: {steps: 7}\nactor: {tools: python}\n"
    )
    (tmp_path / "mine" / "base.yaml").write_text("learner: {steps: 1, lr: 1e-3}\n")
    (tmp_path / "algo.yaml").write_text("defaults: [dapo]\nadvantage: rloo\nloss: {params: {clip_high: 0.5}}\n")
    (tmp_path / "score.yaml").write_text("rule: gsm8k\n")
    monkeypatch.chdir(tmp_path / "mine")
    config = read([*required, "experiment=./exp.yaml", "scoring=../score.yaml"])
    assert (config.learner.steps, config.learner.lr, config.scoring.rule) == (7, 1e-3, "gsm8k")
    assert (config.algorithm.advantage, config.actor.tools) == (PartConfig("rloo"), ["python"])
    assert config.algorithm.loss.params == {"clip_low": 0.2, "clip_high": 0.5}


def test_a_name_alone_stands_for_a_part_with_its_defaults_or_for_a_list_of_one(required: list[str]) -> None:
    words = ["algorithm=dapo", "algorithm.loss=gspo", "algorithm.correction=[mask,zero_variance]", "actor.tools=python"]
    config = read([*required, *words, "algorithm.loss.params.clip_low=0.1"])
    assert config.algorithm.loss == PartConfig("gspo", {"clip_low": 0.1})
    assert config.algorithm.correction == [PartConfig("mask"), PartConfig("zero_variance")]
    assert config.actor.tools == ["python"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", choices("algorithm"))
def test_what_a_run_writes_down_is_read_as_the_same_configuration(
    required: list[str], tmp_path: Path, algorithm: str
) -> None:
    config = read([*required, f"algorithm={algorithm}", "scoring.rules.a=gsm8k", "data.weights={a: 1.5}"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(config), sort_keys=False))
    assert read([f"experiment={tmp_path}/config.yaml"]) == config


def stored_in_groups() -> dict[str, list[str]]:
    """The names of the files in Hydra's memory, by group."""
    return {
        group: [*found] for group, found in ConfigStore.instance().repo.items() if isinstance(found, dict) and found
    }


@pytest.mark.slow
def test_files_of_a_user_stay_in_the_memory_of_hydra_for_one_composition_only(
    required: list[str], tmp_path: Path
) -> None:
    (tmp_path / "base.yaml").write_text("learner: {steps: 1}\n")
    (tmp_path / "own.yaml").write_text("defaults: [base.yaml]\nlearner: {lr: 1e-3}\n")
    (tmp_path / "bad.yaml").write_text("defaults: [own.yaml]\nlearner: {lrr: 1e-3}\n")
    read(required)
    before = stored_in_groups()
    assert read([*required, f"experiment={tmp_path}/own.yaml"]).learner.steps == 1
    assert len(refused([*required, f"experiment={tmp_path}/bad.yaml"])) == 1
    assert stored_in_groups() == before


def test_the_last_of_two_words_for_a_key_counts(required: list[str]) -> None:
    config = read([*required, "experiment=demo", "learner.steps=1", "learner.steps=2", "experiment=null"])
    assert (config.learner.steps, config.run.name) == (2, TrainConfig().run.name)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("# @package _global_\n- 1", ["it must hold KEY: VALUE lines"]),
        ("# @package _global_\nlearner: [1", ["it cannot be read as YAML"]),
        pytest.param(f"# @package _global_\nrun: {'[' * 1200}{']' * 1200}", ["it cannot be read as YAML"], id="nested"),
        (
            "# @package _global_\nlearner: {stepz: 3, lr: fast}\nactor: {chat_api_hosts: x}",
            [
                "learner.stepz=3: there is no such key",
                "learner.lr=fast: it must be",
                "actor.chat_api_hosts=x: there is no such key; did you mean actor.chat_api_host?",
            ],
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_its_name(
    required: list[str], folder: Path, text: str, lines: list[str]
) -> None:
    path = folder / "experiment" / "mine.yaml"
    path.write_text(text)
    given = refused([*required, "experiment=mine"], folder)
    assert all(line.startswith(f"{path}: {expected}") for line, expected in zip(given, lines, strict=True))


@pytest.mark.parametrize(
    ("defaults", "reason"),
    [
        ("[override /algorithm: grop]", "defaults: algorithm=grop: there is no such file; did you mean grpo?"),
        ("[override /algorithm: ./none.yaml]", "defaults: algorithm=./none.yaml: there is no file "),
        ("[override /algorithms: grpo]", "defaults: algorithms: there is no such group; did you mean algorithm?"),
        ("[1: grpo]", "defaults: 1: there is no such group"),
        ("['': grpo]", "defaults: : there is no such group"),
        ("[mine]", "includes itself"),
        ("nothing", "defaults must be a list"),
    ],
)
def test_a_choice_within_a_file_is_refused_in_one_line(
    required: list[str], folder: Path, defaults: str, reason: str
) -> None:
    path = folder / "experiment" / "mine.yaml"
    path.write_text(f"# @package _global_\ndefaults: {defaults}")
    (line,) = refused([*required, "experiment=mine"], folder)
    assert reason in line


def test_a_file_with_the_name_of_a_shipped_one_is_refused(required: list[str], folder: Path) -> None:
    path = folder / "experiment" / "demo.yaml"
    path.touch()
    expected = [f"experiment=demo: asyncrl has a file of this name; rename {path}"]
    assert refused([*required, "experiment=demo"], folder) == expected


def test_a_folder_of_files_must_be_one(required: list[str], tmp_path: Path) -> None:
    assert refused(required, tmp_path / "nowhere") == [f"--config-dir={tmp_path}/nowhere: there is no such folder"]


def test_a_composition_needs_no_required_key() -> None:
    assert composed(["learner.steps=7"]).learner.steps == 7


@pytest.mark.slow
def test_a_chosen_engine_that_the_experiment_replaces_is_refused(required: list[str], folder: Path) -> None:
    (folder / "experiment" / "mine.yaml").write_text("engine: {kind: sglang}\n")
    words = [*required, "experiment=mine"]
    (line,) = refused([*words, "engine=embedded"], folder)
    assert line.startswith("engine=embedded: the experiment's file sets engine.kind=sglang")
    assert line.endswith("write engine.kind=embedded")
    assert read([*words, "engine.kind=embedded"], folder).engine.kind == "embedded"
    assert read([*words, "engine=embedded", "engine.kind=embedded"], folder).engine.kind == "embedded"
    assert read([*words, "engine=sglang"], folder).engine.kind == "sglang"


def test_a_file_of_the_folder_is_proposed_for_a_wrong_path_and_for_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "first.yaml").write_text("run: {name: first}")
    assert refused(["experiment=./frist.yaml"], folder)[0].endswith("frist.yaml; did you mean first.yaml?")
    assert refused(["experiment=first"], folder)[0].endswith("for the file first.yaml write experiment=./first.yaml")


@pytest.mark.slow
def test_several_threads_read_configurations(required: list[str], folder: Path) -> None:
    def steps(number: int) -> int | None:
        file = folder / f"{number}.yaml"
        file.write_text(f"learner: {{steps: {number}}}")
        return read([*required, f"experiment={file}"]).learner.steps

    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(steps, (1, 2, 3))] == [1, 2, 3]


def test_only_files_of_its_kind_and_folders_are_proposed_for_a_path_that_does_not_exist(tmp_path: Path) -> None:
    def near(name: str, *kinds: Collection[str]) -> str:
        return near_path(str(tmp_path / name), *kinds).removeprefix(f"; did you mean {tmp_path}/")

    (tmp_path / "oe.txt").touch()
    assert near("ope.parquet") == ""
    (tmp_path / "oper.jsonl").touch()
    assert near("ope.parquet") == near("ope") == near("oper.jsnol") == "oper.jsonl?"
    assert near("ope.yaml", [".py", ".yaml"]) == near("ope", ()) == ""
    (tmp_path / "oper.py").touch()
    assert near("ope.py") == near("ope.yaml", [".py", ".yaml"]) == "oper.py?"
    (tmp_path / "oper").mkdir()
    assert near("ope", ()) == "oper?"
    assert near("ope.jsonl") == "oper.jsonl?"
