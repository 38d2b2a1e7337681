"""A translated run is judged as in verl: by a function, a manager or a reward model alone."""

from __future__ import annotations

import pytest

from asyncrl.compat.report import Translated
from asyncrl.compat.verl.configuration.command import translated
from asyncrl.compat.verl.configuration.source import read_verl
from asyncrl.compat.verl.configuration.translation import translate

MODEL = ["reward.reward_model.enable=true", "reward.reward_model.model_path=org/model"]
OLDER = ["reward_model.enable=true", "reward_model.model.path=org/model"]
FUNCTION = "reward.custom_reward_function.path=pkg://mine/rewards"
POLICY_LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"


def from_words(*words: str) -> Translated:
    return translate(read_verl(None, words, {}))


def has(result: Translated, *parts: str) -> bool:
    return any(all(part in line for part in parts) for line in result.differs)


@pytest.mark.parametrize("words", [MODEL, OLDER])
@pytest.mark.parametrize("manager", ["naive", "dapo", "batch"])
def test_a_reward_model_judges_alone(words: list[str], manager: str) -> None:
    result = from_words(*words, f"reward.reward_manager.name={manager}")
    settings = result.settings
    assert settings["scoring.rule"] is None
    assert settings["scoring.outcome_model.path"] == "org/model"
    assert not {"scoring.rules", "scoring.manager.name"} & set(settings)
    assert has(result, "the reward model alone judges", "scoring.rule is null")


@pytest.mark.slow
def test_a_run_with_a_reward_model_alone_is_not_refused() -> None:
    words = [*MODEL, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]
    assert "Fix before you start a run:" not in translated(None, words, None)[1]


def test_a_function_judges_alone_although_there_is_a_reward_model() -> None:
    result = from_words(*MODEL, FUNCTION)
    assert result.settings["scoring.rule"] == "mine.rewards.compute_score"
    assert "scoring.outcome_model.path" not in result.settings
    assert has(result, "the model adds nothing to the reward in verl", "org/model")


def test_without_a_path_of_the_model_the_report_asks_for_one() -> None:
    result = from_words(MODEL[0])
    assert result.settings["scoring.rule"] is None
    assert has(result, "name the model in scoring.outcome_model.path")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "key", "meant"),
    [
        ([f"{POLICY_LOSS}=gsppo"], "algorithm.loss=gsppo", "did you mean gspo?"),
        (
            ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=full"],
            "algorithm.kl=full",
            "k3",
        ),
    ],
)
def test_a_loss_or_a_kl_that_does_not_exist_is_refused(words: list[str], key: str, meant: str) -> None:
    usual = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]
    _, report = translated(None, [*usual, *words], None)
    [line] = report[report.index("Fix before you start a run:") + 1 :]
    assert key in line
    assert meant in line


def test_megatrons_optimizer_on_the_host_is_known() -> None:
    key = "actor_rollout_ref.actor.optim.override_optimizer_config"
    result = from_words(f"+{key}.optimizer_cpu_offload=True", f"+{key}.overlap_cpu_optimizer_d2h_h2d=True")
    assert result.settings["learner.optimizer_on_host"] is True
    assert not result.unknown
