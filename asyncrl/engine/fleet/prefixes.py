"""Counts tokens of which a server computes keys and values that some server has computed before.

The turns of a session, and the requests of a turn, continue the same tokens. A server has their keys and values cached
until an update flushes them, or it is lost. Then it computes them again, and so does another server at any time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncrl.engine.fleet.server import Segment


@dataclass(frozen=True, slots=True)
class _Computed:
    """The first `tokens` of a session are computed by the server at `url`, with the weights `label`."""

    url: str
    label: str
    tokens: int


class ComputedPrefixes:
    """Which prefix of each session is computed where."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Computed] = {}

    def again(self, session: str, url: str, prompt: int, segment: Segment, retracts: bool, flushes: bool) -> int:
        """How many tokens the server at `url` computed again for a request with `prompt` tokens, which had this answer.
        `retracts`: if the server is updated under a request, it computes again what the request has sampled.
        `flushes`: and the prompt too; and an update between two requests has the same effect."""
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
        """The server at `url` is lost: what it had computed is flushed when it comes back."""
        for session, last in self._sessions.items():
            if last.url == url:
                self._sessions[session] = replace(last, url="")

    def forget(self, session: str) -> None:
        """The session has ended."""
        self._sessions.pop(session, None)
