"""Divides the GPUs of one node among the learner, the actors and the scorers that are placed there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from asyncrl.errors import ConfigError

USED_MEMORY = 0.82
"""The share of a GPU's memory that is divided among the processes which share it. The rest is for new weights on their
way into a server. It is also for memory that no process counts as its own, such as that of CUDA itself and the graphs
of servers."""
# If there is no room on the GPU for new weights, they come from the host's memory, which takes five times as long.
LEAST_SHARE = 0.1
MOST_MEMORY = 0.95
"""The largest sum of shares on a GPU if at least one of them is not configured. CUDA needs the rest."""
SHARES_IN_TURNS = {"learner": 0.85, "actor": 0.8}
"""The shares of a GPU's memory if learner and servers take turns on the GPU. The rest is for memory that a waiting role
cannot free, such as kernels and buffers of NCCL, and for the memory of SGLang that is neither weights nor cache."""
MEMORY_WEIGHTS = {"learner": 5, "actor": 5, "scoring": 3}
MEMORY_KEYS = {"learner": "learner.memory", "actor": "engine.server.memory"}


@dataclass(frozen=True, slots=True)
class Wish:
    """The GPUs that a role needs on a node.

    - `key`: the option to change if the wish cannot be met;
    - `unit`: the role gets a multiple of this number of GPUs;
    - `count`: the number of units that it wants. `None`: as many as there is room for;
    - `shares`: several of the role's processes may share GPUs.
    """

    key: str
    unit: int = 1
    count: int | None = None
    shares: bool = False

    @property
    def least(self) -> int:
        return self.unit if self.shares else self.unit * (self.count or 1)

    def fitting(self, gpus: int) -> int:
        """Return the number of GPUs that the role takes if the node has `gpus` of them."""
        wanted = gpus if self.count is None else self.unit * self.count
        return min(gpus, wanted) // self.unit * self.unit


def deal(gpus: Sequence[int], wishes: Mapping[str, Wish], in_turns: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the GPUs of each role that has a wish: the first ones for the learner, then those for actors, then for
    scorers.

    If there is room, each role has GPUs of its own. If neither the learner nor the actors have a `count`, the learner
    gets at most half of the GPUs, but at least its `unit`. If there is too little room, the scorers share the last GPUs
    with other roles, and the actors may share GPUs with the learner. With `in_turns`, learner and actors have the same
    GPUs, and scorers have others.

    Raises ConfigError if a role wants more GPUs than there are, or if `in_turns` leaves no GPU for the scorers.
    """
    if not gpus:
        return dict.fromkeys(wishes, ())
    total = len(gpus)
    if large := [wish for wish in wishes.values() if wish.least > total]:
        lines = (f"{each.key}: it takes {each.least} GPUs of a node that has {total}; lower it" for each in large)
        raise ConfigError("\n".join(lines))
    if in_turns:
        return _deal_in_turns(gpus, wishes)
    learner, actor, scoring = (wishes.get(role) for role in ("learner", "actor", "scoring"))
    least = {role: wish.least for role, wish in wishes.items()}
    apart = sum(least.values()) <= total
    scorers = 0
    if scoring is not None and apart:
        room = total - sum(least.values()) + scoring.least
        scorers = scoring.fitting(room if scoring.count or len(wishes) == 1 else scoring.unit)
    ranks = 0
    if learner is not None:
        room = total - scorers - (actor.fitting(total) if actor and actor.count else least.get("actor", 0))
        half = total // 2 if actor is not None and actor.count is None else room
        ranks = learner.fitting(max(learner.unit, min(half, room)) if learner.count is None else total)
    actors = 0
    if actor is not None:
        left = total - scorers - ranks
        actors = actor.fitting(left) if left >= actor.least else actor.least
    dealt = {}
    if learner is not None:
        dealt["learner"] = tuple(gpus[:ranks])
    end = min(total, ranks + actors)
    if actor is not None:
        dealt["actor"] = tuple(gpus[end - actors : end])
    if scoring is not None:
        dealt["scoring"] = tuple(gpus[end : end + scorers]) if apart else tuple(gpus[total - scoring.least :])
    return dealt


def _deal_in_turns(gpus: Sequence[int], wishes: Mapping[str, Wish]) -> dict[str, tuple[int, ...]]:
    scoring, scorers = wishes.get("scoring"), 0
    if scoring is not None:
        alone = len(wishes) == 1
        scorers = scoring.fitting(len(gpus) if scoring.count or alone else scoring.unit)
    others = {role: wish for role, wish in wishes.items() if role != "scoring"}
    left = gpus[: len(gpus) - scorers]
    if any(wish.least > len(left) for wish in others.values()):
        raise ConfigError(
            "cluster.colocated: learner and servers take turns with all memory of their GPUs, which leaves no GPU for "
            "the scorers; set scoring.prm.device=cpu and scoring.outcome_model.device=cpu, or add a GPU"
        )
    dealt = {role: tuple(left[: wish.fitting(len(left))]) for role, wish in others.items()}
    return dealt | ({"scoring": tuple(gpus[len(left) :])} if scoring is not None else {})


def memory_shares(
    dealt: Mapping[str, Sequence[int]], given: Mapping[str, float], in_turns: bool = False
) -> dict[str, float]:
    """Return the share of a GPU's memory for each role that shares a GPU with another role. `given` are configured
    shares.

    Raises ConfigError if the `given` shares leave too little for another role.
    """
    pairs = ((one, other) for one, other in combinations(dealt, 2) if set(dealt[one]) & set(dealt[other]))
    together = dict.fromkeys(role for pair in pairs for role in pair)
    if in_turns:
        return {role: given.get(role, SHARES_IN_TURNS[role]) for role in together}
    weights = {role: MEMORY_WEIGHTS[role] for role in together if role not in given}
    left = USED_MEMORY - sum(given[role] for role in together if role in given)
    part = left / max(1, sum(weights.values()))
    shares = {
        role: given[role] if role in given else max(LEAST_SHARE, round(part * weights[role], 2)) for role in together
    }
    for gpu in dict.fromkeys(gpu for gpus in dealt.values() for gpu in gpus):
        _check_shares({role: share for role, share in shares.items() if gpu in dealt[role]}, given)
    return shares


def _check_shares(shares: Mapping[str, float], given: Mapping[str, float]) -> None:
    """Raises ConfigError if the sum of the `shares` of the roles on one GPU is too large."""
    named = {role: share for role, share in shares.items() if role in given}
    made = sum(share for role, share in shares.items() if role not in given)
    most = MOST_MEMORY if made else 1.0
    total = sum(shares.values())
    if len(shares) < 2 or not named or round(total, 6) <= most:
        return
    keys = " ".join(f"{MEMORY_KEYS[role]}={share:g}" for role, share in named.items())
    *parts, last = [f"{share:g} {'' if role in given else 'at least '}for {role}" for role, share in shares.items()]
    lower = f"them to {most - made:.3g} in all" if len(named) > 1 else f"it to {most - made:.3g}"
    raise ConfigError(
        f"{keys}: a GPU is shared, and {', '.join(parts)} and {last} make {total:.4g} of its memory, of which {most:g} "
        f"may be given; lower {lower}"
    )


def shared_servers(
    dealt: Mapping[str, Sequence[int]], gpus: Sequence[int], first: Callable[[int], int], size: int, count: int
) -> list[int]:
    """Return the indices of an actor's servers that share a GPU with the learner or a scorer. The actor has `count`
    servers, each on `size` of its `gpus`. `first` maps the index of a server to the position of its first GPU.
    """
    others = {gpu for role, each in dealt.items() if role != "actor" for gpu in each}
    return [index for index in range(count) if not others.isdisjoint(gpus[first(index) :][:size])]
