"""A reward manager written for verl: right answers to one prompt share some points, and short ones get more of them."""

from collections import defaultdict

import numpy as np
import torch
from verl import DataProto
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager


@register("shared")
class SharedRewardManager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", **kwargs):
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score
        self.reward_fn_key = reward_fn_key
        self.points = kwargs.get("points", 1.0)

    def __call__(self, data: DataProto, return_dict: bool = False):
        ready = self._extract_reward_from_rm_scores(data, return_dict)
        if ready is not None:
            return ready
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra = defaultdict(list)
        prompt_length = data.batch["prompts"].shape[-1]
        lengths = data.batch["attention_mask"][:, prompt_length:].sum(dim=-1)
        data.union(DataProto.from_dict(tensors={"response_length": lengths}))
        uids = data.non_tensor_batch.get("uid", np.array(["one"] * len(data), dtype=object))
        right = np.zeros(len(data))
        for i in range(len(data)):
            item = data[i]
            text = self.tokenizer.decode(item.batch["responses"][: item.batch["response_length"]])
            right[i] = item.non_tensor_batch["reward_model"]["ground_truth"] in text
        for uid in dict.fromkeys(uids):
            rows = np.flatnonzero((uids == uid) & (right > 0))
            if len(rows) == 0:
                continue
            members = data.select_idxs(rows)
            shares = 1.0 / members.batch["response_length"].float()
            shares = self.points * shares / shares.sum()
            for row, share in zip(rows, shares, strict=True):
                reward_tensor[row, lengths[row] - 1] = share
        extra["right"].extend(right.tolist())
        if return_dict:
            return {"reward_tensor": reward_tensor, "reward_extra_info": extra}
        return reward_tensor
