r"""The answer's number equals the ground truth's number exactly.

The number is read from the first place in this list that the answer has. If this place gives no number, the answer has
no number:

- after the mark `####`: the first number after the last mark. A `####` that begins the heading of a step is not a mark.
- the last `\boxed{}`: its first number
- the last sentence such as "the answer is 5", if it has exactly one number
- the whole text: its last number

If an answer without the mark has an `<answer>` tag, only the content of the last tag is read. If an equation follows
the mark or is in the box, its right side counts.

Numbers may have:

- signs (`-5`, `-$5`, "minus 5")
- thousands separators (`1,234`, `1{,}234`; from a mark, tag, box or sentence also `1 234` and `1,00,000`)
- decimals, exponents (`1e3`, `1.5 \times 10^6`), powers (`2^{10}`, `10⁶`)
- fractions (`3/4`, `\frac{3}{4}`, `¾`) and mixed numbers (`1 1/2`, `1\frac{1}{2}`, `1½`)
- any currency before them and any unit after them: `50%` is 50, `3 million` is 3, `72 m²` is 72

A minus after a digit, letter or closing bracket is an operator or a hyphen. These are not numbers: digits after a
letter (`x_2`, `H2O`), digits that continue in another form (`1,2345`, `3:30`, `1e3000`), and words. If the number from
a mark, tag, box or sentence is a part of an expression (`√2`, `2π`, `2x`, `5!`, `±3`, `> 3`, `5 + 3`, `log(2)`), the
answer has no number. If the whole text is read, its last number counts even in an expression: in `5 + 3`, it is 3.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

from asyncrl.errors import ScoringError
from asyncrl.scoring.rules.text import boxes, tagged
from asyncrl.types import Task, Trajectory

MARK = re.compile(r"####(?!\s{0,9}\**(?i:step|part|case|method|option)\s{1,9}[0-9])")
"""The mark before the answer in GSM8K's solutions, but not `####` before the heading of a step."""

_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,20}(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    rf"(?:(?<![0-9)\]A-Za-z])[-+])?(?<![A-Za-z0-9_^])(?:{_UNSIGNED})(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?(?:/[0-9]+)?"
)
_GOES_ON = re.compile(r"[.,/:-]?[0-9]|[eE][-+]?[0-9]|[¼-¾⅐-⅞]|\^|\*\*[0-9]")
_NAMES = r"sqrt|cbrt|root|log|ln|lg|exp|sin|cos|tan|factorial|floor|ceil"
_OPENS = re.compile(
    rf"(?:[√∛∜±∓≤≥≠≮≯]|\\(?:pm|mp|geq?|leq?|neq?|gt|lt)|(?<![A-Za-z\"/=-])[<>]=?|\b(?:{_NAMES})\s?\(?|\\[cdt]?frac[^\n]*"
    r"|(?:π|\\pi|(?<![A-Za-z'’])[a-z]|[0-9)])\s?[-+*/^])\s?\$?\(?\Z"
)
"""Text before a number that makes the number a part of an expression."""
_CLOSES = re.compile(
    rf"!|\s?(?:[xyzπ√∛∜∞](?![A-Za-z])|[+/^-]\s?\$?[.0-9(]|[+-]\s?[a-zπ√](?![A-Za-z'’])|\\(?:pi|sqrt|pm|mp|infty|theta"
    rf"|[cdt]?frac|{_NAMES})(?![a-z]))|\*[0-9(]|\s\*\s[0-9(]|[abeijnθφτ](?![A-Za-z0-9])|\([-+]?[0-9]|\([a-z][-+*/^)]"
)
"""Text after a number that makes the number a part of an expression."""
_MAX_DIGITS = 1000
"""Longer numbers are not read: no true answer is longer, and reading takes time quadratic in the length."""

_NEAR = 40
"""The number of characters before a number that are searched for `_OPENS`."""

_DIGIT = re.compile("[0-9]")
_STATEMENT = re.compile(r"(?i:\banswer\b[^.\n0-9]{0,80}?(?:\bis\b|:|=))([^\n]{1,300})")
_SENTENCE_END = re.compile(r"[.!?;](?:\s|\Z)")
_REMARK = re.compile(r"(?<=[0-9%*$]) \([^()\n]{1,100}\)")
_MINUS_FIRST = re.compile(r"\A[ \t*$]{0,9}-[ \t]{1,9}(?=[.0-9])")
_SUM = re.compile(r"(?:[\s0-9.,+*/x×÷()$€£^-]*=)*")
"""Calculations up to the last equals sign: `3 * 4 = 2 * 6 =`."""

_CHARACTERS = str.maketrans("−‒–﹣－０１２３４５６７８９．，％／⁄\u00a0\u2009\u202f", "-----0123456789.,%//   ")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_PART = r"(?:\{\s{0,9}(-?[0-9][0-9,.]{0,30})\s{0,9}\}|([0-9]))"
_LATEX_FRACTION = re.compile(rf"\\[cdt]?frac\s?{_PART}\s?{_PART}")
_VULGAR = re.compile(r"([0-9]?)\s?([¼-¾⅐-⅞])")
_SPACED = r"[0-9]{1,3}(?: [0-9]{3}){1,20}"
_INDIAN = r"[0-9]{1,2}(?:,[0-9]{2}){1,20},[0-9]{3}"
_GROUPED = re.compile(rf"(?<![0-9.,/])(?:{_SPACED}|{_INDIAN})(?![0-9/,])")
_POWER = re.compile(r"(?<![0-9.,^])([0-9]{1,20})\^([-+]?[0-9]{1,3})(?![0-9^.])")
_MIXED = re.compile(r"(?<![0-9.,/])([0-9]{1,20}) ([0-9]{1,20})/([0-9]{1,20})(?![0-9])")
_PLAIN = (
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"\^\s?\{?\s?\\circ\s?\}?"), "°"),
    (re.compile(r"\\!|__"), ""),
    (re.compile(r"\\[,;: ]|~|\\quad"), " "),
    (re.compile(r"(?:\^|(?<=[0-9)])\*\*)\s?\{\s?([-+]?[0-9]{1,9})\s?\}|(?<=[0-9)])\*\*([-+]?[0-9])"), r"^\1\2"),
    (re.compile(r"\\(?:text|math)[a-z]{0,9}\s?\{|\\f?boxed\s?\{|\\(?:left|right|displaystyle|bf|rm)(?![a-z])|\{"), ""),
    (re.compile(r"\}"), " "),
    (re.compile(r"\\\$"), "$"),
    (re.compile(r"(?i)(?<![0-9)%])(?<![0-9)%] )\b(?:minus|negative) (?=\$?[.0-9])"), "-"),
    (re.compile(r"(?<![0-9)\]A-Za-z])-\s?(?:[A-Z]{1,3})?[$€£¥₹₩₽]\s?(?=[.0-9])"), "-"),
    (re.compile(r"\b(?:USD|EUR|GBP|INR|CAD|AUD|CNY|RMB|JPY|Rs\.?|US)\s?(?=[0-9])"), ""),
    (re.compile(r"(?<=[0-9])\s{0,9}(?:\\times|\\cdot|[×·*xX])\s{0,9}10\^([-+]?[0-9]{1,3})(?![0-9])"), r"e\1"),
    (re.compile(r"\\(?:times|cdot|div)(?![a-z])"), "*"),
    (re.compile(r"(?<=[A-Za-z)\]])\s?\^[-+]?[0-9]{1,9}"), ""),
)


def exact_number(task: Task, answer: str, trajectory: Trajectory) -> float:
    """1 if the answer's number equals the ground truth's, else 0.

    Raises ScoringError: there is no number in the ground truth.
    """
    return float(final_number(answer) == true_number(task))


def true_number(task: Task) -> Fraction:
    """The ground truth's number. Raises ScoringError: the ground truth has no number."""
    number = final_number(task.truth_text)
    if number is None:
        raise ScoringError(f"the ground truth {task.truth_text!r:.100} of task {task.id} holds no number")
    return number


def final_number(text: str) -> Fraction | None:
    """The number that `text` gives as its answer; None if it gives none."""
    if marks := list(MARK.finditer(text)):
        return _first(text[marks[-1].end() :])
    inside = tagged(text)
    if found := boxes(inside):
        return _first(found[-1].content.rpartition("=")[2])
    stated = _stated(inside)
    return _last(inside, inside is not text) if stated is None else _alone(stated)


def _first(text: str) -> Fraction | None:
    """The first number of the first line that has digits. If that line begins with a calculation, the first number
    after the calculation."""
    plain = _MINUS_FIRST.sub("-", _plain(text.lstrip(), True))
    line = next((line for line in plain.split("\n") if _DIGIT.search(line)), "")
    sums = _SUM.match(line)
    # In `12 (= 3 * 4)` the result is on the left.
    start = sums.end() if sums and sums[0].count("(") <= sums[0].count(")") else 0
    found = _NUMBER.search(line, start)
    return _alone(found) if found else None


def _stated(text: str) -> re.Match[str] | None:
    """The number of the last sentence that states the answer, if that sentence has exactly one number."""
    statements = _STATEMENT.findall(text)
    if not statements:
        return None
    sentence = _plain(_REMARK.sub("", _SENTENCE_END.split(statements[-1], maxsplit=1)[0]), True)
    numbers = list(_NUMBER.finditer(sentence))
    return numbers[0] if len(numbers) == 1 else None


def _last(text: str, closed: bool) -> Fraction | None:
    numbers = list(_NUMBER.finditer(_plain(text, closed)))
    if not numbers:
        return None
    return _alone(numbers[-1]) if closed else _parse(numbers[-1])


def _alone(found: re.Match[str]) -> Fraction | None:
    """The number; None if it is part of an expression."""
    before, plain = found.string[max(0, found.start() - _NEAR) : found.start()], found.string
    return None if _OPENS.search(before) or _CLOSES.match(plain, found.end()) else _parse(found)


def _plain(text: str, closed: bool) -> str:
    """The text with every number in the form of `_NUMBER`. `closed`: the text is only the answer, so a space between
    digits separates thousands."""
    text = re.sub("(?<=[0-9)}])[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda match: "^" + match[0].translate(_SUPERSCRIPTS), text)
    text = _LATEX_FRACTION.sub(_ratio, text.translate(_CHARACTERS))
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    text = _POWER.sub(_product, text)
    if closed:
        text = _GROUPED.sub(lambda match: re.sub("[^0-9]", "", match[0]), text, count=1)
    return _MIXED.sub(_improper, _VULGAR.sub(_fraction, text))


def _ratio(match: re.Match[str]) -> str:
    top, bottom = match[1] or match[2], match[3] or match[4]
    before = match.string[: match.start()][-1:]
    sign = "-" if top.startswith("-") != bottom.startswith("-") else ""
    top, bottom = (each.lstrip("-").replace(",", "") for each in (top, bottom))
    return f"{' ' if before.isdigit() else ''}{sign}{top}/{bottom}"


def _product(match: re.Match[str]) -> str:
    base, exponent = int(match[1]), int(match[2])
    if len(match[1]) * abs(exponent) > _MAX_DIGITS:
        return match[0]
    return f"{base**exponent}" if exponent >= 0 else f"1/{base**-exponent}"


def _fraction(match: re.Match[str]) -> str:
    whole, sign = match.groups()
    return f"{whole}{' ' if whole else ''}{unicodedata.normalize('NFKC', sign).replace(chr(0x2044), '/')}"


def _improper(match: re.Match[str]) -> str:
    whole, top, bottom = map(int, match.groups())
    return f"{whole * bottom + top}/{bottom}"


def _parse(found: re.Match[str]) -> Fraction | None:
    if _GOES_ON.match(found.string, found.end()) or len(found[0]) > _MAX_DIGITS:
        return None
    top, _, bottom = found[0].replace(",", "").partition("/")
    return None if bottom and not int(bottom) else Fraction(Decimal(top)) / int(bottom or 1)
