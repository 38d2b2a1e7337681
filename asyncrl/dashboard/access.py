"""Admits requests to the page only with the page's token, and only if their Host header names this machine.

- The token is in the address that the command prints. The first answer sets it as a cookie. The page then removes it
  from the address, so that neither the history nor a shared link has it.
- A foreign site whose name resolves to 127.0.0.1 (DNS rebinding) is refused, because its requests name that site.
- No request changes anything. So it does no harm if another site has the browser send a request. That site cannot read
  the answer.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Mapping
from hashlib import sha256

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from asyncrl.network.http_server import shows_key

LOCAL = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
READING = ("GET", "HEAD")
COOKIE = "asyncrl-dashboard-"
"""The names of all cookies of dashboards begin with this."""
MOST_OTHERS = 32
"""The maximum number of other dashboards whose cookies a browser keeps. A browser that restores its session never
forgets them itself, and the server refuses requests with 8 KB of cookies, which are about 130."""
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}


class Access:
    """Checks every request. All ports of a host share its cookies, so each token has a cookie of its own."""

    def __init__(self, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(24)
        self.cookie = f"{COOKIE}{sha256(self.token.encode()).hexdigest()[:8]}"

    def admit(self, request: web.BaseRequest) -> bool:
        """True if the request has the token, in its cookie or in its address."""
        return self._is_token(request.cookies.get(self.cookie, "")) or self.names_token(request)

    def names_token(self, request: web.BaseRequest) -> bool:
        """True if the token is in the address."""
        return self._is_token(request.query.get("token", ""))

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self.token.encode())

    def remember(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Make the browser send the token from now on, and forget the oldest cookies of many other dashboards."""
        # Browsers send their oldest cookies first.
        others = [name for name in request.cookies if name.startswith(COOKIE) and name != self.cookie]
        for name in others[:-MOST_OTHERS]:
            response.del_cookie(name)
        response.set_cookie(self.cookie, self.token, httponly=True, samesite="Strict", path="/")


def is_local(host: str) -> bool:
    """True if a Host header names this machine, with any port: an SSH tunnel may have another port."""
    return LOCAL.fullmatch(host) is not None


def guard(access: Access) -> Middleware:
    """Accept only reading requests that name this machine and have the token, and hide answers from other sites."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = _refusal(access, request)
        if refusal is None:
            shows_key(request)
        response = refusal or await handler(request)
        if refusal is None and access.names_token(request):
            access.remember(request, response)
        response.headers.update(HEADERS)
        return response

    return check


def _refusal(access: Access, request: web.Request) -> web.Response | None:
    if request.method not in READING:
        return web.Response(
            status=405, text="this page answers only GET and HEAD requests", headers={hdrs.ALLOW: ", ".join(READING)}
        )
    if not is_local(request.headers.get(hdrs.HOST, "")):
        return web.Response(
            status=421, text="open this page at 127.0.0.1 or localhost, as `asyncrl dashboard` printed it"
        )
    if not access.admit(request):
        return web.Response(status=403, text="open the address that `asyncrl dashboard` printed, with its token")
    return None
