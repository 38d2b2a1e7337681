import numpy as np
import pytest

from asyncrl.config.schema import ScoringConfig, ShapingConfig
from asyncrl.errors import ScoringError
from asyncrl.scoring.rules.registry import load_rules
from asyncrl.scoring.scorer import Scorer
from asyncrl.types import Labels
from tests.scoring.fakes import CharTokenizer, FakePRM, answered


class InProcess:
    """A verifier without a process of its own."""

    def __init__(self, config):
        self._rules = load_rules(config.rule, config.rules)

    def verify(self, task, answer, trajectory):
        return self._rules.judge(task, answer, trajectory)


def scorer(prm=None, **config):
    config = ScoringConfig(**config)
    return Scorer(config, CharTokenizer(), InProcess(config), prm)


def test_labels_hold_outcome_steps_and_parts_under_the_scorers_name():
    config = {"shaping": ShapingConfig(process_weight=0.5), "rules": {"test": "exact_number"}, "rule": "exact_match"}
    _, trajectory = episode = answered("it is 72", rewards={"calculator": 2.0})
    (labels,) = scorer(FakePRM(), **config).score([episode])
    assert isinstance(labels, Labels)
    assert (labels.trajectory_id, labels.scorer) == ("episode-0", "exact_number+fake@1")
    assert (labels.outcome, labels.reward) == (1.0, 1.375)
    assert labels.step_scores.tolist() == [0.75, 0.75]
    assert labels.step_ends.tolist() == [step.end for step in trajectory.steps] == [10, 21]
    assert labels.extra == {"process": 0.75, "environment": 2.0}


def test_without_a_process_model_there_are_no_step_scores():
    (labels,) = scorer().score([answered("no")])
    assert (labels.outcome, labels.reward, labels.scorer) == (0.0, 0.0, "exact_number")
    assert labels.step_scores.shape == labels.step_ends.shape == (0,)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [("error", "IndexError: deep inside"), ("too long", "too long"), ("count", "shapes"), ("nan", "not finite")],
)
def test_one_bad_episode_does_not_fail_the_others_of_its_batch(failure, reason):
    episodes = [answered("72", 0), answered("bad 72", 1), answered("3", 2)]
    first, bad, last = scorer(FakePRM(failure)).score(episodes)
    assert (first.outcome, last.outcome) == (1.0, 0.0)
    assert first.trajectory_id == "episode-0"
    assert last.trajectory_id == "episode-2"
    assert isinstance(bad, ScoringError)
    assert reason in str(bad)


def test_a_batch_without_failure_is_one_call_of_the_model():
    prm = FakePRM()
    assert all(isinstance(each, Labels) for each in scorer(prm).score([answered("72", i) for i in range(5)]))
    assert prm.batches == [5]


def test_a_failing_rule_gives_a_reason_and_no_labels():
    good, bad = scorer().score([answered("72", 0), answered("72", 1, truth="unknown")])
    assert good.reward == 1.0
    assert "holds no number" in str(bad)


def test_an_empty_lease_gives_nothing():
    assert list(scorer(FakePRM()).score([])) == []


def test_step_scores_stand_on_their_steps():
    class Counting(FakePRM):
        def _one(self, transcript):
            return np.arange(sum(segment.is_step for segment in transcript), dtype=np.float32) / 4

    _, trajectory = episode = answered("72")
    (labels,) = scorer(Counting()).score([episode])
    by_end = dict(zip(labels.step_ends.tolist(), labels.step_scores.tolist(), strict=True))
    assert by_end == {step.end: index / 4 for index, step in enumerate(trajectory.steps)}
