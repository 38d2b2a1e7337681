"""The tool `fetch` against real servers, as an episode uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from asyncrl.config.schema import ActorConfig
from asyncrl.config.schema.tools import FetchConfig
from asyncrl.errors import ConfigError, RefusedError, ToolError
from asyncrl.network.public import Connect, public_connector
from asyncrl.tools.fetch import AllowedHosts, FetchPage, PageReader
from asyncrl.tools.toolbox import Toolbox, ToolLimits
from asyncrl.types import ToolCall
from tests.episode.fakes import make_ticket
from tests.network.web import Handler, Names, to_loopback, web_server

PAGE = "<html><head><title>Bees</title></head><body><nav>menu</nav><main>A bee has five eyes.</main></body></html>"


async def page(request: web.Request) -> web.StreamResponse:
    return web.Response(text=PAGE, content_type="text/html")


def fetched(
    handler: Handler,
    calls: Sequence[dict[str, Any]],
    connect: Connect = to_loopback,
    hosts: Sequence[str] = ("pages.example:{port}",),
    **actor: Any,
) -> tuple[list[Any], Toolbox]:
    """Make calls one after another. Returns the texts that the policy reads. `{port}` is the server's."""

    async def main() -> tuple[list[Any], Toolbox]:
        async with web_server(handler) as port:

            def here(text: str) -> str:
                return text.format(port=port)

            config = ActorConfig(fetch=FetchConfig(hosts=list(map(here, hosts))), **actor)
            cls = FetchPage.configured(config)
            allowed, limits = (
                AllowedHosts(config.fetch.hosts),
                (int(config.fetch.max_mb * 2**20), config.tool_timeout_s),
            )
            cls.reader = PageReader(allowed, *limits, connect)  # type: ignore[attr-defined]
            toolbox = Toolbox({"fetch": cls}, ToolLimits(config.tool_timeout_s, 1, config.max_tool_chars))
            async with toolbox.open(make_ticket()) as tools:
                made = [ToolCall("fetch", {**call, "url": here(call["url"])}) for call in calls]
                return [(await tools.answer([call]))[0] for call in made], toolbox

    return asyncio.run(main())


def noting(seen: list[web.Request], answer: Handler = page) -> Handler:
    async def note(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        return await answer(request)

    return note


URL_OF_PAGE = "http://pages.example:{port}/a"


def test_the_policy_reads_the_text_of_a_page():
    answers, toolbox = fetched(page, [{"url": URL_OF_PAGE}])
    assert answers == ["Bees\n\nA bee has five eyes."]
    assert (toolbox.counts.calls, toolbox.counts.refused, toolbox.counts.failures) == (1, 0, 0)


def test_a_long_page_is_read_in_parts_and_fetched_once():
    seen: list[web.Request] = []
    text = "".join(f"{number:09d}\n" for number in range(100)).strip()

    async def long(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text)

    calls = [{"url": URL_OF_PAGE}, *({"url": URL_OF_PAGE, "part": part} for part in (2, 3, 4, 0, -1))]
    answers, _ = fetched(noting(seen, long), calls, max_tool_chars=480)
    parts = [answer.rpartition("\n(part ") for answer in answers[:3]]
    assert "".join(part for part, _, _ in parts) == text
    assert [note for _, _, note in parts] == ["1 of 3)", "2 of 3)", "3 of 3)"]
    assert answers[3:] == ["Error: the page has the parts 1 to 3."] * 3
    assert all(len(answer) <= 480 for answer in answers)
    assert len(seen) == 1


def test_other_hosts_are_refused_before_a_name_is_resolved():
    names, seen = Names(), list[web.Request]()
    hosts = "other.example", "pages.example.evil.example", "evilpages.example", "[::1]", "127.0.0.1"
    urls = [f"http://{host}:{{port}}/" for host in hosts]
    urls += ["http://pages.example/", "http://pages.example:{port}@other.example/", "http://pages.example:1/"]
    answers, toolbox = fetched(noting(seen), [{"url": url} for url in urls], lambda: public_connector(names))
    reasons = [answer.partition(" cannot be fetched: ")[2] for answer in answers]
    assert "a user or a password" in reasons.pop(-2)
    assert all("is not allowed; the allowed hosts are pages.example:" in reason for reason in reasons)
    assert toolbox.counts.refused == len(urls)
    assert not names.asked
    assert not seen


def test_an_allowed_name_of_a_private_address_is_refused():
    seen: list[web.Request] = []
    answers, toolbox = fetched(noting(seen), [{"url": URL_OF_PAGE}], lambda: public_connector(Names()))
    assert "127.0.0.1, which is not a public address" in answers[0]
    answers, _ = fetched(
        noting(seen), [{"url": "http://127.0.0.1:{port}/"}], public_connector, hosts=("127.0.0.1:{port}",)
    )
    assert "127.0.0.1, which is not a public address" in answers[0]
    assert not seen
    assert (toolbox.counts.refused, toolbox.counts.failures) == (1, 0)


def test_a_redirection_to_another_host_is_refused():
    seen: list[web.Request] = []

    async def redirect(request: web.Request) -> web.StreamResponse:
        if request.path == "/b":
            return await page(request)
        raise web.HTTPFound("/b" if request.path == "/a" else f"http://other.example:{request.url.port}/b")

    answers, _ = fetched(noting(seen, redirect), [{"url": URL_OF_PAGE}, {"url": "http://pages.example:{port}/leave"}])
    assert answers[0].endswith("A bee has five eyes.")
    assert "other.example" in answers[1]
    assert "is not allowed" in answers[1]
    assert [request.path for request in seen] == ["/a", "/b", "/leave"]


def test_what_is_no_page_is_the_policys_to_read():
    def with_type(kind: str, status: int = 200) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            return web.Response(body=b"{}", status=status, headers={"Content-Type": kind})

        return answer

    calls: list[dict[str, Any]] = [{"url": URL_OF_PAGE}]
    for kind, shown in (("image/png", "can be read"), ("application/pdf", "can be read"), ("application/json", "{}")):
        assert shown in fetched(with_type(kind), calls)[0][0]
    assert "status 404" in fetched(with_type("text/html", 404), calls)[0][0]
    assert "more than 2000 characters" in fetched(page, [{"url": f"{URL_OF_PAGE}{'a' * 2000}"}])[0][0]
    assert "cannot be fetched" in fetched(page, [{"url": "no url"}])[0][0]


def test_a_page_larger_than_the_limit_is_refused():
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(bytes(1 << 16))
        return response

    limit = FetchConfig().max_mb
    answers, _ = fetched(endless, [{"url": URL_OF_PAGE}])
    assert f"more than {int(limit * 2**20)} bytes" in answers[0]


def test_a_server_that_fails_is_tried_again_and_then_fails_the_episode():
    seen: list[web.Request] = []

    def failing(times: int) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request) -> web.StreamResponse:
            return web.Response(status=503) if len(seen) <= times else await page(request)

        return noting(seen, answer)

    answers, toolbox = fetched(failing(1), [{"url": URL_OF_PAGE}])
    assert (answers[0].startswith("Bees"), toolbox.counts.failures) == (True, 1)
    seen.clear()
    with pytest.raises(ToolError, match="status 503"):
        fetched(failing(9), [{"url": URL_OF_PAGE}])


@pytest.mark.parametrize(
    ("entry", "url", "is_allowed"),
    [
        ("docs.python.org", "https://docs.python.org/3/", True),
        ("docs.python.org", "http://docs.python.org:80/", True),
        ("docs.python.org", "https://DOCS.Python.org./", True),
        ("Docs.python.ORG", "https://docs.python.org/", True),
        ("docs.python.org", "https://docs.python.org:8443/", False),
        ("docs.python.org", "http://docs.python.org:443/", False),
        ("docs.python.org:8443", "https://docs.python.org:8443/", True),
        ("docs.python.org:8443", "https://docs.python.org/", False),
        ("docs.python.org", "https://python.org/", False),
        ("docs.python.org", "https://a.docs.python.org/", False),
        ("docs.python.org", "https://docs.python.org.example/", False),
        ("*.python.org", "https://docs.python.org/", True),
        ("*.python.org", "https://a.docs.python.org/", True),
        ("*.python.org", "https://python.org/", False),
        ("*.python.org", "https://evilpython.org/", False),
        ("münchen.de", "https://xn--mnchen-3ya.de/", True),
        ("xn--mnchen-3ya.de", "https://MÜNCHEN.de/", True),
    ],
)
def test_hosts_are_compared_as_they_are_connected_to(entry: str, url: str, is_allowed: bool):
    hosts = AllowedHosts([entry])
    if is_allowed:
        hosts.check(URL(url))
    else:
        with pytest.raises(RefusedError, match="is not allowed"):
            hosts.check(URL(url))


@pytest.mark.parametrize(
    "entry", ["https://docs.python.org", "*", "*.", "a/b", "", "user@a.org", "a b", "a:port", "a.*"]
)
def test_entries_that_are_no_hosts_are_refused_with_the_form(entry: str):
    with pytest.raises(ConfigError, match=r"actor\.fetch\.hosts: .* is not a host; write HOST"):
        AllowedHosts([entry])


def test_the_tool_needs_hosts_and_tells_the_policy_which():
    with pytest.raises(ConfigError, match=r"actor\.fetch\.hosts=\[HOST"):
        FetchPage.configured(ActorConfig())
    cls = FetchPage.configured(ActorConfig(fetch=FetchConfig(hosts=["docs.python.org", "*.wikipedia.org"])))
    assert cls.schema["description"].endswith("Allowed hosts: docs.python.org, *.wikipedia.org.")
