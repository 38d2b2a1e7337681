"""Scripts in which brackets, quotation marks and comments could hide words with keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.compat.verl.configuration.script import ScriptWord, script_configuration, script_words
from asyncrl.compat.verl.configuration.source import read_noting

CASE = "case $1 in\n a) Y=1;;\nesac\n"
START = "python3 -m verl.trainer.main_ppo"


@pytest.mark.parametrize(
    "opened",
    [
        "X=$(grep -c '(' f)",
        'X="$(grep -c "(" f)"',
        "X=$(sed 's/(.*//' f)",
        'X="${Y:-(}"',
        'X="${Y:-it\'s}"',
        "X=`grep '(' f`",
        "X=$(ls # it's (\n)",
        "X=$(case a in a) ls;; esac)",
        'echo "\\$(x"',
    ],
)
def test_a_bracket_that_is_only_text_swallows_no_command(opened: str) -> None:
    found = script_configuration(f"{opened}\nrun a.b=1 a.c=2\n{CASE}run a.d=3", {})
    assert found.words == [ScriptWord(word, True) for word in ("a.b=1", "a.c=2", "a.d=3")]
    assert found.remarks == []


@pytest.mark.parametrize("opened", ["X=$(ls", "X=${Y", 'X="$(ls', "X=`ls", "X=$(cat <<E\nit's\nE\n)"])
@pytest.mark.parametrize("start", [START, "python3 -m \\\n  verl.trainer.main_ppo"])
def test_a_bracket_that_does_not_close_swallows_no_start_of_verl_and_is_told(
    opened: str, start: str, tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{opened}\n{start} a.b=1 \\\n  'a.c=2'\n{CASE}")
    given, remarks = read_noting(script, [], {})
    assert given == {"a": {"b": 1, "c": 2}}
    assert f"Check the script: {opened.splitlines()[0]}: " in remarks[0]


@pytest.mark.parametrize(
    "text",
    [
        f"LOG=$({START} a.b=1 a.c=2 2>&1)",
        f"LOG=$(\n {START} a.b=1 \\\n a.c=2\n)",
        f"bash -c 'cd x; {START} a.b=1 a.c=2'",
        f"RUN='{START} a.b=1 \\\n a.c=2'\neval \"$RUN\"",
    ],
)
def test_the_words_of_a_start_of_verl_within_a_text_or_a_substitution_count(text: str) -> None:
    assert set(script_words(text, {})) == {ScriptWord("a.b=1", True), ScriptWord("a.c=2", True)}


def test_a_text_that_cannot_be_taken_apart_is_read_once() -> None:
    assert script_words("X=${Y main_ppo a.b=1}\nrun a.c=2", {}) == [ScriptWord("a.c=2", True)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# see the docs \\\nrun a.b=1", ["a.b=1"]),
        ("run a.b=1 # note \\\nrun a.c=2", ["a.b=1", "a.c=2"]),
        ('run "a.b=[1,\n2]" a.c=3', ["a.b=[1, 2]", "a.c=3"]),
        ("run '+a.b=[\"x\",\n2]' a.c=3", ['+a.b=["x", 2]', "a.c=3"]),
        ("(cd x; run a.b=2)\n(run a.c=3) > log", ["a.b=2", "a.c=3"]),
        ('run "a.b=max(1, 2)" a.c=\\)', ["a.b=max(1, 2)", "a.c=)"]),
        ('A="a.b=1"\nA+=" a.c=2"\nrun $A', ["a.b=1", "a.c=2"]),
        ('A+=" a.c=2"\nrun x=$A', ["a.c=2"]),
        ("run a.b=$(awk '{print $1 \"x\"}' f)", ["a.b=$(awk '{print $1 \"x\"}' f)"]),
        ("A+=2\nrun a.b=$A", ["a.b=${A}2"]),
    ],
)
def test_no_word_is_dropped_or_cut(text: str, words: list[str]) -> None:
    assert [word for word, _ in script_words(text, {})] == words


@pytest.mark.parametrize(
    ("calculation", "value"),
    [
        ("7/2", 3),
        ("-7/2", -3),
        ("7/-2", -3),
        ("-7/-2", 3),
        ("-7%2", -1),
        ("7%-2", 1),
        ("-9007199254740993/1", -(2**53) - 1),
    ],
)
def test_a_division_rounds_towards_zero_as_in_bash(calculation: str, value: int) -> None:
    assert script_words(f"run a.b=$(({calculation}))", {}) == [ScriptWord(f"a.b={value}", True)]
