"""The settings of a fleet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """The limits and the pace of a fleet.

    - `attempts` server faults in a row without a new token fail a turn, and so does a wait of `wait_s` for a server.
    - The fleet looks for servers, and checks each, every `check_s`. A lost one is joined again after `retry_s`; the
      pause doubles with every update that fails.
    - Updates are of `mode` (see `weights.mode`); a drain lasts `drain_s` at most.
    - A request samples at most `segment_tokens`, or its whole turn if that is 0.
    - `Fleet.close` takes `close_s` at most.
    """

    attempts: int = 4
    wait_s: float = 600.0
    check_s: float = 5.0
    mode: str = "abort"
    drain_s: float = 60.0
    segment_tokens: int = 0
    retry_s: float = 1.0
    close_s: float = 8.0

    @property
    def salted(self) -> bool:
        """True if sessions keep their prefixes through updates, in a cache of the version under which they began.

        Otherwise every update flushes the cache.
        """
        return self.mode == "in_place"
