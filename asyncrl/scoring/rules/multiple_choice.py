r"""The answer names the same option as the ground truth.

An option is a single capital letter. A small letter counts in brackets, in a box, in an answer tag, as the whole answer
and after "answer:". The forms below are tried in this order, and the first one that occurs in the text decides. If it
occurs several times, its last occurrence counts:

- an `<answer>` tag, a `\boxed{}`, `####`, or `[[C]]`;
- a statement, such as "the answer is C", "C is correct", "I choose C", "actually, it's C". "The answer is C" is also
  read in Chinese, Japanese, Korean, Spanish, Portuguese, French, Italian, German, Dutch and Russian;
- the last or the first line, if it is an option: `C` or `C) Paris`;
- a conclusion: "so C", "it must be C", "which leaves C";
- the only letter in brackets or after "option"; a denied letter, as in "(A) is wrong", does not count.

Marks around a letter (`**C**`, `$C$`, `\text{C}`, quotes, backticks) are ignored. Two letters ("B or C"), a denial
("the answer is not C"), a doubt ("if the answer is C") and a question name no option.
"""

from __future__ import annotations

import re
import unicodedata

from asyncrl.errors import ScoringError
from asyncrl.scoring.rules.text import boxes, tagged
from asyncrl.types import Task, Trajectory

_WRAPPERS = re.compile(
    r"\\(?:text|math)[a-z]{0,9}|\\(?:bf|rm|displaystyle|left|right|quad)(?![a-z])|</?[a-z]{1,9}>|\\[()\[\];, ]"
)
_MARKS = re.compile(r"[*_`$\"“”„«»{}]|(?<![A-Za-z])['‘’]|['‘’](?![A-Za-z])")
_SPACES = re.compile(r"[ \t]+")

_LETTER = r"(?:\( ?(?P<bracketed>[A-Za-z]) ?\)|\[{1,2} ?(?P<squared>[A-Z]) ?\]|(?P<bare>[A-Z])(?![A-Za-z0-9'’&+-]))"
_KIND = r"(?:(?:the )?(?:letter|option|choice|answer|alternative)s? ?:? ?)?"
_NOT_TWO = r"(?! ?(?:(?:or|and|/|&|,) ?(?:option )?\(?[A-Z](?![A-Za-z'’])\)?(?! (?:is|was|are|can|does)\b)|\?))"
_SURE = (
    r"(?:(?:therefore|thus|hence|clearly|indeed|definitely|probably|likely|most likely|then|simply|actually|really"
    r"|in fact),? )?"
)

_CLAIM = (
    r"(?i:answer|solution|(?:correct|right|best|final|my) (?:option|choice|statement|response|letter|one))(?i:\(s\))?"
)
_VERB = r"(?i:\b(?:is|was|remains|becomes|(?:would|should|must|will|has to)(?: therefore| thus)? be)\b ?:?|:|=|->|→|⇒)"
_GOES_ON = r"(?! (?i:is|was) (?i:not|wrong|incorrect|only|tempting)\b)"
_ELSEWHERE = r"(?!(?i:similar|other|another|previous|related|different|such|these|those)\b)"
_ALONE = r"(?= ?[.,;:!)\n]| ?\Z)"
_STATED = (
    re.compile(
        rf"\b{_CLAIM}(?: {_ELSEWHERE}[^\W\d]+){{0,9}}? ?{_VERB} ?\n{{0,2}} ?"
        rf"(?i:{_SURE}{_KIND}){_LETTER}{_NOT_TWO}{_GOES_ON}"
    ),
    re.compile(
        r"\b(?i:choose|chose|pick|select|selected|answer|go with|going with|opt for|settle on|vote for)"
        rf" (?i:{_KIND}){_LETTER}{_NOT_TWO}"
        r"(?= (?i:because|since|as|over|here|for|instead)\b| ?[.,;:!)\n]| ?\Z)"
    ),
    re.compile(
        rf"(?<![A-Za-z'’]){_LETTER}[).:]?(?: [^\n.;,?!:]{{0,60}}?)? (?:is|are|would be|must be|seems) (?i:{_SURE})"
        r"(?:the |my |our )?(?:only |most |single |one )?"
        r"(?:correct|right|best|true|accurate|appropriate|answer|final answer)\b(?! (?:in|only|for|but|about|that)\b)"
    ),
)
_CORRECTED = re.compile(
    r"\b(?:(?i:actually|wait|no|hmm+|sorry|correction|rather|oops)\b[ ,.!:;…—–-]{1,5}){1,4}(?i:it|that|this)"
    rf"(?:['’]s| (?:is|was|should be|must be)) (?i:{_SURE}{_KIND}){_LETTER}{_NOT_TWO}{_ALONE}"
)
_SMALL = re.compile(rf"\b{_CLAIM} ?(?:[:=] ?(?P<named>[a-z])|(?i:is):? (?P<stated>[b-z]|a(?=\.)))(?=[.)]? ?(?:\n|\Z))")
_FOREIGN = re.compile(
    r"(?:(?:答案|正[确確]选项|正[确確][选選][项項]|故[选選]|[应應][选選]|所以[选選]|因此[选選]|答え|正解|정답|답)"
    r"(?:[应應][该該])?(?:是|[为為]|[选選]|は|은|는)? ?:? ?(?:[选選][项項] ?)?"
    r"|\b(?i:respuesta|resposta|risposta|réponse|antwort|antwoord|ответ)"
    r"(?: (?i:correcta|correta|corretta|correcte|exacte|juste|final|finale))? ?"
    r"(?::|[—–-]|(?<= )(?i:es|é|è|est|ist|lautet|is)\b:?) ?(?i:(?:la |el |a |die |de )?"
    r"(?:opción|letra|opção|option|lettre|lettera|opzione|buchstabe|вариант)? ?))"
    rf"{_LETTER}(?! ?\?)"
    r"(?! ?(?:[/&,、或和や]|[还還]是|또는|(?:or|o|ou|oder|of|y|e|et|und|en|или|и)\b) ?\(?[A-Z](?![A-Za-z]))"
)
_FOREIGN_DOUBT = re.compile(
    r"(?i)(?:如果|若|假[设設如]|不|もし|만약|\b(?:si|wenn|falls|ob|se|als|если|no|nicht|não|non|не)\b)[^.!?,;:。、\n]*\Z"
)
_THINGS = re.compile(
    r"(?i)\b(?:vitamin|hepatitis|influenza|type|group|class|grade|plan|point|team|person|company|country|city|student"
    r"|drug|substance|compound|element|protein|factor|gene|set|angle|line|vertex|node|matrix|vector|event|figure|part"
    r"|section|sample|phase|strain|programming|machine|car|party) \Z"
)
"""Words after which a letter is not an option, as in "vitamin C"."""
_LINE = re.compile(rf"{_LETTER}(?:(?<=\))|[).:](?= |\Z)| ?\Z).{{0,300}}|(?P<small>[a-z])\) .{{0,300}}")
_CONCLUDED = re.compile(
    r"\b(?i:so|therefore|thus|hence|(?:must|should|would|has to) be|(?:it|that)(?: is|['’]s)|which is|only|i['’]d say"
    r"|leaves(?: us)?(?: with)?|corresponds to|matches|(?:option|choice)(?: is)?),?"
    rf" (?i:(?:it['’]s|it is|we have|we choose|only) )?(?i:{_KIND}){_LETTER}{_NOT_TWO}(?= ?[.,;:!)\n]| ?\Z)"
)
_MENTIONED = re.compile(r"(?:\((?P<bracketed>[A-Z])\)|(?i:\boption|\bchoice) (?P<bare>[A-Z])(?![A-Za-z'’]))")
_DENIED = re.compile(
    r"\)?[^\n.;!?]{0,40}?\b(?:wrong|incorrect|false|not|isn['’]t|doesn['’]t|cannot|can['’]t|tempting|eliminated|out"
    r"|fails|invalid)\b"
)
_DOUBT = re.compile(
    r"(?i)(?:n['’]t|\b(?:not|never|no|neither|doubt|unless|if|whether|why|suppose|assum(?:e|ing)|eliminate|reject"
    r"|exclude|rule out|than))\b"
    r"(?:(?!\b(?:so|hence|therefore|thus|but|and|then|because)\b)[^.!?,;:\n])*\Z"
)
_WHOLE = re.compile(r"\(?[A-Za-z]\)?[.:]?")
_VERDICT = re.compile(r"\[\[\s?([A-Z])\s?\]\]")
_WINDOW = 60


def multiple_choice(task: Task, answer: str, trajectory: Trajectory) -> float:
    """1 if the answer names the ground truth's letter, else 0. Raises ScoringError: the ground truth names no
    letter."""
    truth = task.truth_text.strip()
    letter = truth.upper() if len(truth) == 1 and truth.isascii() and truth.isalpha() else option(truth)
    if letter is None:
        raise ScoringError(f"the ground truth {task.truth_text!r:.100} of task {task.id} names no option")
    return float(option(answer) == letter)


def option(text: str) -> str | None:
    """The capital letter of the option that the text names; None if it names none."""
    inside = tagged(text)
    if found := boxes(inside):
        return _only(found[-1].content)
    if inside is not text:
        return _only(inside) or _named(_plain(inside))
    if verdicts := _VERDICT.findall(inside):
        return str(verdicts[-1])
    _, mark, after = inside.rpartition("####")
    line = after.strip().partition("\n")[0]
    whole = _WHOLE.fullmatch(_plain(inside).strip())
    return (_only(line) if mark else None) or (whole[0].strip("().:").upper() if whole else _named(_plain(inside)))


def _named(text: str) -> str | None:
    patterns = (*_STATED, _CORRECTED, _SMALL)
    stated = [each for pattern in patterns for each in _sure(pattern, text)]
    stated = [each for each in stated if not _near(_THINGS, text, each.start(each.lastgroup or 0))]
    stated += [each for each in _FOREIGN.finditer(text) if not _near(_FOREIGN_DOUBT, text, each.start())]
    if stated:
        return _letter(max(stated, key=lambda each: each.start()))
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    for line in (lines[-1], lines[0]) if lines else ():
        if (found := _LINE.fullmatch(line)) and not _denied(line, found):
            return _letter(found)
    concluded = [each for each in _sure(_CONCLUDED, text) if not _denied(text, each)]
    if concluded:
        return _letter(concluded[-1])
    letters = {_letter(each) for each in _sure(_MENTIONED, text) if not _denied(text, each)}
    return letters.pop() if len(letters) == 1 else None


def _sure(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """The matches of the pattern, except those shortly after a word of doubt or denial."""
    return [each for each in pattern.finditer(text) if not _near(_DOUBT, text, each.start())]


def _only(text: str) -> str | None:
    """The letter of a text that is only the answer."""
    plain = _plain(text).strip()
    plain = re.sub(r"(?i)\A(?:the )?(?:final |correct )?(?:answer|option|choice)(?: is)? ?:? ?", "", plain)
    if _WHOLE.fullmatch(plain):
        return plain.strip("().:").upper()
    found = _LINE.match(plain)
    return (
        _letter(found) if found and not re.match(r"[).]? ?(?:or|and|/|&|,) ?\(?[A-Z]\b", plain[_end(found) :]) else None
    )


def _plain(text: str) -> str:
    """The text without marks around letters."""
    text = _WRAPPERS.sub(" ", unicodedata.normalize("NFKC", text))
    return _SPACES.sub(" ", _MARKS.sub("", text))


def _letter(found: re.Match[str]) -> str:
    return str(found[found.lastgroup or 0]).upper()


def _end(found: re.Match[str]) -> int:
    return found.end(found.lastgroup or 0)


def _near(pattern: re.Pattern[str], text: str, end: int) -> bool:
    """True if the pattern occurs within the last characters before index `end`."""
    return pattern.search(text, max(0, end - _WINDOW), end) is not None


def _denied(text: str, found: re.Match[str]) -> bool:
    return _DENIED.match(text, _end(found)) is not None
