"""The answer that rules read: the last assistant turn without special tokens and without its thoughts."""

import pytest

from asyncrl.config.schema import ScoringConfig
from asyncrl.scoring.answers import TAGS, answer_texts
from asyncrl.types import Finish
from tests.scoring.fakes import CharTokenizer, episode, score

HEADERS = (
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final <|constrain|>json<|message|>"),
    ("<|channel|> analysis <|message|>", "<|channel|>final json<|message|>"),
)
"""The headers that gpt-oss writes: the header of a message may also name its format."""
PAIRS = (*TAGS, *HEADERS)
TAG_IDS = {0x10F000 + index: tag for index, tag in enumerate(tag for pair in PAIRS for tag in pair)}


class SpecialTags(CharTokenizer):
    """Has the thought tags as special tokens, which a decoding without special tokens drops."""

    def decode(self, token_ids, skip_special_tokens=False, *, clean_up_tokenization_spaces=False):
        return "".join(
            ("" if skip_special_tokens else TAG_IDS[token])
            if token in TAG_IDS
            else super(SpecialTags, self).decode([token], skip_special_tokens)
            for token in token_ids
        )


def answer(text, prompt="user: 8*9?\nassistant: ", tokenizer=None, **options):
    _, trajectory = episode(("prompt", prompt), ("assistant", text))
    return answer_texts(trajectory, tokenizer or CharTokenizer(), **options)[0]


def test_the_answer_is_the_last_assistant_turn_without_special_tokens():
    _, trajectory = episode(
        ("prompt", "Q"), ("assistant", "call"), ("tool", "ok"), ("assistant", "it is 5"), ("tool", "after")
    )
    assert answer_texts(trajectory, CharTokenizer())[0] == "it is 5"


def test_an_episode_that_was_cut_at_a_tool_call_has_no_answer_and_one_that_ended_with_it_has():
    turns = ("prompt", "Q"), ("assistant", "call 72")
    _, trajectory = episode(*turns, finish=Finish.TRUNCATED)
    assert answer_texts(trajectory, CharTokenizer())[0] == ""
    _, trajectory = episode(*turns)
    assert answer_texts(trajectory, CharTokenizer())[0] == "call 72"


@pytest.mark.parametrize(("opening", "closing"), PAIRS)
def test_the_answer_is_what_follows_the_last_closed_thought_of_any_family(opening, closing):
    assert answer(f"{opening}is it 71?{closing}\n\n72") == "72"
    assert answer(f"{opening}71?{closing}{opening}no{closing} 72") == "72"
    assert answer(f"{opening}it is 71") == ""
    assert answer(f"{opening}71?{closing}72{opening}or") == ""
    assert answer(f"is it 71?{closing}72", prompt=f"8*9?\n{opening}\n") == "72"
    assert answer("it is 71", prompt=f"8*9?\n{opening}\n") == ""
    assert answer("72", prompt=f"8*9?\n{opening}\n\n{closing}\n\n") == "72"
    assert answer(f"71{closing}72") == "72"


@pytest.mark.parametrize(("opening", "closing"), PAIRS)
def test_thoughts_between_special_tokens_are_known_too(opening, closing):
    ids = {tag: chr(token) for token, tag in TAG_IDS.items()}
    text = f"{ids[opening]}is it 71?{ids[closing]}72"
    _, trajectory = episode(("prompt", "8*9?"), ("assistant", text))
    assert answer_texts(trajectory, SpecialTags()) == ("72", f"{opening}is it 71?{closing}72")
    assert answer("71", prompt=f"8*9?{ids[opening]}\n", tokenizer=SpecialTags()) == ""


def test_a_message_to_another_channel_ends_no_thought():
    text = "<|channel|>analysis<|message|>71?<|end|><|start|>assistant<|channel|>finally<|message|>71"
    assert answer(text) == ""


def test_an_answer_without_thoughts_is_left_as_it_is():
    assert answer("\n x < think > y\n") == "\n x < think > y\n"


def test_only_the_last_turns_thoughts_matter():
    turns = [("prompt", "?"), ("assistant", "<think>call"), ("tool", "<think>"), ("assistant", "72")]
    _, trajectory = episode(*turns)
    assert answer_texts(trajectory, CharTokenizer())[0] == ""
    _, trajectory = episode(*turns[:2], ("tool", "<think> done"), turns[3])
    assert answer_texts(trajectory, CharTokenizer())[0] == "72"


RIGHT = [
    ("exact_match", "<think>Paris or Rome?</think>Paris", "Paris"),
    ("exact_number", "<think>72</think>72", "72"),
    ("f1", "<think>It may be Rome or Berlin.</think>Paris", "Paris"),
    ("gsm8k", "<think>#### 71</think>#### 72", "72"),
    ("json_schema", '<think>{"a"</think>{"a": 1}', '{"type": "object"}'),
    ("math", r"<think>\boxed{1}</think>$\boxed{2}$", "2"),
    ("multiple_choice", "<think>The answer is A.</think>C", "C"),
    ("code", "<think>```\nprint(2)\n```</think>```python\nprint(1)\n```", '{"inputs": [""], "outputs": ["1"]}'),
]


@pytest.mark.parametrize(("rule", "text", "truth"), RIGHT)
def test_every_rule_judges_the_answer_and_not_the_thoughts(rule, text, truth):
    asked = episode(("prompt", "?"), ("assistant", text), truth=truth)
    assert score(asked, ScoringConfig(rule=rule)).outcome == 1.0
    open_thought = episode(("prompt", "?"), ("assistant", f"<think>{text.rpartition('</think>')[2]}"), truth=truth)
    assert score(open_thought, ScoringConfig(rule=rule)).outcome == 0.0


def test_a_key_has_rules_judge_the_whole_turn():
    asked = episode(("prompt", "?"), ("assistant", "<think>72</think>it is 71"), truth="<think>72</think>it is 71")
    assert score(asked, ScoringConfig(rule="exact_match")).outcome == 0.0
    assert score(asked, ScoringConfig(rule="exact_match", strip_thoughts=False)).outcome == 1.0


@pytest.mark.parametrize(("thoughts", "pattern", "expected"), [(True, "<think>", 1.0), (False, "<think>", 0.0)])
def test_the_format_rule_can_see_the_thoughts(thoughts, pattern, expected):
    rules = {"test": [{"name": "format", "params": {"pattern": pattern, "thoughts": thoughts}}]}
    asked = episode(("prompt", "?"), ("assistant", "<think>so</think>72"))
    assert score(asked, ScoringConfig(rules=rules)).outcome == expected


def with_thoughts(task, answer, trajectory, *, full_answer):
    """A user's rule with the parameter full_answer."""
    return {"score": float(answer == "72"), "thought": float(full_answer == "<think>so</think>72")}


def test_a_rule_of_ones_own_can_ask_for_the_thoughts():
    asked = episode(("prompt", "?"), ("assistant", "<think>so</think>72"))
    labels = score(asked, ScoringConfig(rule=f"{__name__}.with_thoughts"))
    assert (labels.outcome, labels.extra["rule/with_thoughts/thought"]) == (1.0, 1.0)
