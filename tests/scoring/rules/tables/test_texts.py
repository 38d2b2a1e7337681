"""Answers that are compared as texts: `exact_match`, `f1` and `format`."""

import pytest

from tests.scoring.fakes import rules_of
from tests.scoring.rules.tables.judging import LEAST, assert_judged, rows

TRUTHS = ["Paris", "72", "yes", "True", "def f(x): return x", '{"a": 1}', "naïve", "北京", "line one\nline two", "a  b"]
AROUND = [
    "{}",
    " {} ",
    "\n{}\n",
    "{}\r\n",
    "<think>Rome?</think>{}",
    "<answer>{}</answer>",
    "So: <answer>\n{}\n</answer>",
]
NEAR = [
    "{}.",
    "{}!",
    "The answer is {}",
    "**{}**",
    '"{}"',
    "`{}`",
    "${}$",
    r"\boxed{{{}}}",
    "{0} {0}",
    "<answer>{}",
    "x{}",
]


def test_exact_match_wants_the_very_text():
    right = [(frame.format(truth), truth) for truth in TRUTHS for frame in AROUND]
    right += [("nai\u0308ve", "naïve"), ("line one\r\nline two", "line one\nline two")]
    wrong = [(frame.format(truth), truth) for truth in TRUTHS for frame in NEAR]
    wrong += [("paris", "Paris"), ("PARIS", "Paris"), ("72.0", "72"), ("true", "True"), ("a b", "a  b"), ("", "72")]
    wrong += [("<think>Paris", "Paris"), ("<answer>Rome</answer> Paris", "Paris"), ('{"a":1}', '{"a": 1}')]
    assert_judged("exact_match", right, wrong)


SAME_WORDS = rows(r"""
Paris | paris | PARIS. | **Paris** | ‘Paris’ | the Paris | A Paris! | Paris? | (Paris) | - Paris | * Paris | _Paris_
Paris... | Paris — | ¡Paris! | «Paris» | [Paris] | {Paris} | Paris; | #Paris | <answer>Paris</answer>
Rome? <answer>The Paris</answer> | <think>Rome</think>Paris | <think>Rome</think><answer>Paris</answer>
""")
SAME_WORDS += [
    " Paris ",
    '"Paris"',
    "<answer>\nParis.\n</answer> as I said",
]
OTHER_WORDS = rows(r"""
Rome | Pari | Pariss | Par is | P a r i s | the | a an the | ... | ** | Berlin, Germany | I do not know | par-is-ian
Paname | <answer>Rome</answer> Paris | <answer></answer> Paris | <think>Paris | <think>Paris</think> | Parijs | Париж
巴黎 | P@ris | 0 | null
""")
OTHER_WORDS += [
    "",
]
SHARES = [
    ("The Eiffel Tower!", "eiffel tower", 1.0, 1.0),
    ("das ist Käse", "Käse ist das", 1.0, 0.0),
    ("Rome", '["Roma", "Rome"]', 1.0, 1.0),
    ("12", "12", 1.0, 1.0),
    ("a a a", "Paris", 0.0, 0.0),
    ("in Paris", "Paris", 2 / 3, 0.0),
    ("It is Paris", "Paris", 2 / 4, 0.0),
    ("Paris, France", "Paris", 2 / 3, 0.0),
    ("Paris Paris", "Paris", 2 / 3, 0.0),
    ("The answer is Paris", "Paris", 2 / 4, 0.0),
    ("I think it is Paris", "Paris", 2 / 6, 0.0),
    ("Paris or Rome", "Paris", 2 / 4, 0.0),
]


def test_f1_compares_words():
    right = [(each, "Paris") for each in SAME_WORDS] + [(each, '["Roma", "the Paris"]') for each in SAME_WORDS]
    wrong = [(each, "Paris") for each in OTHER_WORDS] + [(each, '["Madrid", "Paris"]') for each in OTHER_WORDS]
    assert_judged("f1", right, wrong)
    for text, truth, score, exact in SHARES:
        assert rules_of("f1")(text, truth).scores == {"f1": pytest.approx(score), "f1/exact": exact}


BEHIND = [
    "72",
    " 72",
    "\n72",
    "\n\n72",
    "\t72",
    " $72",
    "**72**",
    " **72**",
    r" \boxed{72}",
    " -5",
    " seventy-two",
    "x",
    " .",
]
BEFORE = ["", "8 * 9 = 72\n", "**", "### Answer\n", "<think>hm</think>", "#"]
UNFINISHED = ["", " ", "\n", "\t\n ", "   \n\n"]
NO_MARK = [
    "",
    "72",
    "The answer is 72",
    "### 72",
    "# # # # 72",
    "###\n# 72",
    "##",
    r"\boxed{72}",
    "<answer>72</answer>",
]


@pytest.mark.slow
def test_format_finds_its_pattern():
    right = [(f"{before}####{behind}", "") for before in BEFORE for behind in BEHIND]
    cut = [(f"{before}####{behind}", "") for before in ["", "so\n", "**"] for behind in UNFINISHED]
    thought = [(f"<think>#### 72</think>{text}", "") for text in NO_MARK] + [(f"<think>{text}", "") for text in NO_MARK]
    assert_judged("format", right, cut + thought + [(text, "") for text in NO_MARK])


THOUGHTFUL = [
    f"<think>{thought}</think>{space}72" for thought in ["so", "a\nb", "#", "x" * 99] for space in ["", "\n", " "]
]
THOUGHTLESS = ["72", "<think>72", "</think>72", "so <think>a</think>72", "<think></think>72", "<think>a</think>", ""]


def test_format_can_ask_for_thoughts():
    right, wrong = [(each, "") for each in THOUGHTFUL * 4], [(each, "") for each in THOUGHTLESS * 6]
    assert len(THOUGHTFUL) * 4 >= LEAST
    assert_judged("format", right, wrong, pattern=r"(?s)\A<think>.+?</think>\s*\S", thoughts=True)
