"""Verifiers that several starts of a test file share, so that their processes start once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from asyncrl.config.schema import ModelConfig, ScoringConfig
from asyncrl.scoring import verifier as verifier_module
from asyncrl.scoring.rules.base import RuleInput, RuleScores
from asyncrl.scoring.rules.registry import BUILT_IN
from asyncrl.scoring.verifier import Verifier


class _Shared:
    """A verifier that the block of `shared_verifiers` closes."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def submit(self, given: RuleInput) -> Future[RuleScores]:
        return self._verifier.submit(given)

    def score(self, given: RuleInput) -> RuleScores:
        return self._verifier.score(given)

    def close(self) -> None:
        pass


@contextmanager
def shared_verifiers() -> Iterator[None]:
    """Give each caller that opens a verifier with the settings of an earlier one this earlier one."""
    opened: dict[str, Verifier] = {}

    def shared(config: ScoringConfig, policy: ModelConfig | None, *settings: Any) -> _Shared:
        # No built-in rule reads the policy's tokenizer.
        is_built_in = config.rule in BUILT_IN and not config.rules
        key = repr((config, None if is_built_in else policy, settings))
        if key not in opened:
            opened[key] = Verifier(config, policy, *settings)
        return _Shared(opened[key])

    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(verifier_module, "Verifier", shared)
            yield
    finally:
        for each in opened.values():
            each.close()
