"""Secrets of a configuration do not leave the run's folder."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config.changes import KEYS, by_key
from asyncrl.config.secrets import MASK, masked

SECRET = "s3cr3t-0f-a-t3st"


@pytest.mark.parametrize(
    "value",
    [
        {"engine.server.environment": {"HF_TOKEN": SECRET, "OPENAI_API_KEY": SECRET, "DB_PASSWORD": SECRET}},
        {"scoring": {"judge": {"params": {"apiKey": SECRET, "headers": {"Authorization": SECRET}}}}},
        {"params": [{"api-key": SECRET}], "credentials": {"user": SECRET, "keys": [SECRET]}},
        {"url": f"https://user:{SECRET}@host:80/v1", "other": [f"postgres://{SECRET}@host/db"]},
        {"url": f"https://host/v1?api_key={SECRET}&a=1", "signed": f"https://host/x?a=1&X-Amz-Signature={SECRET}"},
        {"arguments": ["--api-key", SECRET, f"--admin-api-key={SECRET}", f"--hf-token {SECRET}"]},
        {"command": f"WANDB_API_KEY={SECRET} serve", "header": f"Bearer {SECRET}"},
    ],
)
def test_a_secret_is_masked_wherever_a_configuration_holds_it(value: dict[str, Any]) -> None:
    text = repr(masked(value))
    assert SECRET not in text
    assert MASK in text


@pytest.mark.parametrize("token", ["hf_" + "a" * 34, "sk-proj-" + "b" * 40, "ghp_" + "c" * 36])
def test_a_token_that_shows_what_it_is_is_masked_in_any_text(token: str) -> None:
    assert token not in repr(masked({"note": [f"use {token} here"]}))


def test_what_is_no_secret_stays() -> None:
    defaults = by_key({})
    assert set(defaults) == set(KEYS)
    assert masked(defaults) == defaults
    plain = {
        "max_tokens": 3,
        "eos_token": "</s>",
        "answer": "monkey=1",
        "level": "token",
        "data": ["hf://datasets/a/b", "s3://bucket/a@b", "https://host/a?step=3"],
        "arguments": ["--max-tokens", "5", "--tokenizer", "name", "--api-key"],
        "keys": "keys/of/the/run",
    }
    assert masked(plain) == plain
