"""The policy's tokenizer and chat template may come from elsewhere, if their ids are the model's."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.config.schema import EngineConfig, ModelConfig
from asyncrl.engine.sglang.launch import server_command
from asyncrl.errors import ConfigError
from asyncrl.launch.preflight.models import check_tokenizer
from asyncrl.learner.checkpoint.export import folder_writer
from asyncrl.modelling.opening import open_config
from asyncrl.modelling.tokenizer import open_tokenizer
from asyncrl.runs.decoding import tokenizer_decode
from asyncrl.scoring.verifier import policy_settings, policy_tokenizer
from tests.learner.support import write_model

pytestmark = pytest.mark.slow

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
QUESTION = [{"role": "user", "content": "why"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Another tokenizer, with a token more and without a padding token."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def rendered(model: ModelConfig) -> str:
    return str(open_tokenizer(model).apply_chat_template(QUESTION, tokenize=False))


def test_every_reader_of_tokens_gets_the_named_tokenizer_and_so_does_the_export(
    model: Path, elsewhere: Path, tmp_path: Path
) -> None:
    named = ModelConfig(str(model), tokenizer=str(elsewhere))
    assert "<more>" not in open_tokenizer(ModelConfig(str(model))).get_vocab()
    [more] = open_tokenizer(named)("<more>", add_special_tokens=False).input_ids
    assert policy_tokenizer(policy_settings(named)).decode([more]) == "<more>"
    assert tokenizer_decode(named)([more]) == "<more>"
    folder_writer(named)(tmp_path / "export")
    assert open_tokenizer(ModelConfig(str(tmp_path / "export"))).decode([more]) == "<more>"
    command = server_command(EngineConfig(), named, 1, 0)
    assert command[command.index("--tokenizer-path") + 1] == str(elsewhere)


@pytest.mark.parametrize("kind", ["text", "file"])
def test_a_chat_template_is_given_as_text_or_by_its_file_and_is_exported(
    kind: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    given = TEMPLATE if kind == "text" else str(tmp_path / "chat.jinja")
    named = ModelConfig(str(model), chat_template=given)
    assert rendered(named) == "<user>why"
    folder_writer(named)(tmp_path / "export")
    assert rendered(ModelConfig(str(tmp_path / "export"))) == "<user>why"


def test_a_template_that_is_neither_text_nor_file_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template=chat\.jinja: .* nor a readable file"):
        open_tokenizer(ModelConfig(str(model), chat_template="chat.jinja"))


def test_a_tokenizer_that_does_not_exist_is_named_by_its_key(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.tokenizer=.*cannot be loaded"):
        open_tokenizer(ModelConfig(str(model), tokenizer=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer.json", "[]"), ("tokenizer_config.json", "null"), ("tokenizer_config.json", '{"eos_token": 3}')],
)
def test_files_of_a_tokenizer_that_cannot_be_used_are_refused(
    name: str, text: str, model: Path, tmp_path: Path
) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"^model.tokenizer=.*: its tokenizer cannot be loaded"):
        open_tokenizer(ModelConfig(str(model), tokenizer=str(tmp_path)))


@pytest.mark.parametrize("text", ["null", '{"model_type": "qwen3", "hidden_size": "64"}'])
def test_a_configuration_that_cannot_be_used_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^model.path=.*: transformers cannot read its configuration"):
        open_config(ModelConfig(str(tmp_path)))


def test_padding_falls_back_to_the_end_token_with_one_warning(
    model: Path, elsewhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = ModelConfig(str(model), tokenizer=str(elsewhere))
    for warns in (True, False):
        tokenizer = open_tokenizer(named, warn=warns)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id is not None
    assert [each.levelno for each in caplog.records if "no padding token" in each.message] == [logging.WARNING]
    caplog.clear()
    assert open_tokenizer(ModelConfig(str(model)), warn=True).pad_token is not None
    assert not caplog.records


def test_a_tokenizer_with_ids_beyond_the_embedding_is_refused_before_the_start(model: Path, tmp_path: Path) -> None:
    check_tokenizer(ModelConfig(str(model)))
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([f"<more {number}>" for number in range(30)])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.tokenizer=.* gives '<more 29>' the id \d+, .* ends at 279"):
        check_tokenizer(ModelConfig(str(model), tokenizer=str(tmp_path)))
