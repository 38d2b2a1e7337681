"""Compares an agent's own account of its episode with the record, and makes the record follow it.

An agent that works with tokens may return its final sequence, and say which of its tokens the policy sampled. The
record knows which tokens were sampled, and after which tokens. So a claim is accepted or refused token by token:

- A token that is claimed as sampled must have been sampled after exactly the tokens before it. Otherwise the claim is
  refused.
- A token that was sampled but is not claimed becomes context, which is not trained.
- If the sequence ends before a recorded branch that it follows, or departs from it, the rest of this branch is cut.
- A completion that is not in the sequence is left out: the agent has thrown it away, for example because another
  candidate was better.
- A token is trained once, even if several completions have it at its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.episode.branches import Prefix
from asyncrl.episode.recorder import Recorder
from asyncrl.errors import RefusedError
from asyncrl.types import common_prefix


@dataclass(frozen=True, eq=False)
class ClaimedSequence:
    """An agent's final sequence: `tokens` int32[T], and `sampled` bool[T], true on tokens that the policy is said to
    have sampled. `logprobs` float32[T] are what the agent takes for the log-probs of these tokens; None: not given."""

    tokens: NDArray[np.int32]
    sampled: NDArray[np.bool_]
    logprobs: NDArray[np.float32] | None = None


def follow(recorder: Recorder, claim: ClaimedSequence) -> int:
    """Change the record of an episode so that it agrees with `claim`. Returns the number of completions that `claim`
    leaves out. If `claim` ends within a completion, the trajectory counts as truncated.

    Raises RefusedError: the claim is false, or claims no token as sampled. Its message has the position of the first
    false token.
    """
    if not claim.sampled.any():
        raise RefusedError("it says that the policy sampled no token, so nothing could be trained")
    known = np.zeros(len(claim.tokens), np.bool_)
    exact, recorded = known.copy(), np.zeros(len(claim.tokens), np.float32)
    reached = 0
    for each in recorder.completions:
        common = common_prefix(claim.tokens, each.tokens)
        reached = max(reached, common)
        span = slice(each.turn.start, max(common, each.turn.start))
        known[span], recorded[span] = True, each.branch.columns(span.stop)[1][span]
        if claim.logprobs is not None:
            # Two branches may have sampled the same tokens, with different log-probs.
            exact[span] |= claim.logprobs[span] == recorded[span]
    if len(false := np.flatnonzero(claim.sampled & ~known)):
        at = false[0]
        where = "it lies in tokens that the policy was given"
        if at >= reached:
            where = f"at position {reached} the sequence departs from all that the policy was given and sampled"
        raise RefusedError(f"token {claim.tokens[at]} at position {at} was not sampled by the policy there: {where}")
    if claim.logprobs is not None and len(differing := np.flatnonzero(claim.sampled & ~exact)):
        at = differing[0]
        raise RefusedError(
            f"the log-prob of the token at position {at} is given as {claim.logprobs[at]:g}, but it was sampled with "
            f"{recorded[at]:g}"
        )
    depth: dict[int, int] = {}
    for each in recorder.completions:
        common = common_prefix(claim.tokens, each.tokens)
        depth[id(each.branch)] = max(common, depth.get(id(each.branch), 0))
    # The branch that follows the claim furthest comes first, because a token is trained only once.
    order = sorted(enumerate(recorder.completions), key=lambda pair: -depth[id(pair[1].branch)])
    taken = np.zeros(len(claim.tokens), np.bool_)
    found = {number: _following(recorder, each, claim, taken) for number, each in order}
    recorder.completions = [part for _, parts in sorted(found.items()) for part in parts or ()]
    return sum(parts is None for parts in found.values())


def _following(
    recorder: Recorder, completion: Prefix, claim: ClaimedSequence, taken: NDArray[np.bool_]
) -> list[Prefix] | None:
    """Return a list with the completion as the claim leaves it, unchanged or shorter. The list is empty if the claim
    says that none of its tokens was sampled. Return None if the claim lacks the completion, or has other completions in
    its place.

    `taken` is true on tokens of the claim that another completion has already. The tokens of this completion are added.
    """
    branch, turn, length = completion.branch, completion.turn, len(claim.tokens)
    common = common_prefix(claim.tokens, completion.tokens)
    if common <= turn.start:
        return None
    if common < turn.end:
        recorder.truncated |= common == length
        branch.cut(common)
        turn = branch.turns[-1]
    span = slice(turn.start, turn.end)
    own = claim.sampled[span] & ~taken[span]
    if claim.logprobs is not None:
        own &= claim.logprobs[span] == branch.columns(turn.end)[1][span]
    taken[span] |= own
    if own.all():
        return [completion._replace(turn=turn)]
    kept = branch.keep(turn, own)
    if kept:
        return [completion._replace(turn=kept[-1])]
    return None if claim.sampled[span].any() else []
