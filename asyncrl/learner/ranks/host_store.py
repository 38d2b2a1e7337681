"""The store by which torch connects the ranks of several hosts, kept by the first host's launcher.

torch's own store for several hosts accepts every connection to its port. This store needs the run's keys.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from asyncrl.learner.ranks.rendezvous import Caller, StoreCall, Stored

ANSWER_S = 30.0
"""Seconds that a rank waits for the first host's answer."""
RETRY_S = 0.02


class HostStore(dist.Store):
    """The store of one round (start of all ranks). Keep a reference for as long as torch uses it.

    A wait raises DistStoreError after `timeout_s`. A call raises UnavailableError if the first host does not answer.
    """

    def __init__(self, caller: Caller, round_name: str, timeout_s: float) -> None:
        super().__init__()
        self._caller = caller
        self._round = round_name
        self._timeout_s = timeout_s

    def _call(self, method: Any, key: str, **values: Any) -> bytes | None:
        stored: Stored = self._caller.call(StoreCall(self._round, method, key, **values), Stored, ANSWER_S)
        return stored.value

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", key, value=value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._call("get", key) or b""

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount=amount) or b"0")

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        given = [each.encode() if isinstance(each, str) else bytes(each) for each in (expected, value)]
        return self._call("compare_set", key, expected=given[0], value=given[1]) or b""

    def delete_key(self, key: str) -> bool:
        return self._call("delete_key", key) is not None

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._call("get", key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"no rank has set {', '.join(keys)} within {seconds:g} s")
            time.sleep(RETRY_S)
