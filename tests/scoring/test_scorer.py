from concurrent.futures import Future

import numpy as np
import pytest
from msgspec import structs

from asyncrl.config.schema import OutcomeModelConfig, ScoringConfig, ScoringModelConfig, ShapingConfig
from asyncrl.errors import ScoringError
from asyncrl.scoring.models.base import StepScores
from asyncrl.scoring.scorer import Scorer
from asyncrl.types import Labels
from tests.scoring.fakes import (
    CharTokenizer,
    FakeOutcome,
    FakePRM,
    TextPRM,
    answered,
    episode,
    lease,
    make_scorer,
    score,
)


def all_of(*episodes, prm=None, **config):
    """The results of a batch that passes through rules and process model at once."""
    scorer = make_scorer(ScoringConfig(**config), prm or FakePRM())
    return list(scorer.score([lease(each, "rules", "prm") for each in episodes]))


def test_labels_hold_outcome_steps_and_parts_under_the_scorers_names():
    config = ScoringConfig(
        rule="exact_match",
        rules={"test": [{"name": "exact_number"}, {"name": "format", "weight": 0.5, "params": {"pattern": "it is"}}]},
        shaping=ShapingConfig(process_weight=0.5),
    )
    _, trajectory = found = answered("it is 72", rewards={"calculator": 2.0})
    labels = score(found, config, FakePRM(), FakeOutcome(0.25))
    assert isinstance(labels, Labels)
    assert (labels.trajectory_id, labels.scorer) == ("episode-0", "exact_number,format+outcome@1+fake@1")
    assert (labels.outcome, labels.reward) == (1.0, 1.5 + 0.25 + 0.5 * 0.75)
    assert labels.step_scores.tolist() == [0.75, 0.75]
    assert labels.step_ends.tolist() == [step.end for step in trajectory.steps] == [10, 21]
    assert labels.extra == {
        "rule/exact_number": 1.0,
        "rule/format": 1.0,
        "rule/format/out_of_time": 0.0,
        "rule/format/out_of_memory": 0.0,
        "rules": 1.5,
        "accuracy": 1.0,
        "outcome_model": 0.25,
        "process": 0.75,
        "environment": 2.0,
    }


def test_without_a_rule_the_outcome_models_score_is_the_reward_and_the_outcome():
    config = ScoringConfig(rule=None)
    (result,) = make_scorer(config, outcome_model=FakeOutcome(0.25)).score([lease(answered("x"), "outcome_model")])
    labels = result.labels
    assert (labels.reward, labels.outcome, labels.scorer) == (0.25, 0.25, "outcome@1")
    assert labels.extra == {"outcome_model": 0.25, "environment": 0.0}


def test_a_scorer_says_once_that_its_models_judge_episodes_with_images_by_their_text(caplog):
    task, trajectory = answered("it is 72")
    images = {"image_spans": np.array([[0, 1]], np.int32), "image_digests": np.zeros((1, 32), np.uint8)}
    showing = structs.replace(trajectory, **images)
    scorer = make_scorer(ScoringConfig(), FakePRM())
    [plain] = scorer.score([lease((task, trajectory), "rules", "prm")])
    assert "images" not in caplog.text
    for _ in range(2):
        [found] = scorer.score([lease((task, showing), "rules", "prm")])
        assert found.labels.step_scores.tolist() == plain.labels.step_scores.tolist()
    assert caplog.text.count("they judge only its text") == 1


def scored_by_a_user(*scores, **changes):
    """An episode whose turns have these scores of a simulated user."""
    turns = [("prompt", "Q"), *([("assistant", "it is 72"), ("tool", "no")] * len(scores))]
    task, trajectory = episode(*turns, **changes)
    left = iter(scores)
    given = [turn._replace(score=next(left)) if turn.role == "assistant" else turn for turn in trajectory.turns]
    return task, structs.replace(trajectory, turns=tuple(given))


@pytest.mark.parametrize(("how", "environment"), [("sum", 1.5), ("last", 0.25), ("mean", 0.5), ("max", 1.0)])
def test_a_users_scores_of_turns_are_environment_reward_and_step_scores(how, environment):
    shaping = ShapingConfig(environment_weight=2.0, turn_scores=how, step_transforms=["clip"])
    found = scored_by_a_user(0.25, None, 1.0, 0.25, rewards={"calculator": 3.0})
    labels = score(found, ScoringConfig(shaping=shaping))
    assert labels.extra["environment"] == 3.0 + environment
    assert labels.reward == 1.0 + 2 * (3.0 + environment)
    assert labels.step_scores.tolist() == [0.25, 1.0, 0.25]
    steps = found[1].steps
    assert labels.step_ends.tolist() == [steps[0].end, steps[2].end, steps[3].end]


def test_step_scores_are_the_process_models_where_it_scores_and_the_users_where_it_is_a_shadow():
    found = scored_by_a_user(0.0, 1.0)
    repeats = ScoringConfig(shaping=ShapingConfig(enable_anti_hack=False))
    assert score(found, repeats, FakePRM()).step_scores.tolist() == [0.75, 0.75]
    assert score(found, ScoringConfig(shadow=True), FakePRM()).step_scores.tolist() == [0.0, 1.0]
    assert score(scored_by_a_user(None, None), ScoringConfig()).step_scores.tolist() == []


def test_branches_are_scored_by_themselves_and_rules_and_outcome_models_judge_the_last():
    class PromptPRM(FakePRM):
        def _one(self, transcript):
            return super()._one(transcript) * np.float32(len(transcript[0].text) / 8)

    class PromptOutcome(FakeOutcome):
        def score(self, transcripts):
            return [float(len(transcript[0].text)) for transcript in transcripts]

    turns = [("prompt", "Q"), ("assistant", "call"), ("tool", "ok"), ("assistant", "72")]
    found = episode(*turns, ("prompt", "QQQQ"), ("assistant", "it is 3"), ("prompt", "QQ"), ("assistant", "so 72"))
    labels = score(found, None, PromptPRM(), PromptOutcome())
    assert labels.step_scores.tolist() == [0.75 * letters / 8 for letters in (1, 1, 4, 2)]
    assert labels.step_ends.tolist() == [step.end for step in found[1].steps]
    assert (labels.outcome, labels.extra["outcome_model"]) == (1.0, 2.0)


def says_why(task, answer, trajectory):
    return {"score": 1.0, "reason": " it is so\n"}


def test_kinds_done_one_after_another_end_in_the_labels_of_all_at_once():
    found = answered("it is 72", rewards={"calculator": 2.0})
    talker = {"name": "tests.scoring.test_scorer.says_why", "weight": 0}
    config = ScoringConfig(rules={"test": ["exact_number", talker]}, shaping=ShapingConfig(process_weight=0.5))
    scorer = make_scorer(config, FakePRM(), FakeOutcome(0.25))
    partial = None
    for kind in ("rules", "outcome_model", "prm"):
        (scored,) = scorer.score([lease(found, kind, partial=partial, final=kind == "prm")])
        partial = scored.labels
        assert scored.final == (kind == "prm")
    together = score(found, config, FakePRM(), FakeOutcome(0.25))
    assert (partial.reward, partial.outcome, partial.scorer) == (together.reward, together.outcome, together.scorer)
    assert partial.extra == together.extra
    assert partial.vote == together.vote == "72"
    assert [each.text for each in partial.reasons] == [each.text for each in together.reasons] == ["it is so"]
    assert partial.step_scores.tolist() == together.step_scores.tolist()


def test_step_scores_of_an_earlier_lease_are_shaped_by_the_last():
    found = answered("72")
    scorer = make_scorer(ScoringConfig(shaping=ShapingConfig(process_weight=1.0)), FakePRM())
    (first,) = scorer.score([lease(found, "prm", final=False)])
    assert first.labels.step_scores.tolist() == [0.75, 0.75]
    (last,) = scorer.score([lease(found, "rules", partial=first.labels)])
    assert (last.labels.reward, last.labels.outcome) == (1.75, 1.0)
    assert last.labels.step_scores.tolist() == [0.75, 0.75]


@pytest.mark.parametrize(
    ("failure", "reason"),
    [("error", "IndexError: deep inside"), ("too long", "too long"), ("count", "shapes"), ("nan", "not finite")],
)
def test_one_bad_episode_does_not_fail_the_others_of_its_batch(failure, reason):
    episodes = [answered("72", 0), answered("bad 72", 1), answered("3", 2)]
    first, bad, last = all_of(*episodes, prm=FakePRM(failure))
    assert (first.labels.outcome, last.labels.outcome) == (1.0, 0.0)
    assert first.labels.trajectory_id == "episode-0"
    assert last.labels.trajectory_id == "episode-2"
    assert isinstance(bad, ScoringError)
    assert reason in str(bad)


def test_nonsense_of_an_outcome_model_fails_its_episode_alone():
    scorer = make_scorer(outcome_model=FakeOutcome())
    good, bad = scorer.score([lease(answered(text), "rules", "outcome_model") for text in ("72", "bad 72")])
    assert good.labels.extra["outcome_model"] == 0.25
    assert "gave [nan]" in str(bad)


def test_a_batch_without_failure_is_one_call_of_the_model():
    prm = FakePRM()
    assert not any(isinstance(each, ScoringError) for each in all_of(*[answered("72", i) for i in range(5)], prm=prm))
    assert prm.batches == [5]


def test_a_model_reads_only_what_asks_for_it():
    prm = FakePRM()
    scorer = make_scorer(prm=prm)
    plain, scored = scorer.score([lease(answered("72", 0), "rules"), lease(answered("72", 1), "rules", "prm")])
    assert prm.batches == [1]
    assert (len(plain.labels.step_scores), len(scored.labels.step_scores)) == (0, 2)
    assert plain.labels.step_ends.shape == (0,)


def test_a_failing_rule_gives_a_reason_and_no_labels():
    good, bad = all_of(answered("72", 0), answered("72", 1, truth="unknown"))
    assert good.labels.reward == 1.0
    assert "holds no number" in str(bad)


def test_an_episode_whose_verdict_was_called_off_has_a_reason():
    class Closing:
        def submit(self, case):
            future = Future()
            future.cancel()
            return future

    (bad,) = Scorer(ScoringConfig(), CharTokenizer(), Closing()).score([lease(answered("72"), "rules")])
    assert "were closed" in str(bad)


def test_what_a_process_does_not_serve_it_refuses():
    (bad,) = make_scorer().score([lease(answered("72"), "rules", "prm")])
    assert "does not serve prm: see scoring.serve" in str(bad)


def test_an_empty_lease_gives_nothing():
    assert list(make_scorer(prm=FakePRM()).score([])) == []


def test_an_episode_without_steps_has_no_process_score_and_is_no_zero():
    (bad,) = all_of(answered("72", steps=()))
    assert "no steps to score" in str(bad)


def test_an_episode_without_steps_is_still_judged_by_rule():
    (scored,) = make_scorer().score([lease(answered("72", steps=()), "rules")])
    assert (scored.labels.reward, scored.repeated) == (1.0, 0.0)


def test_without_rules_the_models_verdict_is_the_outcome():
    scorer = make_scorer(prm=FakePRM(), outcome_model=FakeOutcome(0.25))
    both, process, nothing = scorer.score(
        [lease(answered("72"), *kinds) for kinds in (("outcome_model", "prm"), ("prm",), ())]
    )
    assert both.labels.outcome == 0.25
    assert process.labels.outcome == 0.75
    assert "accuracy" not in process.labels.extra
    assert "see scoring.needs" in str(nothing)


def test_logits_are_scaled_as_the_configuration_says():
    class Sure:
        name = "sure@1"

        def score(self, transcripts):
            return [StepScores(np.float32([0.9, 0.9]), np.float32([2.0, -2.0])) for _ in transcripts]

    def scores(**shaping):
        return score(answered("72"), ScoringConfig(shaping=ShapingConfig(**shaping)), Sure()).step_scores.tolist()

    sigmoid = 1 / (1 + np.exp(-2.0))
    assert scores() == pytest.approx([0.9, 0.9])
    assert scores(prm_apply_sigmoid=True) == pytest.approx([sigmoid, 1 - sigmoid])
    assert scores(use_raw_logit=True) == [2.0, -2.0]
    tanh = scores(use_logit_tanh=True, prm_apply_sigmoid=True)
    assert tanh == pytest.approx([2 * sigmoid - 1, 1 - 2 * sigmoid]), "tanh wins, and by default is 2 p - 1"
    assert scores(use_logit_tanh=True, tanh_tau=1.0, tanh_rmax=3.0) == pytest.approx([3 * np.tanh(2), -3 * np.tanh(2)])


def test_a_shadow_is_recorded_and_changes_nothing_that_is_trained():
    config = ScoringConfig(
        shadow=True,
        prm=ScoringModelConfig(path="a"),
        outcome_model=OutcomeModelConfig(path="b"),
        shaping=ShapingConfig(process_weight=5.0),
    )
    found = answered("72")
    shadowed, plain = score(found, config, FakePRM(), FakeOutcome()), score(found)
    assert (shadowed.reward, shadowed.outcome) == (plain.reward, plain.outcome)
    assert len(shadowed.step_scores) == len(shadowed.step_ends) == 0
    assert shadowed.extra == {**plain.extra, "shadow/process": 0.75, "shadow/outcome_model": 0.25}


@pytest.mark.parametrize(("text", "score_of_all", "agree"), [("72", 0.9, True), ("5", 0.9, False), ("5", 0.1, True)])
def test_the_process_model_agrees_with_the_rules_or_not(text, score_of_all, agree):
    (scored,) = all_of(answered(text), prm=TextPRM(lambda step: score_of_all))
    assert scored.agree == agree
