"""Counts recomputed tokens: those whose keys and values a server of the fleet has computed before.

The turns of a session, and the requests of a turn, continue the same tokens. A server has the tokens' keys and values
cached until an update flushes them or the server is lost. After that, the server computes them again. A different
server always has to compute them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncrl.engine.fleet.server import Segment


@dataclass(frozen=True, slots=True)
class _Computed:
    """The server at `url` has computed the first `tokens` tokens of a session, with the weights that have this
    `label`."""

    url: str
    label: str
    tokens: int


class ComputedPrefixes:
    """The computed prefix of each session, and the server that computed it."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Computed] = {}

    def again(self, session: str, url: str, prompt: int, segment: Segment, retracts: bool, flushes: bool) -> int:
        """Count the tokens that the server at `url` computed again for a request of `prompt` tokens, whose answer is
        `segment`. `retracts`: after an update during a request, the server computes the sampled tokens again.
        `flushes`: it also computes the prompt again, after an update during a request or between two requests.
        """
        spans, last = segment.spans, self._sessions.get(session)
        if not spans:
            return 0
        again = prompt if flushes else 0
        recomputed = sum(again + span.start for span in spans[1:]) if retracts else 0
        if last is not None and (last.url != url or (flushes and last.label != spans[0].label)):
            recomputed += min(last.tokens, prompt)
        self._sessions[session] = _Computed(url, spans[-1].label, prompt + len(segment.tokens))
        return recomputed

    def lose(self, url: str) -> None:
        """Forget the prefixes of the server at `url`: it is lost, and flushes its cache before it rejoins."""
        for session, last in self._sessions.items():
            if last.url == url:
                self._sessions[session] = replace(last, url="")

    def forget(self, session: str) -> None:
        """Forget a session that has ended."""
        self._sessions.pop(session, None)
