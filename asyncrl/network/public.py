"""Sends GET requests to the public internet. The URLs are not trusted: a task, a page or the policy wrote them.

No URL, name server or page can change these rules:

- A connection goes only to a public address. The address of each socket is checked before the socket connects. So the
  check cannot be avoided by another spelling of an address, nor by a name that later resolves to another address.
- The URL of a redirection is checked in the same way. The caller bounds the number of redirections.
- No cookies and no credentials are sent, and the proxy of the environment is not used.
- The size of a body is bounded, even after decompression, and so is the total time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from socket import AddressFamily

import aiohttp
from aiohttp import AddrInfoType
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from asyncrl.errors import RefusedError, UnavailableError

SPECIAL_IPV4 = tuple(
    map(
        IPv4Network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16"),
            *("192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
            # A public address, at which the Azure host of a virtual machine answers.
            "168.63.129.16/32",
        ),
    )
)
"""IANA's registry of special-purpose addresses, and multicast. Some of these addresses can be reached, but none serves
pages, so nothing is lost if all are refused. The list is here because versions of Python know different parts of the
registry."""
PUBLIC_IPV6 = IPv6Network("2000::/3")
"""The network of all addresses that are allotted for the internet. Outside of it are loopback, link-local and
site-local addresses, and most addresses that embed an IPv4 address: mapped, translated (64:ff9b::/96, 64:ff9b:1::/48)
or compatible.
"""
SPECIAL_IPV6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20")))
"""The special-purpose addresses of IANA's registry that are within PUBLIC_IPV6. 2001::/23 has Teredo, and 2002::/16 is
6to4: both embed an IPv4 address."""
ISATAP = (0x5EFE, 0x0200_5EFE)
"""Two values of 32 bits. If the third group of 32 bits of an IPv6 address is one of them, the last 32 bits are an IPv4
address (ISATAP). A site's router tunnels packets to this IPv4 address."""

REDIRECTIONS = (301, 302, 303, 307, 308)
PASSING = (408, 425, 429)
"""Statuses after which a later request may succeed. All statuses from 500 on are treated in the same way."""

NO_SUCH_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
PART_BYTES = 1 << 16
_GZIP = zlib.MAX_WBITS | 16
_GZIP_MAGIC = b"\x1f\x8b"
_HEADERS = {"User-Agent": "asyncrl", "Accept-Encoding": "gzip"}

CheckUrl = Callable[[URL], None]
"""A function that raises RefusedError if a URL must not be fetched."""

Connect = Callable[[], aiohttp.BaseConnector]
"""A function that makes the connector of one fetch."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The page that a server sent. `url` is the URL after all redirections."""

    url: URL
    content_type: str
    charset: str | None
    body: bytes


def check_public(address: str) -> None:
    """Check an address. Raises RefusedError: `address` is not an address of the public internet."""
    number = ipaddress.ip_address(address.partition("%")[0])
    if not (_is_public_ipv4(number) if isinstance(number, IPv4Address) else _is_public_ipv6(number)):
        raise RefusedError(f"nothing is fetched from {address}, which is not a public address")


def _is_public_ipv4(number: IPv4Address) -> bool:
    return not any(number in network for network in SPECIAL_IPV4)


def _is_public_ipv6(number: IPv6Address) -> bool:
    if number not in PUBLIC_IPV6 or any(number in network for network in SPECIAL_IPV6):
        return False
    is_tunnel = int(number) >> 32 & 0xFFFF_FFFF in ISATAP
    return not is_tunnel or _is_public_ipv4(IPv4Address(int(number) & 0xFFFF_FFFF))


class PublicResolver(AbstractResolver):
    """Resolves names by `resolver`, and refuses names that lead to an address that is not public."""

    def __init__(self, resolver: AbstractResolver) -> None:
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: AddressFamily = AddressFamily.AF_INET
    ) -> list[ResolveResult]:
        """Resolve a name. Raises RefusedError: it leads to an address that is not public."""
        found = await self._resolver.resolve(host, port, family)
        for each in found:
            check_public(each["host"])
        return found

    async def close(self) -> None:
        await self._resolver.close()


def public_socket(info: AddrInfoType) -> socket.socket:
    """Make the socket of a connection. Raises RefusedError: its address is not public."""
    family, kind, protocol, _, address = info
    check_public(str(address[0]))
    return socket.socket(family, kind, protocol)


def public_connector(resolver: AbstractResolver | None = None) -> aiohttp.TCPConnector:
    """Return a connector that connects only to public addresses. It resolves names by `resolver`, or by the host's
    resolver if that is None."""
    names = PublicResolver(resolver or aiohttp.ThreadedResolver())
    return aiohttp.TCPConnector(resolver=names, use_dns_cache=False, socket_factory=public_socket)


def _anywhere(url: URL) -> None:
    """Accept every URL."""


async def get_public(
    url: str,
    limit: int,
    timeout_s: float,
    redirections: int = 0,
    check: CheckUrl = _anywhere,
    connect: Connect = public_connector,
) -> Fetched:
    """Fetch the page of a URL, at most `limit` bytes. `check` is called with the URL and with the URL of each
    redirection.

    Raises RefusedError: a URL is not http or https, contains a user or a password, leads to an address that is not
    public, or fails the check; there are more than `redirections` redirections, or more than `limit` bytes; the status
    is neither 200 nor one of the following. Raises UnavailableError: the server cannot be reached, took more than
    `timeout_s` seconds in total, or answered with a status of 500 or more or one of PASSING.
    """
    shown = f"{url!r:.200}"
    limit_s = asyncio.timeout(timeout_s)
    try:
        async with limit_s, _session(connect()) as session:
            return await _followed(session, URL(url), limit, redirections, check)
    except UnavailableError as error:
        raise UnavailableError(f"{shown} cannot be fetched: {error}") from error
    except RefusedError as error:
        raise RefusedError(f"{shown} cannot be fetched: {error}") from error
    except aiohttp.ClientConnectorDNSError as error:
        if isinstance(error.os_error, socket.gaierror) and error.os_error.errno in NO_SUCH_NAME:
            raise RefusedError(f"{shown} cannot be fetched: there is no host {error.host}") from error
        raise UnavailableError(f"{shown} cannot be fetched: {error}") from error
    except aiohttp.InvalidURL as error:
        raise RefusedError(f"{shown} cannot be fetched: it is not a URL: {error!s:.300}") from error
    except (aiohttp.ClientError, OSError) as error:
        reason = f"it took more than {timeout_s:g} s" if limit_s.expired() else f"{error!r:.300}"
        raise UnavailableError(f"{shown} cannot be fetched: {reason}") from error
    except (ValueError, zlib.error) as error:
        raise RefusedError(f"{shown} cannot be fetched: {error!r:.300}") from error


def _session(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=_HEADERS,
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        trust_env=False,
    )


async def _followed(
    session: aiohttp.ClientSession, url: URL, limit: int, redirections: int, check: CheckUrl
) -> Fetched:
    for _ in range(redirections + 1):
        _check_form(url)
        check(url)
        async with session.get(url, allow_redirects=False) as response:
            if response.status not in REDIRECTIONS or not redirections:
                return Fetched(url, response.content_type, response.charset, await _body(response, limit))
            location = response.headers.get("Location", "")
        if not location:
            raise RefusedError(f"status {response.status} without a Location")
        url = url.join(URL(location))
    raise RefusedError(f"it redirects more than {redirections} times")


def _check_form(url: URL) -> None:
    """Raises RefusedError: the scheme is not http or https, there is no host, or there is a user or a password."""
    if url.scheme not in ("http", "https"):
        raise RefusedError(f"its scheme is {url.scheme!r}; only http and https are fetched")
    if not url.host:
        raise RefusedError("it has no host")
    if url.user is not None or url.password is not None:
        raise RefusedError("it has a user or a password; none is sent")


async def _body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Read the body of a response. Raises UnavailableError: the status is 500 or more or one of PASSING, or the body
    ends too early; RefusedError: the status is neither one of these nor 200, or the body is too large or packed in an
    unknown way."""
    if response.status >= 500 or response.status in PASSING:
        raise UnavailableError(f"status {response.status}")
    if response.status != 200:
        raise RefusedError(f"status {response.status}")
    unpacking = _unpacking(response.headers.get("Content-Encoding", "identity").strip().lower())
    parts, size, packed = [], 0, 0
    async for part in response.content.iter_chunked(PART_BYTES):
        packed += len(part)
        unpacked = unpacking.decompress(part, limit - size + 1) if unpacking else part
        parts.append(unpacked)
        size += len(unpacked)
        if size > limit or packed > limit:
            raise RefusedError(f"it has more than {limit} bytes")
    if unpacking and packed and not unpacking.eof:
        raise UnavailableError("its packed body ends too early")
    if unpacking and unpacking.unused_data.startswith(_GZIP_MAGIC):
        raise RefusedError("its packed body has several parts")
    return b"".join(parts)


def _unpacking(encoding: str) -> zlib._Decompress | None:
    """Return the decompressor of a body, or None if the body is not packed. Raises RefusedError: it is packed in an
    unknown way."""
    if encoding in ("", "identity"):
        return None
    if encoding in ("gzip", "x-gzip"):
        return zlib.decompressobj(_GZIP)
    raise RefusedError(f"its encoding is {encoding!r:.50}; only gzip is unpacked")
