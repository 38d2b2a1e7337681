"""Simulates a fleet of engines, and the requests that share their speed.

A request goes to the engine with the fewest requests, so all engines have about equally many. The fleet is therefore
simulated as a whole: with r requests on E engines, each request gets tokens as fast as on one engine with r / E
requests.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Generator
from itertools import pairwise
from operator import itemgetter
from typing import Any, TypeAlias

import simpy

from asyncrl.capacity.description import Rates

Process: TypeAlias = Generator[simpy.Event, Any, None]
"""The body of a process of the simulation: it yields the events that it waits for."""


class SimulatedEngines:
    """The engines that generate the simulated shard of a batch. `count` is their number. It may be a fraction, since a
    shard gets its share of all engines.

    - `version` is the policy version that the engines serve.
    - `idle_s` are the seconds without a request, as a mean over the engines.
    - `request_s` are the summed seconds of all requests, divided by the number of engines.
    """

    def __init__(self, environment: simpy.Environment, count: float, rates: Rates) -> None:
        self.version = 0
        self.idle_s = self.request_s = 0.0
        self.switched = environment.event()
        self._environment = environment
        self._count = count
        self._rates = rates
        # The tokens that a request would have by now if it had run since the simulation began. They grow more slowly
        # while there are many requests.
        self._progress = 0.0
        self._switches = [(0.0, 0)]
        self._updated = environment.now
        self._is_paused = False
        self._requests: list[tuple[float, int, simpy.Event]] = []
        self._numbered = 0
        self._alarm = 0

    def generate(self, tokens: float) -> simpy.Event:
        """Start a request. Returns an event that occurs when the request has received `tokens` tokens."""
        self.update()
        self._numbered += 1
        done = self._environment.event()
        heapq.heappush(self._requests, (self._progress + tokens, self._numbered, done))
        self._set_alarm()
        return done

    @property
    def progress(self) -> float:
        """The number of tokens that a request would have by now if it had run since the simulation began."""
        self.update()
        return self._progress

    def versions_between(self, start: float, end: float) -> list[tuple[int, float]]:
        """The versions that sampled the tokens of a request from `progress` `start` to `end`, oldest first, each with
        its number of tokens."""
        first = max(0, bisect_right(self._switches, start, key=itemgetter(0)) - 1)
        marks = [*self._switches[first:], (math.inf, -1)]
        spans = ((version, min(end, after) - max(start, begin)) for (begin, version), (after, _) in pairwise(marks))
        return [(version, tokens) for version, tokens in spans if tokens > 0]

    def switch(self, version: int) -> Process:
        """Wait for the transfer of a new version, and pause the engines while they switch to it, as a process of the
        simulation."""
        yield self._environment.timeout(self._rates.transfer_s)
        if self._rates.switch_s:
            self.update()
            self._is_paused = True
            self._set_alarm()
            yield self._environment.timeout(self._rates.switch_s)
            self.update()
            self._is_paused = False
            self._set_alarm()
        self.update()
        if version > self.version:
            self.version = version
            self._switches.append((self._progress, version))
        switched, self.switched = self.switched, self._environment.event()
        switched.succeed()

    def update(self) -> None:
        """Add the times and tokens since the last update to the sums."""
        now = self._environment.now
        seconds, self._updated = now - self._updated, now
        requests = len(self._requests) / self._count
        self.idle_s += seconds * max(0.0, 1 - requests)
        self.request_s += seconds * requests
        if not self._is_paused:
            self._progress += seconds / self._seconds_per_token()

    def _seconds_per_token(self) -> float:
        return self._rates.pass_s + self._rates.request_s * max(1.0, len(self._requests) / self._count)

    def _set_alarm(self) -> None:
        """Set an alarm for the end of the request that ends first. It replaces an earlier alarm."""
        self._alarm += 1
        if self._requests and not self._is_paused:
            left = max(0.0, self._requests[0][0] - self._progress)
            wait = self._environment.timeout(left * self._seconds_per_token(), self._alarm)
            wait.callbacks.append(self._end_requests)

    def _end_requests(self, alarm: simpy.Event) -> None:
        if alarm.value != self._alarm:
            return
        # A request that is due now counts as done, even if rounding gives slightly fewer tokens.
        due = self._requests[0][0]
        self.update()
        self._progress = max(self._progress, due)
        while self._requests and self._requests[0][0] <= self._progress:
            heapq.heappop(self._requests)[2].succeed()
        self._set_alarm()
