"""A key that another system has is refused with our name for it."""

from __future__ import annotations

import re

import pytest

from asyncrl.config.compose import read
from asyncrl.config.keys import OPTIONS, SECTIONS, option_of
from asyncrl.config.other_words import KEYS, REMARKS, WITHOUT, hint
from asyncrl.errors import ConfigError


def refusal(word: str) -> str:
    with pytest.raises(ConfigError) as refused:
        read([f"{word}=1", "model.path=m", "data.train=t"])
    return str(refused.value).splitlines()[0]


def test_every_word_names_keys_that_exist() -> None:
    assert REMARKS.keys() <= set(KEYS.values())
    for ours in KEYS.values():
        for key in re.split(" or | and ", ours):
            assert key in SECTIONS or option_of(key) or option_of(key.removesuffix(f".{key.rpartition('.')[2]}")), key


def test_no_word_is_a_key_of_ours_with_another_meaning() -> None:
    own = {key.rpartition(".")[2] for key in OPTIONS}
    # TRL's beta weighs the KL; ours belongs to a prioritised sampler, and its full name is no mistake.
    assert own & {*KEYS, *WITHOUT} == {"beta"}


@pytest.mark.parametrize(
    ("word", "end"),
    [
        ("learning_rate", "; did you mean learner.lr?"),
        ("learner.learing_rate", "; did you mean learner.lr?"),
        ("min_lr", "; did you mean learner.lr_floor? It is a share of learner.lr, not a rate"),
        ("num_generations", "; did you mean learner.group_size?"),
        ("beta", '; did you mean algorithm.kl="{name: k3, params: {weight: 1}}"?'),
        ("algorithm.kl.weight", '; did you mean algorithm.kl="{name: k3, params: {weight: 1}}"?'),
        (
            "actor_rollout_ref.rollout.n",
            "; did you mean learner.group_size? `asyncrl from-verl` translates keys of verl",
        ),
        ("actor_rollout_ref.rollout.dtype2", "; `asyncrl from-verl` translates keys of verl"),
        ("learner.learning_rate", "; did you mean learner.lr?"),
        ("max-new-tokens", "; did you mean actor.max_turn_tokens?"),
        ("clip_ratio", "; did you mean algorithm.loss.params.clip_low and algorithm.loss.params.clip_high?"),
        ("top_p", ": the correction needs the log-probs of the whole distribution, so actors sample from all of it"),
        ("learner.beta", "; did you mean learner.betas?"),
        (
            "per_device_train_batch_size",
            "; did you mean learner.batch_size? It counts all episodes of a step, on all GPUs together",
        ),
        (
            "output_dir",
            "; did you mean run.dir and run.name? The first is the folder of all runs, and the second names one run in "
            "it",
        ),
        ("something_new", ""),
    ],
)
def test_a_word_of_another_system_is_refused_with_ours(word: str, end: str) -> None:
    assert refusal(word) == f"{word}=1: there is no such key{end}"


def test_a_word_without_a_counterpart_has_the_reason() -> None:
    assert all(hint(word) == f": {reason}" for word, reason in WITHOUT.items())
