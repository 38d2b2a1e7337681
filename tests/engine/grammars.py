"""Turns under a grammar for tests over real servers: the masked policy, computed with transformers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.base import Generation
from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.types import Grammar, Sampling
from tests.engine import real
from tests.engine.real import STOP_ID, prompts
from tests.engine.support import parameters
from tests.episode.fakes import make_tokenizer
from tests.helpers import async_until

WORDS = tuple("".join(letters) + end for letters in product("ab", repeat=3) for end in ("yes", "no"))
"""All texts of each of the `GRAMMARS`."""
GRAMMARS = {
    "regex": Grammar("regex", "[ab]{3}(yes|no)"),
    "ebnf": Grammar("ebnf", 'root ::= letter letter letter ("yes" | "no")\nletter ::= "a" | "b"'),
}
LETTERS = 120
LONG = Grammar("regex", f"[ab]{{{LETTERS}}}")
PIECES = [make_tokenizer().decode([token]) for token in range(len(make_tokenizer()))]
Taken = tuple[NDArray[np.int32], float, Generation]


async def sample_under_grammars(fleet: Fleet) -> list[Taken]:
    """Turns of 4 prompts under each of `GRAMMARS`, at three temperatures."""
    cases = [
        (start, temperature, f"{name}{index}{temperature}", grammar)
        for index, start in enumerate(prompts(4))
        for name, grammar in GRAMMARS.items()
        for temperature in (0.0, 0.5, 1.0)
    ]
    found = await asyncio.gather(
        *(
            fleet.generate(start, Sampling(temperature, 40, grammar), (STOP_ID,), session)
            for start, temperature, session, grammar in cases
        )
    )
    return [(start, temperature, got) for (start, temperature, *_), got in zip(cases, found, strict=True)]


def assert_words(model: Any, taken: list[Taken], ends: Collection[int]) -> None:
    """Each turn is one of `WORDS` and an end, of the masked policy of `model`, and its masses are right."""
    for start, temperature, got in taken:
        text = "".join(PIECES[token] for token in got.tokens[:-1])
        assert text in WORDS
        assert got.tokens[-1] in ends
        assert got.finish_reason == "stop"
        allowed = [
            _next_of_words("".join(PIECES[each] for each in got.tokens[:k]), ends) for k in range(len(got.tokens))
        ]
        mass = assert_masked({int(got.versions[0]): model}, start, got, temperature, allowed)
        assert got.grammar_mass is not None
        measured = mass if temperature == 1 else np.zeros_like(mass)
        np.testing.assert_allclose(got.grammar_mass, measured, rtol=1e-3)


def _next_of_words(text: str, ends: Collection[int]) -> list[int]:
    """The tokens that may follow the beginning `text` of a word."""
    if text in WORDS:
        return list(ends)
    return [
        token for token, piece in enumerate(PIECES) if piece and any(word.startswith(text + piece) for word in WORDS)
    ]


async def push_under_long_turns(
    fleet: Fleet, versions: range, policy: Callable[[int], Any] = real.policy
) -> list[Taken]:
    """Push `versions` while turns of `LETTERS` letters go on, one after another in 4 sessions; those turns. Between two
    pushes each session ends a turn: one that is cut again and again would fail, on a slow machine."""
    first, *later = versions
    await fleet.update_weights(first, parameters(policy(first)))
    taken: list[Taken] = []
    ended: Counter[int] = Counter()
    stop = asyncio.Event()

    async def work(index: int, start: NDArray[np.int32]) -> None:
        while not stop.is_set():
            got = await fleet.generate(start, Sampling(1.0, LETTERS + 1, LONG), (STOP_ID,), f"s{index}")
            taken.append((start, 1.0, got))
            ended[index] += 1

    async def all_end_one() -> None:
        before = ended.copy()
        await async_until(lambda: all(worker.done() or ended[i] > before[i] for i, worker in enumerate(workers)), 120)

    workers = [asyncio.create_task(work(index, start)) for index, start in enumerate(prompts(4))]
    for version in later:
        await all_end_one()
        await fleet.update_weights(version, parameters(policy(version)))
    await all_end_one()
    stop.set()
    await asyncio.gather(*workers)
    return taken


def assert_long(taken: list[Taken], ends: Collection[int], policy: Callable[[int], Any] = real.policy) -> None:
    """Check that each turn has `LETTERS` letters, with the log-probs of the masked policy.

    The version of the policy is the recorded one of each token. Only tokens of the last version may have a mass.
    """
    models = {int(version): policy(int(version)) for _, _, got in taken for version in got.versions}
    for start, temperature, got in taken:
        text = "".join(PIECES[token] for token in got.tokens[:-1])
        assert len(text) == LETTERS
        assert set(text) <= {"a", "b"}
        lengths = np.cumsum([0, *(len(PIECES[token]) for token in got.tokens[:-1])])
        allowed = [_next_letters(LETTERS - int(done), ends) for done in lengths]
        mass = assert_masked(models, start, got, temperature, allowed)
        assert got.grammar_mass is not None
        measured = got.grammar_mass > 0
        np.testing.assert_allclose(got.grammar_mass[measured], mass[measured], rtol=1e-3)
        assert not measured[got.versions != got.versions[-1]].any()


def _next_letters(left: int, ends: Collection[int]) -> list[int]:
    if not left:
        return list(ends)
    return [token for token, piece in enumerate(PIECES) if piece and set(piece) <= {"a", "b"} and len(piece) <= left]


def assert_masked(
    models: Mapping[int, Any], start: NDArray[np.int32], got: Generation, temperature: float, allowed: list[list[int]]
) -> NDArray[np.float64]:
    """The log-probs are those of the policies of `models` by version, masked to the `allowed` tokens at each place and
    renormalised. Returns what of each policy's probability that was, float64[G]."""
    whole = torch.tensor(np.concatenate([start, got.tokens]), dtype=torch.int64)[None]
    mass, masked = np.zeros(len(got.tokens)), np.zeros(len(got.tokens))
    for version in set(got.versions.tolist()):
        with torch.no_grad():
            logits = models[version].eval()(whole).logits[0, len(start) - 1 : -1].double()
        policy = (logits / (temperature or 1.0)).log_softmax(-1)
        for place in np.flatnonzero(got.versions == version).tolist():
            left = policy[place, allowed[place]].logsumexp(0)
            mass[place] = float(left.exp())
            masked[place] = float(policy[place, got.tokens[place]] - left)
    np.testing.assert_allclose(got.logprobs, masked, atol=1e-4)
    return mass
