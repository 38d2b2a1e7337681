"""`asyncrl try`: one episode in the terminal, with a script, with the embedded engine and with a server that runs."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from huggingface_hub import constants
from rich.console import Console

from asyncrl.commands.trial import __main__ as trial
from asyncrl.commands.trial.transcript import Transcript
from asyncrl.machine.slow_code import watched_code
from tests.data.test_tables import lines, row
from tests.engine.fleet.fakes import FakeSglang
from tests.engine.support import tiny_model
from tests.helpers import GENEROUS_S, status_of
from tests.templates.families import tokenizer

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Status, output and errors of `asyncrl try WORDS`."""
    monkeypatch.setenv("COLUMNS", "100")
    status = status_of("try", *words)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.fixture
def guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the environment, the rule and the tasks of the page."""
    for name, code in re.findall(r"`(my_\w+\.py)`.*?```python\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(code)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    (tmp_path / "tasks.jsonl").write_text(re.findall(r"```text\n(\{.*?)```", PAGE, re.DOTALL)[0] * 2)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def script(path: Path, *answers: Any) -> Path:
    path.write_text("".join(f"{json.dumps(answer)}\n" for answer in answers))
    return path


def calling(number: int) -> dict[str, Any]:
    return {"content": "", "tool_calls": [{"name": "guess", "arguments": {"number": number}}]}


OF_GUESS = ("actor.environment=my_environments.Guess", "scoring.rule=my_rewards.score")


def test_a_script_plays_an_environment_without_a_model_and_every_turn_is_shown(
    guess: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = script(guess / "answers.jsonl", calling(50), calling(500), {"content": "Then:", **calling(42)}, "42!")
    found = run(monkeypatch, capsys, guess / "tasks.jsonl", "--index", 1, "--answers", answers, *OF_GUESS)
    status, shown, errors = found
    assert status == 0, errors
    parts = [
        r"task +guess/tasks/1 \(.*tasks.jsonl: line 2\)",
        r"tools +guess",
        r"user ─+\nFind the secret number.\nThe number lies between 1 and 100.",
        r"assistant ─+\n→ guess\(\{\"number\": 50\}\)",
        r"tool guess ─+\nlower",
        r"Error: the number lies between 1 and 100",
        r"tool guess ─+\nfound",
        r"assistant ─+\n42!",
        r"finish +completed after 4 turns of the policy",
        r"environment +Guess 1\n",
        r"answer +42!",
        r"outcome +1\n",
    ]
    assert re.search(".*".join(parts), shown, re.DOTALL), shown


STEP_REWARDS = """
def found(task, trajectory, texts):
    return [float("50" in text) for text in texts]


def too_few(task):
    return [1.0]
"""


@pytest.mark.slow
def test_the_rewards_of_steps_and_of_calls_are_shown(
    guess: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (guess / "my_steps.py").write_text(STEP_REWARDS)
    monkeypatch.delitem(sys.modules, "my_steps", raising=False)
    with (guess / "my_environments.py").open("a") as file:
        file.write("\n    def get_call_reward(self):\n        return self.guesses[-1] / 100\n")
    answers = script(guess / "answers.jsonl", calling(50), calling(500), calling(40), "42!")
    words = (guess / "tasks.jsonl", "--answers", answers, *OF_GUESS)
    status, printed, errors = run(monkeypatch, capsys, *words, "scoring.steps=my_steps.found")
    assert status == 0, errors
    assert re.search(r"turns +0\.5, none, 0\.4, none\n.*steps +1, 1, 0, 0\n", printed, re.DOTALL), printed
    status, printed, _ = run(monkeypatch, capsys, *words, "scoring.steps=my_steps.too_few")
    assert status == 1
    assert re.search(r"scoring.steps=my_steps.too_few .*my_steps.py, line 6. returned 1 numbers for 4 steps", printed)


MODEL = """
from asyncrl.scoring.models import StepScores


class Numbers:
    def __init__(self, config):
        self.name = "numbers"
        self.found = config.params["found"]

    def score(self, transcripts):
        steps = [[each.plain for each in transcript if each.is_step] for transcript in transcripts]
        scores = [[self.found if "50" in text else 0.25 for text in texts] for texts in steps]
        return list(map(StepScores.of_probabilities, scores))
"""


@pytest.mark.slow
def test_the_step_scores_of_a_class_are_shown(
    guess: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (guess / "my_prm.py").write_text(MODEL)
    monkeypatch.delitem(sys.modules, "my_prm", raising=False)
    answers = script(guess / "answers.jsonl", calling(50), calling(40), "42!")
    words = (guess / "tasks.jsonl", "--answers", answers, *OF_GUESS, "scoring.shaping.process_weight=1")
    of_class = (*words, "scoring.prm.family=my_prm.Numbers")
    status, printed, errors = run(monkeypatch, capsys, *of_class, "scoring.prm.params={found: 0.75}")
    assert status == 0, errors
    assert re.search(r"rules .*\nsteps +0\.75, 0\.25, 0\.25\n", printed, re.DOTALL), printed
    status, printed, _ = run(monkeypatch, capsys, *of_class, "scoring.prm.params={found: 7}")
    assert status == 1
    assert re.search(r"the process reward model failed: .*outside \[0, 1\]", printed)
    status, printed, _ = run(monkeypatch, capsys, *words, "scoring.prm.path=a/model")
    assert status == 0
    assert re.search(r"steps +not scored: only a class of your own is loaded", printed)


@pytest.mark.slow
def test_what_goes_wrong_in_an_episode_is_shown_with_the_turns_before_it(
    guess: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = script(guess / "answers.jsonl", calling(50))
    status, shown, _ = run(monkeypatch, capsys, guess / "tasks.jsonl", "--answers", answers, *OF_GUESS)
    assert status == 1
    assert re.search("lower.*the episode failed: EngineError: the script has 1 answers", shown, re.DOTALL)
    rule = "scoring.rule=my_faults.nothing"
    (guess / "my_faults.py").write_text("def nothing(task, answer, trajectory):\n    raise KeyError('secret')\n")
    answers = script(guess / "answers.jsonl", '<tool_call>{"name": "dig", "arguments": {}}</tool_call>', "Done.")
    status, shown, _ = run(monkeypatch, capsys, guess / "tasks.jsonl", "--answers", answers, OF_GUESS[0], rule)
    assert status == 1
    assert re.search(r"Error:.*dig.*the rule failed: KeyError: 'secret' \(.*, line \d+\)", shown, re.DOTALL)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--index", 9), r"--index=9: .*tasks\.jsonl has tasks 0 to 1"),
        (("--answers", "nowhere.jsonl"), r"--answers=nowhere.jsonl cannot be read"),
        ((), r"model\.path: name a model .*--answers FILE"),
        (("model.path=./modl",), r"model\.path=\./modl: there is no such folder"),
        (("model.path=modl",), r"model\.path=modl: there is no such folder, .*HF_HUB_OFFLINE=1 forbids"),
        (("actor.environment=my_environments.Chess",), r"Chess"),
        (("scoring.rule=my_rewards.nowhere",), r"scoring\.rule=my_rewards\.nowhere cannot be imported"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_the_reason(
    guess: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[object, ...],
    reason: str,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    given = words if not words or "--answers" in words else ("--answers", script(guess / "a.jsonl", "x"), *words)
    status, shown, errors = run(monkeypatch, capsys, guess / "tasks.jsonl", *given)
    assert status == 2
    assert re.search(reason, errors), errors
    assert "assistant" not in shown, "it played the episode before it refused it"


@pytest.mark.parametrize("line", ["{", "5", '{"tool_calls": [{"name": "a"}]}', '{"text": "a"}'])
def test_a_line_of_a_script_that_is_no_answer_is_named(
    guess: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    (guess / "a.jsonl").write_text(f'"fine"\n{line}\n')
    status, _, errors = run(monkeypatch, capsys, guess / "tasks.jsonl", "--answers", guess / "a.jsonl", *OF_GUESS)
    assert status == 2
    assert re.search(r"a\.jsonl: line 2 is not (JSON|an answer).*write \"TEXT\" or", errors), errors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model that says anything."""
    of_family, policy = tokenizer("hermes3"), tiny_model()
    policy.resize_token_embeddings(len(of_family))
    of_family.save_pretrained(tmp_path / "model")
    policy.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


LIMITS = ("actor.tools=[]", "actor.max_turn_tokens=8", "actor.max_tokens=256", "engine.max_length=256")


@pytest.mark.slow
def test_the_embedded_engine_plays_with_the_weights_of_the_model(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = lines(tmp_path / "tasks.jsonl", row(3))
    status, shown, errors = run(monkeypatch, capsys, tasks, f"model.path={model}", *LIMITS)
    assert status == 0, errors
    assert re.search(r"user ─+\nWhat is 3\+1\?.*assistant ─+.*finish.*ground truth +4\noutcome +0\n", shown, re.DOTALL)
    answers = script(tmp_path / "answers.jsonl", "#### 4")
    _, shown, _ = run(monkeypatch, capsys, tasks, "--answers", answers, f"model.path={model}", *LIMITS)
    assert re.search(r"assistant ─+\n#### 4\n", shown)


@pytest.mark.slow
def test_a_server_that_would_have_to_be_joined_is_refused(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, at = lines(tmp_path / "tasks.jsonl", row(3)), ("engine.kind=vllm", "engine.urls=['http://127.0.0.1:9']")
    status, _, errors = run(monkeypatch, capsys, tasks, f"model.path={model}", *at, *LIMITS)
    assert status == 2
    assert "engine.kind=vllm: use sglang, embedded or --answers" in errors


def test_a_server_that_runs_is_asked_for_tokens_and_for_nothing_else(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, loop, server = lines(tmp_path / "tasks.jsonl", row(3)), asyncio.new_event_loop(), FakeSglang()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(GENEROUS_S)
        at = ("engine.kind=sglang", f"engine.urls=['{server.url}']")
        status, shown, errors = run(monkeypatch, capsys, tasks, f"model.path={model}", *at, *LIMITS)
        asyncio.run_coroutine_threadsafe(server.die(), loop).result(GENEROUS_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert status == 0, errors
    assert set(server.calls) == {"generate"}
    assert re.search(r"tokens +\d+, of which 8 sampled", shown)


def test_a_name_of_a_role_or_tool_has_no_effect_on_the_terminal():
    out = io.StringIO()
    role = {"role": "\x1b[2Jrole", "content": "said"}
    Transcript(Console(file=out)).messages([role, {"role": "tool", "name": "\x1b]0;title\x07", "content": "result"}])
    assert "\x1b" not in out.getvalue()
    assert "role" in out.getvalue()


OF_TRL = """
def correct(prompts, completions, solution, **kwargs):
    return [float(each in text) for each, text in zip(solution, completions)]


def hard(prompts, completions, difficulty, **kwargs):
    return [1.0]
"""


@pytest.mark.slow
def test_a_missing_column_of_a_reward_function_is_refused_with_the_line_that_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rewards_of_trl.py").write_text(OF_TRL)
    monkeypatch.delitem(sys.modules, "rewards_of_trl", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1?", "answer": "2", "level": 3}\n')
    answers = script(tmp_path / "answers.jsonl", "2")
    words = (tmp_path / "sums.jsonl", "--answers", answers, "scoring.rule=rewards_of_trl.correct")
    status, shown, errors = run(monkeypatch, capsys, *words)
    assert (status, "assistant" in shown) == (2, False)
    assert "line 1: rewards_of_trl.correct takes solution; the file has the columns answer, level, prompt" in errors
    [line] = re.findall(r"prompt: add (\S+ \S+)", errors)
    status, shown, errors = run(monkeypatch, capsys, *words, line.rstrip(",").replace('"', ""))
    assert (status, re.findall(r"outcome +(\S+)", shown)) == (0, ["1"]), errors
    _, _, errors = run(monkeypatch, capsys, *words[:-1], "scoring.rule=rewards_of_trl.hard")
    assert "answer, level, prompt: none has such a name; add difficulty to the file, rename the parameter" in errors


def test_code_that_ends_the_process_is_named_with_its_line_and_no_folder_is_left(
    guess: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class EndedError(BaseException):
        """Takes the place of the end of the process."""

    def leave(status: int) -> NoReturn:
        raise EndedError(status)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(tempfile, "tempdir", str(guess))
    (guess / "my_exits.py").write_text("import os\ndef score(task, answer, trajectory):\n    os._exit(0)\n")
    monkeypatch.delitem(sys.modules, "my_exits", raising=False)
    answers = script(guess / "answers.jsonl", calling(42), "42!")
    words = (guess / "tasks.jsonl", "--answers", answers, OF_GUESS[0], "scoring.rule=my_exits.score")
    with pytest.raises(EndedError, match="1"):
        run(monkeypatch, capsys, *words)
    shown = capsys.readouterr().out
    assert re.search(r"your own code ended the program by os\._exit\(0\) \(.*my_exits.py, line 3, in score\)", shown)
    assert not list(guess.glob("asyncrl-try-*"))


BLOCKING = """
import time
from pathlib import Path


def score(task, answer, trajectory):
    while not Path("told").exists():
        time.sleep(0.01)
    return 1.0
"""


def test_code_that_blocks_is_named_while_it_runs(
    guess: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (guess / "my_blocks.py").write_text(BLOCKING)
    monkeypatch.delitem(sys.modules, "my_blocks", raising=False)
    monkeypatch.chdir(guess)
    said: list[str] = []

    def tell(text: str, *values: object) -> None:
        said.append(text % values)
        if "my_blocks.py" in said[-1]:
            Path("told").touch()

    monkeypatch.setattr("asyncrl.machine.slow_code.log.warning", tell)
    monkeypatch.setattr(trial, "watched_code", partial(watched_code, 0.05))
    answers = script(guess / "answers.jsonl", calling(42), "42!")
    words = (guess / "tasks.jsonl", "--answers", answers, OF_GUESS[0], "scoring.rule=my_blocks.score")
    status, shown, errors = run(monkeypatch, capsys, *words)
    assert status == 0, errors
    assert re.search(r"outcome +1\n", shown)
    assert any(re.fullmatch(r"my_blocks.py, line [78], in score, has run for 0 s", each) for each in said)


@pytest.mark.slow
def test_code_that_ends_the_program_is_named_with_its_line_and_without_a_traceback(
    guess: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (guess / "my_ends.py").write_text("def score(task, answer, trajectory):\n    raise SystemExit(4)\n")
    monkeypatch.delitem(sys.modules, "my_ends", raising=False)
    answers = script(guess / "answers.jsonl", calling(42), "42!")
    words = (guess / "tasks.jsonl", "--answers", answers, OF_GUESS[0])
    status, shown, _ = run(monkeypatch, capsys, *words, "scoring.rule=my_ends.score")
    assert status == 1
    assert re.search(r"your own code tried to end the program: SystemExit: 4 \(.*my_ends.py, line 2\)", shown)
    code = (guess / "my_environments.py").read_text()
    (guess / "my_environments.py").write_text(f"{code}\n    def get_call_reward(self):\n        exit(4)\n")
    monkeypatch.delitem(sys.modules, "my_environments", raising=False)
    status, shown, errors = run(monkeypatch, capsys, *words)
    assert status == 1
    assert re.search(r"it tried to end the program: SystemExit: 4 \(.*my_environments.py, line \d+\)", shown)
    assert "get_call_reward of environment Guess failed" in errors
    assert "Traceback" not in errors
