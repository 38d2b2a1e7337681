"""Secrets are known by their names and by their looks."""

from __future__ import annotations

import time
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.masking import MASK, masked, masked_text
from asyncrl.text import reason_of
from tests.helpers import GENEROUS_S

SECRET = "s3cr3t-0f-a-t3st"


@pytest.mark.parametrize(
    "value",
    [
        {
            "environment": {"HF_TOKEN": SECRET, "PLAIN": SECRET},
            "env": [f"PLAIN={SECRET}"],
            "headers": {"X-Any": SECRET},
        },
        {"judge": {"params": {"apiKey": SECRET, "headers": {"Authorization": SECRET}}}},
        {"params": [{"api-key": SECRET}], "credentials": {"user": SECRET, "keys": [SECRET]}},
        {"url": f"https://user:{SECRET}@host:80/v1", "other": [f"postgres://{SECRET}@host/db"]},
        {"url": f"https://host/v1?api_key={SECRET}&a=1", "signed": f"https://host/x?a=1&X-Amz-Signature={SECRET}"},
        {"arguments": ["--api-key", SECRET, f"--admin-api-key={SECRET}", f"--hf-token {SECRET}"]},
        {"command": f"WANDB_API_KEY={SECRET} serve", "header": f"Bearer {SECRET}"},
    ],
)
def test_a_secret_is_masked_wherever_a_value_holds_it(value: dict[str, Any]) -> None:
    text = repr(masked(value))
    assert SECRET not in text
    assert MASK in text


@pytest.mark.parametrize(
    "text",
    [
        f"{{'api_key': '{SECRET}', 'b': 1}} and \"token\": \"{SECRET}\"",
        f"actor.agent_environment={{A: {SECRET}, B: x}} was refused",
        f"actor.agent_options={{url: x, headers: {{Authorization: Bearer {SECRET}}}}}",
        f"engine.server.environment.PLAIN={SECRET},{SECRET}",
        f"engine.server.arguments=[--api-key,'{SECRET}']",
        f"actor.agent_environment={{A: {SECRET}",
        f"Cannot connect to https://user:{SECRET}@host/path?x=1",
        f"DB_PASSWORD='two {SECRET}' DB_PASS=a#{SECRET}&{SECRET}",
        f"api_key='a {SECRET}",
        f'{{"api_key": "a {SECRET}',
        rf'{{"api_key": "a\"{SECRET}"}}',
        rf"{{'api_key': 'a\'\\{SECRET}'}}",
        f"{{'api_key': b'a\"{SECRET}'}}",
        f"actor.agent_environment={{A: 'a}}{SECRET}', B: \"{SECRET}\"}}",
    ],
)
def test_a_secret_is_masked_in_a_text_for_people(text: str) -> None:
    shown = masked_text(text)
    assert SECRET not in shown
    assert masked_text(shown) == shown


@pytest.mark.parametrize("token", ["hf_" + "a" * 34, "sk-proj-" + "b" * 40, "ghp_" + "c" * 36])
def test_a_token_that_shows_what_it_is_is_masked_in_any_text(token: str) -> None:
    assert token not in repr(masked({"note": [f"use {token} here"]}))


@pytest.mark.parametrize("value", [12345678, 1.5])
def test_a_number_may_be_a_password(value: float) -> None:
    assert masked({"password": value, "env": {"PIN": value}}) == {"password": MASK, "env": {"PIN": MASK}}


def test_what_is_no_secret_stays() -> None:
    plain = {
        "max_tokens": 3,
        "eos_token": "</s>",
        "answer": "monkey=1 eos_token=</s> max_tokens=3",
        "level": "token",
        "columns": {"prompt_key": "question", "reward_fn_key": "source", "image_key": "images", "sortKey": "length"},
        "note": "cost_per_token=0.5 --ground-truth-key answer ?answer_key=a",
        "data": ["hf://datasets/a/b", "s3://bucket/a@b", "https://host/a?step=3"],
        "arguments": ["--max-tokens", "5", "--tokenizer", "name", "--api-key"],
        "keys": "keys/of/the/run",
        "api_key": "${oc.env:KEY}",
        "message": "actor.session_key: the key is easy to guess; actor.environment=my.Class: there is none",
    }
    assert masked(plain) == plain


def test_the_reason_of_an_error_has_no_secret() -> None:
    assert reason_of(ConfigError(f"https://u:{SECRET}@h failed")) == f"ConfigError: https://{MASK}@h failed"


@pytest.mark.parametrize("end", ["", "}", "x", "{"])
def test_a_mapping_that_is_masked_already_and_cut_off_takes_no_longer(end: str) -> None:
    began = time.monotonic()
    assert MASK in masked_text("env={" + "A: (hidden), " * 2_000 + end)
    assert time.monotonic() - began < GENEROUS_S


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        *("a", "a.", "-a", "a=b", "http://", "{a: ", "@", "'", "--a ", "token=", "env={", "[", "\\"),
        *("key='", "key='\\", "env={'", "env={'\n", "env={\"'\n", "env={\"'{'\n", "env={'a'", "{key: {"),
    ],
)
def test_no_text_takes_long(part: str) -> None:
    began = time.monotonic()
    masked_text(part * (200_000 // len(part)))
    assert time.monotonic() - began < GENEROUS_S
