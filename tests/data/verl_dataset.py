"""A dataset class as a user of verl writes it; it knows nothing of asyncrl, and stays unchanged."""

import json

import numpy as np
import torch
from torch.utils.data import Dataset


class QuizDataset(Dataset):
    """Quiz questions, one JSON object a line, with a chat prompt tokenised to a fixed length."""

    def __init__(self, data_files, tokenizer, config, processor=None):
        if not isinstance(data_files, (list, tuple)):
            data_files = [data_files]
        self.tokenizer = tokenizer
        self.processor = processor
        self.prompt_key = config.get("prompt_key", "prompt")
        self.max_prompt_length = config.get("max_prompt_length", None) or 64
        self.return_raw_chat = config.get("return_raw_chat", False)
        self.instruction = config.get("instruction", "Answer with one word.")
        self.rows = []
        for data_file in data_files:
            with open(data_file) as lines:  # noqa: PTH123
                self.rows += [json.loads(line) for line in lines]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, item):
        row = self.rows[item]
        chat = [
            {"role": "system", "content": self.instruction},
            {"role": "user", "content": row["question"]},
        ]
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = self.tokenizer.encode(text, add_special_tokens=False)[-self.max_prompt_length :]
        padding = self.max_prompt_length - len(ids)
        row_dict = {
            "input_ids": torch.tensor([0] * padding + ids),
            "attention_mask": torch.tensor([0] * padding + [1] * len(ids)),
            "raw_prompt_ids": ids,
            "data_source": "quiz",
            "ability": "knowledge",
            "reward_model": {"style": "rule", "ground_truth": np.array(row["answers"])},
            "extra_info": {"split": "train", "index": item, "level": np.int64(row["level"])},
            "index": item,
            "tools_kwargs": {"search": {"create_kwargs": {"topic": row["topic"]}}} if "topic" in row else {},
        }
        if self.return_raw_chat:
            row_dict["raw_prompt"] = np.array(chat, dtype=object)
        return row_dict
