"""The reward managers of process reward models, against plain forward passes of tiny random models and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from asyncrl.compat.verl import (
    DataProto,
    QwenPRMRewardManager,
    SkyworkPRMRewardManager,
    from_trajectories,
    load_reward_manager,
)
from asyncrl.compat.verl.rewards.process_keys import KEYS, read_keys
from asyncrl.config.option import as_yaml, options
from asyncrl.errors import ConfigError, DataProtoError, ScoringError
from asyncrl.scoring.transcript import Passage
from asyncrl.types import Role, Step, Turn
from tests.helpers import make_trajectory
from tests.scoring.models.families import CHAT, FAMILIES, Family
from tests.scoring.models.support import byte_tokenizer
from tests.scoring.models.test_families import shrunk

PAD = CHAT.pad_token_id
QUESTION = "what is 12 + 5?"
ANSWERS = ("add them\n\nso 12 + 5 = 17\n\n#### 17", "guess\n\nmaybe\n\n#### 16", "#### 17\n\nthanks")


def right(solution_str: str, ground_truth: str, **_: Any) -> float:
    return float(f"#### {ground_truth}" in solution_str)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    root, known = tmp_path_factory.mktemp("models"), {}

    def make(name: str) -> Family:
        if name not in known:
            known[name] = FAMILIES[name](root)
        return known[name]

    return make


def batch(answers: Sequence[str], uids: Sequence[str] | None = None, tokenizer: Any = CHAT) -> DataProto:
    prompts = [tokenizer.encode(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")] * len(answers)
    responses = [tokenizer.encode(f"{answer}<|im_end|>") for answer in answers]
    longest = max(map(len, responses))
    rows = [[*p, *r, *[PAD] * (longest - len(r))] for p, r in zip(prompts, responses, strict=True)]
    ids, size = torch.tensor(rows), len(prompts[0])
    lengths = torch.tensor([[size + len(r)] for r in responses])
    return DataProto.from_dict(
        {
            "prompts": ids[:, :size],
            "responses": ids[:, size:],
            "attention_mask": (torch.arange(ids.shape[1]) < lengths).long(),
        },
        {
            "raw_prompt": [[{"role": "system", "content": "be brief"}, {"role": "user", "content": QUESTION}]]
            * len(answers),
            "data_source": ["sums"] * len(answers),
            "reward_model": [{"ground_truth": "17"}] * len(answers),
            **({"uid": list(uids)} if uids else {}),
        },
    )


def manager(family: Family, **keys: Any) -> Any:
    given = {"prm_model_path": str(family.folder), "dtype": "float32", "length_bonus_weight": 0.0, **keys}
    return load_reward_manager(family.name, CHAT, 0, right, **given)


def logits(family: Family, answer: str, cut: str = "\n\n") -> list[float]:
    """A plain forward pass over the steps of an answer."""
    with torch.no_grad():
        scores = family.scores([Passage(QUESTION, False), *(Passage(step, True) for step in answer.split(cut))])
    return [float(score) for score in scores]


def last_tokens(data: DataProto) -> list[int]:
    size = data.batch["prompts"].shape[1]
    found: list[int] = (data.batch["attention_mask"][:, size:].sum(-1) - 1).tolist()
    return found


def rewards_of(family: Family, answers: Sequence[str], **keys: Any) -> list[float]:
    """Each row's reward, which must be at its last token alone."""
    data = batch(answers)
    rewards = manager(family, **keys)(data)
    at = rewards[torch.arange(len(answers)), last_tokens(data)]
    assert torch.equal(rewards.sum(-1), at)
    found: list[float] = at.tolist()
    return found


FREE = {"enable_anti_hack": False}
AGGREGATED: dict[str, Callable[[Sequence[float]], float]] = {
    "mean_response": lambda scores: sum(scores) / len(scores),
    "pooled_last": lambda scores: scores[-1],
    "min": min,
}


@pytest.mark.parametrize("name", ["qwen_prm", "skywork_prm"])
@pytest.mark.parametrize("aggregation", AGGREGATED)
def test_the_reward_is_the_aggregate_of_the_logits_of_a_plain_forward(
    made: Callable[[str], Family], name: str, aggregation: str
) -> None:
    family, cut = made(name), "\n\n" if name == "qwen_prm" else "\n"
    answers = [answer.replace("\n\n", cut) for answer in ANSWERS]
    expected = [AGGREGATED[aggregation](logits(family, answer, cut)) for answer in answers]
    found = rewards_of(family, answers, prm_aggregation=aggregation, prm_apply_sigmoid=False, **FREE)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_sigmoid_or_a_tanh_bounds_the_logit_and_tanh_wins(made: Callable[[str], Family]) -> None:
    family = made("qwen_prm")
    one = logits(family, ANSWERS[0])[-1]
    last = {"prm_aggregation": "pooled_last", "prm_apply_sigmoid": True, **FREE}
    sigmoid = 1 / (1 + math.exp(-one))
    assert rewards_of(family, ANSWERS[:1], **last) == pytest.approx([sigmoid], abs=1e-5)
    tanh = rewards_of(family, ANSWERS[:1], use_logit_tanh=True, tanh_tau=4.0, tanh_rmax=3.0, **last)
    assert tanh == pytest.approx([3 * math.tanh(one / 4)], abs=1e-5)


@pytest.mark.slow
def test_skyworks_values_are_probabilities_unless_the_key_says_otherwise(made: Callable[[str], Family]) -> None:
    family = made("skywork_prm")
    value = logits(family, "17")[0]
    assert rewards_of(family, ["17"], **FREE) == pytest.approx([1 / (1 + math.exp(-value))], abs=1e-5)
    assert rewards_of(family, ["17"], prm_apply_sigmoid=False, **FREE) == pytest.approx([value], rel=1e-4)


@pytest.mark.parametrize("aggregation", ["raw", "per_step"])
def test_raw_scores_are_at_the_last_token_of_their_steps(made: Callable[[str], Family], aggregation: str) -> None:
    family, data = made("qwen_prm"), batch(ANSWERS[:1])
    result = manager(family, prm_aggregation=aggregation, prm_acc_bonus_weight=0.25, **FREE)(data, return_dict=True)
    rewards, answer = result["reward_tensor"][0].tolist(), ANSWERS[0]
    # One byte a token; a blank line belongs to the step before it, and the end of the turn to the last one.
    ends = [len("add them\n\n") - 1, len("add them\n\nso 12 + 5 = 17\n\n") - 1, len(answer)]
    first, second, third = logits(family, answer)
    expected = dict(zip(ends, (first, second, third + 0.25), strict=True))
    assert {at: value for at, value in enumerate(rewards) if value} == pytest.approx(expected, rel=1e-4)
    assert result["reward_extra_info"]["step_scores"][0] == pytest.approx([first, second, third], rel=1e-4)


def test_of_a_group_only_the_best_keeps_its_score(made: Callable[[str], Family]) -> None:
    family = made("qwen_prm")
    keys = {"prm_aggregation": "best_of_n", "prm_apply_sigmoid": True, "prm_acc_bonus_weight": 0.5, **FREE}
    answers = [*ANSWERS, ANSWERS[1]]
    data = batch(answers, ["a", "a", "a", "b"])
    found = manager(family, **keys)(data).sum(-1).tolist()
    means = [np.mean([1 / (1 + math.exp(-each)) for each in logits(family, answer)]) for answer in answers]
    best = int(np.argmax(means[:3]))
    expected = [means[row] * (row in (best, 3)) + 0.5 * ("17" in answers[row]) for row in range(4)]
    assert found == pytest.approx(expected, abs=1e-4)
    with pytest.raises(DataProtoError, match="the batch has no uid"):
        manager(family, **keys)(batch(answers))


def test_right_answers_get_bonuses_and_wrong_ones_the_penalty(made: Callable[[str], Family]) -> None:
    family, data = made("skywork_prm"), batch(ANSWERS[:2])
    keys = {"prm_acc_bonus_weight": 0.8, "incorrect_answer_penalty": -0.3, "length_bonus_weight": 0.05}
    told = manager(family, target_response_length=50, **keys)(data, return_dict=True)
    extra, rewards = told["reward_extra_info"], told["reward_tensor"].sum(-1).tolist()
    tokens = len(ANSWERS[0]) + 1
    bonus = 0.05 * (1 - abs(tokens - 50) / 50)
    assert rewards == pytest.approx([extra["process"][0] + 0.8 + bonus, extra["process"][1] - 0.3], abs=1e-6)
    assert (extra["acc"], extra["score"]) == ([1.0, 0.0], [1.0, 0.0])
    assert extra["length_bonus"] == pytest.approx([bonus, 0.0])
    assert extra["incorrect_answer"] == pytest.approx([0.0, -0.3])


def test_what_follows_the_answer_and_what_is_too_long_earns_nothing(made: Callable[[str], Family]) -> None:
    family, keys = made("qwen_prm"), {"prm_apply_sigmoid": True}
    first, second = (1 / (1 + math.exp(-each)) for each in logits(family, ANSWERS[2]))
    # A step after the answer counts only if it costs.
    assert rewards_of(family, [ANSWERS[2]], **keys) == pytest.approx([min(first, (first + second) / 2)], abs=1e-5)
    whole = rewards_of(family, [ANSWERS[2]], stop_at_answer=False, **keys)
    assert whole == pytest.approx([(first + second) / 2], abs=1e-5)
    assert rewards_of(family, ANSWERS[:1], max_resp_len=10, **keys) == [0.0]


def test_batches_of_any_size_score_the_same(made: Callable[[str], Family]) -> None:
    family = made("qwen_prm")
    one, many = (rewards_of(family, ANSWERS, prm_micro_batch_size=size) for size in (1, 8))
    assert one == pytest.approx(many, rel=1e-4)
    assert (
        read_keys("qwen_prm", {"prm_model_path": "a", "prm_micro_batch_size": 3}).model("qwen_prm", 0).micro_inputs == 3
    )


def test_a_response_of_another_tokenizer_is_read_by_that_one(made: Callable[[str], Family], tmp_path: Path) -> None:
    family = made("qwen_prm")
    other = byte_tokenizer("<|im_start|>", "<|im_end|>", "<pad>", merges=[("s", "o"), ("1", "7")])
    other.save_pretrained(tmp_path / "policy")
    data = batch(ANSWERS, tokenizer=other)
    assert last_tokens(data) == [
        last - 3 * (row == 0) - (row == 2) for row, last in enumerate(last_tokens(batch(ANSWERS)))
    ]
    expected = rewards_of(family, ANSWERS)
    for given in (other, str(tmp_path / "policy")):
        assert manager(family, input_tokenizer=given)(data).sum(-1).tolist() == pytest.approx(expected, rel=1e-4)


def test_what_tools_answer_is_context_and_no_step(made: Callable[[str], Family]) -> None:
    family, data = made("qwen_prm"), batch(["call it\n\nso 17"])
    mask = data.batch["attention_mask"][:, data.batch["prompts"].shape[1] :].clone()
    mask[0, len("call ") : len("call it\n\n")] = 0
    data.batch["response_mask"] = mask
    result = manager(family, prm_aggregation="raw", **FREE)(data, return_dict=True)
    with torch.no_grad():
        passages = [Passage(QUESTION, False), Passage("call", True), Passage("it", False), Passage("so 17", True)]
        expected = [float(each) for each in family.scores(passages)]
    assert result["reward_extra_info"]["step_scores"][0] == pytest.approx(expected, rel=1e-4)
    rewards = result["reward_tensor"][0]
    assert rewards.nonzero()[:, 0].tolist() == [len("call ") - 1, len("call it\n\nso 17")]


def test_our_own_trajectories_keep_their_steps_and_branches(made: Callable[[str], Family]) -> None:
    family = made("skywork_prm")
    spans = ((0, Role.PROMPT), (3, Role.ASSISTANT), (6, Role.PROMPT), (8, Role.ASSISTANT), (12, None))
    turns = tuple(Turn(start, end, role) for (start, role), (end, _) in pairwise(spans) if role)
    steps = (Step(3, 5), Step(5, 6), Step(8, 12))
    sampled = np.isin(np.arange(12), [3, 4, 5, 8, 9, 10, 11])
    trajectory = make_trajectory(
        tokens=np.arange(65, 77, dtype=np.int32),
        logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        turns=turns,
        steps=steps,
    )
    data = from_trajectories([trajectory], PAD)
    data.non_tensor_batch["data_source"] = np.array(["sums"] * len(data), dtype=object)
    data.non_tensor_batch["reward_model"] = np.array([{"ground_truth": "17"}] * len(data), dtype=object)
    result = manager(family, prm_aggregation="raw", **FREE)(data, return_dict=True)
    scores = result["reward_extra_info"]["step_scores"]
    assert len(scores[0]) == len(steps)
    # Responses begin at the tokens 3 and 8.
    assert result["reward_tensor"].nonzero().tolist() == [[0, 1], [0, 2], [1, 3]]
    assert result["reward_tensor"][result["reward_tensor"] != 0].tolist() == pytest.approx(scores[0])


def test_a_row_that_cannot_be_scored_is_named_and_is_no_zero(made: Callable[[str], Family]) -> None:
    with pytest.raises(ScoringError, match=r"row\.1.*tokens"):
        manager(made("qwen_prm"))(batch(["17", "x" * 600]))


def test_a_verdict_that_is_no_number_is_refused_with_its_row(made: Callable[[str], Family]) -> None:
    family = made("skywork_prm")
    keys = {"prm_model_path": str(family.folder), "dtype": "float32"}
    broken = SkyworkPRMRewardManager(CHAT, compute_score=lambda **_: math.nan, **keys)
    with pytest.raises(ScoringError, match="the reward of row 0 is nan"):
        broken(batch(["17"]))
    empty = SkyworkPRMRewardManager(CHAT, compute_score=lambda **_: {"score": 1.0, "acc": None}, **keys)
    assert empty(batch(["17"]), return_dict=True)["reward_extra_info"]["acc"] == [1.0]


def test_a_rule_is_called_only_if_something_depends_on_it(made: Callable[[str], Family]) -> None:
    family = made("skywork_prm")
    keys = {"prm_model_path": str(family.folder), "dtype": "float32"}
    free = SkyworkPRMRewardManager(CHAT, length_bonus_weight=0.0, **keys)
    assert "acc" not in free(batch(["17"]), return_dict=True)["reward_extra_info"]
    with pytest.raises(NotImplementedError, match="sums"):
        SkyworkPRMRewardManager(CHAT, **keys)(batch(["17"]))


@pytest.mark.slow
def test_the_managers_are_made_as_in_the_fork(made: Callable[[str], Family]) -> None:
    qwen, skywork = made("qwen_prm"), made("skywork_prm")
    keys = {"dtype": "float32", "length_bonus_weight": 0.0}
    by_name = QwenPRMRewardManager(tokenizer=CHAT, prm_model_path=str(qwen.folder), **keys)
    assert torch.equal(by_name(batch(ANSWERS)), manager(qwen)(batch(ANSWERS)))
    by_place = SkyworkPRMRewardManager(CHAT, str(skywork.folder), **keys)
    assert torch.equal(by_place(batch(ANSWERS)), manager(skywork)(batch(ANSWERS)))


@pytest.mark.parametrize("path", [None, ""])
def test_without_a_model_the_answer_alone_gives_the_reward(path: str | None) -> None:
    keys = {"prm_acc_bonus_weight": 0.8, "incorrect_answer_penalty": -0.3, "length_bonus_weight": 0.0}
    for manager_class in (QwenPRMRewardManager, SkyworkPRMRewardManager):
        alone = manager_class(tokenizer=CHAT, compute_score=right, prm_model_path=path, **keys)
        result = alone(batch(ANSWERS), return_dict=True)
        assert result["reward_tensor"].sum(-1).tolist() == pytest.approx([0.8, -0.3, 0.8])
        assert result["reward_extra_info"]["acc"] == [1.0, 0.0, 1.0]
        assert "process" not in result["reward_extra_info"]
        with pytest.raises(ScoringError, match="set prm_model_path"):
            alone.compute_prm_scores(torch.zeros(1, 1).long(), torch.ones(1, 1).long())


@pytest.mark.parametrize("name", ["qwen_prm", "skywork_prm"])
def test_the_scores_of_a_models_own_tokens_are_those_of_a_plain_forward(
    made: Callable[[str], Family], name: str
) -> None:
    family = made(name)
    bare = manager(family, prm_apply_sigmoid=False)
    data = batch(ANSWERS)
    steps = [Passage(step, True) for step in ("add them", "so 12 + 5 = 17")]
    read = bare._prm._encoder([Passage(QUESTION, False), *steps])
    own = torch.tensor([[*read.ids, PAD]])
    found = bare.compute_prm_scores(own, torch.tensor([[*[1] * len(read.ids), 0]]))[0]
    assert [float(found[at]) for (at,) in read.reads] == pytest.approx(
        logits(family, "add them|so 12 + 5 = 17", "|"), rel=1e-4, abs=1e-4
    )
    ids = torch.cat([data.batch["prompts"], data.batch["responses"]], dim=1)
    mask = data.batch["attention_mask"]
    scores = bare.compute_prm_scores(ids, mask)
    assert scores.shape == ids.shape
    assert (scores[mask == 0] == 0).all()
    alone = bare.compute_prm_scores(ids[:1], mask[:1])
    assert torch.allclose(scores[:1], alone, atol=1e-4), "rows are scored independently"
    bounded = manager(family, prm_apply_sigmoid=True).compute_prm_scores(ids, mask)
    assert torch.allclose(bounded[mask == 1], torch.sigmoid(scores[mask == 1]), atol=1e-5)
    with pytest.raises(ScoringError, match=r"text 0 has \d+ tokens with ids up to 1000000"):
        bare.compute_prm_scores(torch.full_like(ids, 1_000_000), mask)


def test_a_model_whose_marker_is_beyond_its_embedding_is_refused_by_name_when_the_manager_is_made(
    made: Callable[[str], Family], tmp_path: Path
) -> None:
    family = made("qwen_prm")
    number = AutoTokenizer.from_pretrained(family.folder).convert_tokens_to_ids("<extra_0>")
    folder = shrunk(tmp_path / "short", family.folder, number)
    with pytest.raises(ConfigError, match=rf"{folder}: family qwen_prm reads the token '<extra_0>'.*has {number} rows"):
        QwenPRMRewardManager(tokenizer=CHAT, prm_model_path=str(folder), dtype="float32")


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"prm_acc_bonus": 1.0}, "unknown key prm_acc_bonus; did you mean prm_acc_bonus_weight"),
        ({"prm_aggregation": "meen"}, "prm_aggregation='meen': it must be one of mean_response"),
        ({"incorrect_answer_penalty": 0.3}, r"a number in \(-inf, 0\]"),
        ({"prm_micro_batch_size": 0}, "prm_micro_batch_size=0"),
        ({"strategy": "megatron"}, "one of fsdp, fsdp2 or null"),
        ({"prm_model_path": "", "length_bonus_weight": 0.0}, "nothing gives a reward: set prm_model_path"),
        ({"prm_aggregation": "product"}, "set prm_apply_sigmoid=true"),
    ],
)
def test_a_key_that_cannot_be_used_is_refused_with_the_fix(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_keys("qwen_prm", {"prm_model_path": "a/b", **keys})


@pytest.mark.parametrize(
    ("device_map", "gpus", "placed"),
    [("auto", 0, ("auto", 1)), ("auto", 4, ("auto", 4)), ("cpu", 4, ("cpu", 1)), ("cuda:1", 4, ("cuda:1", 1))],
)
def test_a_device_map_of_auto_spreads_the_model_over_all_gpus(
    device_map: str, gpus: int, placed: tuple[str, int]
) -> None:
    model = read_keys("qwen_prm", {"prm_model_path": "a/b", "device_map": device_map}).model("qwen_prm", gpus)
    assert (model.device, model.gpus) == placed


def test_other_device_maps_are_refused() -> None:
    keys = read_keys("qwen_prm", {"prm_model_path": "a/b", "device_map": "balanced_low_0"})
    with pytest.raises(ConfigError, match="device_map=balanced_low_0: use auto"):
        keys.model("qwen_prm", 2)


def test_the_defaults_are_verls() -> None:
    found = {each.name: each.default for each in options(KEYS["qwen_prm"])}
    assert found == {
        **{"prm_model_path": None, "prm_aggregation": "mean_response", "prm_apply_sigmoid": False},
        **{"use_logit_tanh": False, "tanh_tau": 2.0, "tanh_rmax": 1.0, "prm_micro_batch_size": 8},
        **{"prm_acc_bonus_weight": 0.0, "enable_anti_hack": True, "stop_at_answer": True},
        **{"incorrect_answer_penalty": 0.0, "target_response_length": 400, "length_bonus_weight": 0.05},
        **{"max_resp_len": 1024, "dtype": "bfloat16", "device_map": "auto", "use_shm": False, "strategy": None},
    }


def test_the_page_lists_every_key_with_its_default() -> None:
    text = (Path(__file__).parents[4] / "docs" / "verl.md").read_text()
    table = text.split("<!-- keys of process-reward managers -->\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    listed = {key.strip("`"): default for key, default, *_ in rows}
    declared = {each.name: as_yaml(each.default) for each in options(KEYS["qwen_prm"])}
    assert {name: listed[name] for name in declared} == declared
    assert listed.keys() - declared.keys() == {"reward_manager", "tokenizer", "input_tokenizer"}
