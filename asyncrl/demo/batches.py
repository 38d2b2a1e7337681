"""Transcripts as padded batches of token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from asyncrl.demo.tokenizer import ASSISTANT_MARK
from asyncrl.demo.transcripts import TOOLS, Message


def batch(tokenizer: PreTrainedTokenizerFast, transcripts: Sequence[list[Message]]) -> tuple[Tensor, Tensor]:
    """Token ids int64[B, T], padded on the right, and bool[B, T], true on the assistant's turns with their ends."""
    rows: Any = [tokenizer.apply_chat_template(each, tools=TOOLS, return_dict=False) for each in transcripts]
    masks = [torch.tensor(list(_assistant(row, tokenizer))) for row in rows]
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=tokenizer.pad_token_id)
    return ids, pad_sequence(masks, batch_first=True)


def _assistant(row: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> Iterator[bool]:
    mark, end = tokenizer.convert_tokens_to_ids(ASSISTANT_MARK), tokenizer.eos_token_id
    inside = False
    for token in row:
        yield inside
        inside = token == mark or (inside and token != end)
