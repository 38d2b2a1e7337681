"""The model card in the folder of an exported model."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.runs.card import CARD, PICTURE, is_ours, named, write_card
from asyncrl.runs.environment import record_environment
from asyncrl.runs.run import Run
from tests.runs.support import write_run

LOCAL = {"model.path": "/home/someone/models/base", "data.train": ["/home/someone/tasks.parquet"]}


def front_matter(text: str) -> dict[str, Any]:
    match = re.match(r"---\n(.*?)\n---\n", text, re.S)
    assert match is not None
    return dict(yaml.safe_load(match[1]))


def written(run: Path, steps: int | None = None) -> str:
    (run / "model").mkdir(exist_ok=True)
    assert write_card(Run(run), run / "model", steps)
    return (run / "model" / CARD).read_text()


@pytest.mark.slow
def test_it_names_base_data_algorithm_results_and_limits(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.1, 0.5, 0.9], {"algorithm.advantage.name": "rloo", "run.seed": 7})
    record_environment(run)
    text = written(run)
    front = front_matter(text)
    assert front["base_model"] == "owner/base"
    assert front["datasets"] == ["owner/tasks"]
    assert front["library_name"] == "transformers"
    assert {"asyncrl", "rloo"} <= set(front["tags"])
    for line in (
        "| held-out accuracy | 0.25 | 0.75 |",
        "| advantage | `rloo` |",
        "| run.seed | `7` |",
        "3 steps trained 24 trajectories",
        "one run with one seed (7)",
        "CPU cores",
    ):
        assert line in text
    assert (run / "model" / PICTURE).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_it_names_no_folders_of_the_machine(tmp_path: Path) -> None:
    text = written(write_run(tmp_path / "run", [0.1], LOCAL))
    assert "base_model" not in front_matter(text)
    assert "someone" not in text
    assert "`tasks.parquet`" in text


@pytest.mark.slow
def test_the_card_of_a_checkpoint_tells_what_was_known_at_its_step(tmp_path: Path) -> None:
    text = written(write_run(tmp_path / "run", [0.1, 0.5, 0.9]), steps=2)
    assert "2 steps trained 16 trajectories" in text
    assert "| training batches: reward | 0.1 | 0.5 |" in text
    assert "| held-out accuracy | 0.25 | 0.25 |" in text


@pytest.mark.slow
def test_a_card_is_written_anew_unless_somebody_changed_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.1])
    assert is_ours(written(run))
    assert is_ours(written(run))
    mine = (run / "model" / CARD).read_text().replace("## Limits", "## My limits")
    for text in (mine, "# All mine\n"):
        (run / "model" / CARD).write_text(text)
        assert not write_card(Run(run), run / "model")
        assert (run / "model" / CARD).read_text() == text
        assert named(text, "owner/name") == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "shown", "hidden"),
    [
        (
            {
                "actor.tools": ["calculator"],
                "actor.verl_tools": [{"class_name": "mine.Vault"}, {"function_tool_path": "/home/me/functions.py"}],
                "actor.mcp_servers": {"files": {"command": "serve"}},
            },
            ["these tools: `calculator`, `mine.Vault`, `functions.py`, `files`"],
            ["Agent loops", "/home/me"],
        ),
        (
            {
                "actor.agent": "verl",
                "actor.agent_options": {
                    "default_agent_loop": "mine.Loop",
                    "agent_loop_config_path": "/home/me/loops.yaml",
                    "config": {"actor_rollout_ref": {"rollout": {"multi_turn": {"tool_config_path": "t/tools.yaml"}}}},
                },
            },
            [
                "these tools: `tools.yaml`",
                "Agent loops written for verl played its episodes: `mine.Loop`, `loops.yaml`",
            ],
            ["calculator", "/home/me"],
        ),
        ({"actor.environment": "mine.World"}, [], ["calculator", "tool-use"]),
    ],
)
def test_it_names_the_tools_and_loops_that_played(
    tmp_path: Path, values: dict[str, Any], shown: list[str], hidden: list[str]
) -> None:
    text = written(write_run(tmp_path / "run", [0.1], values))
    assert all(each in text for each in shown)
    assert not any(each in text for each in hidden)


@pytest.mark.slow
def test_a_card_on_the_hub_names_the_model_there(tmp_path: Path) -> None:
    text = named(written(write_run(tmp_path / "run", [0.1])), "owner/name")
    assert 'path = "owner/name"' in text
    assert is_ours(text)


@pytest.mark.slow
def test_what_it_says_about_loading_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.learner.support import write_model

    run = write_run(tmp_path / "run", [0.1])
    write_model(run / "model")
    blocks = re.findall(r"```python\n(.*?)```", written(run), re.S)
    (run / "model" / "block.py").write_text("\n".join(blocks))
    monkeypatch.chdir(run / "model")
    assert runpy.run_path("block.py")["output"].shape[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("base", ["a/b\nlicense: mit", "x/`](javascript:1)", "a/b\ud800", "yes", "<script>/x"])
def test_a_hostile_name_of_the_base_model_is_text_and_names_no_model_of_the_hub(tmp_path: Path, base: str) -> None:
    run = write_run(tmp_path / "run", [0.1], {"model.path": base})
    write_card(Run(run), tmp_path)
    text = (tmp_path / CARD).read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert not front.keys() & {"base_model", "license"}
    assert "``" not in text.replace("```", "")
