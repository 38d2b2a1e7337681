"""Data that the learner could not train are refused where they arrive, and a plan that fails for ever can be
skipped."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asyncrl.errors import AsyncrlError, RefusedError, WireError
from asyncrl.replay.from_config import vocabulary
from asyncrl.replay.protocol import PutLabels, PutTrajectory
from asyncrl.replay.starts.admission import Admission
from asyncrl.types import Labels, Trajectory
from asyncrl.wire import Message, encode, labels_message, read_labels, read_trajectory, trajectory_message
from tests.helpers import make_labels, make_trajectory
from tests.replay.support import Core, make_settings

pytestmark = pytest.mark.slow

VOCABULARY, MAX_TOKENS = 100, 64
RULES = {"vocabulary": VOCABULARY, "max_tokens": MAX_TOKENS}

INTEGERS = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 12)
FLOATS = st.floats(width=32)
VALUES = (
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=5) | st.lists(INTEGERS, max_size=3)
)
SPANS = st.lists(st.tuples(INTEGERS, INTEGERS), max_size=3)
TRAJECTORY: dict[str, st.SearchStrategy[Any]] = {
    "turns": st.lists(
        st.tuples(INTEGERS, INTEGERS, st.sampled_from(["prompt", "assistant", "tool", "robot"]), st.just("stop")).map(
            lambda turn: [*turn, []]
        ),
        max_size=3,
    ),
    "steps": SPANS,
    "rewards": st.dictionaries(st.text(max_size=3), st.floats(), max_size=2),
    "timings": st.dictionaries(st.text(max_size=3), st.floats(), max_size=2),
    "finish": st.text(max_size=5),
    "task": VALUES,
    "tokens": hnp.arrays(np.int32, st.integers(0, 80), elements=INTEGERS),
    "logprobs": hnp.arrays(np.float32, st.sampled_from([7, 8, 9]), elements=FLOATS),
    "versions": hnp.arrays(np.int32, st.tuples(st.integers(1, 3), st.just(2)), elements=INTEGERS),
}
LABELS: dict[str, st.SearchStrategy[Any]] = {
    "reward": VALUES,
    "outcome": VALUES,
    "extra": st.dictionaries(st.text(max_size=3), VALUES, max_size=2),
    "step_ends": hnp.arrays(np.int32, st.integers(0, 3), elements=INTEGERS),
    "step_scores": hnp.arrays(np.float32, st.integers(0, 3), elements=FLOATS),
}


def changed(message: Message, field: str, value: Any) -> Message:
    if field in message.arrays:
        return Message(message.kind, 1, message.body, {**message.arrays, field: value})
    return Message(message.kind, 1, {**message.body, field: value}, message.arrays)


def assert_trainable(trajectory: Trajectory, newest: int) -> None:
    """Check what the learner's arithmetic needs of a trajectory."""
    tokens, mask = trajectory.tokens, trajectory.loss_mask
    assert 0 < len(tokens) <= MAX_TOKENS
    assert tokens.min() >= 0
    assert tokens.max() < VOCABULARY
    assert np.isfinite(trajectory.logprobs).all()
    assert not trajectory.logprobs[~mask].any()
    assert trajectory.versions[mask].min() >= 0
    assert trajectory.versions.max() <= newest + 1
    assert not mask[0]
    position = 0
    for start, end in trajectory.steps:
        assert position <= start < end <= len(tokens)
        assert mask[start:end].all()
        position = end
    assert all(map(math.isfinite, [*trajectory.rewards.values(), *trajectory.timings.values()]))


def assert_scores(labels: Labels) -> None:
    """Check what the learner's arithmetic needs of labels."""
    assert np.isfinite(np.float32([labels.reward, labels.outcome, *labels.extra.values()])).all()
    assert labels.step_ends.tolist() in ([], [8])
    assert np.isfinite(labels.step_scores).all()
    assert len(labels.step_scores) == len(labels.step_ends)


@pytest.mark.parametrize("field", [*TRAJECTORY, *LABELS])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_message_with_anything_in_a_field_is_refused_or_can_be_trained(
    tmp_path_factory: pytest.TempPathFactory, field: str, data: st.DataObject
) -> None:
    core = Core(tmp_path_factory.mktemp("store"), make_settings(**RULES))
    (ticket,) = core.tickets(1)
    trajectory, anything = make_trajectory(ticket), data.draw({**TRAJECTORY, **LABELS}[field])
    try:
        if field in TRAJECTORY:
            sent = changed(trajectory_message(trajectory), field, anything)
            core.ask(PutTrajectory(0), encode(sent))
            assert_trainable(read_trajectory(sent), newest=0)
        else:
            core.put(trajectory)
            core.lease()
            sent = changed(labels_message(make_labels(ticket.id)), field, anything)
            core.ask(PutLabels("s", "1"), encode(sent))
            assert_scores(read_labels(sent))
    except AsyncrlError:
        assert core.status()["accepted" if field in TRAJECTORY else "labelled"] == 0
    core.store.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": np.array([1, 2, 3, 4, 5, 6, 7, VOCABULARY], np.int32)}, "token id 100, .* has 100 rows"),
        ({"length": MAX_TOKENS + 2}, r"66 tokens; actor.max_tokens \(actor.max_total_tokens, if .*\) allows 64"),
        ({"version": 2}, "sampled by version 2, but the newest is 0"),
    ],
)
def test_what_would_fail_every_learner_is_refused_by_name(tmp_path: Path, changes: Any, reason: str) -> None:
    core = Core(tmp_path, make_settings(**RULES))
    (ticket,) = core.tickets(1)
    with pytest.raises(RefusedError, match=reason):
        core.put(make_trajectory(ticket, **changes))
    assert core.put(make_trajectory(ticket, version=1)) == "stored", "an engine serves a version before it is told of"


@pytest.mark.parametrize("ends", [[9], [4], [8, 8], [8, 7], [0], [-1]])
def test_step_scores_of_steps_that_are_not_there_are_refused(tmp_path: Path, ends: list[int]) -> None:
    core = Core(tmp_path, make_settings())
    (ticket,) = core.tickets(1)
    core.put(make_trajectory(ticket))
    core.lease()
    arrays = {"step_scores": np.ones(len(ends), np.float32), "step_ends": np.array(ends, np.int32)}
    sent = Message("labels", 1, labels_message(make_labels(ticket.id)).body, arrays)
    with pytest.raises((RefusedError, WireError), match=r"no steps that end|must be 1 or more and increase"):
        core.ask(PutLabels("s", "1"), encode(sent))
    core.scoring_failed(ticket.id)
    assert core.lease()[0].id == ticket.id, "its scorer may try again"


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"vocab_size": 151936}, 151936),
        ({"vocab_size": 7, "text_config": {"vocab_size": 262208}}, 262208),
        ({"vocab_size": 7, "text_config": {"hidden_size": 1}}, 7),
        ({"llm_config": {"vocab_size": 9}}, 9),
        ({"hidden_size": 1}, None),
        ([], None),
    ],
)
def test_the_vocabulary_is_read_from_the_models_folder_without_transformers(
    tmp_path: Path, config: Any, size: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vocabulary(str(tmp_path)) == size


def test_a_skipped_plan_stays_where_it_is_and_its_trajectories_are_dead_letters(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=3, per_version=4)))
    core.run_episodes(12)
    first, second = core.planned(0), core.planned(1)
    for _ in range(2):
        with pytest.raises(RefusedError, match="step 0 was trained: the learner is at step 1 now"):
            core.skip(0)
        core.restart()
    assert core.plan(0) == first, "the learner resumes from before it"
    assert core.skip(0, "its tokens kill every learner") == 4
    core.restart()
    skipped = core.planned(0)
    assert skipped.skipped == "its tokens kill every learner"
    assert (skipped.ids, core.plan(1)) == (first.ids, second)
    assert core.skip(0, "again") == 0
    reasons = {name: dead.reason for name, dead in core.dead_letters().items()}
    assert reasons == dict.fromkeys(first.ids, "plan 0 was skipped: its tokens kill every learner")
    status = core.status()
    assert (status["dead"], status["plans_skipped"], status["depth_plans"]) == (4, 1, 2)
    third = core.planned(2)
    assert not set(third.ids) & {*first.ids, *second.ids}
    for version in (1, 2, 3):
        core.publish(version)
    core.checkpointed(3)
    audit = core.audit()
    assert audit["states"] == {"dead": 4, "trained": 8}
    assert (audit["lost"], audit["trained_twice"], audit["planned"]) == (0, 0, 8)
    with pytest.raises(RefusedError, match="in a plan that was skipped"):
        core.requeue(first.ids[0])


def test_groups_of_a_skipped_plan_go_into_no_later_one_and_what_others_trained_stays_trained(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=3, per_version=4, uses=2)))
    core.run_episodes(8)
    plans = [core.planned(step) for step in range(2)]
    committed = core.status()["committed"]
    twice = set(plans[0].ids) & set(plans[1].ids)
    core.publish(1)
    core.checkpointed(1)
    core.skip(1)
    once = set(plans[1].ids) - twice
    assert set(core.dead_letters()) == once
    later = core.plan(2)
    assert later is None or not set(later.ids) & set(plans[1].ids)
    assert core.audit()["lost"] == 0
    assert core.audit()["trained_twice"] == 0
    assert core.status()["committed"] == committed - len(once), "the second use of those that were used once"


def test_only_a_plan_that_is_recorded_and_was_not_trained_can_be_skipped(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=3, per_version=4)))
    core.run_episodes(8)
    with pytest.raises(RefusedError, match="step 0 has no recorded plan; 0 steps"):
        core.skip(0)
    core.plan(0)
    core.publish(1)
    with pytest.raises(RefusedError, match="step 0 was trained"):
        core.skip(0)
    core.plan(1)
    core.checkpointed(2)
    with pytest.raises(RefusedError, match="step 1 was trained"):
        core.skip(1)


def test_those_who_died_with_their_plan_stay_dead_letters_with_their_data_though_their_groups_are_closed(
    tmp_path: Path,
) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=4, per_version=4, uses=2)))
    core.run_episodes(4)
    ids = core.planned(0).ids
    assert core.skip(0) == len(ids)
    status = core.status()
    assert (status["dead"], status["dropped"], status["depth_ready"]) == (len(ids), 0, 0)
    assert sorted(core.dead_letters()) == sorted(ids)
    assert [each.id for each in core.fetch(ids)] == ids
