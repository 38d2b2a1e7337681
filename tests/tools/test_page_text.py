"""The text of pages."""

from __future__ import annotations

import pytest
from yarl import URL

from asyncrl.errors import RefusedError
from asyncrl.network.public import Fetched
from asyncrl.tools.page_text import html_text, page_text


def text_of(html: str) -> str:
    return html_text(html.encode())


def test_a_page_keeps_its_lines_and_loses_what_nobody_reads():
    page = """<!DOCTYPE html><html><head><title>Bees &amp; more</title><style>p {color: red}</style></head>
    <body><nav>Home <a href="/x">About</a></nav>
    <h1>Bees</h1><p>A bee  has
    <b>five</b> eyes.<br>They fly.</p><!-- no -->
    <ul><li><p>queen</p></li><li>drone <i>(male)</i><ul><li>lazy</li></ul></li></ul>
    <table><tr><th>Part<th>Count</tr><tr><td>wings</td><td>4</td></tr></table>
    <pre>def hum():
        return "z"

hum()</pre>
    <script>alert("<p>x</p>")</script><noscript>no</noscript><p hidden>no</p>
    <div>one</div><div>two<span> three</span></div> four
    <aside>no</aside></body></html>"""
    assert text_of(page).splitlines() == [
        *("Bees & more", "", "# Bees", "", "A bee has five eyes.", "They fly.", "", "- queen", "", "- drone (male)"),
        *("- lazy", "", "Part | Count", "wings | 4", "", "def hum():", '        return "z"', "", "hum()", ""),
        *("one", "two three", "four"),
    ]


def test_the_main_part_is_the_only_one_where_a_page_marks_it():
    assert text_of("<header>Site</header><main><p>Text</p></main><footer>Law</footer>") == "Text"
    assert text_of("<p>Intro</p><article>One</article><article>Two</article>") == "Intro\n\nOne\n\nTwo"
    assert text_of("<div role=main>Text</div><p>Other</p>") == "Text"


@pytest.mark.parametrize(
    ("body", "charset", "text"),
    [
        ("<p>grün €".encode(), None, "grün €"),
        ("<p>grün".encode("latin-1"), "latin-1", "grün"),
        ("<meta charset=latin-1><p>grün".encode("latin-1"), None, "grün"),
        ("<p>grün".encode(), "no such charset", "grün"),
        ("\ufeff<p>grün".encode(), None, "grün"),
        ("<p>Привет".encode("cp1251"), "windows-1251", "Привет"),
        (b"", None, ""),
        (b"<!-- nothing -->", None, ""),
        (b"plain \xff text", None, None),
        (b"\x00\x01<<<>>", None, None),
    ],
)
def test_pages_are_decoded_as_they_say(body: bytes, charset: str | None, text: str | None):
    read = html_text(body, charset)
    assert text is None or read == text


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        "<div>" * 100_000 + "x",
        "<table>" * 3000 + "<tr><td>x",
        "<b>a" * 100_000,
        "<li>" * 100_000,
        "<ul><li>" + "<div> </div>" * 50_000,
        "<ul><li><pre>" + "<div> </div>" * 50_000,
        "<a '" * 200_000,
        "<a" * 500_000,
        "<p>" + "&amp;" * 200_000,
        '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b SYSTEM "file:///etc/passwd">]><p>&a;&b;</p>',
    ],
)
def test_hostile_pages_are_read_or_refused_and_nothing_else(page: str):
    assert "root:" not in text_of(page)


def test_a_tag_that_would_take_minutes_is_refused():
    names = " ".join(f"a{number}='>'" for number in range(200_000))
    with pytest.raises(RefusedError, match="too long to be read"):
        text_of(f"<p {names}>x")


def test_other_texts_are_as_they_are_and_what_is_no_text_is_refused():
    def fetched(kind: str, body: bytes, charset: str | None = None) -> Fetched:
        return Fetched(URL("http://pages.example/"), kind, charset, body)

    assert page_text(fetched("text/plain", b"<p> a\n b \xff")) == "<p> a\n b \ufffd"
    assert page_text(fetched("application/problem+json", b'{"a": 1}')) == '{"a": 1}'
    assert page_text(fetched("text/markdown", "ü".encode("latin-1"), "latin-1")) == "ü"
    assert page_text(fetched("application/xhtml+xml", b"<html><body><p>x</p></body></html>")) == "x"
    for kind in ("application/pdf", "image/svg", "application/octet-stream", "video/mp4"):
        with pytest.raises(RefusedError, match="only HTML and other texts"):
            page_text(fetched(kind, b"x"))
