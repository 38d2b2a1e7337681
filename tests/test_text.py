"""Text from elsewhere: it has an encoding, a bound, and a reason is always found."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl import text, wire
from asyncrl.config import load
from asyncrl.errors import WireError
from asyncrl.text import cut, encodable, is_own, json_text, own_line, reason_of

ANY_TEXT = st.text(st.characters(codec=None, categories=None), max_size=30)
PLAIN = st.recursive(
    st.none() | st.integers() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(value=PLAIN)
def test_every_text_within_a_plain_value_has_an_encoding_afterwards(value: Any) -> None:
    found = encodable(value)
    json.dumps(found, ensure_ascii=False).encode()


def test_json_text_has_null_where_a_number_is_not_finite() -> None:
    written = json_text({"loss": float("nan"), "curve": [1.5, float("inf")], 3: "half \ud800 of a pair"})
    assert json.loads(written, parse_constant=pytest.fail) == {
        "loss": None,
        "curve": [1.5, None],
        "3": "half ? of a pair",
    }


@given(text=ANY_TEXT, size=st.integers(1, 10))
def test_a_cut_text_has_an_encoding_and_no_more_of_its_own_than_it_may(text: str, size: int) -> None:
    found = cut(text, size)
    found.encode()
    assert len(found) <= size + len("\n[30 characters cut]\n")


def test_a_long_text_keeps_its_head_and_tail_and_says_what_is_gone() -> None:
    assert cut("abcdefghij", 10) == "abcdefghij"
    assert cut("abcdefghij", 5) == "abc\n[5 characters cut]\nij"
    assert cut("abcdefghij", 1) == "a\n[9 characters cut]\n"
    assert cut("a\ud800", 10) == "a?"


def test_an_exception_that_cannot_tell_its_message_still_is_a_reason() -> None:
    class Silent(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise KeyError("no message")

    assert reason_of(ValueError("x")) == "ValueError: x"
    assert "Silent" in reason_of(Silent())


def test_a_reason_names_the_innermost_line_of_the_users_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = tmp_path / "my_rewards.py"
    module.write_text("import json\n\ndef score(text):\n    return json.loads(text)\n")
    monkeypatch.chdir(tmp_path)
    code: dict[str, Any] = {}
    exec(compile(module.read_text(), str(module), "exec"), code)
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the text of the json module is not ours
        code["score"]("{")
    assert reason_of(raised.value).endswith(" (my_rewards.py, line 4)")
    outer = ValueError(f"the loop failed: {reason_of(raised.value)}")
    outer.__cause__ = raised.value
    assert reason_of(outer).count("my_rewards.py, line 4") == 1
    with pytest.raises(SyntaxError) as malformed:
        compile("x =", str(module), "exec")
    assert reason_of(malformed.value).endswith(" (my_rewards.py, line 1)")


def test_an_error_of_asyncrls_own_code_has_no_line(tmp_path: Path):
    with pytest.raises(WireError) as raised:
        wire.decode([b"no message"])
    raised.value.with_traceback(raised.tb.tb_next)  # The first frame is this test's.
    assert own_line(raised.value) == ""


def test_a_folder_whose_name_only_begins_with_that_of_the_package_is_the_users():
    package = Path(text.__file__).parent
    assert not is_own(str(package / "wire.py"))
    assert is_own(f"{package}_rewards/score.py")


def test_a_log_line_is_bounded_however_long_the_text_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    told = logged("a reason: " + "x\ud800" * 1_000_000, capsys)
    assert "a reason: x?x?" in told
    assert len(told) < 20_000


def test_a_log_line_shows_no_part_of_a_secret_that_lies_where_the_line_is_cut(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "s3cret" not in logged("api_key=" + "s3cret" * 10_000, capsys)


def logged(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a role writes for a warning."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        load.log_to_stderr()
        root.warning(text)
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    return capsys.readouterr().err
