"""The settings of a fleet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """The limits and intervals of a fleet.

    - A turn fails after `attempts` server faults in a row without a new token, or if no server is ready for `wait_s`.
    - Every `check_s` the fleet looks for servers and checks each of them. It rejoins a lost server after `retry_s`.
      This pause doubles with every failed update, up to a bound.
    - `mode` is the way in which servers are updated (see `weights.mode`). A drain (the wait for running requests before
      an update) lasts at most `drain_s`.
    - If a server has not answered a canary after `canary_s`, its requests are aborted, since the canary may be waiting
      in the queue of a full server.
    - A request samples at most `segment_tokens`; 0: its whole turn.
    - `Fleet.close` takes `close_s` at most.
    - `seed` is the run's seed, from which each session gets its own (see `Sampling.seed`).
    """

    attempts: int = 4
    wait_s: float = 600.0
    check_s: float = 5.0
    mode: str = "abort"
    drain_s: float = 60.0
    canary_s: float = 150.0
    segment_tokens: int = 0
    retry_s: float = 1.0
    close_s: float = 8.0
    seed: int = 0

    @property
    def salted(self) -> bool:
        """True if sessions keep their prefixes through updates. Then each session uses the prefix cache of the version
        under which it began. False if every update flushes the cache.
        """
        return self.mode == "in_place"
