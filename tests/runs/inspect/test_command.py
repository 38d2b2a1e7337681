"""The subcommands as they are typed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.config.changes import values_of
from asyncrl.config.schema import DataConfig, LearnerConfig, TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.observe.kept.writing import KeptWriter
from asyncrl.replay.store.store import ENDPOINT_FILE
from asyncrl.runs.finding import run_with_store
from asyncrl.runs.from_config import read_config
from tests.helpers import status_of
from tests.observe.kept.examples import example_step
from tests.runs.inspect.support import make_run, run_episodes, write_config

DATA = DataConfig(["train.parquet"])
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Return a function that runs a command line where runs/mine is a run, and returns status, output and errors."""
    monkeypatch.chdir(tmp_path)
    core = make_run(Path("runs/mine"))
    core.configure(values_of(TrainConfig(data=DATA)))
    core.configure(values_of(TrainConfig(data=DATA, learner=LearnerConfig(lr=0.5))))
    run_episodes(core, 4)
    core.fail(core.tickets(1)[0].id)
    core.store.close()

    def run(*arguments: str, command: str = "inspect") -> tuple[int, str, str]:
        code = status_of(command, *arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.slow
def test_a_run_is_found_by_its_folder_its_name_or_its_store(call: Call) -> None:
    write_config(Path("runs/mine"), replay_port=6)
    for where in (["runs/mine"], ["mine"], ["--run", "runs/mine"], ["--run", "mine"], ["--store", "runs/mine/replay"]):
        code, out, _ = call("status", "--json", *where)
        status = json.loads(out)
        assert code == 0
        assert status["totals"]["accepted"] == 4
        assert "no replay serves" in status["problem"]


@pytest.mark.slow
def test_a_line_of_the_status_that_goes_into_a_pipe_is_whole_and_tables_have_the_width_of_a_terminal(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(Path("runs/mine"), replay_port=6)
    Path("runs/mine/summary.json").write_text(json.dumps({"result": "stopped"}))
    lines = call("status", "--once", "mine")[1].splitlines()
    goes_on = "asyncrl resume runs/mine continues it, and asyncrl report runs/mine shows its results"
    (whole,) = (line for line in lines if goes_on in line)
    monkeypatch.setenv("FORCE_COLOR", "1")
    on_terminal = re.sub("\x1b[^m]*m", "", call("status", "--once", "mine")[1])
    assert goes_on not in on_terminal
    (titles,) = (line for line in lines if line.startswith("trajectories"))
    assert len(titles) <= 80 < len(whole)
    assert titles.rstrip() in [line.rstrip() for line in on_terminal.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("result", "says"),
    [
        ("done", "the run is done: asyncrl report runs/mine shows its results"),
        (
            "stopped",
            "the run has stopped: asyncrl resume runs/mine continues it, and asyncrl report runs/mine",
        ),
        ("failed", "the run failed: asyncrl resume runs/mine continues it"),
        (None, "no replay serves"),
    ],
)
def test_the_status_of_a_run_that_has_ended_says_how_and_what_to_do(call: Call, result: str | None, says: str) -> None:
    write_config(Path("runs/mine"), replay_port=6)
    Path("runs/mine/summary.json").write_text(json.dumps({"result": result}))
    assert json.loads(call("status", "--json", "mine")[1])["problem"].startswith(says)


def test_a_configuration_of_a_version_whose_data_was_one_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{model: {path: m}, data: {train: train.parquet, eval: null}}")
    with pytest.raises(ConfigError, match="of another version of asyncrl"):
        read_config(tmp_path)


def test_a_replay_that_was_started_by_hand_is_found_by_the_address_that_it_wrote(call: Call) -> None:
    run = run_with_store("mine")
    assert run.endpoints() == []
    Path("runs/mine/replay", ENDPOINT_FILE).write_text("tcp://127.0.0.1:7")
    assert run.endpoints() == ["tcp://127.0.0.1:7"]


def test_the_help_of_a_subcommand_describes_it(call: Call) -> None:
    status = " ".join(call("--help", command="status")[1].split())
    assert "Rates, queues, lags" in status
    assert "`asyncrl status` and `asyncrl inspect status` are the same command" in status
    assert "One line per episode." in call("list", "--help")[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["status"], "name the run, such as runs/NAME, or its store with --store; there are runs/mine"),
        (["status", "--run", "old"], "another version of asyncrl"),
        (
            ["status", "runs/yours"],
            "runs/yours is not a run: name the folder of a run, such as runs/NAME, or its name; there",
        ),
        (["status", "--run", "yours"], "yours is not a run: name the folder of a run"),
        (["status", "begun"], "there is no store runs/begun/replay: it was never made, or has been removed\n"),
        (["list", "logged"], "runs/logged/replay: it was never made, or has been removed; see runs/logged/logs\n"),
        (["status", "runs/file"], "runs/file is not a run: name the folder of a run"),
        (["status", "file"], "file is not a run: name the folder of a run"),
        (["status", "--store", "yours"], "there is no store yours: name one, such as runs/NAME/replay; there are"),
        (["show", "t000000000.9.0", "--run", "mine"], "do you mean t000000000.0.0"),
        (["show", "t000000001", "--run", "mine"], "do you mean t000000001.0.0, t000000001.1.0?"),
        (["show", "t000000077.0.0", "--run", "mine"], "do you mean t0"),
        (["show", "nonsense", "--run", "mine"], "such as t000000012.3.0"),
        (["export", "--to", "out", "--state", "tired", "--run", "mine"], "use one of waiting, leased"),
        (["import", "--from", "runs", "--to", "store"], "not a run that `asyncrl inspect export` wrote"),
        (["requeue", "--all", "--run", "mine"], "no replay serves runs/mine/replay: start the run"),
        (["requeue", "mine", "t000000002.0.0"], "no replay serves runs/mine/replay: start the run"),
        (["requeue", "t000000002.0.0", "--run", "mine"], "no replay serves runs/mine/replay: start the run"),
        (["requeue", "mine"], "name dead letters by their ids, or use --all"),
        (["status", "mine", "--run", "mine"], "the run is named twice"),
        (["list", "mine", "--step", "3"], "step 3 has no recorded batch; the run has no batch yet"),
    ],
)
def test_an_error_names_its_fix_and_ends_with_status_1_or_2(call: Call, arguments: list[str], fix: str) -> None:
    Path("runs/old/replay").mkdir(parents=True)
    Path("runs/old/config.yaml").write_text("replay: {no_such_key: 1}\n")
    Path("runs/begun").mkdir()
    write_config(Path("runs/begun"))
    Path("runs/logged/logs").mkdir(parents=True)
    write_config(Path("runs/logged"))
    Path("runs/file").touch()
    code, out, err = call(*arguments)
    assert (code in (1, 2), out) == (True, "")
    assert fix in err


@pytest.mark.parametrize("command", ["inspect", "status"])
def test_a_run_that_is_not_there_is_a_wrong_usage_as_for_every_command(call: Call, command: str) -> None:
    words = ["list", "yours"] if command == "inspect" else ["yours"]
    code, out, err = call(*words, command=command)
    assert (code, out, "yours is not a run" in err) == (2, "", True)


@pytest.mark.slow
def test_an_episode_is_shown_as_text_by_the_runs_own_tokenizer_and_as_ids_without(
    call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    assert "3 4  ⟨0.9⟩" in call("show", "t000000000.0.0", "--run", "mine")[1]
    assert "name a tokenizer with --tokenizer" in caplog.text
    write_config(Path("runs/mine"))
    assert "3 4  ⟨0.9⟩" in call("show", "t000000000.0.0", "--run", "mine")[1]
    assert "this machine has no tokenizer" in caplog.text
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained("runs/mine/model")
    assert f"{tokenizer.decode([3, 4])} ⟨0.9⟩" in call("show", "t000000000.0.0", "--run", "mine")[1]


def test_an_exported_run_is_imported_and_shown(call: Call) -> None:
    assert call("export", "--run", "mine", "--to", "out")[1] == "wrote 4 trajectories and 0 steps to out\n"
    assert call("import", "--from", "out", "--to", "store")[1] == "imported 4 trajectories to store\n"
    there, back = (
        json.loads(call("show", "t000000000.0.0", "--json", *where)[1])
        for where in (["--run", "mine"], ["--store", "store"])
    )
    assert there == back
    assert len(json.loads(call("dead-letters", "--json", "--store", "store")[1])) == 1


def test_a_list_has_a_line_an_episode_in_the_order_and_of_the_states_that_were_asked_for(call: Call) -> None:
    def listed(*arguments: str) -> list[str]:
        code, out, _ = call("list", "mine", "--json", *arguments)
        assert code == 0
        return [row["id"] for row in json.loads(out)]

    first, second, third, last = (f"t00000000{group}.{member}.0" for group in range(2) for member in range(2))
    failed = "t000000002.0.0"
    assert listed() == [failed, last, third, second, first]
    assert listed("--reverse", "--limit", "2") == [first, second]
    assert listed("--sort", "reward", "--limit", "0") == [last, third, second, first, failed]
    assert listed("--sort", "reward", "--reverse", "--limit", "1") == [first]
    assert listed("--state", "dead") == [failed]
    assert listed("--state", "labelled", "--sort", "time") == [last, third, second, first]
    assert listed("--evaluation", "0") == []
    out = call("list", "--run", "mine", "--limit", "2")[1].splitlines()
    assert out[1].split() == [failed, "dead", *"-------", "broken"]
    assert out[2].split() == [last, "labelled", "-", "0.375", "0.1875", "-", "12", "2", "0.225", "completed", "test"]
    assert out[3] == "the first 2; --limit N shows more, --limit 0 all"


def test_a_step_shows_its_best_and_worst_episodes_and_how_they_end(call: Call) -> None:
    core = make_run(Path("runs/mine"))
    assert core.plan(0) is not None
    core.store.close()
    out = call("step", "mine", "0", "--best", "1")[1]
    assert "reward    0.1875 on average, from 0 to 0.375" in out
    assert [" ".join(line.split()) for line in out.split("best\n")[1].splitlines() if line] == [
        "t000000001.1.0 reward 0.375 outcome 0.1875 lag 0 turns 2 completed",
        "9 10 11",
        "worst",
        "t000000000.0.0 reward 0 outcome 0 lag 0 turns 2 completed",
        "9 10 11",
    ]
    assert [row["id"] for row in json.loads(call("list", "mine", "--step", "0", "--json")[1])] == [
        f"t00000000{group}.{member}.0" for group in (1, 0) for member in (1, 0)
    ]
    assert [each["answer"] for each in json.loads(call("step", "mine", "0", "--json")[1])["worst"]] == ["9 10 11 "]


def test_an_episode_whose_text_is_gone_is_shown_from_what_the_learner_kept(call: Call) -> None:
    step = example_step(7, members=1, groups=1)
    (kept,) = step.episodes
    KeptWriter(Path("runs/mine"), 1 << 30).add(step)
    code, out, _ = call("show", "mine", kept.row.id)
    assert code == 0
    assert ["kept", "of", "step", "7"] in [line.split() for line in out.splitlines()]
    assert " ".join(map(str, kept.trajectory.tokens[:5])) in out
    shown = json.loads(call("show", "mine", kept.row.id, "--json")[1])
    assert shown["kept"]["advantages"] == kept.advantages.tolist()
    assert shown["kept"]["task"]["ground_truth"] == "7"
    assert shown["labels"]["scorer"] == kept.labels.scorer
    assert call("show", "mine", "t000000021.9.0")[0] == 1


def test_a_step_whose_text_is_gone_ends_with_what_the_learner_kept(call: Call) -> None:
    core = make_run(Path("runs/mine"))
    assert core.plan(0) is not None
    with core.store.transaction() as tx:
        for group in range(2):
            for member in range(2):
                tx.delete("data", f"t00000000{group}.{member}.0")
    core.store.close()
    assert "its text was removed" in call("step", "mine", "0", "--best", "1")[1]
    step = example_step(0, members=2, groups=1)
    KeptWriter(Path("runs/mine"), 1 << 30).add(step)
    found = json.loads(call("step", "mine", "0", "--best", "4", "--json")[1])
    assert found["kept_groups"] == ["t000000000"]
    assert [each["id"] for each in found["best"] if each["answer"]] == ["t000000000.1.0", "t000000000.0.0"]
    assert "kept" in call("step", "mine", "0")[1]


def test_a_sample_that_is_damaged_hides_nothing_else(call: Call, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path("runs/mine/episodes")
    folder.mkdir()
    (folder / "index.jsonl").write_text("none")
    assert call("show", "mine", "t000000000.0.0")[0] == 0
    (folder / "index.jsonl").write_text("none\n")
    assert call("show", "mine", "t000000000.0.0")[0] == 0
    assert "cannot be read" in caplog.text


def test_dead_letters_are_a_table_or_json(call: Call) -> None:
    (letter,) = json.loads(call("dead-letters", "--run", "mine", "--json")[1])
    assert (letter["reason"], letter["attempts"]) == ("broken", 1)
    out = call("dead-letters", "--run", "mine")[1]
    assert "1 dead letters with 1 reasons" in out
    assert letter["id"] in out
    assert "broken" in out


def test_changes_are_a_table_or_json(call: Call) -> None:
    (change,) = json.loads(call("changes", "--run", "mine", "--json")[1])
    assert change == {"step": 0, "key": "learner.lr", "old": 1e-06, "new": 0.5, "time": 0}
    assert "learner.lr" in call("changes", "--run", "mine")[1]


def test_the_subcommands_of_inspect_are_those_of_replay_too(call: Call) -> None:
    for command in ("inspect", "replay"):
        code, out, _ = call("status", "--run", "mine", "--once", command=command)
        assert code == 0
        assert "oldest ticket" in out
        assert call("list", "mine", "--limit", "1", command=command)[0] == 0
        code, _, err = call("statsu", command=command)
        assert code == 2
        assert "invalid choice: 'statsu'" in err
        assert "usage: asyncrl inspect" in err


def test_a_narrow_terminal_shows_whole_ids(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "46")
    rows = json.loads(call("list", "mine", "--json")[1])
    code, out, _ = call("list", "mine")
    assert code == 0
    assert rows
    assert all(row["id"] in out for row in rows)
