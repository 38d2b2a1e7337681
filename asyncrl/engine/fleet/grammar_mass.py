"""Measures the share of the policy's probability that a grammar allows at each token of a turn.

Let pi be the policy's distribution, A the set of tokens that the grammar allows, and Z the probability of A under pi.
Then a token is sampled from mu(a) = pi(a) / Z, and the server reports log mu. Once the turn is complete, the server
computes log pi without the grammar, which gives log Z = log pi - log mu.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.base import PlacedImage
from asyncrl.engine.fleet.endpoint import Endpoint
from asyncrl.engine.fleet.partial_turn import PartialTurn
from asyncrl.errors import EngineError

logger = logging.getLogger(__name__)


async def measure_grammar(
    turn: PartialTurn, endpoint: Endpoint, images: Sequence[PlacedImage] = ()
) -> NDArray[np.float32]:
    """Measure Z float32[G] for the sampled tokens of a whole turn, on the server that has just sampled it.

    The prompt has `images`. Z is 0 where it is unknown: at a temperature other than 1, for tokens from older weights,
    and if the server fails.
    """
    sampled = turn.generation()
    mass = np.zeros(len(sampled.tokens), np.float32)
    if turn.temperature != 1:
        return mass
    try:
        policy, version = await endpoint.logprobs(turn.tokens, len(turn.tokens) - len(mass), images)
    except EngineError as error:
        logger.info("a turn under a grammar will not be trained: %s", error)
        return mass
    known = (sampled.versions == version) & np.isfinite(policy)
    # Rounding may give more than 1.
    mass[known] = np.exp(np.minimum(policy - sampled.logprobs, 0.0))[known]
    return mass
