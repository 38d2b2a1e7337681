import pytest

from asyncrl.config.schema import GuardConfig
from asyncrl.scoring.stats import HackAlarm

CONFIG = GuardConfig(window_s=100.0, reward_rise=0.1, agreement_fall=0.1)


UP, DOWN, FLAT = [k / 20 for k in range(11)], [1 - k / 20 for k in range(11)], [0.5] * 11


def rings(rewards, agreements, seconds=10.0, outcomes=FLAT):
    alarm = HackAlarm(CONFIG)
    for index, means in enumerate(zip(rewards, outcomes, agreements, strict=False)):
        alarm.add(index * seconds, *means)
    return alarm.ringing


@pytest.mark.parametrize(
    ("rewards", "agreements", "ringing"),
    [(UP, DOWN, True), (UP, UP, False), (UP, FLAT, False), (DOWN, DOWN, False), (FLAT, DOWN, False)],
)
def test_it_rings_where_the_reward_rises_and_agreement_falls(rewards, agreements, ringing):
    assert rings(rewards, agreements) == ringing


@pytest.mark.parametrize(
    ("outcomes", "ringing"), [(UP, False), (FLAT, True), (DOWN, True), ([each / 10 for each in UP], True)]
)
def test_it_does_not_ring_where_the_outcomes_rise_with_the_reward(outcomes, ringing):
    assert rings(UP, DOWN, outcomes=outcomes) == ringing


def test_small_drifts_and_a_short_while_are_no_trend():
    assert not rings([reward / 10 for reward in UP], DOWN)
    assert not rings(UP, DOWN, seconds=4.0)
    assert not rings(UP[:5], DOWN[:5], seconds=25.0)


def test_noise_around_a_trend_does_not_hide_it():
    assert rings([r + 0.1 * (-1) ** k for k, r in enumerate(UP)], [a - 0.1 * (-1) ** k for k, a in enumerate(DOWN)])


def test_it_begins_once_ends_when_the_window_has_passed_on_and_counts():
    alarm = HackAlarm(CONFIG)
    begins = [
        alarm.add(10.0 * k, reward, 0.5, agreement) for k, (reward, agreement) in enumerate(zip(UP, DOWN, strict=True))
    ]
    assert sum(begins) == 1
    for k in range(11, 30):
        alarm.add(10.0 * k, UP[-1], 0.5, DOWN[-1])
    assert not alarm.ringing
    for k, (reward, agreement) in enumerate(zip(UP, DOWN, strict=True)):
        alarm.add(300 + 10.0 * k, 1 + reward, 0.5, agreement - 1)
    assert alarm.ringing
    assert alarm.count == 2
