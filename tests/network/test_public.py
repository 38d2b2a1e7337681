from __future__ import annotations

import asyncio
import gzip
import re
import socket
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import AddrInfoType, web

import asyncrl
from asyncrl.errors import RefusedError, UnavailableError
from asyncrl.network.public import CheckUrl, Connect, Fetched, check_public, get_public, public_connector, public_socket
from tests.network.web import Handler, Names, to_loopback, web_server

BODY = b"what a page has"

NOT_PUBLIC = (
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1"),
    *("255.255.255.255", "198.18.0.1", "192.0.2.1", "240.0.0.1", "100.100.100.200", "192.0.0.192"),
    *("168.63.129.16", "64:ff9b::7f00:1", "64:ff9b:1::1", "::127.0.0.1", "::ffff:0:7f00:1", "fec0::1"),
    *("::1", "::", "fe80::1%eth0", "fd00::1", "fd00:ec2::254", "::ffff:10.0.0.1", "::ffff:127.0.0.1"),
    *("2002:7f00:1::", "2001:db8::1", "2001::1", "ff02::1"),
)


async def answer(request: web.Request) -> web.StreamResponse:
    return web.Response(body=BODY)


def served(
    handler: Handler,
    url: str = "http://pages.example:{port}/a",
    connect: Connect = to_loopback,
    limit: int = 100,
    redirections: int = 0,
    timeout_s: float = 20.0,
    check: CheckUrl = lambda url: None,
) -> Fetched:
    """Return the page that is fetched from a real server."""

    async def fetch() -> Fetched:
        async with web_server(handler) as port:
            return await get_public(url.format(port=port), limit, timeout_s, redirections, check, connect)

    return asyncio.run(fetch())


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_that_are_not_public_are_refused(address: str):
    with pytest.raises(RefusedError, match="not a public address"):
        check_public(address)
    with pytest.raises(RefusedError, match=r"not a public address|cannot be fetched"):
        asyncio.run(get_public(f"http://{f'[{address}]' if ':' in address else address}/a", 100, 20.0))
    names = Names(address)
    with pytest.raises(RefusedError, match="not a public address"):
        asyncio.run(get_public("http://pages.example/a", 100, 20.0, connect=lambda: public_connector(names)))
    assert names.asked == ["pages.example"]


IANA: Mapping[str, str] = {
    "0.0.0.0/8": "this network",
    "10.0.0.0/8": "private use",
    "100.64.0.0/10": "shared address space",
    "127.0.0.0/8": "loopback",
    "169.254.0.0/16": "link local",
    "172.16.0.0/12": "private use",
    "192.0.0.0/24": "IETF protocol assignments",
    "192.0.0.9/32": "port control protocol anycast",
    "192.0.0.170/31": "NAT64 and DNS64 discovery",
    "192.0.2.0/24": "documentation",
    "192.31.196.0/24": "AS112",
    "192.52.193.0/24": "AMT",
    "192.88.99.0/24": "6to4 relay anycast",
    "192.168.0.0/16": "private use",
    "192.175.48.0/24": "AS112",
    "198.18.0.0/15": "benchmarking",
    "198.51.100.0/24": "documentation",
    "203.0.113.0/24": "documentation",
    "224.0.0.0/4": "multicast",
    "233.252.0.0/24": "documentation",
    "240.0.0.0/4": "reserved",
    "255.255.255.255/32": "limited broadcast",
    "168.63.129.16/32": "the host of Azure",
    "::/128": "unspecified",
    "::1/128": "loopback",
    "::/96": "compatible with IPv4",
    "::ffff:0:0/96": "mapped IPv4",
    "::ffff:0:0:0/96": "translated IPv4",
    "64:ff9b::/96": "translated IPv4",
    "64:ff9b:1::/48": "local translated IPv4",
    "100::/64": "discard only",
    "100:0:0:1::/64": "dummy prefix",
    "2001::/23": "IETF protocol assignments",
    "2001::/32": "Teredo",
    "2001:1::1/128": "port control protocol anycast",
    "2001:2::/48": "benchmarking",
    "2001:3::/32": "AMT",
    "2001:4:112::/48": "AS112",
    "2001:10::/28": "ORCHID",
    "2001:20::/28": "ORCHIDv2",
    "2001:30::/28": "drone remote identification",
    "2001:db8::/32": "documentation",
    "2002::/16": "6to4",
    "2620:4f:8000::/48": "AS112",
    "3fff::/20": "documentation",
    "5f00::/16": "segment routing",
    "fc00::/7": "unique local",
    "fe80::/10": "link local",
    "fec0::/10": "site local",
    "ff00::/8": "multicast",
}
"""The registries of special-purpose addresses, multicast, and what holds an address of IPv4."""


@pytest.mark.parametrize("network", IANA)
def test_no_address_of_a_special_purpose_is_public(network: str):
    found = ip_network(network)
    middle = found[found.num_addresses // 2]
    for address in (found[0], middle, found[-1]):
        with pytest.raises(RefusedError, match="not a public address"):
            check_public(str(address))


@pytest.mark.parametrize("network", IANA)
def test_addresses_next_to_those_of_a_special_purpose_are_public_unless_they_are_special_too(network: str):
    found = ip_network(network)
    everything = ip_network("0.0.0.0/0" if found.version == 4 else "2000::/3")
    special = [each for each in map(ip_network, IANA) if each.version == found.version]
    for number in (int(found[0]) - 1, int(found[-1]) + 1):
        if int(everything[0]) <= number <= int(everything[-1]):
            address = type(found[0])(number)
            if not any(address in each for each in special):
                check_public(str(address))


@pytest.mark.parametrize("address", ["2606:2800::5efe:10.0.0.1", "2606:2800::200:5efe:127.0.0.1"])
def test_a_tunnel_to_an_address_that_is_not_public_is_refused(address: str):
    with pytest.raises(RefusedError, match="not a public address"):
        check_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("93.184.215.14", "1.1.1.1", "8.8.8.8", "192.0.1.1", "198.17.0.1", "100.128.0.1", "172.32.0.1"),
        *("2606:2800:21f:cb07:6820:80da:af6b:8b2c", "2001:200::1", "2001:4860:4860::8888", "2a00:1450::1"),
        "2606:2800::5efe:93.184.215.14",
    ],
)
def test_public_addresses_are_allowed(address: str):
    check_public(address)


def test_only_known_files_open_connections_by_http_to_addresses_that_the_configuration_names():
    """An address from a task, a page or a policy is fetched by `network.public` alone."""
    clients = re.compile(
        r"^\s*(?:import|from) (?:aiohttp|httpx2?|requests|urllib\.request|urllib3|http\.client)\b", re.M
    )
    package = Path(asyncrl.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if clients.search(
            re.sub(
                r"from aiohttp import (?:hdrs, )?web\n|from aiohttp\.(?:typedefs|http|web_protocol)",
                "",
                path.read_text(),
            )
        )
    }
    assert found == {
        "network/public.py",
        *("sandbox/fusion.py", "agents/policy.py", "agents/server.py"),
        *("engine/fleet/http.py", "tools/search/retrieval.py", "tools/mcp/http.py"),
        *("data/converters/openenv.py", "scoring/models/remote.py", "launch/preflight/hub.py"),
        *("agents/programs/verifiers_agent/asyncrl_chat.py", "agents/programs/gym_agent/__main__.py"),
    }


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "１２７.0.0.1", "127。0。0。1", "①27.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1"),
        *("[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "localhost", "LOCALHOST", "localhost.", "0", "0.0.0.0"),
    ],
)
def test_no_way_to_write_the_own_machine_reaches_it(host: str):
    requests = []

    async def note(request: web.Request) -> web.StreamResponse:
        requests.append(request)
        return await answer(request)

    with pytest.raises((RefusedError, UnavailableError), match="cannot be fetched"):
        served(note, f"http://{host}:{{port}}/a", public_connector)
    assert not requests


class Rebinding(Names):
    """A resolver whose answer is a public address when it is read first, and the own machine from then on."""

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> Any:
        class Answer(dict[str, Any]):
            first = True

            def __getitem__(self, name: str) -> Any:
                if name == "host" and self.first:
                    self.first = False
                    return "93.184.215.14"
                return super().__getitem__(name)

        (found,) = await super().resolve(host, port, family)
        return [Answer(found)]


def test_the_address_that_a_socket_connects_to_is_the_one_that_is_checked():
    requests = []

    async def note(request: web.Request) -> web.StreamResponse:
        requests.append(request)
        return await answer(request)

    with pytest.raises(RefusedError, match=r"127\.0\.0\.1, which is not a public address"):
        served(note, connect=lambda: public_connector(Rebinding()))
    assert not requests


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://pages.example/a", "only http and https"),
        ("file:///etc/passwd", "only http and https"),
        ("gopher://pages.example/a", "only http and https"),
        ("pages.example/a", "only http and https"),
        ("http:///a", "no host"),
        ("http://user@pages.example/", "a user or a password"),
        ("http://user:word@pages.example/", "a user or a password"),
        ("http://:word@pages.example/", "a user or a password"),
        ("http://[bad", "cannot be fetched"),
        ("http://x:99999/a", "cannot be fetched"),
        ("http://pages.example\r\nHost: other/", "cannot be fetched"),
    ],
)
def test_urls_of_other_forms_are_refused_before_a_name_is_resolved(url: str, reason: str):
    names = Names()
    with pytest.raises(RefusedError, match=reason):
        asyncio.run(get_public(url, 100, 20.0, connect=lambda: public_connector(names)))
    assert not names.asked


def test_a_page_is_fetched_with_its_type():
    async def page(request: web.Request) -> web.StreamResponse:
        assert request.headers.keys() & {"Cookie", "Authorization", "Referer"} == set()
        return web.Response(text="grün", content_type="text/html", charset="latin-1")

    fetched = served(page)
    assert (fetched.content_type, fetched.charset, fetched.body) == ("text/html", "latin-1", "grün".encode("latin-1"))
    assert fetched.url.host == "pages.example"


def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert served(answer).body == BODY


def test_a_redirection_is_followed_as_often_as_permitted_and_checked_each_time():
    seen: list[str] = []

    async def redirect(request: web.Request) -> web.StreamResponse:
        number = int(request.path.removeprefix("/"))
        assert "Cookie" not in request.headers
        if not number:
            return await answer(request)
        found = web.HTTPFound(f"/{number - 1}")
        found.set_cookie("session", "secret")
        raise found

    url = "http://pages.example:{port}/2"
    fetched = served(redirect, url, redirections=2, check=lambda url: seen.append(url.path))
    assert (fetched.body, fetched.url.path, seen) == (BODY, "/0", ["/2", "/1", "/0"])
    with pytest.raises(RefusedError, match="redirects more than 1 times"):
        served(redirect, url, redirections=1)
    with pytest.raises(RefusedError, match="status 302"):
        served(redirect, url)


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("file:///etc/passwd", "only http and https"),
        ("http://user:word@pages.example/", "a user or a password"),
        ("http://169.254.169.254/latest/meta-data/", "not a public address"),
        ("http://[::ffff:169.254.169.254]/", "not a public address"),
        ("//10.0.0.1/", "not a public address"),
        ("", "without a Location"),
    ],
)
def test_a_redirection_leads_nowhere_that_a_url_may_not(location: str, reason: str):
    async def redirect(request: web.Request) -> web.StreamResponse:
        return web.Response(status=302, headers={"Location": location} if location else {})

    def factory(info: AddrInfoType) -> socket.socket:
        # The page is on a server of the test; all other addresses are checked.
        return socket.socket(*info[:3]) if info[4][0] == "127.0.0.1" else public_socket(info)

    def connect() -> aiohttp.TCPConnector:
        return aiohttp.TCPConnector(resolver=Names(), socket_factory=factory)

    with pytest.raises(RefusedError, match=reason):
        served(redirect, connect=connect, redirections=5)


def test_a_body_is_read_up_to_the_limit():
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(bytes(1 << 16))
        return response

    assert served(answer, limit=len(BODY)).body == BODY
    with pytest.raises(RefusedError, match=f"more than {len(BODY) - 1} bytes"):
        served(answer, limit=len(BODY) - 1)
    with pytest.raises(RefusedError, match="more than 100000 bytes"):
        served(endless, limit=100_000)


async def test_a_host_that_is_no_address_in_its_usual_form_is_a_fault_of_the_url():
    for host in ("2130706433", "127.0.0.1."):
        with pytest.raises(RefusedError, match="it is not a URL"):
            await get_public(f"http://{host}/", 100, 10.0)


@pytest.mark.slow
def test_a_packed_body_is_unpacked_up_to_the_limit():
    def packed(content: bytes, encoding: str = "gzip") -> Handler:
        async def page(request: web.Request) -> web.StreamResponse:
            assert request.headers["Accept-Encoding"] == "gzip"
            return web.Response(body=content, headers={"Content-Encoding": encoding})

        return page

    assert served(packed(gzip.compress(BODY)), limit=len(BODY) + 100).body == BODY
    bomb = gzip.compress(bytes(50_000_000))
    with pytest.raises(RefusedError, match="more than 100000 bytes"):
        served(packed(bomb), limit=100_000)
    with pytest.raises(RefusedError, match="cannot be fetched"):
        served(packed(b"no gzip at all"))
    with pytest.raises(UnavailableError, match="its packed body ends too early"):
        served(packed(gzip.compress(BODY)[:-20]))
    with pytest.raises(RefusedError, match="its packed body has several parts"):
        served(packed(gzip.compress(BODY) + gzip.compress(b"more")))
    assert served(packed(gzip.compress(BODY) + bytes(20)), limit=len(BODY) + 100).body == BODY
    with pytest.raises(RefusedError, match="only gzip is unpacked"):
        served(packed(BODY, "br"))


def test_a_refusal_differs_from_what_may_go_better_another_time():
    def status(number: int) -> Handler:
        async def page(request: web.Request) -> web.StreamResponse:
            return web.Response(status=number)

        return page

    async def silent(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return await answer(request)

    for number in (404, 403, 204):
        with pytest.raises(RefusedError, match=f"status {number}"):
            served(status(number))
    for number in (500, 503, 429):
        with pytest.raises(UnavailableError, match=f"status {number}"):
            served(status(number))
    with pytest.raises(UnavailableError, match=r"more than 0\.2 s"):
        served(silent, timeout_s=0.2)
    with pytest.raises(UnavailableError, match="cannot be fetched"):
        served(answer, "http://pages.example:1/a")


def test_a_host_that_does_not_exist_is_refused_and_a_name_server_that_fails_is_not():
    def no_answer(number: int) -> Mapping[str, Any]:
        class Unknown(Names):
            async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> Any:
                raise socket.gaierror(number, "no answer")

        return {"connect": lambda: public_connector(Unknown())}

    with pytest.raises(RefusedError, match=r"there is no host pages\.example"):
        served(answer, **no_answer(socket.EAI_NONAME))
    with pytest.raises(UnavailableError, match="cannot be fetched"):
        served(answer, **no_answer(socket.EAI_AGAIN))
