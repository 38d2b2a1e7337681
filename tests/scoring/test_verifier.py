import os
import subprocess
import sys
import textwrap

import psutil
import pytest

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.verifier import Verifier
from tests.helpers import until
from tests.scoring.fakes import answered

MODULE = """
import os, re

def obeys(task, answer, trajectory):
    if answer == "loop":
        print("looping", flush=True)
        while True:
            pass
    if answer == "regex":
        return re.match("(a*)*b", "a" * 60) is None
    if answer == "crash":
        os._exit(3)
    if answer == "raise":
        raise LookupError("no such thing")
    if answer == "nothing":
        return None
    print("a rule may print")
    return {"score": float(answer), "tokens": len(trajectory), "member": trajectory.member}
"""


@pytest.fixture
def verifier(tmp_path, monkeypatch):
    (tmp_path / "obedient_rewards.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    verifier = Verifier("obedient_rewards.obeys", {}, timeout_s=1.0)
    yield verifier
    verifier.close()


def verify(verifier, answer):
    task, trajectory = answered(answer, index=3)
    return verifier.verify(task, answer, trajectory)


def test_the_verdict_of_the_process_is_that_of_the_rule(verifier):
    verdict = verify(verifier, "0.25")
    assert verdict.outcome == 0.25
    assert verdict.extra == {"tokens": 17, "member": 3}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("loop", r"longer than scoring\.timeout_s=1"),
        ("regex", r"longer than scoring\.timeout_s=1"),
        ("crash", "took its process down"),
        ("raise", "LookupError: no such thing"),
        ("nothing", "must be a finite number"),
    ],
)
def test_a_rule_that_fails_says_why_and_the_next_episode_is_judged(verifier, answer, reason):
    with pytest.raises(ScoringError, match=reason):
        verify(verifier, answer)
    assert verify(verifier, "1").outcome == 1.0


def test_a_rule_that_cannot_be_loaded_is_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"scoring\.rule=no_such_module\.rule"):
        Verifier("no_such_module.rule", {}, timeout_s=1.0)


HANGING = """
from asyncrl.scoring.verifier import Verifier
from tests.scoring.fakes import answered
verifier = Verifier("obedient_rewards.obeys", {}, timeout_s=1.0)
task, trajectory = answered("loop")
verifier.verify(task, "loop", trajectory)
"""


def test_a_hanging_rule_does_not_outlive_a_killed_scorer(verifier):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    scorer = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, env=environment)
    assert scorer.stdout.readline() == b"looping\n"
    (rules,) = psutil.Process(scorer.pid).children()
    scorer.kill()
    scorer.wait()
    scorer.stdout.close()
    until(lambda: not rules.is_running() or rules.status() == psutil.STATUS_ZOMBIE)


def test_closing_ends_a_process_that_is_busy_or_already_gone(verifier):
    with pytest.raises(ScoringError):
        verify(verifier, "crash")
    verifier.close()
    verifier.close()
