"""Trajectories, labels and packed tokens in verl's layout, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.compat.verl import (
    DataProto,
    add_tokens,
    from_trajectories,
    to_episodes,
    to_labels,
    to_tokens,
    to_trajectories,
)
from asyncrl.errors import DataProtoError, InvariantError
from asyncrl.learner.batch.local_batch import build_episodes, build_local_batch
from asyncrl.types import BatchPlan, Finish, Labels, Role, Step, ToolCall, Trajectory, Turn
from asyncrl.wire import encode, join, labels_message, trajectory_message
from tests.helpers import make_labels, make_task, make_trajectory
from tests.test_wire import trajectories

CPU = torch.device("cpu")
PAD = 99


def make_tool_episode(**changes: Any) -> Trajectory:
    """Prompt 0 1, the policy's 2 3, a tool's 4, the policy's 5."""
    versions = np.array([-1, -1, 3, 4, -1, 4], np.int32)
    values: dict[str, Any] = {
        "length": 6,
        "versions": versions,
        "logprobs": np.array([0, 0, -0.5, -0.25, 0, -1], np.float32),
        "turns": (
            Turn(0, 2, Role.PROMPT),
            Turn(2, 4, Role.ASSISTANT, "tool", (ToolCall("calculator", {"expression": "1+1"}),)),
            Turn(4, 5, Role.TOOL),
            Turn(5, 6, Role.ASSISTANT, "stop", score=0.25),
        ),
        "steps": (Step(2, 4), Step(5, 6)),
        "rewards": {"calculator": 0.5},
        "timings": {"generate": 1.5},
    }
    return make_trajectory(**{**values, **changes})


def make_branches(**changes: Any) -> Trajectory:
    """Two branches, the second of which begins with 4 5."""
    versions = np.array([-1, 0, 0, -1, -1, -1, 1], np.int32)
    values: dict[str, Any] = {
        "length": 7,
        "versions": versions,
        "logprobs": np.where(versions >= 0, -0.5, 0).astype(np.float32),
        "turns": (
            Turn(0, 1, Role.PROMPT),
            Turn(1, 3, Role.ASSISTANT, "stop"),
            Turn(3, 3, Role.TOOL),
            Turn(3, 6, Role.PROMPT),
            Turn(6, 7, Role.ASSISTANT, "length"),
        ),
        "steps": (Step(1, 3), Step(6, 7)),
        "finish": Finish.TRUNCATED,
    }
    return make_trajectory(**{**values, **changes})


def sent(each: Trajectory | Labels) -> bytes:
    return join(encode(trajectory_message(each) if isinstance(each, Trajectory) else labels_message(each)))


def test_prompts_are_padded_on_the_left_and_responses_on_the_right() -> None:
    short = make_trajectory(length=3, id="short")
    data = from_trajectories(
        [make_tool_episode(), short], PAD, [make_labels(short.id, 0.0), make_labels("t000000001.0.0", 2.5)]
    )
    batch = {name: tensor.tolist() for name, tensor in data.batch.items()}
    assert batch["prompts"] == [[0, 1], [PAD, 0]]
    assert batch["responses"] == [[2, 3, 4, 5], [1, 2, PAD, PAD]]
    assert batch["input_ids"] == [[0, 1, 2, 3, 4, 5], [PAD, 0, 1, 2, PAD, PAD]]
    assert batch["attention_mask"] == [[1] * 6, [0, 1, 1, 1, 0, 0]]
    assert batch["position_ids"] == [[0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 2, 2]]
    assert batch["response_mask"] == [[1, 1, 0, 1], [1, 1, 0, 0]]
    assert batch["rollout_log_probs"] == [[-0.5, -0.25, 0, -1], [-0.5, -0.5, 0, 0]]
    assert batch["versions"] == [[3, 4, -1, 4], [0, 0, -1, -1]]
    assert batch["token_level_scores"] == batch["token_level_rewards"] == [[0, 0, 0, 2.5], [0, 0, 0, 0]]
    assert data.non_tensor_batch["uid"].tolist() == ["t000000001"] * 2
    assert data.non_tensor_batch["__num_turns__"].tolist() == [4, 2]


@pytest.mark.parametrize("name", ["multi_modal_data", "multi_modal_inputs"])
def test_rows_with_images_of_verl_are_refused_by_name(name: str) -> None:
    data = from_trajectories([make_tool_episode()], PAD)
    data.non_tensor_batch[name] = np.array([{}], object)
    assert len(to_trajectories(data)) == 1
    data.non_tensor_batch[name] = np.array([{"image": [b"x"]}], object)
    with pytest.raises(DataProtoError, match=f"{name} has images"):
        to_trajectories(data)


def test_every_branch_is_a_row_with_the_reward_of_its_episode() -> None:
    data = from_trajectories([make_branches()], PAD, [make_labels("t000000001.0.0", 1.0)])
    assert data.batch["prompts"].tolist() == [[PAD, PAD, 0], [3, 4, 5]]
    assert data.batch["responses"].tolist() == [[1, 2], [6, PAD]]
    assert data.batch["token_level_scores"].tolist() == [[0, 1], [1, 0]]
    assert data.non_tensor_batch["branch"].tolist() == [0, 1]


def test_fixed_lengths_pad_more_and_never_cut() -> None:
    data = from_trajectories([make_tool_episode()], PAD, max_prompt_length=4, max_response_length=5)
    assert data.batch["input_ids"].tolist() == [[PAD, PAD, 0, 1, 2, 3, 4, 5, PAD]]
    with pytest.raises(DataProtoError, match="a response has 4 tokens; max_response_length is 3"):
        from_trajectories([make_tool_episode()], PAD, max_response_length=3)


def test_tasks_give_the_fields_of_verls_data_sets() -> None:
    task = make_task(extra_info={"index": 3}, tools_kwargs={"calculator": {"create_kwargs": {}}})
    data = from_trajectories([make_tool_episode()], PAD, tasks={task.id: task})
    row = data[0].non_tensor_batch
    assert row["raw_prompt"] == [{"role": "user", "content": "0+1"}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1"}
    kwargs = {"calculator": {"create_kwargs": {}}}
    assert (row["data_source"], row["extra_info"]) == ("test", {"index": 3, "tools_kwargs": kwargs})
    assert row["tools_kwargs"] == kwargs


@pytest.mark.slow
@given(st.lists(trajectories(), max_size=4, unique_by=lambda each: each.id))
def test_any_trajectories_come_back_bit_for_bit(given_ones: list[Trajectory]) -> None:
    found = to_trajectories(from_trajectories(given_ones, PAD))
    assert [sent(each) for each in found] == [sent(each) for each in given_ones]


def test_episodes_with_tools_and_branches_come_back_from_the_disk_too(tmp_path: Path) -> None:
    episodes = [make_tool_episode(id="a"), make_branches(id="b"), make_trajectory(id="c")]
    scores = np.array([0.25, 1.0], np.float32)
    labels = [
        Labels("a", 0.5, 1.0, "rule@1", scores, np.array([4, 6], np.int32), {"length": 3.0}),
        make_labels("b", -1.0),
        make_labels("c", 0.0),
    ]
    from_trajectories(episodes, PAD, labels).save_to_disk(tmp_path / "batch")
    data = DataProto.load_from_disk(tmp_path / "batch")
    assert [sent(each) for each in to_trajectories(data)] == [sent(each) for each in episodes]
    assert [sent(each) for each in to_labels(data)] == [sent(each) for each in labels]


def test_a_batch_of_verls_own_becomes_trajectories() -> None:
    data = DataProto.from_dict(
        {
            "prompts": torch.tensor([[PAD, 0], [0, 1]]),
            "responses": torch.tensor([[5, 6, 7, 8], [5, PAD, PAD, PAD]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]),
            "response_mask": torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0]]),
            "old_log_probs": torch.full((2, 4), -0.5),
            "token_level_scores": torch.tensor([[0, 0, 0, 1.0], [0.5, 0, 0, 0]]),
        },
        {"uid": ["g", "g"], "acc": [1.0, 0.0]},
    )
    first, second = to_trajectories(data, version=7)
    assert first.tokens.tolist() == [0, 5, 6, 7, 8]
    assert first.versions.tolist() == [-1, 7, -1, 7, 7]
    assert first.logprobs.tolist() == [0, -0.5, 0, -0.5, -0.5]
    assert [(turn.start, turn.end, turn.role) for turn in first.turns] == [
        (0, 1, Role.PROMPT),
        (1, 2, Role.ASSISTANT),
        (2, 3, Role.TOOL),
        (3, 5, Role.ASSISTANT),
    ]
    assert first.steps == (Step(1, 2), Step(3, 5))
    assert (second.group_id, second.member, second.id) == ("g", 1, "g.1")
    assert [(each.trajectory_id, each.reward, each.outcome) for each in to_labels(data)] == [
        ("g.0", 1.0, 1.0),
        ("g.1", 0.5, 0.0),
    ]


def test_what_a_batch_lacks_is_named() -> None:
    data = from_trajectories([make_tool_episode()], PAD)
    with pytest.raises(DataProtoError, match="the batch has no token_level_scores"):
        to_labels(data)
    data.batch.pop("versions")
    with pytest.raises(DataProtoError, match="has no versions: pass the `version`"):
        to_trajectories(data)
    data.batch.pop("rollout_log_probs")
    with pytest.raises(DataProtoError, match="neither rollout_log_probs nor old_log_probs"):
        to_trajectories(data, 1)
    with pytest.raises(DataProtoError, match="has no responses, attention_mask"):
        to_trajectories(data.select(["prompts"]), 1)


def make_elsewhere(**changes: Any) -> DataProto:
    """One prompt of two tokens, and a response of one token and one of padding."""
    tensors = {
        "prompts": torch.tensor([[3, 4]]),
        "responses": torch.tensor([[5, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0]]),
        "response_mask": torch.tensor([[1, 0]]),
        "rollout_log_probs": torch.tensor([[-0.5, 0.0]]),
        "token_level_scores": torch.tensor([[1.0, 0.0]]),
    }
    return DataProto.from_dict({**tensors, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask has 3 columns; .* must have 4"),
        ({"rollout_log_probs": torch.zeros(1, 3)}, "rollout_log_probs has 3 columns; .* must have 2"),
        ({"responses": torch.tensor([[2**40, 0]])}, "responses has ids that are not whole numbers"),
        ({"prompts": torch.tensor([[1.5, 2.0]])}, "prompts has ids that are not whole numbers"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_named(changes: Any, message: str) -> None:
    with pytest.raises(DataProtoError, match=message):
        to_trajectories(make_elsewhere(**changes), version=0)


def test_a_response_mask_on_padding_counts_no_token() -> None:
    data = make_elsewhere(response_mask=torch.tensor([[1, 1]]))
    assert to_episodes(data).lengths.tolist() == [1] == [int(to_tokens(data).mask.sum())]


def test_a_batch_without_rows_has_no_tokens_and_no_episodes() -> None:
    data = make_elsewhere()[:0]
    assert to_tokens(data).mask.tolist() == to_episodes(data).lengths.tolist() == []


def test_a_row_of_which_nothing_was_sampled_is_no_trajectory() -> None:
    data = from_trajectories([make_tool_episode()], PAD)
    data.batch["response_mask"].zero_()
    data.batch["versions"].fill_(-1)
    with pytest.raises(InvariantError, match="no token was sampled"):
        to_trajectories(data)


def test_packed_tokens_and_episodes_are_those_of_the_learner() -> None:
    episodes = [make_tool_episode(id="a"), make_branches(id="b", member=1), make_trajectory(id="c", group_id="g2")]
    scores = np.array([0.25, 1.0], np.float32)
    labels = [Labels("a", 0.5, 1.0, "rule", scores, np.array([4, 6], np.int32)), make_labels("b"), make_labels("c")]
    data = from_trajectories(episodes, PAD, labels)
    plan = BatchPlan(
        step=0,
        version=4,
        ids=[each.id for each in episodes],
        group_ids=[each.group_id for each in episodes],
        tokens=[len(each) for each in episodes],
        sampled=[each.sampled_tokens for each in episodes],
        weights=[1.0] * 3,
    )
    expected = dict(build_local_batch(range(3), episodes, CPU).tokens.tensors())
    found = dict(to_tokens(data).tensors())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    ours, theirs = to_episodes(data, version=4), build_episodes(plan, labels, CPU)
    for name in ("group", "reward", "outcome", "lengths", "step_scores", "step_sequence", "step_end"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_numbers_of_the_algorithms_come_back_to_their_tokens() -> None:
    data = from_trajectories([make_tool_episode(id="a"), make_trajectory(id="b", length=3)], PAD)
    data.batch["old_log_probs"] = data.batch["rollout_log_probs"] * 2
    tokens = to_tokens(data)
    assert tokens.proximal is not None
    assert tokens.proximal.tolist() == [0, 0, -1, -0.5, 0, -2, 0, -1, -1]
    numbered = type(tokens)(
        tokens.sequence,
        tokens.position,
        tokens.mask,
        tokens.behaviour,
        tokens.versions,
        advantages=torch.arange(9.0),
    )
    add_tokens(data, numbered)
    assert data.batch["advantages"].tolist() == [[2, 3, 4, 5], [7, 8, 0, 0]]
    assert "returns" not in data.batch


def test_scores_of_turns_have_verls_names_and_come_back() -> None:
    data = from_trajectories([make_tool_episode(), make_trajectory(id="plain")], PAD)
    assert data.non_tensor_batch["turn_scores"].tolist() == [[0.25], []]
    assert data.non_tensor_batch["reward_scores"].tolist() == [{"calculator": 0.5, "user_turn_rewards": [0.25]}, {}]
    with_scores, without = to_trajectories(data)
    assert (with_scores.turn_scores, with_scores.rewards) == ([0.25], {"calculator": 0.5})
    assert without.turn_scores == []


def test_grammars_go_with_the_batch_and_come_back_and_what_they_restricted_is_not_trained() -> None:
    turns = make_tool_episode().turns
    mass = np.array([1, 1, 0.5, 0.99, 1, 1], np.float32)
    under = make_tool_episode(turns=(turns[0], turns[1]._replace(grammar="regex"), *turns[2:]), grammar_mass=mass)
    free = make_trajectory(length=3, id="free")
    data = from_trajectories([under, free], PAD)
    assert "grammar_mass" not in from_trajectories([free], PAD).batch
    torch.testing.assert_close(data.batch["grammar_mass"], torch.tensor([[0.5, 0.99, 1, 1], [1, 1, 1, 1]]))
    assert list(map(sent, to_trajectories(data))) == [sent(under), sent(free)]
    restricted = to_tokens(data).restricted
    assert restricted is not None
    assert restricted.nonzero()[:, 0].tolist() == [2]
    del data.batch["grammar_mass"]
    unknown = to_trajectories(data)[0].grammar_mass
    assert unknown.tolist() == [1, 1, 0, 0, 1, 0]
