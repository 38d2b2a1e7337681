"""The algorithms that a configuration may compose, and the errors for those that it may not."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.algorithms.from_config import check
from asyncrl.config.files import choices
from asyncrl.errors import ConfigError
from tests.algorithms.my_parts import Squared
from tests.algorithms.support import make_algorithm, make_config, preset


@pytest.mark.slow
@pytest.mark.parametrize("name", choices("algorithm"))
def test_every_preset_is_a_sound_composition(name):
    check(preset(name), step_scores=True, group_size=8)


def test_a_part_of_the_users_own_is_named_by_its_path():
    algorithm = make_algorithm(loss=("tests.algorithms.my_parts.Squared", {"weight": 0.2}), correction=[])
    assert algorithm.parts.loss == Squared(weight=0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "pppo"}, r"algorithm.loss=pppo: did you mean ppo\? use one of .*cispo"),
        ({"loss": "dppo"}, r"algorithm.loss=dppo: did you mean dppo_kl or dppo_tv or the preset algorithm=dppo\? use"),
        (
            {"correction": ["icepop"]},
            r"algorithm.correction=icepop: did you mean the preset algorithm=icepop\? use one",
        ),
        ({"advantage": "xyz"}, r"algorithm.advantage=xyz: use one of .*grpo.*, or the dotted path"),
        ({"loss": "no.such.Loss"}, r"algorithm.loss=no.such.Loss cannot be imported \(ModuleNotFoundError"),
        ({"loss": "tests.algorithms.support.alone"}, r"is not a part of kind loss: see docs/algorithms.md"),
        ({"kl": "tests.algorithms.my_parts.Squared"}, r"is not a part of kind kl: see"),
        (
            {"advantage": "tests.algorithms.bad_parts.Nameless"},
            r"kind advantage: give it a class attribute `name`; see",
        ),
        ({"loss": ("ppo", {"clip": 1})}, r"algorithm.loss ppo has no parameter 'clip'; it takes clip_low, clip_high"),
        ({"loss": ("gpg", {"cap": 1})}, r"gpg has no parameter 'cap'; it takes none"),
        ({"loss": ("ppo", {"clip_low": 1.5})}, r"algorithm.loss ppo: clip_low=1.5: it must be a number in \[0, 1\]"),
        ({"loss": ("ppo", {"clip_low": "a"})}, r"clip_low='a': it must be a number in"),
        ({"loss": ("ppo", {"clip_low": True})}, r"clip_low=True: it must be a number"),
        ({"loss": ("ppo", {"clip_low": None})}, r"clip_low=None: it must be a number"),
        ({"loss": ("ppo", {"clip_low": float("nan")})}, r"clip_low=nan: it must be a number"),
        ({"loss": ("ppo", {"dual_clip": 1.0})}, r"dual_clip=1.0: it must be a number in \(1, inf\] or null"),
        ({"advantage": ("gae", {"whiten": 1})}, r"whiten=1: it must be true or false"),
        ({"advantage": ("gae", {"step_weight": float("inf")})}, r"step_weight=inf: it must be a number"),
        ({"advantage": ("gdpo", {"weights": {"a": "b"}})}, r"it must be a mapping to numbers"),
        ({"advantage": ("gdpo", {"weights": {}})}, r"gdpo: weights={}: name a score"),
        ({"advantage": "gdpo"}, r"algorithm.advantage gdpo needs weights: weight of each score"),
        ({"kl": ("k3", {"horizon": 1.5})}, r"horizon=1.5: it must be a whole number in \[1, inf\)"),
        (
            {"kl": ("none", {"weight": 0.04})},
            r'so that weight would have no effect: write algorithm.kl="{name: k3, params: {weight: 0.04}}", or',
        ),
        ({"correction": [("truncate", {"level": "word"})]}, r"level='word': it must be one of token, turn, turn_"),
        ({"correction": [("mask", {"low": 2.0, "high": 1.0})]}, r"mask: low=2.0: it must be below high=1.0"),
        ({"correction": [("reject", {})]}, r"algorithm.correction reject needs high: largest divergence"),
        ({"correction": ["vaco"]}, r"algorithm.correction vaco needs delta: largest mean of"),
        ({"loss": ("vespo", {"k_neg": 5.0})}, r"vespo: k_neg=5.0: it must be a number in \[0, 4\]"),
        ({"loss": ("topr", {"level": "token"})}, r"level='token': it must be one of sequence, geometric"),
        ({"advantage": ("oapl", {"beta": 0})}, r"algorithm.advantage oapl: beta=0: it must be a number in \(0, inf\)"),
        ({"correction": [("reject", {"high": -0.1})]}, r"reject: high=-0.1: by=k3 is never negative, so everything"),
        (
            {"loss": ("sapo", {"dual_clip": 5.0})},
            r"sapo: dual_clip=5.0: .*never reaches this.*4 / tau_neg = 3.81",
        ),
        ({"correction": [("reject", {"low": 2.0, "high": 1.0})]}, r"reject: low=2.0: it must be below high=1.0"),
        (
            {"correction": [("reject", {"by": "difference", "low": -1.0, "high": 1.0})]},
            r"high=1.0: with low=-1.0 nothing is ever dropped, .* set bounds between -1 and 1",
        ),
        ({"stream": [("rl", {"weight": 0.5})]}, r"rl: weight=0.5: .* has no effect: set score, or weight=0"),
        (
            {"stream": [("ce", {"weight": -1.0})]},
            r"algorithm.stream ce: weight=-1.0: it must be a number in \[0, inf\)",
        ),
        ({"stream": ["sft"]}, r"algorithm.stream=sft: use one of ce, ref_kl, rl"),
        ({"loss": ("ipo", {"delta": 1.0})}, r"ipo: delta=1.0: it must be a number in \(0, 1\)"),
        ({"loss": ("clip_cov", {"cov_low": 9.0})}, r"clip_cov: cov_low=9.0: it must be below cov_high=5.0"),
        ({"aggregation": "seq-mean-token-sum-norm"}, r"algorithm.aggregation \S* needs norm: the constant"),
        ({"value_aggregation": "seq-mean-token-sum-norm"}, r"algorithm.value_aggregation \S* needs norm: the constant"),
        (
            {"value_aggregation": ("seq-mean-token-sum-norm", {"norm": 0})},
            r"algorithm.value_aggregation \S*: norm=0: it must be",
        ),
        ({"value_aggregation": "mean"}, r"algorithm.value_aggregation=mean: .*use one of"),
        ({"value_aggregation": "no.Mean"}, r"algorithm.value_aggregation=no.Mean cannot be imported"),
        ({"reward": [("overlong", {"max_length": 10, "buffer": 20})]}, r"buffer=20: it must be at most max_length=10"),
    ],
)
def test_a_wrong_name_or_parameter_is_refused_with_what_is_allowed(changes, message):
    with pytest.raises(ConfigError, match=message):
        Algorithm.from_config(make_config(**changes))


SEQUENCE = [("truncate", {"level": "sequence"})]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"loss": "gspo"},
            r"loss=gspo has one ratio a sequence, and algorithm.correction truncate .* set level=sequence",
        ),
        ({"loss": "gmpo", "correction": [("mask", {"level": "turn"})]}, r"gmpo has one ratio a sequence.*mask"),
        ({"loss": "gspo", "correction": ["m2po"]}, r"gspo has one ratio a sequence.*m2po"),
        ({"loss": "gspo", "correction": [("reject", {"over": "token", "high": 1.0})]}, r"gspo has one ratio.*reject"),
        ({"advantage": "remax"}, r"remax needs a greedily sampled member .* set algorithm.greedy_sibling=true"),
        ({"greedy_sibling": True}, r"greedy_sibling=true: .*algorithm.advantage=grpo does not read it: set .*remax"),
        (
            {"correction": ["truncate", "mask"]},
            r"truncate, mask, which weigh tokens .*: only one of them is allowed; use reject or veto",
        ),
        ({"loss": "reinforce"}, r"algorithm.loss=reinforce accounts for mu itself: set algorithm.correction=\[\]"),
        (
            {"proximal": "behaviour", "advantage": "optimal_token_baseline", "correction": []},
            r"optimal_token_baseline needs the whole distributions .* set algorithm.proximal=recompute",
        ),
        (
            {"proximal": "interpolate", "advantage": "optimal_token_baseline"},
            r"and optimal_token_baseline needs it before the updates: set algorithm.proximal=recompute",
        ),
        (
            {"stream": ["tests.algorithms.bad_parts.Bare"]},
            r"stream=bare: derive your stream from LossStream, and do not name it rl, policy",
        ),
        ({"stream": ["ce", "ce"]}, r"algorithm.stream has ce twice: list each stream once"),
        (
            {"stream": [("rl", {"weight": 0.0}), ("ce", {"weight": 0.0})]},
            r"rl has weight=0, and no other stream trains: add ce or ref_kl",
        ),
        ({"loss": "vespo"}, r"algorithm.loss=vespo accounts for mu itself: set algorithm.correction=\[\]"),
        ({"loss": "topr", "correction": SEQUENCE}, r"algorithm.loss=topr accounts for mu itself"),
        ({"loss": "oapl", "correction": SEQUENCE}, r"algorithm.loss=oapl accounts for mu itself"),
        ({"loss": "vespo", "correction": ["m2po"]}, r"vespo has one ratio a sequence.*m2po"),
        ({"loss": "gspo", "correction": [("vaco", {"delta": 0.2})]}, r"gspo has one ratio a sequence.*vaco"),
        ({"proximal": "behaviour", "correction": [("vaco", {"delta": 1.0})]}, r"is 1 everywhere, so vaco would do"),
        ({"loss": "ipo"}, r"algorithm.loss=ipo accounts for mu itself: set algorithm.correction=\[\]"),
        (
            {"loss": "gspo", "correction": [("reject", {"over": "turn_mean", "high": 1.0})]},
            r"gspo has one ratio a sequence.*reject",
        ),
        (
            {"loss": "gspo", "advantage": "grpo_turns", "correction": ["opsm"]},
            r"gspo has one ratio a sequence, .* opsm would drop some .* because algorithm.advantage=grpo_turns gives",
        ),
        (
            {"loss": "gmpo", "advantage": "gae", "correction": ["outliers"]},
            r"gmpo has one ratio a sequence, .* outliers would drop some .* because algorithm.advantage=gae gives",
        ),
        ({"advantage": "vtrace"}, r"algorithm.advantage=vtrace accounts for mu itself: set algorithm.correction=\[\]"),
        (
            {"advantage": "vtrace", "loss": "topr", "correction": []},
            r"advantage=vtrace and algorithm.loss=topr both account for mu, .* set algorithm.loss=gpg",
        ),
        ({"correction": ["normalise"]}, r"no weights to normalise: put truncate or mask before it"),
        (
            {"correction": ["truncate", "opsm", "normalise"]},
            r"normalise runs once before the updates, and opsm in every update, .*: put opsm after it",
        ),
        ({"correction": ["normalise", "truncate"]}, r"no weights to normalise"),
        ({"proximal": "behaviour"}, r"pi_prox / mu is 1 everywhere, so truncate would do nothing"),
        ({"proximal": "behaviour", "advantage": "vtrace", "correction": []}, r"so vtrace would do nothing"),
        (
            {"proximal": "behaviour", "correction": [], "kl": ("k1", {"place": "reward", "target": 0.1})},
            r"target=0.1 would follow the KL of the policies that sampled, .* set algorithm.proximal=recompute",
        ),
        (
            {"proximal": "interpolate", "correction": ["m2po"]},
            r"known only in the forward pass of an update, and m2po needs it before",
        ),
        ({"proximal": "interpolate_linear", "correction": ["m2po"]}, r"known only in the forward pass"),
        ({"kl": ("k3", {"place": "reward", "importance_weighted": True})}, r"is a form of the loss: set place=loss"),
        ({"proximal": "interpolate", "loss": "kl_cov"}, r"and kl_cov needs it before the updates: set algorithm"),
        ({"proximal": "interpolate", "kl": ("k1", {"place": "reward"})}, r"and k1 needs it before"),
        ({"proximal": "interpolate", "advantage": "vtrace", "correction": []}, r"and vtrace needs it before"),
        ({"advantage": "pure", "kl": ("k1", {"place": "reward"})}, r"pure does not read the reward; set place=loss"),
    ],
)
def test_parts_that_do_not_go_together_are_refused_with_the_fix(changes, message):
    with pytest.raises(ConfigError, match=message):
        Algorithm.from_config(make_config(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "gspo", "advantage": "grpo", "correction": ["opsm", "outliers"]},
        {"loss": "ppo", "advantage": "grpo_turns", "correction": ["opsm", "outliers"]},
        {"loss": "gpg", "advantage": "vtrace", "correction": []},
        {"correction": ["truncate", "normalise", "opsm"]},
        {"proximal": "behaviour", "correction": [], "kl": ("k1", {"place": "reward"})},
        {"proximal": "behaviour", "correction": [], "kl": ("none", {})},
    ],
)
def test_parts_that_go_together_are_accepted(changes: dict[str, Any]) -> None:
    Algorithm.from_config(make_config(**changes))


@pytest.mark.parametrize(
    ("changes", "updates", "needed"),
    [
        ({}, 1, False),
        ({}, 2, True),
        ({"correction": ["mask", "veto", ("reject", {"high": 1.0}), "opsm"]}, 1, False),
        ({"correction": ["m2po"]}, 1, True),
        ({"correction": ["truncate", "normalise"]}, 1, True),
        ({"advantage": "vtrace", "correction": []}, 1, True),
        ({"loss": "kl_cov"}, 1, True),
        ({"advantage": "optimal_token_baseline"}, 1, True),
        ({"kl": ("k3", {"target": 0.01})}, 1, True),
        ({"kl": "k3"}, 1, False),
        ({"proximal": "recompute"}, 1, True),
        ({"loss": "ipo", "correction": []}, 2, False),
        ({"loss": "vespo", "correction": []}, 2, False),
        ({"loss": "oapl", "correction": []}, 2, False),
        ({"loss": "reinforce", "correction": ["zero_variance"]}, 2, False),
        ({"loss": "gpg", "correction": [], "stream": ["rl", "ce"]}, 2, False),
        ({"loss": "gpg"}, 2, True),
        ({"loss": "gpg", "correction": ["opsm"]}, 2, False),
        ({"loss": "gpg", "correction": [], "advantage": "vtrace"}, 2, True),
        ({"loss": "ipo", "correction": [], "stream": ["tests.algorithms.my_parts.Focal"]}, 2, True),
    ],
)
def test_auto_computes_proximal_log_probs_first_only_where_something_needs_them_before_the_update(
    changes, updates, needed
):
    assert Algorithm.from_config(make_config(**changes), updates).needs_proximal == needed


def test_only_streams_and_a_kl_that_read_the_reference_ask_for_it():
    assert not make_algorithm(stream=["ce"]).needs_reference
    assert make_algorithm(stream=["ref_kl"]).needs_reference
    assert make_algorithm(kl="k3").needs_reference


def test_sequence_level_losses_go_with_sequence_level_corrections():
    for correction in (SEQUENCE, [("truncate", {"level": "geometric"}), "veto", ("reject", {"high": 1.0})], []):
        make_algorithm(loss="gspo", correction=correction)


@pytest.mark.parametrize(
    ("changes", "offers", "message"),
    [
        ({"advantage": "pure"}, {"step_scores": False}, r"pure needs step scores: set scoring.prm.path"),
        ({"advantage": "process_grpo"}, {"step_scores": False}, r"process_grpo needs step scores"),
        ({"advantage": "prime"}, {"step_scores": False}, r"prime needs step scores"),
        (
            {"advantage": "rloo"},
            {"group_size": 1},
            r"rloo compares the members of a group: set learner.group_size above 1",
        ),
        ({"advantage": "optimal_token_baseline"}, {"group_size": 1}, r"optimal_token_baseline compares the members"),
        (
            {"loss": "oapl", "correction": []},
            {"weighted_samples": True},
            r"loss=oapl trains log-ratios to be the advantages: set replay.sampler.kind=oldest, or .*beta=0",
        ),
    ],
)
def test_what_the_run_cannot_offer_is_refused_with_the_fix(changes, offers, message):
    config = make_config(**changes)
    check(config, **{"step_scores": True, "group_size": 8})
    with pytest.raises(ConfigError, match=message):
        check(config, **{"step_scores": True, "group_size": 8, **offers})
