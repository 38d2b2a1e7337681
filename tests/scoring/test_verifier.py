import json
import os
import re
import subprocess
import sys
import textwrap
from contextlib import closing
from dataclasses import replace

import numpy as np
import psutil
import pytest

from asyncrl.config.schema import ModelConfig, ScoringConfig
from asyncrl.errors import AsyncrlError, ConfigError, ScoringError
from asyncrl.scoring.rules.base import RuleInput
from asyncrl.scoring.verifier import Steps, Verifier
from asyncrl.types import Role, Turn, runs_of
from tests.episode.fakes import ids, make_tokenizer
from tests.helpers import GENEROUS_S, has_ended, living, make_trajectory, until
from tests.scoring.fakes import answered, rule_input

pytestmark = pytest.mark.slow

MODULE = """
import ctypes, os, re, signal, subprocess, sys, time
from pathlib import Path
from asyncrl import wire

class Mute(Exception):
    def __str__(self):
        raise ValueError("no message")

class Manager:
    def __init__(self, tokenizer, num_examine):
        pass
    def __call__(self, data):
        return 0.0

def of_trl(completions, trainer_state, log_metric, **kwargs):
    log_metric("step", trainer_state.global_step)
    log_metric("last", trainer_state.max_steps)
    assert completions[0][-1]["content"][1]
    return [len(completions[0])]

def obeys(task, answer, trajectory):
    if answer == "loop":
        print("looping", os.getpid(), flush=True)
        while True:
            pass
    if answer == "regex":
        return re.match("(a*)*b", "a" * 60) is None
    if answer == "crash":
        os._exit(3)
    if answer == "segmentation fault":
        ctypes.string_at(0)
    if answer == "leave the program":
        raise SystemExit("enough")
    if answer == "interrupt":
        raise KeyboardInterrupt("enough")
    if answer == "escape":
        raise LookupError("red " + chr(27) + "[31m")
    if answer == "no output":
        sys.stdout.close()
        sys.stdout = None
        return 1.0
    if answer == "raise":
        raise LookupError("no such thing")
    if answer == "memory":
        try:
            held = bytearray(3 << 30)
            time.sleep(60)
            return len(held)
        except Exception:
            return 0.0
    if answer == "child memory":
        subprocess.run([sys.executable, "-c", "import time; x = bytearray(3 << 29); time.sleep(60)"])
        return 0.0
    if answer.startswith("leave"):
        child = subprocess.Popen(["sleep", "977"])
        Path(answer.split()[1]).write_text(str(child.pid))
        while answer.endswith("overrun"):
            time.sleep(0.01)
        return 1.0
    if answer == "signals":
        for each in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), each)
        return 1.0
    if answer == "mute":
        raise Mute
    if answer == "half a pair":
        raise LookupError("half of a pair: " + chr(0xD800))
    if answer == "forge":
        frame = sys._getframe()
        while "pipe" not in frame.f_locals:
            frame = frame.f_back
        pipe, number = (frame.f_locals[name] for name in ("pipe", "number"))
        for forged in (1, number):
            scores = {"outcome": 9.0, "total": 9.0, "scores": {}, "vote": "", "reasons": []}
            pipe.send(wire.join(wire.encode(wire.Message("scores", forged, scores))))
        return 0.0
    if answer == "talk":
        return {"score": 0.5, "reason": "it has " + "no " * 2000 + chr(0xD800), "pred": "72"}
    if answer == "nothing":
        return None
    if answer.startswith("meet"):
        # Two episodes that each wait for the other: they are judged at once, or overrun.
        here, there = answer.split()[1:]
        Path(here).touch()
        while not Path(there).exists():
            time.sleep(0.01)
        return 1.0
    print("a rule may print")
    return {"score": float(answer), "tokens": len(trajectory), "member": trajectory.member}
"""

MANAGER = ScoringConfig(rule="tests.scoring.rules.test_verl.Manager")
CONFIG = ScoringConfig(rule="obedient_rewards.obeys", timeout_s=GENEROUS_S, rule_memory_mb=512, rule_processes=2)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rules")
    (folder / "obedient_rewards.py").write_text(textwrap.dedent(MODULE))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(folder)
        verifier = Verifier(CONFIG)
        yield verifier
        verifier.close()


def test_the_scores_of_the_process_are_those_of_the_rule(verifier):
    scores = verifier.score(rule_input("0.25", index=3))
    assert (scores.outcome, scores.total) == (0.25, 0.25)
    assert scores.scores == {"obeys": 0.25, "obeys/tokens": 17, "obeys/member": 3}


def test_the_signals_by_which_slurm_asks_a_scorer_to_stop_or_drain_do_not_end_a_rule(verifier):
    assert verifier.score(rule_input("signals")).outcome == 1.0


def test_an_interrupt_that_a_rule_raises_is_told_with_its_line(verifier):
    with pytest.raises(ScoringError, match=r"raised KeyboardInterrupt: enough \(.*obedient_rewards.py, line \d+\)"):
        verifier.score(rule_input("interrupt"))


def test_an_error_of_a_rule_cannot_write_to_the_terminal(verifier):
    with pytest.raises(ScoringError, match="red \N{REPLACEMENT CHARACTER}"):
        verifier.score(rule_input("escape"))


def test_a_rule_may_close_its_output(verifier):
    assert verifier.score(rule_input("no output")).outcome == 1.0


def test_a_rule_may_say_why_and_a_long_reason_is_cut(verifier):
    scores = verifier.score(rule_input("talk"))
    assert (scores.scores, scores.vote) == ({"obeys": 0.5}, "72")
    ((name, text),) = scores.reasons
    assert name == "obeys"
    assert text.startswith("it has no no")
    assert "characters cut" in text
    assert len(text) < 2100


@pytest.mark.usefixtures("verifier")
def test_a_function_of_trl_gets_the_turns_and_the_step_and_names_itself_when_it_fails():
    found = rule_input("72", version_runs=runs_of(np.array([-1] * 5 + [6] * 5 + [-1] * 2 + [6] * 3, np.int32)))
    with closing(Verifier(ScoringConfig(rule="obedient_rewards.of_trl"), steps=Steps(40, 2))) as verifier:
        scores = verifier.score(found)
        assert scores.scores == {"of_trl": 3.0, "of_trl/step": 12.0, "of_trl/last": 40.0}
        with pytest.raises(ScoringError, match=r"of_trl raised IndexError: .*, at task task-0"):
            verifier.score(rule_input("7"))


@pytest.mark.parametrize("answer", ["loop", "regex"])
@pytest.mark.usefixtures("verifier")
def test_a_rule_that_never_ends_is_stopped_by_its_time_limit(answer):
    with (
        closing(Verifier(replace(CONFIG, timeout_s=1.0))) as verifier,
        pytest.raises(ScoringError, match=r"longer than scoring\.timeout_s=1 \(\S*obedient_rewards\.py, line \d+\)"),
    ):
        verifier.score(rule_input(answer))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("crash", r"the rule ended its process with status 3 \(\S*obedient_rewards\.py, line \d+\)"),
        ("segmentation fault", r"ended its process by SIGSEGV \(\S*obedient_rewards\.py, line \d+\)"),
        ("leave the program", r"the rule raised SystemExit: enough \(\S*obedient_rewards\.py, line \d+\)"),
        ("raise", "LookupError: no such thing"),
        ("memory", r"more than scoring\.rule_memory_mb=512"),
        ("child memory", r"more than scoring\.rule_memory_mb=512"),
        ("nothing", "must be a finite number"),
        ("mute", "Mute"),
        ("half a pair", r"LookupError: half of a pair: \?"),
    ],
)
def test_a_rule_that_fails_says_why_and_the_next_episode_is_judged(verifier, answer, reason):
    with pytest.raises(ScoringError, match=reason):
        verifier.score(rule_input(answer))
    assert verifier.score(rule_input("1")).outcome == 1.0


def test_an_answer_that_a_rule_forges_is_not_taken_for_that_of_another_episode(verifier, caplog):
    assert verifier.score(rule_input("forge")).outcome == 9.0, "a rule may give its own episode any score"
    assert [verifier.score(rule_input(answer)).outcome for answer in ("0.5", "0.25")] == [0.5, 0.25]
    refused = [each for each in caplog.messages if "an answer to another request than its present one" in each]
    # A number that it made up, and its true answer, which came after the forged one.
    assert [re.search(r"\d+ so far", each).group() for each in refused] == ["1 so far", "2 so far"]


@pytest.mark.parametrize("fate", ["overrun", "close"])
@pytest.mark.usefixtures("verifier")
def test_what_a_rule_leaves_behind_ends_with_its_process(tmp_path, fate):
    verifier = Verifier(replace(CONFIG, timeout_s=4.0 if fate == "overrun" else GENEROUS_S))
    try:
        if fate == "overrun":
            with pytest.raises(ScoringError, match="took longer"):
                verifier.score(rule_input(f"leave {tmp_path / 'pid'} overrun"))
        else:
            assert verifier.score(rule_input(f"leave {tmp_path / 'pid'} {fate}")).outcome == 1.0
            verifier.close()
        left = int((tmp_path / "pid").read_text())
        until(lambda: has_ended(left))
    finally:
        verifier.close()


@pytest.mark.parametrize("fate", ["done", "overrun"])
@pytest.mark.usefixtures("verifier")
def test_what_a_rule_leaves_behind_ends_after_a_killed_scorer_even_while_the_rule_runs(tmp_path, fate):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = HANGING.replace('"loop"', f'"leave {tmp_path / "pid"} {fate}"')
    scorer = subprocess.Popen([sys.executable, "-c", program + "input()"], stdin=subprocess.PIPE, env=environment)
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    left = psutil.Process(int((tmp_path / "pid").read_text()))
    scorer.kill()
    scorer.wait()
    scorer.stdin.close()
    until(lambda: not living([left]))


@pytest.mark.heavy
def test_a_program_that_never_ends_is_worth_nothing_and_dead_letters_no_episode():
    rules = {"test": [{"name": "code", "params": {"partial": True}}]}
    truth = json.dumps({"inputs": ["1"] * 4, "outputs": ["1"] * 4})
    with closing(Verifier(ScoringConfig(rules=rules, timeout_s=8.0))) as verifier:
        scores = verifier.score(rule_input("while True: pass", truth=truth))
    assert scores.scores == {"code": 0.0, "code/passed": 0.0, "code/out_of_time": 1.0, "code/unclear": 0.0}


def test_as_many_episodes_are_judged_at_once_as_there_are_processes(verifier, tmp_path):
    for _ in range(2):
        verifier.score(rule_input("1"))
    here, there = tmp_path / "a", tmp_path / "b"
    meeting = [verifier.submit(rule_input(f"meet {here} {there}")), verifier.submit(rule_input(f"meet {there} {here}"))]
    assert [future.result().outcome for future in meeting] == [1.0, 1.0]


def test_episodes_keep_their_scores_whatever_happens_to_others(verifier):
    answers = ["1", "crash", "2", "raise", "3", "4", "crash", "5"]
    futures = [verifier.submit(rule_input(answer)) for answer in answers]
    for answer, future in zip(answers, futures, strict=True):
        if answer in ("crash", "raise"):
            assert isinstance(future.exception(), ScoringError)
        else:
            assert future.result().outcome == float(answer)


def test_a_rule_that_cannot_be_loaded_is_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"scoring\.rule=no_such_module\.rule"):
        Verifier(ScoringConfig(rule="no_such_module.rule"))


@pytest.mark.usefixtures("verifier")
def test_a_manager_without_the_policys_tokenizer_is_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"needs model\.path"):
        Verifier(ScoringConfig(rule="obedient_rewards.Manager"))


def test_a_verl_manager_reads_with_the_policys_tokenizer(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    task, trajectory = answered("?")
    tokens = np.concatenate([ids(tokenizer, "the prompt"), answer := ids(tokenizer, "so 72")])
    start = len(tokens) - len(answer)
    mask = np.arange(len(tokens)) >= start
    turns = (Turn(0, start, Role.PROMPT), Turn(start, len(tokens), Role.ASSISTANT, "stop"))
    trajectory = make_trajectory(
        length=len(tokens),
        tokens=tokens,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=turns,
        steps=(),
    )
    verifier = Verifier(MANAGER, ModelConfig(path=str(tmp_path)))
    try:
        assert verifier.score(RuleInput(task, trajectory, "", "")).scores == {"Manager": 1.0, "Manager/acc": 1.0}
    finally:
        verifier.close()


HANGING = """
from asyncrl.config.schema import ScoringConfig
from asyncrl.scoring.verifier import Steps, Verifier
from tests.scoring.fakes import rule_input
verifier = Verifier(ScoringConfig(rule="obedient_rewards.obeys", timeout_s=3600.0))
verifier.score(rule_input("loop"))
"""


@pytest.mark.usefixtures("verifier")
def test_a_hanging_rule_ends_with_its_killed_scorer():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    scorer = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, env=environment)
    word, rules = scorer.stdout.readline().split()
    assert word == b"looping"
    scorer.kill()
    scorer.wait()
    scorer.stdout.close()
    until(lambda: has_ended(int(rules)))


@pytest.mark.usefixtures("verifier")
def test_closing_ends_processes_that_are_busy_or_already_gone():
    verifier = Verifier(ScoringConfig(rule="obedient_rewards.obeys", timeout_s=3600.0, rule_processes=2))
    with pytest.raises(ScoringError):
        verifier.score(rule_input("crash"))
    before = set(psutil.Process().children(recursive=True))
    futures = [verifier.submit(rule_input("loop")) for _ in range(4)]
    looping = until(lambda: two_new_children(before))
    # It does not wait for the loops, which would go on for an hour.
    verifier.close()
    verifier.close()
    with pytest.raises(ScoringError, match="was closed"):
        verifier.submit(rule_input("1"))
    assert all(future.cancelled() or isinstance(future.exception(), AsyncrlError) for future in futures)
    until(lambda: not living(looping))


def two_new_children(before: set[psutil.Process]) -> set[psutil.Process]:
    """The children of this process that are not among `before`, once there are two."""
    found = set(psutil.Process().children(recursive=True)) - before
    return found if len(found) >= 2 else set()
