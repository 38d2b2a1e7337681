"""Turns under a grammar on a real vLLM server: what its log-probs are, and what updates do to such turns."""

from __future__ import annotations

import pytest

from asyncrl.engine.base import Generation
from asyncrl.engine.vllm.server import VllmServer
from asyncrl.errors import EngineError
from asyncrl.types import Grammar, Sampling
from tests.engine.grammars import Taken, assert_long, assert_words, push_under_long_turns, sample_under_grammars
from tests.engine.real import STOP_ID, prompts, run
from tests.engine.support import parameters
from tests.episode.fakes import make_tokenizer
from tests.vllm.test_real_server import (
    DEFAULTS,
    KINDS,
    RealServer,
    fleet_of,
    needs,
    policy,
    server,  # noqa: F401 - a fixture
)

pytestmark = needs("vLLM", "ASYNCRL_VLLM_PYTHON")

ENDS = [*DEFAULTS["eos_token_id"], make_tokenizer().eos_token_id]
"""The end tokens that vLLM allows after a grammar: all of the model's files, and that of the tokenizer."""


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_the_policy_masked_by_the_grammar_and_renormalised(
    server: RealServer,  # noqa: F811
    kind: type[VllmServer],
) -> None:
    async def scenario() -> list[Taken]:
        await server.ready()
        async with fleet_of(server.url, kind=kind) as fleet:
            await fleet.update_weights(7, parameters(policy(7)))
            return await sample_under_grammars(fleet)

    assert_words(policy(7), run(scenario), ENDS)


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_turns_under_a_grammar_obey_it_through_pushes(server: RealServer, mode: str) -> None:  # noqa: F811
    async def scenario() -> tuple[list[Taken], dict[str, float]]:
        await server.ready()
        async with fleet_of(server.url, mode) as fleet:
            taken = await push_under_long_turns(fleet, range(4), policy)
            return taken, dict(fleet.stats().counters)

    taken, counters = run(scenario)
    assert_long(taken, ENDS, policy)
    assert bool(counters["grammar_restarts"]) == (mode == "abort")
    assert any(len(set(got.versions)) > 1 for _, _, got in taken) == (mode == "retract")


@pytest.mark.parametrize("grammar", [Grammar("regex", "[a-z{4"), Grammar("ebnf", "root ::= ::=")])
def test_a_grammar_that_is_none_fails_the_turn_with_the_servers_reason(
    server: RealServer,  # noqa: F811
    grammar: Grammar,
) -> None:
    async def scenario() -> Generation:
        await server.ready()
        async with fleet_of(server.url) as fleet:
            await fleet.update_weights(7, parameters(policy(7)))
            with pytest.raises(EngineError, match=r"[Gg]rammar"):
                await fleet.generate(prompts(1)[0], Sampling(1.0, 20, grammar), (STOP_ID,), "bad")
            return await fleet.generate(prompts(1)[0], Sampling(1.0, 20), (STOP_ID,), "good")

    assert len(run(scenario).tokens)
