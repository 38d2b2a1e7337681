"""What is posted as tensors."""

from __future__ import annotations

import base64
import json
import pickle

import torch

from asyncrl.actor.engine.sglang.transports.tensor import tensors_body


def test_every_rank_gets_all_tensors_of_a_bucket_and_none_of_what_lies_beside_them() -> None:
    whole = torch.arange(1000.0)
    body = json.loads(tensors_body({"a": whole[10:12]}, 2, "4-me"))
    first, second = body["serialized_named_tensors"]
    assert first == second
    assert len(first) < 2000
    [(name, tensor)] = pickle.loads(base64.b64decode(first))  # noqa: S301 - our own
    assert name == "a"
    assert tensor.tolist() == [10.0, 11.0]
    assert body["weight_version"] == "4-me"
    assert body["flush_cache"] is False
    assert "weight_version" not in json.loads(tensors_body({"a": whole}, 1, None))
