"""The schema says which values of a configuration are secrets."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.changes import KEYS, by_key, changed_keys
from asyncrl.config.compose import composed, parsed, read
from asyncrl.config.keys import OPTIONS
from asyncrl.config.option import Option
from asyncrl.config.schema import TrainConfig
from asyncrl.config.secrets import masked, shown, shown_words
from asyncrl.errors import ConfigError
from asyncrl.masking import MASK, masked_text

SECRET = "s3cr3t-0f-a-t3st"
TELLING = {
    *(
        "key",
        "keys",
        "token",
        "secret",
        "secrets",
        "password",
        "passphrase",
        "credential",
        "credentials",
        "auth",
        "pat",
    ),
    *("env", "environ", "environment", "environments", "headers", "cookie", "cookies", "dsn", "bearer"),
}


def undeclared(options: dict[str, Option]) -> list[str]:
    """Options that may hold texts, whose name may be that of a secret, and that do not say whether it is one."""
    return [
        key
        for key, option in options.items()
        if option.holds_texts and option.secret is None and TELLING & set(key.rpartition(".")[2].split("_"))
    ]


def test_an_option_whose_name_looks_secret_says_whether_it_is() -> None:
    assert undeclared(dict(OPTIONS)) == [], "give the option secret=..., as config/option.py says"
    new = Option("judge_key", str, True, None, "the key of a judge", "", (), "", None)
    assert undeclared({"scoring.judge_key": new}) == ["scoring.judge_key"]


def test_defaults_have_no_secrets() -> None:
    defaults = by_key({})
    assert set(defaults) == set(KEYS)
    assert masked(defaults) == defaults
    assert masked(asdict(TrainConfig())) == asdict(TrainConfig())


def test_all_variables_of_a_program_are_hidden_whatever_their_names() -> None:
    given = {"actor": {"agent_environment": {"MODE": SECRET, "LEVEL": ""}, "environments": {"a": "my.Class"}}}
    kept = {"environments": {"a": "my.Class"}}
    assert masked(given) == {"actor": {"agent_environment": {"MODE": MASK, "LEVEL": ""}, **kept}}
    assert shown("actor.agent_environment.MODE", SECRET) == f"actor.agent_environment.MODE={MASK}"
    assert shown("actor.mcp_servers.web.headers.X-Any", SECRET) == f"actor.mcp_servers.web.headers.X-Any={MASK}"


@pytest.mark.parametrize(
    "word",
    [
        f"actor.session_key=[{SECRET}]",
        f"actor.session_key='{SECRET}",
        f"actor.session_key={SECRET},b",
        f"~actor.session_key={SECRET}",
        f"actor.sesion_ky={SECRET}",
        f"actor.agent_enviroment.MODE={SECRET}",
        f"actor.agent_environment={{MODE: {SECRET}",
        f"actor.mcp_servers={{web: {{headers: {{X-Any: {SECRET}}}",
        f"actor={{session_key: {{a: {SECRET}}}}}",
        f"engine.server.environment=[{SECRET}]",
        f"engine.router=['https://user:{SECRET}@host']",
        f"model.path=m=https://user:{SECRET}@host",
        f"--secret={SECRET}",
    ],
)
def test_a_refused_word_of_the_command_line_does_not_show_its_secret(word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        composed([word])
    assert SECRET not in str(refused.value)
    assert str(refused.value).startswith(word.lstrip("~+").partition("=")[0]) or MASK in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        ["actor.session_key=short" + SECRET[:5]],
        [f"actor.session_key={SECRET}", f"engine.router=ftp://u:{SECRET}@h", "engine.kind=sglang"],
        [f"actor.agent_options={{api_key: {SECRET}}}"],
        [f"actor.agent_environment={{MODE: [{SECRET}]}}"],
        [f"actor.search.url=https://u:{SECRET}@h", "actor.search.corpus=x"],
    ],
)
def test_a_refused_value_does_not_show_its_secret(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "tasks.parquet").touch()
    with pytest.raises(ConfigError) as refused:
        read(["model.path=m", f"data.train={tmp_path / 'tasks.parquet'}", *words])
    assert SECRET[:5] not in str(refused.value)


def test_a_file_of_an_experiment_that_is_refused_does_not_show_its_secret(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"actor:\n  session_key: [{SECRET}]\n  sesion_key: {SECRET}\n  agent_environment: {SECRET}\n")
    with pytest.raises(ConfigError) as refused:
        composed([f"experiment={file}"])
    assert SECRET not in str(refused.value)


def test_what_readers_see_in_place_of_a_secret_is_refused_as_a_value() -> None:
    with pytest.raises(ConfigError, match=r"actor\.agent_environment: it contains \(hidden\)"):
        read(
            ["model.path=m", "data.train=nowhere", "actor.agent_environment={A: '(hidden)'}"], names_missing_data=False
        )


def test_the_words_of_a_command_for_people_have_no_secrets() -> None:
    words = ["sbatch", "--export=ALL,FOO=1", f"actor.agent_environment={{A: {SECRET}}}", "--api-key", SECRET, "a.b=1"]
    shown_ones = shown_words(words)
    assert SECRET not in " ".join(shown_ones)
    assert (shown_ones[:2], shown_ones[-1]) == (words[:2], "a.b=1")


def test_a_run_resumes_with_another_secret_where_nothing_else_may_change() -> None:
    def values(**server: Any) -> dict[str, Any]:
        return by_key({"actor": {"mcp_servers": {"web": {"url": "https://host", **server}}}})

    before = values(headers={"Authorization": SECRET})
    assert changed_keys(before, values(headers={"Authorization": "an0ther"})) == ["actor.mcp_servers"]
    with pytest.raises(ConfigError, match=r"actor\.mcp_servers=") as refused:
        changed_keys(before, values(headers={"Authorization": "an0ther"}, tools=["one"]))
    assert SECRET not in str(refused.value)
    assert "an0ther" not in str(refused.value)


def test_the_hint_how_to_quote_a_value_is_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        parsed("actor.end_tokens=[<|eot|>]")
    assert masked_text(str(refused.value)) == str(refused.value)
