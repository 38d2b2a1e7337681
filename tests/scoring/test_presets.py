"""The reward managers: presets of configs/scoring, composed as the command line composes them, and what they make of
an episode."""

import pytest

from asyncrl.config.compose import read
from asyncrl.errors import ConfigError
from tests.scoring.fakes import TextPRM, lines, score

pytestmark = pytest.mark.slow

PRM = TextPRM(lambda text: 0.25 if "perhaps" in text else 0.75)
RIGHT, WRONG = ["8 * 9", "perhaps 72", "#### 72"], ["8 * 9", "perhaps 71", "#### 71"]


@pytest.fixture
def preset(tmp_path):
    """The scoring section that a command line with these overrides gives."""
    data = tmp_path / "train.parquet"
    data.touch()

    def scoring(*overrides):
        return read([f"data.train={data}", "model.path=m", "scoring.rule=gsm8k", *overrides]).scoring

    return scoring


def rewards(config, with_prm=False):
    prm = PRM if with_prm else None
    return [score(lines(*texts), config, prm).reward for texts in (RIGHT, WRONG)]


def test_naive_is_the_rules_alone(preset):
    assert rewards(preset()) == rewards(preset("scoring=naive")) == [1.0, 0.0]


def test_dapo_adds_the_soft_penalty_on_long_answers(preset):
    config = preset("scoring=dapo", "scoring.shaping.overlong_max_length=40", "scoring.shaping.overlong_buffer=36")
    length = len("\n".join(RIGHT)) + 1
    assert rewards(config) == pytest.approx([1 - (length - 4) / 36, -(length - 4) / 36])


def test_dapo_must_be_told_the_length(preset):
    with pytest.raises(ConfigError, match=r"scoring\.shaping\.overlong_max_length=0 with .*overlong_buffer=512"):
        preset("scoring=dapo")


def test_prime_judges_many_cases_at_once(preset):
    config = preset("scoring=prime")
    assert config.rule_processes == 8
    assert rewards(config) == [1.0, 0.0]


@pytest.mark.parametrize("name", ["qwen_prm", "skywork_prm"])
def test_the_process_managers_pay_step_scores_with_bonuses_for_right_answers(preset, name):
    config = preset(f"scoring={name}", "scoring.prm.path=p", "scoring.shaping.prm_acc_bonus_weight=0.5")
    assert config.prm.family == name
    length, mean = len("\n".join(RIGHT)) + 1, (0.75 + 0.25 + 0.75) / 3
    assert rewards(config, with_prm=True) == pytest.approx([mean + 0.5 + 0.05 * length / 400, mean])


@pytest.mark.parametrize("name", ["qwen_prm", "skywork_prm", "pure"])
def test_a_process_manager_must_be_told_its_model(preset, name):
    with pytest.raises(ConfigError, match=r"scoring\.prm\.path=null: nothing gives step scores; name a process"):
        preset(f"scoring={name}")


def test_pure_pays_the_worst_step_and_the_outcome(preset):
    config = preset("scoring=pure", "scoring.prm.path=p")
    assert rewards(config, with_prm=True) == pytest.approx([1 - 0.5, -0.5])
    assert score(lines(*RIGHT), config, PRM).step_scores.tolist() == pytest.approx([0.5, -0.5, 0.5])


def test_rules_needs_and_transforms_can_be_written_on_the_command_line(preset):
    config = preset(
        "+scoring.rules={test: [{name: exact_number}, {name: format, weight: 0.5, params: {pattern: '#'}}], b: gsm8k}",
        "+scoring.needs={test: [rules]}",
        "scoring.shaping.step_transforms=[clip,delta]",
        "scoring.serve=[rules]",
    )
    assert score(lines(*RIGHT), config).extra["rules"] == 1.5
    assert (config.needs, config.serve) == ({"test": ["rules"]}, ["rules"])
    assert config.shaping.step_transforms == ["clip", "delta"]
