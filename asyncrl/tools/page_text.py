"""Reads the text of a web page, as a person would copy it from a browser: HTML by lxml, other texts unchanged.

Headings, list items, rows of tables and preformatted text keep their lines. Scripts, styles, forms and menus are left
out. If a page marks its main part, everything else is left out, too.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Final

from asyncrl.errors import RefusedError
from asyncrl.network.public import Fetched

if TYPE_CHECKING:
    from lxml.html import HtmlElement

HTML_TYPES = ("text/html", "application/xhtml+xml")
TEXT_TYPES = ("application/json", "application/xml", "application/javascript", "application/x-ndjson")
TEXT_SUFFIXES = ("+json", "+xml")

_HEADINGS: Final = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_WITH_GAP: Final = frozenset(("p", "pre", "table", "blockquote", "section", "article", "figure", "dl", *_HEADINGS))
"""Elements with an empty line around them."""

_BLOCKS: Final = _WITH_GAP | {
    *("address", "body", "caption", "center", "dd", "details", "div", "dt", "fieldset", "figcaption", "footer", "form"),
    *("header", "hr", "li", "main", "ol", "summary", "tbody", "tfoot", "thead", "tr", "ul"),
}
_LEFT_OUT: Final = {
    *("aside", "audio", "button", "canvas", "dialog", "head", "iframe", "input", "math", "menu", "nav", "noscript"),
    *("object", "option", "script", "select", "style", "svg", "template", "textarea", "video"),
}
_CELLS: Final = ("td", "th")
_MAIN: Final = ("//main", "//*[@role='main']", "//article")
_BLANKS = re.compile(r"[ \t\r\n\f\v\u00a0]+")
_DECLARED = re.compile(rb"<meta[^>]{0,200}charset|<\?xml[^>]{0,100}encoding", re.IGNORECASE)
_HUGE_TAG = re.compile(rb"""<[a-zA-Z](?:[^<>"']|"[^"]*"|'[^']*'){20000}""")
"""A tag so long that libxml2 could need minutes to read it, because it compares each attribute with all earlier ones of
the tag."""

_HEAD_BYTES = 2048


def page_text(fetched: Fetched) -> str:
    """The title and the text of a fetched page. Raises RefusedError: what was fetched is not a text."""
    kind = fetched.content_type
    if kind in HTML_TYPES:
        return html_text(fetched.body, fetched.charset)
    if kind.startswith("text/") or kind in TEXT_TYPES or kind.endswith(TEXT_SUFFIXES):
        return fetched.body.decode(_known(fetched.charset) or "utf-8", errors="replace").removeprefix("\ufeff").strip()
    raise RefusedError(f"the page is of the type {kind!r:.100}; only HTML and other texts can be read")


def html_text(body: bytes, charset: str | None = None) -> str:
    """The text of a page of HTML. The encoding is `charset`, or else the one that the page declares, or else UTF-8.

    Raises RefusedError: the page would take too long to read.
    """
    from lxml import etree, html

    if _HUGE_TAG.search(body):
        raise RefusedError("a tag of the page is too long to be read")
    encoding = _known(charset) or (None if _DECLARED.search(body[:_HEAD_BYTES]) else "utf-8")
    # `no_network`: lxml loads neither document types nor entities.
    parser = html.HTMLParser(encoding=encoding, no_network=True, remove_comments=True, remove_pis=True)
    try:
        root = html.document_fromstring(body, parser=parser, ensure_head_body=True)
    except etree.ParserError:  # The page has nothing but blanks and comments.
        return ""
    title = _BLANKS.sub(" ", root.findtext(".//title") or "").strip()
    lines = _Lines()
    _walk(_main_part(root), lines)
    text = lines.text()
    return text if not title or text.startswith(f"# {title}") else f"{title}\n\n{text}".strip()


def _known(charset: str | None) -> str | None:
    try:
        return codecs.lookup(charset).name if charset else None
    except LookupError:
        return None


def _main_part(root: HtmlElement) -> HtmlElement:
    """The only element that the page marks as its main part, or else its body."""
    for path in _MAIN:
        found = root.xpath(path)
        if len(found) == 1:
            return found[0]
    return root.find("body")


class _Lines:
    """Collects text in lines, with an empty line between paragraphs."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._line: list[str] = []
        # These two flags describe `_line`. If each call looked through the parts of the line, lines of very many parts
        # would be slow.
        self._has_mark = self._has_text = False
        self.preformatted = 0

    def add(self, text: str | None) -> None:
        """Add text to the line. Outside of preformatted parts, blanks and newlines become one blank."""
        if not text:
            return
        first, *rest = text.split("\n") if self.preformatted else [_BLANKS.sub(" ", text)]
        self._append(first)
        for line in rest:
            self._end()
            self._append(line)

    def _append(self, part: str) -> None:
        self._line.append(part)
        self._has_text = self._has_text or bool(part.strip())

    def begin(self, mark: str = "") -> None:
        """Begin a line, unless one has just begun."""
        if self._has_text:
            self._end()
        elif self._has_mark:
            # The line has only the mark of a list item, and the item's first paragraph continues it.
            return
        self._line = [mark] if mark else []
        self._has_mark = bool(mark)

    def gap(self) -> None:
        """Leave an empty line before the next one."""
        self.begin()
        if self._lines and self._lines[-1] and not self._line:
            self._lines.append("")

    def _end(self) -> None:
        line = "".join(self._line)
        line = line.rstrip() if self.preformatted else _BLANKS.sub(" ", line).strip()
        if line or self.preformatted:
            self._lines.append(line)
        self._line.clear()
        self._has_mark = self._has_text = False

    def text(self) -> str:
        self._end()
        return "\n".join(self._lines).strip()


def _walk(top: HtmlElement, lines: _Lines) -> None:
    # A page may be nested deeper than Python's recursion limit.
    stack: list[tuple[HtmlElement, bool]] = [(top, False)]
    while stack:
        element, is_left = stack.pop()
        if is_left:
            _leave(element.tag, lines)
            if element is not top:
                lines.add(element.tail)
            continue
        if not isinstance(element.tag, str) or element.tag in _LEFT_OUT or element.get("hidden") is not None:
            lines.add(element.tail)
            continue
        _enter(element, lines)
        lines.add(element.text)
        stack.append((element, True))
        stack.extend((child, False) for child in reversed(element))


def _enter(element: HtmlElement, lines: _Lines) -> None:
    tag = element.tag
    if tag in _WITH_GAP:
        lines.gap()
    if tag in _BLOCKS or tag == "br":
        lines.begin("- " if tag == "li" else _HEADINGS.get(tag, ""))
    if tag in _CELLS and element.getprevious() is not None:
        lines.add(" | ")
    lines.preformatted += tag == "pre"


def _leave(tag: str, lines: _Lines) -> None:
    if tag in _BLOCKS:
        lines.begin()
    lines.preformatted -= tag == "pre"
    if tag in _WITH_GAP:
        lines.gap()
