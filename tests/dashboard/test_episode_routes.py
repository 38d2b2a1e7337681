from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.config.locations import CONFIG_FILE
from asyncrl.dashboard.vocabulary import load_vocabulary
from asyncrl.runs.run import Run
from tests.dashboard.support import answer, make_run, values
from tests.observe.kept.examples import write_examples
from tests.runs.inspect.support import make_run as make_store
from tests.runs.inspect.support import run_episodes


def make_kept(folder: Path) -> Path:
    """A run with kept episodes, whose tokens are those of the tokenizer in the folder of its exported model."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    write_examples(folder, encode=tokenizer.encode)
    return make_run(folder)


def test_the_table_leads_to_the_episode_and_its_group(tmp_path: Path) -> None:
    run = make_kept(tmp_path / "run")
    table = values([run], "/api/runs/run/episodes?flag=best&sort=-reward&limit=1")
    assert table["choices"]["total"] == 48
    row = table["rows"][0]
    address = f"/api/runs/run/episodes/{row['step']}/{row['id']}"
    episode = values([run], address)
    assert episode["vocabulary_problem"] == ""
    assert episode["record"] is None
    assert "".join(episode["parts"][1]["tokens"]["pieces"]) == "I use the tool: calculator(1 + 1)."
    assert f"--explain-episode {row['id']}" in episode["commands"]["its time, span by span"]
    assert len(values([run], f"{address}/group")["members"]) == 4
    assert values([run], f"{address}/neighbours?flag=best")["before"]["flags"] == ["best"]
    assert values([run], f"{address}/tokens?start=1")["start"] == 1


def test_a_search_finds_what_was_asked_and_answered_in_groups_and_episodes(tmp_path: Path) -> None:
    run = make_kept(tmp_path / "run")
    found = values([run], "/api/runs/run/episodes?text=ADDED%20two&rows=groups&limit=5")
    assert found["search"] == {"searched": 48, "of": 48, "complete": True}
    assert (found["matched"], found["groups"], len(found["rows"])) == (12, 12, 5)
    member = found["rows"][0]["members"][0]
    assert (member["member"], member["answer"]) == (1, "I added two numbers.")
    assert found["vocabulary_problem"] == ""
    found = values([run], "/api/runs/run/episodes?text=what%20is%203%20%2B%201&finish=truncated")
    assert found["search"]["of"] == 12
    assert [row["id"] for row in found["rows"]] == ["t000000010.3.0"]
    assert "search" not in values([run], "/api/runs/run/episodes")


@pytest.mark.slow
def test_what_is_not_there_is_refused_with_the_reason(tmp_path: Path) -> None:
    run = make_kept(tmp_path / "run")
    for path, wanted, reason in (
        ("episodes/1/t1.0.0", 400, "is not kept"),
        ("episodes/one/t1.0.0", 400, "step must be a number"),
        ("episodes?colour=red", 400, "no filter colour"),
        ("dead-letters", 503, "replay"),
    ):
        status, _, body = answer([run], f"/api/runs/run/{path}")
        assert status == wanted
        assert reason in json.loads(body)["error"]


def test_a_run_without_kept_episodes_has_an_empty_table(tmp_path: Path) -> None:
    found = values([make_run(tmp_path / "run")], "/api/runs/run/episodes")
    assert (found["matched"], found["rows"], found["choices"]["steps"]) == (0, [], None)


def test_dead_letters_and_records_are_those_of_the_replay(tmp_path: Path) -> None:
    run = make_kept(tmp_path / "run")
    core = make_store(run)
    ids = run_episodes(core, 4)
    core.fail(core.tickets(1)[0].id)
    core.store.close()
    found = values([run], "/api/runs/run/dead-letters")
    assert (found["total"], found["letters"][0]["reason"]) == (1, "broken")
    assert found["reasons"] == [{"scoring": False, "reason": "broken", "count": 1}]
    record = values([run], f"/api/runs/run/episodes/0/{ids[0]}")["record"]
    assert record["state"] == "labelled"


def test_the_tokenizer_of_the_configured_model_shows_text(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path / "model_of_the_run")
    # A configuration of another version counts too.
    (tmp_path / CONFIG_FILE).write_text(f"model: {{path: {tmp_path / 'model_of_the_run'}}}\nunknown: 1\n")
    vocabulary = load_vocabulary(Run(tmp_path))
    assert vocabulary.problem == ""
    assert vocabulary.decode(build_tokenizer().encode("h\N{LATIN SMALL LETTER E WITH ACUTE}llo")) == "h\u00e9llo"
    assert set(build_tokenizer().encode("<|im_end|>")) <= vocabulary.special


def test_without_a_tokenizer_ids_are_shown_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("no JSON")
    vocabulary = load_vocabulary(Run(tmp_path))
    assert vocabulary.decode([7, 8]) == "7 8 "
    assert str(tmp_path / "model") in vocabulary.problem
    assert CONFIG_FILE in vocabulary.problem
