"""The vote of an attempt at a task: a text that is equal for attempts with the same answer."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Mapping

from asyncrl.scoring.rules.base import VOTE
from asyncrl.scoring.rules.exact_number import MARK, final_number
from asyncrl.scoring.rules.multiple_choice import option
from asyncrl.scoring.rules.text import boxes, tagged

LONGEST = 64
"""The maximum number of characters in a vote. A longer answer is cut, and a digest of it is put at the end."""


def read_plainly(answer: str) -> str:
    """The content of the last box, else of the last answer tag, else the text after the last `####`, else the whole
    answer. White space and the Unicode composition of characters are made uniform."""
    inside = tagged(answer)
    found = boxes(inside)
    marks = [] if found or inside is not answer else list(MARK.finditer(inside))
    text = found[-1].content if found else inside[marks[-1].end() :] if marks else inside
    return " ".join(unicodedata.normalize("NFKC", text).split())


READERS: Mapping[str, Callable[[str], object]] = {
    "exact_number": final_number,
    "gsm8k": final_number,
    "multiple_choice": option,
}
"""Maps the name of a rule to the function by which the rule finds the answer in a text. The function returns None if
there is no answer."""


def vote(result: object, read: Callable[[str], object], answer: str) -> str:
    """The vote of an attempt: the `pred` of its rule's result, else the answer that `read` finds; empty if there is no
    answer."""
    given = result.get(VOTE) if isinstance(result, Mapping) else None
    found = read(answer) if given is None else given
    text = "" if found is None else str(found)
    if len(text) <= LONGEST:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{text[: LONGEST - len(digest) - 1]} {digest}"
