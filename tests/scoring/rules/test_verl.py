"""A reward manager written in verl's style, used as it is by its dotted path."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.rules.base import RuleInput
from asyncrl.scoring.rules.registry import load_rules
from asyncrl.scoring.rules.verl import VerlBatch
from tests.scoring.fakes import CharTokenizer, episode, rule_input


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str.endswith(ground_truth)), "acc": True, "pred": solution_str}


class Manager:
    """Reads a batch as verl's managers do, and puts each score on the response's last token."""

    def __init__(self, tokenizer, num_examine, compute_score=compute_score, reward_fn_key="data_source", scale=1.0):
        self.tokenizer, self.num_examine, self.compute_score = tokenizer, num_examine, compute_score
        self.reward_fn_key, self.scale = reward_fn_key, scale

    def __call__(self, data, return_dict=False):
        if "rm_scores" in data.batch:
            raise AssertionError("there are none")
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra = {}
        for i in range(len(data)):
            item = data[i]
            prompt_length = item.batch["prompts"].shape[-1]
            valid = int(item.batch["attention_mask"][prompt_length:].sum())
            ids = item.batch["responses"][:valid]
            result = self.compute_score(
                data_source=item.non_tensor_batch[self.reward_fn_key],
                solution_str=self.tokenizer.decode(ids.tolist(), skip_special_tokens=True),
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=item.non_tensor_batch.get("extra_info", {}),
            )
            reward_tensor[i, valid - 1] = self.scale * result["score"]
            for key, value in result.items():
                extra.setdefault(key, []).append(value)
        return {"reward_tensor": reward_tensor, "reward_extra_info": extra} if return_dict else reward_tensor


class Careless(Manager):
    def __call__(self, data, return_dict=False):
        return None


class Old(Manager):
    """A manager of the time before `return_dict`."""

    def __call__(self, data):
        return super().__call__(data)


class Overlong(Manager):
    def __init__(self, tokenizer, num_examine, overlong_buffer_cfg, max_resp_len):
        super().__init__(tokenizer, num_examine)
        self.room = max_resp_len - overlong_buffer_cfg.len if overlong_buffer_cfg["enable"] else 0

    def __call__(self, data, return_dict=False):
        data.batch["room"] = torch.tensor([[float(self.room)]])
        first, none = data[0:1], data[1:]
        assert (len(first), len(none)) == (1, 0)
        taken = data.pop(batch_keys=["responses"], non_tensor_batch_keys=["raw_prompt"])
        assert "responses" not in data.batch
        assert set(taken.non_tensor_batch) == {"raw_prompt"}
        return {
            "reward_tensor": first.batch["room"],
            "reward_extra_info": {"turns": data.non_tensor_batch["__num_turns__"]},
        }


class Asynchronous(Manager):
    async def __call__(self, data, return_dict=False):
        return super().__call__(data, return_dict)


def tuples(data_source, solution_str, ground_truth, extra_info):
    return solution_str.endswith(ground_truth), "parsed"


HERE = "tests.scoring.rules.test_verl."


def graded(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.5 if solution_str.endswith(f"#{ground_truth}") else -0.5, "acc": ground_truth in solution_str}


def judge(answer, name="Manager", **entry):
    config = ScoringConfig(rules={"test": [{"name": HERE + name, **entry}]})
    return load_rules(config, CharTokenizer).score(rule_input(answer))


def test_a_manager_is_made_with_the_tokenizer_and_judges_batches_of_one():
    assert judge("it is 72").scores == {"Manager": 1.0, "Manager/acc": 1.0}
    assert judge("it is 71").total == 0.0
    assert judge("it is 71").outcome == 1.0, "acc says whether the answer is right"
    assert judge("72", params={"scale": 0.5}).total == 0.5
    assert judge("72", params={"compute_score": HERE + "compute_score"}).outcome == 1.0


def test_acc_of_a_functions_result_is_the_outcome_and_its_score_the_reward():
    for answer, outcome, reward in (("#72", 1.0, 1.5), ("72", 1.0, -0.5), ("71", 0.0, -0.5)):
        scores = judge(answer, "graded")
        assert (scores.outcome, scores.total) == (outcome, reward)
        assert scores.scores == {"graded": reward, "graded/acc": outcome}


def test_a_function_is_found_in_a_file_of_any_folder(tmp_path):
    file = tmp_path / "my-rewards.py"
    file.write_text(
        "def size(data_source, solution_str, ground_truth, extra_info, by=1):\n    return by * len(solution_str)\n"
    )
    config = ScoringConfig(rule=[{"name": f"{file}:size", "params": {"by": 2}}])
    assert load_rules(config, CharTokenizer).score(rule_input("it is 72")).scores == {
        "size": 2.0 * len("callokit is 72")
    }
    assert load_rules(ScoringConfig(rule=f"{file}:size")).score(rule_input("72")).scores == {
        "size": float(len("callok72"))
    }
    with pytest.raises(ConfigError, match=r"scoring\.rule=.*my-rewards\.py has no sise; did you mean size\?"):
        load_rules(ScoringConfig(rule=f"{file}:sise"))


def test_of_several_branches_a_batch_has_the_last():
    first = [("prompt", "??"), ("assistant", "call"), ("tool", "ok")]
    task, trajectory = episode(*first, ("prompt", "so"), ("assistant", "72"), ("tool", "x"))
    batch = VerlBatch.of(RuleInput(task, trajectory, "72", "72x"))
    for name, text in (("prompts", "so"), ("responses", "72<end>x"), ("input_ids", "so72<end>x")):
        assert CharTokenizer().decode(batch.batch[name][0].tolist()) == text
    assert batch.batch["response_mask"][0].tolist() == [1, 1, 1, 0]
    assert batch.non_tensor_batch["__num_turns__"].tolist() == [3]


@pytest.mark.parametrize("name", ["Old", "Asynchronous", "tuples"])
def test_other_shapes_of_verls_are_used_as_they_are(name):
    assert judge("it is 72", name).outcome == 1.0
    assert judge("it is 71", name).total == 0.0


def test_a_manager_gets_its_configuration_as_attributes_and_may_cut_its_batch():
    params = {"max_resp_len": 10, "overlong_buffer_cfg": {"enable": True, "len": 4}}
    assert judge("72", "Overlong", params=params).scores == {"Overlong": 6.0, "Overlong/turns": 4.0}


def test_a_batch_has_the_episode_under_verls_names():
    episode = rule_input("72")
    batch = VerlBatch.of(episode)
    (item,) = batch
    assert len(batch) == 1
    assert "".join(map(chr, item.batch["prompts"].tolist())) == "what?"
    assert item.batch["responses"].tolist() == episode.trajectory.tokens[5:].tolist()
    assert item.batch["response_mask"].tolist() == episode.trajectory.loss_mask[5:].tolist()
    assert item.batch["attention_mask"].shape == item.batch["input_ids"].shape == (17 - 2,)
    assert item.non_tensor_batch["data_source"] == "test"
    assert item.non_tensor_batch["reward_model"] == {"style": "rule", "ground_truth": "72"}
    assert batch.non_tensor_batch["extra_info"].shape == (1,)
    with pytest.raises(IndexError):
        batch[1]


def test_a_manager_is_checked_without_a_tokenizer_and_what_it_lacks_is_told():
    load_rules(ScoringConfig(rule=HERE + "Manager"))
    with pytest.raises(ConfigError, match=r"compute_score=no\.such cannot be imported"):
        load_rules(ScoringConfig(rules={"a": [{"name": HERE + "Manager", "params": {"compute_score": "no.such"}}]}))
    with pytest.raises(ConfigError, match="reward manager class"):
        load_rules(ScoringConfig(rules={"a": [{"name": HERE + "Manager", "params": {"no_such": 1}}]}))


def test_a_manager_that_returns_nonsense_is_a_failure_and_not_a_zero():
    with pytest.raises(ScoringError, match="without `reward_tensor`"):
        load_rules(ScoringConfig(rule=HERE + "Careless"), CharTokenizer).score(rule_input("72"))


TRUTHS = [["Paris", "City of Light"], {"target": 24, "numbers": [4, 6], "note": None}, 24, 0.5, True, "24", '["24"]']


def told(data_source, solution_str, ground_truth, extra_info=None):
    """The type and the value that a function got, as a number that tells them apart; it spoils both."""
    found = float(SEEN.index((type(ground_truth).__name__, json.dumps(ground_truth))))
    hint = {None: 0.0, "x": 100.0}[extra_info["hint"]]
    kwargs = 1000.0 * len(extra_info["tools_kwargs"]["search"]["create_kwargs"])
    if isinstance(ground_truth, list | dict):
        ground_truth.clear()
    return {"score": found + hint + kwargs}


SEEN = [(type(truth).__name__, json.dumps(truth)) for truth in TRUTHS]


class Teller(Manager):
    def __init__(self, tokenizer, num_examine):
        super().__init__(tokenizer, num_examine, told)


@pytest.mark.parametrize("name", ["told", "Teller"])
def test_functions_and_managers_get_the_truth_and_the_extra_info_of_the_row(name):
    score = load_rules(ScoringConfig(rule=f"{__name__}.{name}"), CharTokenizer).score
    for number, truth in enumerate(TRUTHS):
        for hint, more in ((None, 0.0), ("x", 100.0)):
            extra = {"hint": hint, "tools_kwargs": {"search": {"create_kwargs": {"a": None}}}}
            given = rule_input("72", copy.deepcopy(truth))
            given = replace(given, task=replace(given.task, extra_info=extra))
            before = repr(given.task)
            assert score(given).outcome == number + more + 1000.0
            assert repr(given.task) == before
