from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from asyncrl.dashboard.episode_page import MOST_CHARACTERS, TOKENS_A_TURN, describe_episode, more_tokens
from asyncrl.dashboard.group_page import describe_group
from asyncrl.dashboard.vocabulary import Vocabulary
from asyncrl.errors import RefusedError
from asyncrl.observe.kept.episode import KeptEpisode
from asyncrl.types import Finish, Labels, Role, Task, Trajectory, Turn, runs_of
from tests.observe.kept.examples import HOSTILE, example_episode, from_utf8, utf8

VOCABULARY = Vocabulary(from_utf8, frozenset({10}))


def described(episode: KeptEpisode) -> dict[str, Any]:
    return describe_episode(episode, VOCABULARY)


def text_of(part: dict[str, Any]) -> str:
    return "".join(part["tokens"]["pieces"])


def played(turns: list[tuple[Role, str]], template: str = "") -> KeptEpisode:
    """An episode of these turns, with the text `template` after each."""
    tokens: list[int] = []
    spans = []
    for role, text in turns:
        spans.append(Turn(len(tokens), len(tokens) + len(utf8(text)), role))
        tokens += utf8(text + template)
    mask = np.zeros(len(tokens), np.bool_)
    for span in spans:
        mask[span.start : span.end] = span.role is Role.ASSISTANT
    trajectory = Trajectory(
        "t1.0.0",
        "task",
        "t1",
        0,
        np.array(tokens, np.int32),
        np.where(mask, -0.5, 0).astype(np.float32),
        runs_of(np.where(mask, 3, -1).astype(np.int32)),
        tuple(spans),
        (),
        Finish.COMPLETED,
    )
    like = example_episode(0, 0, 0)
    values = mask.astype(np.float32)
    return KeptEpisode(like.row, trajectory, Labels("t1.0.0", 1, 1, "test"), None, values, values, values)


def test_every_turn_has_its_text_its_tokens_and_their_values() -> None:
    episode = example_episode(3, 0, 0)
    found = described(episode)
    assert [part["role"] for part in found["parts"]] == ["prompt", "assistant", "tool", "assistant"]
    assert text_of(found["parts"][1]) == "I use the tool: calculator(1 + 1)."
    assert "logprob" not in found["parts"][0]["tokens"]
    values = found["parts"][1]["tokens"]
    turn = episode.trajectory.turns[1]
    assert values["logprob"] == pytest.approx(episode.trajectory.logprobs[turn.start : turn.end].tolist(), rel=1e-4)
    assert values["weight"] == pytest.approx(episode.importance_weights[turn.start : turn.end].tolist(), rel=1e-4)
    assert set(values["version"]) == {int(episode.trajectory.versions[turn.start])}


def test_an_image_is_a_mark_at_its_first_placeholder_also_where_a_part_is_cut_there() -> None:
    episode = played([(Role.PROMPT, "see ##### it"), (Role.ASSISTANT, "ok")])
    spans, names = np.array([[4, 9]], np.int32), np.arange(32, dtype=np.uint8)[None]
    shown = replace(episode, trajectory=structs.replace(episode.trajectory, image_spans=spans, image_digests=names))
    assert text_of(described(shown)["parts"][0]) == "see [image 00010203, 5 tokens] it"
    assert "".join(more_tokens(shown, 6, VOCABULARY)["pieces"]) == " it"
    assert described(shown)["parts"][0]["tokens"]["ids"] == utf8("see ##### it")


def test_what_a_scorer_says_in_words_is_there() -> None:
    assert described(example_episode(3, 0, 0))["labels"]["reasons"] == [
        {"scorer": "exact_number", "text": "read 0 ", "more": 0}
    ]


def test_marks_of_the_template_between_turns_are_shown_too() -> None:
    found = described(
        played([(Role.PROMPT, "ask"), (Role.ASSISTANT, "answer"), (Role.TOOL, "result")], template="<end>")
    )
    assert [(part["role"], text_of(part)) for part in found["parts"]] == [
        ("prompt", "ask"),
        ("template", "<end>"),
        ("assistant", "answer"),
        ("template", "<end>"),
        ("tool", "result"),
        ("template", "<end>"),
    ]


@pytest.mark.slow
@given(texts=st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=4))
def test_the_parts_joined_are_the_whole_text(texts: list[str]) -> None:
    turns = [(Role.PROMPT, "p"), *((Role.ASSISTANT, text) for text in texts)]
    found = described(played(turns, template="|"))
    assert "".join(map(text_of, found["parts"])) == "p|" + "".join(f"{text}|" for text in texts)


def test_a_long_turn_comes_in_pieces_that_join_to_its_text() -> None:
    text = "".join(f"line {number} \N{EURO SIGN}\n" for number in range(500))
    episode = played([(Role.PROMPT, "ask"), (Role.ASSISTANT, text)])
    part = described(episode)["parts"][1]
    assert len(part["tokens"]["ids"]) == TOKENS_A_TURN
    shown, start = text_of(part), part["start"] + TOKENS_A_TURN
    while start < part["end"]:
        more = more_tokens(episode, start, VOCABULARY)
        assert len(more["ids"]) == len(more["pieces"]) == len(more["logprob"])
        shown, start = shown + "".join(more["pieces"]), start + len(more["ids"])
    assert shown == text
    with pytest.raises(RefusedError, match="no token 100000"):
        more_tokens(episode, 100_000, VOCABULARY)


@pytest.mark.slow
def test_an_episode_of_ten_megabytes_is_sent_as_its_first_tokens_and_counts() -> None:
    turns = [(Role.PROMPT, "ask"), *([(Role.ASSISTANT, "a"), (Role.TOOL, "x" * 500_000)] * 20)]
    parts = described(played(turns))["parts"]
    assert len(parts) == 41
    assert sum(len(part["tokens"]["ids"]) for part in parts) <= 12_000
    assert parts[-1]["end"] > 10_000_000


def test_special_tokens_are_named() -> None:
    part = described(played([(Role.PROMPT, "a\nb\n"), (Role.ASSISTANT, "c")]))["parts"][0]
    assert part["tokens"]["special"] == [1, 3]


def test_a_branch_names_the_one_that_it_begins_as_and_how_far() -> None:
    found = described(example_episode(0, 0, 1))["branch_list"]
    assert [(each["parent"], each["shared"]) for each in found] == [(None, 0), (0, len("user: "))]
    assert [each["turns"] for each in found] == [2, 1]
    assert all(each["score"] is not None for each in found)


def test_step_scores_stand_at_the_spans_of_their_steps() -> None:
    episode = example_episode(0, 0, 0)
    spans = [(each["start"], each["end"]) for each in described(episode)["scores"]]
    assert spans == [tuple(step) for step in episode.trajectory.steps]


def test_scales_tell_the_range_of_the_tokens_that_were_sampled() -> None:
    found = described(example_episode(3, 1, 2))["scales"]
    assert found["advantage"]["min"] == found["advantage"]["max"] == pytest.approx(-0.49)
    assert found["logprob"]["max"] < 0
    assert found["mass"]["mean"] == pytest.approx(0.9)


def test_numbers_that_are_not_finite_are_sent_as_texts() -> None:
    episode = example_episode(0, 0, 0)
    weights = np.where(episode.trajectory.loss_mask, np.nan, 0).astype(np.float32)
    found = described(replace(episode, importance_weights=weights))
    assert set(found["parts"][1]["tokens"]["weight"]) == {"nan"}
    assert "weight" not in found["scales"]


def test_long_texts_of_a_task_are_cut_and_say_how_much_is_missing() -> None:
    task = Task("id", [{"role": "user", "content": "x" * (MOST_CHARACTERS + 7)}], "truth", "source")
    message = described(replace(example_episode(0, 0, 0), task=task))["task"]["messages"][0]
    assert (len(message["content"]["text"]), message["content"]["more"]) == (MOST_CHARACTERS, 7)


def test_the_content_of_a_message_may_have_any_form() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]},
    ]
    found = described(replace(example_episode(0, 0, 0), task=Task("id", messages, "truth", "source")))["task"]
    assert '"hello"' in found["messages"][0]["content"]["text"]
    assert '"add"' in found["messages"][1]["rest"]["text"]


def test_arguments_of_calls_are_indented_json() -> None:
    call = described(example_episode(0, 0, 0))["parts"][1]["calls"][0]
    assert call == {"name": "calculator", "arguments": {"text": '{\n  "expression": "1 + 1"\n}', "more": 0}}


def test_hostile_text_arrives_as_it_was_written() -> None:
    assert HOSTILE in text_of(described(example_episode(0, 0, 3))["parts"][2])


def test_members_of_a_group_say_where_they_part_from_the_chosen_one() -> None:
    members = [example_episode(0, 0, member) for member in range(4)]
    found = describe_group(list(reversed(members)), members[0].row.id, VOCABULARY)
    assert [each["member"] for each in found["members"]] == [0, 1, 2, 3]
    hostile = found["members"][3]
    tokens = [member.trajectory.tokens.tolist() for member in members]
    same = hostile["same"]
    assert tokens[0][:same] == tokens[3][:same]
    assert tokens[0][same] != tokens[3][same]
    assert found["common"] == same
    assert hostile["after"].startswith("<script>")
    assert found["members"][0]["after"].startswith("2")
    assert found["members"][1]["last"] == "I added two numbers."
