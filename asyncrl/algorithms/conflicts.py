"""Finds parts of an algorithm (loss, advantage, corrections and so on) that cannot be used together, or cannot be used
in this run. Each message names the configuration key and its value, and says how to mend the conflict."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.algorithms.advantages.base import Advantage, SequenceAdvantage
from asyncrl.algorithms.composition import Composition
from asyncrl.algorithms.loss_streams import LossStream
from asyncrl.algorithms.losses.base import Loss
from asyncrl.algorithms.proximal import INTERPOLATED, names_before_updates


def conflicts(parts: Composition, *, greedy_sibling: bool) -> Iterator[str]:
    """A message for each conflict between the parts. greedy_sibling: True if every group has a greedily sampled
    member."""
    yield from _weight_conflicts(parts)
    yield from _normalise_conflicts(parts)
    yield from _proximal_conflicts(parts)
    yield from _other_conflicts(parts, greedy_sibling)
    yield from _stream_conflicts(parts)


def missing_data(advantage: Advantage, *, step_scores: bool, group_size: int, demonstrations: bool) -> Iterator[str]:
    """A message for each reason why the data of the run do not fit the advantage.

    step_scores: True if a model or a simulated user scores steps. demonstrations: True if demonstrations are members of
    groups.
    """
    setting = f"algorithm.advantage={advantage.name}"
    of_policy = advantage.needs_critic or advantage.uses_ratio or advantage.needs_collisions
    if demonstrations and of_policy:
        yield (
            f"{setting} needs values of the policy at each sampled token, and a demonstration is not sampled: set "
            "data.demonstration=null, or algorithm.advantage to one that compares whole episodes, such as grpo"
        )
    if advantage.needs_steps and not step_scores:
        implicit = ", or implicit.train=true" if advantage.name == "prime" else ""
        yield (
            f"{setting} needs step scores: set scoring.prm.path to a process reward model, scoring.prm.family to a "
            "class of yours (my_module.MyScorer), scoring.steps to a function of yours (my_module.my_function)"
            f"{implicit}, or use simulated users, an environment or an agent that reward turns (docs/scoring.md)"
        )
    if group_size == 1 and advantage.needs_group:
        yield f"{setting} compares the members of a group: set learner.group_size above 1"


def sampler_conflicts(loss: Loss) -> Iterator[str]:
    """A message if a sampler's importance weights cannot multiply the advantages of this loss."""
    if not loss.is_proportional:
        yield (
            "replay.sampler.kind=prioritised multiplies advantages by importance weights, but algorithm.loss="
            f"{loss.name} trains log-ratios to be the advantages: set replay.sampler.kind=oldest, or "
            "replay.sampler.beta=0"
        )


def _weight_conflicts(parts: Composition) -> Iterator[str]:
    weighing = [rule.name for rule in parts.corrections if rule.weighs]
    weigh = "weighs" if len(weighing) == 1 else "weigh"
    setting = f"algorithm.correction has {', '.join(weighing)}, which {weigh} tokens by pi_prox / mu"
    if len(weighing) > 1:
        yield f"{setting}: only one of them is allowed; use reject or veto for further bounds"
    for part, corrects in ((parts.loss, parts.loss.corrects), (parts.advantage, parts.advantage.uses_ratio)):
        if weighing and corrects:
            named = f"algorithm.{part.kind}={part.name}"
            yield f"{setting}, and {named} accounts for mu itself: set algorithm.correction=[]"
    if parts.advantage.uses_ratio and parts.loss.corrects:
        yield (
            f"algorithm.advantage={parts.advantage.name} and algorithm.loss={parts.loss.name} both account for mu, so "
            "its ratio would count twice: set algorithm.loss=gpg"
        )


def _normalise_conflicts(parts: Composition) -> Iterator[str]:
    names = [rule.name for rule in parts.corrections]
    if "normalise" not in names:
        return
    before = parts.corrections[: names.index("normalise")]
    if not any(rule.weighs for rule in before):
        yield "algorithm.correction normalise has no weights to normalise: put truncate or mask before it"
    for late in (rule.name for rule in before if rule.follows_policy):
        yield (
            f"algorithm.correction normalise runs once before the updates, and {late} in every update, so normalise "
            f"does not know which tokens {late} drops: put {late} after it"
        )


def _proximal_conflicts(parts: Composition) -> Iterator[str]:
    setting, advantage = f"algorithm.proximal={parts.proximal}", parts.advantage
    by_ratio = [rule.name for rule in parts.corrections if rule.uses_ratio]
    by_ratio += [advantage.name] if advantage.uses_ratio else []
    by_ratio += [parts.loss.name] if parts.loss.uses_ratio else []
    if parts.proximal == "behaviour" and by_ratio:
        yield (
            f"{setting}: pi_prox / mu is 1 everywhere, so {', '.join(by_ratio)} would do nothing: set "
            "algorithm.proximal=recompute, or algorithm.correction=[]"
        )
    if parts.proximal == "behaviour" and advantage.needs_collisions:
        yield (
            f"{setting}: algorithm.advantage={advantage.name} needs the whole distributions of the proximal policy: "
            "set algorithm.proximal=recompute"
        )
    if parts.proximal == "behaviour" and parts.has_kl and parts.kl.target:
        yield (
            f"{setting}: the coefficient of algorithm.kl target={parts.kl.target} would follow the KL of the policies "
            "that sampled, not the KL of the trained policy: set algorithm.proximal=recompute, or target=null"
        )
    if parts.proximal in INTERPOLATED and (early := names_before_updates(parts)):
        yield (
            f"{setting} is known only in the forward pass of an update, and {', '.join(early)} needs it before the "
            "updates: set algorithm.proximal=recompute"
        )


def _other_conflicts(parts: Composition, greedy_sibling: bool) -> Iterator[str]:
    by_token = [rule.name for rule in parts.corrections if rule.by_token]
    if parts.loss.sequence_level and by_token:
        yield (
            f"algorithm.loss={parts.loss.name} has one ratio a sequence, and algorithm.correction "
            f"{', '.join(by_token)} treats its tokens differently: set level=sequence or level=geometric "
            "(reject: over=sequence_mean)"
        )
    advantage = f"algorithm.advantage={parts.advantage.name}"
    by_advantage = [rule.name for rule in parts.corrections if rule.by_advantage]
    if parts.loss.sequence_level and by_advantage and not isinstance(parts.advantage, SequenceAdvantage):
        yield (
            f"algorithm.loss={parts.loss.name} has one ratio a sequence, and algorithm.correction "
            f"{', '.join(by_advantage)} would drop some of its tokens, because {advantage} gives them different "
            "advantages: leave out the correction, or choose an advantage of whole sequences, such as grpo"
        )
    if parts.advantage.needs_greedy and not greedy_sibling:
        yield f"{advantage} needs a greedily sampled member in every group: set algorithm.greedy_sibling=true"
    if greedy_sibling and not parts.advantage.needs_greedy:
        yield (
            "algorithm.greedy_sibling=true: a greedily sampled member is a baseline and is not trained, and "
            f"{advantage} does not read it: set algorithm.greedy_sibling=false, or algorithm.advantage=remax"
        )
    if parts.has_kl and parts.kl.place == "reward" and not parts.advantage.uses_reward:
        yield f"algorithm.kl place=reward: {advantage} does not read the reward; set place=loss"
    if parts.kl.importance_weighted and parts.kl.place == "reward":
        yield "algorithm.kl importance_weighted=true is a form of the loss: set place=loss"


def _stream_conflicts(parts: Composition) -> Iterator[str]:
    names = [stream.name for stream in parts.streams]
    if twice := next((name for name in names if names.count(name) > 1), None):
        yield f"algorithm.stream has {twice} twice: list each stream once"
    for stream in parts.streams:
        if isinstance(stream, LossStream) == (stream.name == "rl") or stream.name in ("policy", "kl", "entropy"):
            yield (
                f"algorithm.stream={stream.name}: derive your stream from LossStream, and do not name it rl, policy, "
                "kl or entropy"
            )
    rl = next((stream for stream in parts.streams if stream.name == "rl"), None)
    others = [stream for stream in parts.streams if isinstance(stream, LossStream) and stream.weight]
    if rl is not None and not rl.weight and not others:
        yield "algorithm.stream rl has weight=0, and no other stream trains: add ce or ref_kl with a weight"
