"""A reward manager for single rows, written for verl 0.9.1: right answers of few letters get more points."""

import inspect

from verl import DataProto
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.utils.reward_score import default_compute_score


@register("brief")
class BriefRewardManager(RewardManagerBase):
    def __init__(self, config, tokenizer, compute_score, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer, compute_score)
        self.compute_score = compute_score or default_compute_score
        self.points = config.reward.reward_kwargs.get("points", 1.0)
        self.is_async = inspect.iscoroutinefunction(self.compute_score)
        self.reward_router_address = reward_router_address

    async def run_single(self, data: DataProto) -> dict:
        data = data[-1:]
        item = data[0]
        response_ids = item.batch["responses"]
        length = item.batch["attention_mask"][-response_ids.shape[-1] :].sum()
        text = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.decode(response_ids[:length], skip_special_tokens=True)
        )
        given = {
            "data_source": item.non_tensor_batch["data_source"],
            "solution_str": text,
            "ground_truth": item.non_tensor_batch["reward_model"]["ground_truth"],
            "extra_info": item.non_tensor_batch.get("extra_info", {}),
        }
        if self.is_async:
            score = await self.compute_score(**given)
        else:
            score = await self.loop.run_in_executor(None, lambda: self.compute_score(**given))
        return {
            "reward_score": self.points * score / len(text),
            "reward_extra_info": {"acc": score, "letters": len(text)},
        }
