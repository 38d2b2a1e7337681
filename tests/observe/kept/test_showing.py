from __future__ import annotations

from asyncrl.observe.kept.showing import MAX_CHARS, logged
from tests.observe.kept.examples import HOSTILE, example_episode, from_utf8


def test_an_episode_is_plain_values_and_messages() -> None:
    episode = example_episode(step=2, group=0, member=1)
    found = logged(episode, from_utf8).facts
    assert all(isinstance(value, (int, float, str)) for value in found.values())
    assert (found["id"], found["flags"], found["truth"]) == ("t000000006.1.0", "best", "2")
    assert found["score/accuracy"] == 1
    assert found["advantage"] == 0.5
    turns = logged(episode, from_utf8).messages
    assert [each["role"] for each in turns] == ["prompt", "assistant", "tool", "assistant", "prompt", "assistant"]
    assert turns[0]["content"] == "user: What is 2 + 0?\n"


def test_hostile_and_long_text_stays_text_and_is_bounded() -> None:
    shown = logged(example_episode(step=0, group=2, member=3), from_utf8)
    assert HOSTILE in shown.messages[2]["content"]
    assert shown.facts["truth"] == "", "its task is not known"
    long = logged(example_episode(step=0, group=0, member=0), lambda ids: "x" * 10_000_000).messages
    assert all(len(each["content"]) < MAX_CHARS + 100 for each in long)
