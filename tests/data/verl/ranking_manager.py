"""A reward manager written for verl: the answers to one prompt are ranked by their score, and only the rank counts."""

from collections import defaultdict

import torch
from verl import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager


@register("ranking")
class RankingRewardManager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", top=1.0):
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.top = top

    def __call__(self, data: DataProto, return_dict: bool = False):
        if "rm_scores" in data.batch.keys():
            return data.batch["rm_scores"]
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra = defaultdict(list)
        printed = defaultdict(int)
        groups = defaultdict(list)
        scores = []
        for i in range(len(data)):
            item = data[i]
            prompt_ids = item.batch["prompts"]
            prompt_length = prompt_ids.shape[-1]
            valid_prompt_length = item.batch["attention_mask"][:prompt_length].sum()
            valid_prompt_ids = prompt_ids[-valid_prompt_length:]
            valid_response_length = item.batch["attention_mask"][prompt_length:].sum()
            valid_response_ids = item.batch["responses"][:valid_response_length]
            prompt = self.tokenizer.decode(valid_prompt_ids, skip_special_tokens=True)
            response = self.tokenizer.decode(valid_response_ids, skip_special_tokens=True)
            truth = item.non_tensor_batch["reward_model"]["ground_truth"]
            source = item.non_tensor_batch[self.reward_fn_key]
            score = self.compute_score(
                data_source=source,
                solution_str=response,
                ground_truth=truth,
                extra_info=item.non_tensor_batch.get("extra_info", {}),
            )
            scores.append(float(score))
            groups[item.non_tensor_batch["uid"]].append(i)
            if printed[source] < self.num_examine:
                printed[source] += 1
                print("[prompt]", prompt)
                print("[response]", response)
                print("[ground_truth]", truth)
                print("[score]", score)
        lengths = data.batch["attention_mask"][:, data.batch["prompts"].shape[-1] :].sum(-1)
        for rows in groups.values():
            for i in rows:
                beaten = sum(scores[j] < scores[i] for j in rows)
                reward_tensor[i, lengths[i] - 1] = self.top * beaten / max(1, len(rows) - 1)
        extra["acc"] = [score > 0.5 for score in scores]
        extra["group_size"] = [len(groups[uid]) for uid in data.non_tensor_batch["uid"]]
        extra["pred"] = ["text" for _ in scores]
        if return_dict:
            return {"reward_tensor": reward_tensor, "reward_extra_info": extra}
        return reward_tensor
